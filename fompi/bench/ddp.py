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

Of k buckets the last one is full when the backward ends, and the first one after a k-th of it. So a backward can hide
(k - 1) / k of the messages or of itself, whichever is less: `hidden` is the share of that which is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import fompi
from fompi.base.errors import FompiError
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.options import Options
from fompi.bench.rivals import steps
from fompi.bench.rivals.gloo import Gloo
from fompi.bench.step import blocks, compare
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import Figure, Row, alternate

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
AT_BALANCE, LEAST_AT_BALANCE, LEAST_HIDDEN = (0.8, 1.25), 1.3, 0.9
"""Balance: compute / messages in this range. There fompi shall be so many times as fast as gloo."""


def rows(comm: Communicator, options: Options) -> list[Row]:
    try:
        import torch.distributed as distributed
    except ImportError:
        raise FompiError("bench ddp compares with PyTorch, which is not installed: pip install torch") from None
    from fompi.torch.autoload import register

    register()
    with TcpHosts(comm.link.comm) as cluster:
        gloo = Gloo(comm.link.comm, cluster.rendezvous())
        try:
            group = distributed.new_group(backend="fompi")
            models = MODELS[:1] if options.quick else MODELS
            return [measured(comm, cluster, group, model, options.rounds) for model in options.each(models)]
        finally:
            gloo.close()


def measured(comm: Communicator, cluster: TcpHosts, group: Any, model: Blocks, rounds: int) -> Row:
    import torch

    from fompi.torch import DistributedDataParallel

    def made() -> Any:
        return blocks(model.depth, 0, model.width, model.hidden)

    x = torch.randn(model.rows, model.width, generator=torch.Generator().manual_seed(comm.rank))
    models = {name: made() for name in (GLOO, GROUP, OURS, COMPUTE)}
    ours = DistributedDataParallel(models[OURS], comm, bucket_nbytes=BUCKET_MB << 20)
    backward = _Timed(models[COMPUTE], x)
    calls: dict[str, Callable[[], Any]] = {
        GLOO: steps.data_parallel(models[GLOO], x, bucket_cap_mb=BUCKET_MB),
        GROUP: steps.data_parallel(models[GROUP], x, bucket_cap_mb=BUCKET_MB, process_group=group),
        OURS: partial(_step, ours, x),
        COMPUTE: backward,
        MESSAGES: partial(_all_reduces, comm, model),
    }
    for call in calls.values():
        call()
    gradients = {name: [p.grad for p in models[name].parameters()] for name in (GLOO, GROUP, OURS)}
    for name in (GROUP, OURS):
        compare(comm, f"gloo and {name}", gradients[name], gradients[GLOO])
    backward.seconds.clear()
    samples = alternate(comm.link.comm, calls, rounds, idle=cluster.idle)
    row = Row(str(model), str(cluster), samples, base=GROUP, progress=f"{progress(comm)}; gloo: threads")
    return Row(**{**vars(row), "figures": _figures(row, model, median(backward.seconds), cluster.shared)})


def _figures(row: Row, model: Blocks, backward: float, is_shared: bool) -> list[Figure]:
    compute, messages = row.median(COMPUTE), row.median(MESSAGES)
    least_hidden = None if is_shared else LEAST_HIDDEN
    is_balanced = AT_BALANCE[0] <= compute / messages <= AT_BALANCE[1]
    least = None if is_shared else LEAST_AT_BALANCE if is_balanced else 1.0
    figures = [Figure("compute / messages", compute / messages), Figure(BACKWARD, 1e3 * backward, "ms")]
    hideable = (1 - 1 / model.buckets) * min(messages, backward)
    for name in (GROUP, OURS):
        figures.append(row.ratio(GLOO, name, least=least))
        if model.buckets > 1:
            hidden = (compute + messages - row.median(name)) / hideable
            figures.append(Figure(f"{name}: hidden", hidden, least=least_hidden))
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


def _step(model: Any, x: Any) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def _all_reduces(comm: Communicator, model: Blocks) -> None:
    """The gradients of all buckets, all started at once."""
    import torch

    part = torch.ones(model.nbytes // 4 // model.buckets)
    for pending in [fompi.all_reduce.start(part, comm=comm, op="mean") for _ in range(model.buckets)]:
        pending.wait()
