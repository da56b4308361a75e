"""Orders of pipelines that PyTorch makes and writes: they are accepted, and its V orders are ours."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from fompi.model.pipeline import placement_of
from fompi.parallel.actions import SCHEDULES, actions

MADE = {
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
    "interleaved zero bubble": schedules.ScheduleInterleavedZeroBubble,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "all forwards first": schedules.ScheduleLoopedBFS,
}


@pytest.fixture(params=[(2, 4), (4, 8), (4, 12)], ids=str)
def sizes(request):
    """(ranks, micro-batches)"""
    torch.distributed.init_process_group("fake", rank=0, world_size=request.param[0], store=FakeStore())
    yield request.param
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", MADE)
def test_orders_of_pytorch(sizes, name, tmp_path):
    """As its file says them, open or by its name, with the messages and without."""
    p, m = sizes
    numbers = (0, 2 * p - 1) if placement_of(name) == "v" else (0, p)
    stages = [PipelineStage(torch.nn.Identity(), s, 2 * p, torch.device("cpu")) for s in numbers]
    schedule, found = MADE[name](stages, m, loss_fn=lambda y, t: y.sum()), []
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        schedule._dump_csv(str(path), form)
        found.append(actions(str(path), p, m, 2))
        with path.open() as file:
            assert actions(file, p, m, 2) == found[-1]
    assert found[0] == found[1]
    if placement_of(name) == "v" and name in SCHEDULES:
        assert found[0] == actions(name, p, m, 2, overlap_f_b=name == "dualpipev")
