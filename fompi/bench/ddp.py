"""DistributedDataParallel over fompi and over gloo, ten shapes: mpirun -n 2 python -m fompi bench ddp

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

- the wire: forward, a k-th of the backward, and all messages;
- the cores: compute, the host time of the messages of k - 1 buckets, and the messages of the last one. Host time is
  what messages in the background add to kernels that last longer than the messages.

`hidden` is the share of what the larger bound lets a step hide that is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import fompi
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.options import Options
from fompi.bench.rivals import steps
from fompi.bench.rivals.gloo import torch_hosts
from fompi.bench.step import blocks, compare, repeated
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import Figure, Row, alternate, of_all_ranks, seconds_of

BUCKET_MB = 1


class Blocks(NamedTuple):
    """A stack of `depth` blocks x + gelu(x @ w1.T) @ w2.T, and the rows of a rank."""

    depth: int
    width: int
    hidden: int
    rows: int

    def __str__(self) -> str:
        return f"{self.depth} blocks {self.width}x{self.hidden}, {self.rows} rows"

    @property
    def nbytes(self) -> int:
        return 4 * 2 * self.depth * self.width * self.hidden

    @property
    def buckets(self) -> int:
        """A parameter is in one bucket, also if it is larger than a bucket should be."""
        return max(1, round(self.nbytes / max(BUCKET_MB << 20, 4 * self.width * self.hidden)))


MODELS = (
    Blocks(4, 512, 1024, 256), Blocks(4, 512, 1024, 64), Blocks(4, 512, 1024, 512), Blocks(4, 512, 1024, 1024),
    Blocks(8, 256, 512, 256), Blocks(16, 256, 512, 256), Blocks(32, 128, 256, 256), Blocks(2, 256, 1024, 256),
    Blocks(2, 1024, 2048, 256), Blocks(1, 1024, 4096, 256),
)  # fmt: skip

GLOO, GROUP, OURS = "gloo", "fompi", "fompi.torch"
COMPUTE, BACKWARD, MESSAGES = "compute alone", "backward alone", "messages alone"
BESIDE, KERNELS = "messages beside kernels", "the same kernels"
LEAST_HIDDEN = 0.9


def rows(comm: Communicator, options: Options) -> list[Row]:
    with torch_hosts(comm, "ddp") as (cluster, distributed):
        group = distributed.new_group(backend="fompi")
        models = MODELS[:1] if options.quick else MODELS
        return [measured(comm, cluster, group, model, options.rounds) for model in options.each(models)]


def measured(comm: Communicator, cluster: TcpHosts, group: Any, model: Blocks, rounds: int) -> Row:
    import torch

    from fompi.torch import DistributedDataParallel

    x = torch.randn(model.rows, model.width, generator=torch.Generator().manual_seed(comm.rank))
    made = partial(blocks, model.depth, width=model.width, hidden=model.hidden)
    models = {name: made() for name in (GLOO, GROUP, OURS, COMPUTE)}
    ours = DistributedDataParallel(models[OURS], comm, bucket_nbytes=BUCKET_MB << 20)
    backward = _Timed(models[COMPUTE], x)
    messages = partial(_all_reduces, comm, model)
    calls: dict[str, Callable[[], Any]] = {
        GLOO: steps.data_parallel(models[GLOO], x, bucket_cap_mb=BUCKET_MB),
        GROUP: steps.data_parallel(models[GROUP], x, bucket_cap_mb=BUCKET_MB, process_group=group),
        OURS: steps.alone(ours, x),
        COMPUTE: backward,
        MESSAGES: messages,
    }
    for call in calls.values():
        call()
    seconds = of_all_ranks(comm.link.comm, np.array([seconds_of(messages), seconds_of(backward)])).max(axis=0)
    repeats = int(1.5 * seconds[0] / seconds[1]) + 1  # so kernels last longer than the messages beside them
    calls[KERNELS] = partial(repeated, backward, repeats)
    calls[BESIDE] = partial(_all_reduces, comm, model, calls[KERNELS])
    gradients = {name: [p.grad for p in models[name].parameters()] for name in (GLOO, GROUP, OURS)}
    for name in (GROUP, OURS):
        compare(comm, f"gloo and {name}", gradients[name], gradients[GLOO])
    backward.seconds.clear()
    samples = alternate(comm.link.comm, calls, rounds, idle=cluster.idle)
    host = median([a - b for a, b in zip(samples.pop(BESIDE), samples.pop(KERNELS), strict=True)])
    row = Row(str(model), str(cluster), samples, base=GROUP, progress=f"{progress(comm)}; gloo: threads")
    limits = _limits(row, model.buckets, median(backward.seconds), host)
    figures = _figures(row, max(limits.values()), cluster.shared)
    figures[1:1] = [Figure(BACKWARD, 1e3 * median(backward.seconds), "ms"), Figure("host time", 1e3 * host, "ms")]
    return replace(row, limits=limits, figures=figures)


def _limits(row: Row, buckets: int, backward: float, host: float) -> dict[str, float]:
    """The two bounds of a step."""
    compute, messages = row.median(COMPUTE), row.median(MESSAGES)
    return {
        "the wire": compute - backward * (1 - 1 / buckets) + messages,
        "the cores": compute + host * (1 - 1 / buckets) + messages / buckets,
    }


def _figures(row: Row, bound: float, is_shared: bool) -> list[Figure]:
    alone = row.median(COMPUTE) + row.median(MESSAGES)
    figures = [Figure("compute / messages", row.median(COMPUTE) / row.median(MESSAGES))]
    for name in (GROUP, OURS):
        figures.append(row.ratio(GLOO, name, least=None if is_shared else 1.0, limit=row.median(GLOO) / bound))
        hidden = (alone - row.median(name)) / (alone - bound) if bound < alone else 1.0
        figures.append(Figure(f"{name}: hidden", hidden, least=None if is_shared else LEAST_HIDDEN))
        figures.append(Figure(f"{name}: time / bound", row.median(name) / bound))
    return figures


class _Timed:
    """A step without messages, with the seconds of each backward."""

    def __init__(self, model: Any, x: Any):
        self.model, self.x, self.seconds = model, x, list[float]()

    def __call__(self) -> None:
        self.model.zero_grad()
        loss = self.model(self.x).square().mean()
        begun = perf_counter()
        loss.backward()
        self.seconds.append(perf_counter() - begun)


def _all_reduces(comm: Communicator, model: Blocks, meanwhile: Callable[[], object] = lambda: None) -> None:
    """The gradients of all buckets, all started at once."""
    import torch

    part = torch.ones(model.nbytes // 4 // model.buckets)
    begun = [fompi.all_reduce.start(part, comm=comm, op="mean") for _ in range(model.buckets)]
    meanwhile()
    for pending in begun:
        pending.wait()
