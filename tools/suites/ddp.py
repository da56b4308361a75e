"""DistributedDataParallel over fompi and over gloo, ten shapes.

    mpirun -n 2 python -m fompi bench tools/suites/ddp.py

The models are stacks of residual MLP blocks, on real kernels of torch with one thread per rank. All contestants have
the same buckets, and their gradients are compared before the timing.

| contestant          | what it is                                                                     |
|---------------------|--------------------------------------------------------------------------------|
| `gloo`              | torch's DistributedDataParallel on a group of gloo                             |
| `fompi`             | the same class on a group of the backend "fompi": a script that was not edited |
| `fompi.torch`       | `fompi.torch.DistributedDataParallel`                                          |
| `compute alone`     | forward and backward without messages; `backward alone` is a part of it        |
| `messages alone`    | the all-reduces of all buckets                                                 |

Of k buckets the first one is full after a k-th of the backward, and the last one when it ends. So no step is shorter
than either of two bounds:

- the link: forward, a k-th of the backward, and all messages;
- the cores: compute, the host time of the messages of k - 1 buckets, and the messages of the last one. Host time is
  what messages in the background add to kernels that last longer than the messages.

`hidden` is the share of what the larger bound lets a step hide that is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

import fompi
from c10d import beside_torch, compare
from fompi.bench.measure import Bench, Call
from fompi.engine.communicator import Communicator
from fompi.torch import DistributedDataParallel
from fompi.tuning.rounds import Figure, Row, of_all_ranks, seconds_of
from means import repeated
from training import Blocks, alone, data_parallel

BUCKET_MB = 1

MODELS = (
    Blocks(4, 512, 1024, 256), Blocks(4, 512, 1024, 64), Blocks(4, 512, 1024, 512), Blocks(4, 512, 1024, 1024),
    Blocks(8, 256, 512, 256), Blocks(16, 256, 512, 256), Blocks(32, 128, 256, 256), Blocks(2, 256, 1024, 256),
    Blocks(2, 1024, 2048, 256), Blocks(1, 1024, 4096, 256),
)  # fmt: skip

GLOO, GROUP, OURS = "gloo", "fompi", "fompi.torch"
COMPUTE, BACKWARD, MESSAGES = "compute alone", "backward alone", "messages alone"
BESIDE, KERNELS = "messages beside kernels", "the same kernels"
LEAST_HIDDEN = 0.9


def rows(bench: Bench) -> list[Row]:
    with beside_torch(bench) as (beside, group):
        return [measured(beside, group, model) for model in bench.each(MODELS[: 1 if bench.quick else None])]


def buckets_of(model: Blocks) -> int:
    """How many buckets there are. A parameter is in one, also if it is larger than a bucket should be."""
    return max(1, round(model.nbytes / max(BUCKET_MB << 20, 4 * model.width * model.hidden)))


def measured(bench: Bench, group: Any, model: Blocks) -> Row:
    comm, buckets, seconds = bench.comm, buckets_of(model), list[float]()
    ours, compute = (model.task(comm.rank) for _ in range(2))
    backward, messages = alone(compute, seconds=seconds), partial(_all_reduces, comm, model.nbytes, buckets)
    steps = {
        GLOO: data_parallel(model.task(comm.rank), bucket_cap_mb=BUCKET_MB),
        GROUP: data_parallel(model.task(comm.rank), group, bucket_cap_mb=BUCKET_MB),
        OURS: alone(ours, DistributedDataParallel(ours.model, comm, bucket_nbytes=BUCKET_MB << 20)),
    }
    calls: dict[str, Call] = {**steps, COMPUTE: backward, MESSAGES: messages}
    for call in calls.values():
        call()
    taken = of_all_ranks(bench.mpi, np.array([seconds_of(messages), seconds_of(backward)])).max(axis=0)
    repeats = int(1.5 * taken[0] / taken[1]) + 1  # so kernels last longer than the messages beside them
    calls[KERNELS] = partial(repeated, backward, repeats)
    calls[BESIDE] = partial(messages, calls[KERNELS])
    for name in (GROUP, OURS):
        compare(bench, f"gloo and {name}", steps[name].gradients, steps[GLOO].gradients)
    seconds.clear()
    samples = bench.times(calls)
    host = median([a - b for a, b in zip(samples.pop(BESIDE), samples.pop(KERNELS), strict=True)])
    row = bench.row_of(str(model), samples, base=GROUP)
    limits = _limits(row, buckets, median(seconds), host)
    figures = _figures(bench, row, max(limits.values()))
    figures[1:1] = [Figure(BACKWARD, 1e3 * median(seconds), "ms"), Figure("host time", 1e3 * host, "ms")]
    return replace(row, limits=limits, figures=figures)


def _limits(row: Row, buckets: int, backward: float, host: float) -> dict[str, float]:
    """The two bounds of a step."""
    compute, messages = row.median(COMPUTE), row.median(MESSAGES)
    return {
        "the link": compute - backward * (1 - 1 / buckets) + messages,
        "the cores": compute + host * (1 - 1 / buckets) + messages / buckets,
    }


def _figures(bench: Bench, row: Row, bound: float) -> list[Figure]:
    summed = row.median(COMPUTE) + row.median(MESSAGES)
    figures = [Figure("compute / messages", row.median(COMPUTE) / row.median(MESSAGES))]
    for name in (GROUP, OURS):
        figures.append(row.ratio(GLOO, name, least=bench.asked(1.0), limit=row.median(GLOO) / bound))
        hidden = (summed - row.median(name)) / (summed - bound) if bound < summed else 1.0
        figures.append(Figure(f"{name}: hidden", hidden, least=bench.asked(LEAST_HIDDEN)))
        figures.append(Figure(f"{name}: time / bound", row.median(name) / bound))
    return figures


def _all_reduces(comm: Communicator, nbytes: int, buckets: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """The gradients of all buckets, all started at once."""
    part = torch.ones(nbytes // 4 // buckets)
    begun = [fompi.all_reduce.start(part, comm=comm, op="mean") for _ in range(buckets)]
    meanwhile()
    for pending in begun:
        pending.wait()
