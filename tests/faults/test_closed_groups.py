"""What is in flight when a group of torch is destroyed dies with it: groups that are made later never see it."""

import pytest

CODE = """
import datetime, itertools, os
import torch, torch.distributed as dist
dist.init_process_group("fompi")
rank = dist.get_rank()
subsets = [s for n in (2, 3) for s in itertools.permutations(range(4), n)]

def fail(kind, group):
    x = torch.ones(3)
    if kind == "time-out":
        if rank == 0:
            dist.barrier(group=group)
    elif kind == "one starts":
        if rank == 3:
            dist.all_reduce(x, group=group, async_op=True)
    elif kind == "mismatch":
        dist.all_reduce(x, group=group) if rank else dist.barrier(group=group)
    elif kind == "message":
        if rank == 1:
            dist.isend(torch.ones(9), 2, group=group)
    elif kind == "receive":
        if rank == 2:
            dist.recv(torch.ones(9), 0, group=group)

for number, kind in enumerate(KINDS):
    group = dist.new_group(range(4), timeout=datetime.timedelta(seconds=0.3))
    try:
        fail(kind, group)
    except (RuntimeError, ValueError) as error:
        pass
    dist.destroy_process_group()
    dist.init_process_group("fompi")
    for subset in subsets[number::len(KINDS)]:
        part = dist.new_group(subset)
        if rank in subset:
            x = torch.full((2,), float(rank))
            dist.all_reduce(x, group=part)
            assert x[0] == sum(subset), (kind, subset, x)
    dist.barrier()
emit("done")
dist.destroy_process_group()
"""


@pytest.mark.one_mpi
@pytest.mark.timeout(120)
def test_groups_after_a_failure_in_a_group(launch):
    kinds = ["time-out", "one starts", "mismatch", "message", "receive"]
    ended = launch(4, CODE.replace("KINDS", repr(kinds)), world=False)
    assert ended.finished.stdout.count("done") == 4, ended.output
