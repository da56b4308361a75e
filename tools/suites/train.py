"""Steps of a GPT by torch's own classes, over gloo and over fompi.

    mpirun -n 2 python -m fompi bench tools/suites/train.py

Each row is a way to train that torch has. The two contestants run the same lines, on a group of gloo and on one of the
backend "fompi". Their gradients are compared before the timing.

| row            | what it is                                                                                      |
|----------------|-------------------------------------------------------------------------------------------------|
| `DDP`          | `DistributedDataParallel`                                                                       |
| `DDP, fp16`    | the same with torch's `fp16_compress_hook`                                                      |
| `FSDP2`        | `fully_shard` of each block, then of the model                                                  |
| `1F1B`         | `Schedule1F1B` of torch.distributed.pipelining, a stage on each rank, two microbatches a stage  |
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from c10d import beside_torch, compare
from fompi.bench.measure import Bench
from fompi.tuning.rounds import Row
from training import Gpt, TorchStep, data_parallel, fully_sharded, pipelined

GLOO, OURS = "gloo", "fompi"

LEAST = {"DDP": 1.05, "DDP, fp16": 1.05, "FSDP2": 1.6, "1F1B": 1.05}
"""Asked between hosts: fompi is at least this many times as fast as gloo."""

WITHIN, WITHIN_HALF = 1e-3, 4e-3
"""Gradients may differ by this share of the largest one. Those of fp16 are rounded once in each sum."""


FULL = Gpt(6, 384, 6, 8192, 4, 64)
"""17 million parameters."""

QUICK = Gpt(2, 32, 2, 64, 2, 8)


def rows(bench: Bench) -> list[Row]:
    with beside_torch(bench) as (beside, group):
        groups = {GLOO: distributed.group.WORLD, OURS: group}
        return beside.rows({way: partial(_row, way=way, groups=groups) for way in LEAST})


def _row(bench: Bench, way: str, groups: dict[str, Any]) -> Row:
    steps = {name: _step(bench, way, group) for name, group in groups.items()}
    for step in steps.values():
        step()
    compare(bench, way, steps[OURS].gradients, steps[GLOO].gradients, WITHIN_HALF if "fp16" in way else WITHIN)
    row = bench.row(way, steps, base=OURS)
    return replace(row, figures=[row.ratio(GLOO, OURS, least=bench.asked(LEAST[way]))])


def _step(bench: Bench, way: str, group: Any) -> TorchStep:
    rank, ranks, size = bench.comm.rank, bench.comm.size, QUICK if bench.quick else FULL
    if way == "1F1B":
        task = size._replace(sequences=size.sequences * ranks).task(0)
        parts = task.parts[len(task.parts) * rank // ranks : len(task.parts) * (rank + 1) // ranks]
        return pipelined([task._replace(parts=parts).model], task, 2 * ranks, group)
    task = size.task(rank)
    if way == "FSDP2":
        return fully_sharded(task, group)
    return data_parallel(task, group, fp16_compress_hook if "fp16" in way else None)
