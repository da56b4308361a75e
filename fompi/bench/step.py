"""Training steps against torch over gloo: mpirun -n 2 python -m fompi bench step

The model is a stack of residual MLP blocks, on real kernels of torch with one thread per rank. All contestants of a row
have the same model, the same rows and the same optimizer. Their gradients or parameters are compared before the timing.

| row | fompi | rivals |
|---|---|---|
| data parallel | `fompi.torch.DistributedDataParallel` | torch's; one all-reduce after the backward |
| parameters sharded | `DataParallel(zero=3)` | FSDP2, gathered again for the backward |
| pipeline | `fompi.torch.Pipeline`, 1F1B and interleaved | torch's 1F1B and interleaved 1F1B |

`compute alone` is the step of a rank without messages; of a pipeline, all micro-batches through the stages of a rank.
`MFU` is the share of the speed of one large product on this machine, measured in the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.options import Options
from fompi.bench.rivals import steps
from fompi.bench.rivals.gloo import torch_hosts
from fompi.engine.communicator import Communicator
from fompi.parallel.data import SGD, DataParallel
from fompi.tuning.rounds import Figure, Row, WrongResult, alternate, of_all_ranks

WIDTH, HIDDEN, BLOCKS = 512, 1024, 8
ROWS, MICROBATCHES, RATE = 256, 8, 1e-3
PIPELINES = ("1F1B", "1f1b", 1), ("eager 1F1B", "eager-1f1b", 1), ("interleaved", "interleaved", 2)
PRODUCT, SIDE = "one product", 1024
COMPUTE = "compute alone"

Step = Callable[[], Any]


def rows(comm: Communicator, options: Options) -> list[Row]:
    with torch_hosts(comm, "step") as (cluster, _):
        makers = options.each(CASES[:1] if options.quick else CASES, lambda f: f.__name__)
        return [make(comm, cluster, options.rounds) for make in makers]


# --------------------------------------------------------------------------------------------------------- the model


def blocks(count: int, seed: int = 0, width: int = WIDTH, hidden: int = HIDDEN) -> Any:
    """The model: x + gelu(x @ w1.T) @ w2.T, block after block."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(x)))

    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(count)))


def rows_of(rank: int, number: int = ROWS) -> Any:
    import torch

    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(rank))


def flops(number: int, count: int) -> float:
    """Operations of a forward and a backward of `number` rows through `count` blocks."""
    return 6.0 * number * count * 2 * WIDTH * HIDDEN


def one_product() -> Step:
    import torch

    a, b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    return lambda: a @ b


# ----------------------------------------------------------------------------------------------------------- the rows


def data_parallel(comm: Communicator, cluster: TcpHosts, rounds: int) -> Row:
    from fompi.torch import DistributedDataParallel

    x, models = rows_of(comm.rank), [blocks(BLOCKS) for _ in range(4)]
    ours = DistributedDataParallel(models[0], comm)
    calls = {
        "fompi": steps.alone(ours, x),
        "torch DDP": steps.data_parallel(models[1], x),
        "all-reduce after the backward": steps.averaged_after(models[2], x),
        COMPUTE: steps.alone(models[3], x),
    }
    for call in calls.values():
        call()
    for name, model in zip([*calls][1:3], models[1:3], strict=True):
        compare(comm, name, [p.grad for p in models[0].parameters()], [p.grad for p in model.parameters()])
    return evaluated("data parallel", comm, cluster, calls, rounds, flops(ROWS, BLOCKS), ROWS * comm.size)


def sharded(comm: Communicator, cluster: TcpHosts, rounds: int) -> Row:
    from torch.distributed.tensor import DTensor

    x, model, theirs = rows_of(comm.rank), blocks(BLOCKS), blocks(BLOCKS)
    params = {name: p.detach() for name, p in model.named_parameters()}
    nbytes = 4 * 2 * WIDTH * HIDDEN  # a bucket is a block, as is a unit of FSDP
    with DataParallel(params, optimizer=SGD(RATE), comm=comm, zero=3, bucket_nbytes=nbytes) as dp:
        calls: dict[str, Step] = {
            "fompi": partial(sharded_step, dp, x),
            "FSDP2": steps.fully_sharded(theirs, x, RATE),
            COMPUTE: steps.alone(blocks(BLOCKS), x, RATE),
        }
        for call in calls.values():
            call()
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in theirs.parameters()]
        compare(comm, "FSDP2", [dp[name].clone() for name in params], full)
        row = evaluated("parameters sharded", comm, cluster, calls, rounds, flops(ROWS, BLOCKS), ROWS * comm.size)
    return row


def sharded_step(dp: DataParallel, x: Any) -> None:
    """A step with gathered weights, which are forgotten after each use: forward and backward written out."""
    import torch
    from torch.nn.functional import gelu

    kept = []
    for i in range(BLOCKS):
        names = f"{i}.up.weight", f"{i}.down.weight"
        up, down = map(dp.__getitem__, names)
        z = x @ up.T
        kept.append((x, z))
        x = x + gelu(z) @ down.T
        del up, down
        for name in names:
            dp.release(name)
    dy = 2 / x.numel() * x
    for i in reversed(range(BLOCKS)):
        names = f"{i}.up.weight", f"{i}.down.weight"
        (x, z), (up, down) = kept.pop(), map(dp.__getitem__, names)
        dz = torch.ops.aten.gelu_backward(dy @ down, z)
        dp.ready(names[1], dy.T @ gelu(z))
        dp.ready(names[0], dz.T @ x)
        dy = dy + dz @ up
        del up, down
    dp.step()


def pipeline(comm: Communicator, cluster: TcpHosts, rounds: int) -> Row:
    """1F1B, also with forwards that run ahead, and interleaved, with half of the blocks in each of two chunks."""
    from fompi.torch import Pipeline

    x, size, count = rows_of(0, ROWS * MICROBATCHES // 2), comm.size, BLOCKS // 2  # blocks of a rank
    parts = x.chunk(MICROBATCHES)
    calls: dict[str, Step] = {}
    pipes = []
    for name, schedule, chunks in PIPELINES:
        ours, theirs = ([blocks(count // chunks, seed=comm.rank + i * size) for i in range(chunks)] for _ in range(2))
        pipe = Pipeline(
            ours,
            comm=comm,
            microbatches=MICROBATCHES,
            schedule=schedule,
            activations=tuple(parts[0].shape),
            loss=lambda y, target: y.square().mean(),
        )
        pipes.append(pipe)
        calls[f"fompi {name}"] = partial(_pipeline_step, pipe, ours, parts)
        rival, torch_step = _rival(name), steps.pipelined(theirs, x, MICROBATCHES)
        calls.setdefault(rival, torch_step)
        calls[f"fompi {name}"]()
        torch_step()
        grads = [[p.grad for module in modules for p in module.parameters()] for modules in (ours, theirs)]
        scaled = [g / MICROBATCHES for g in grads[0]]  # torch's schedules divide by the micro-batches
        compare(comm, rival, scaled, grads[1])
    calls[COMPUTE] = partial(_all_microbatches, blocks(count), parts)
    work = flops(len(x), count)
    row = evaluated("pipeline", comm, cluster, calls, rounds, work, len(x))
    for pipe in pipes:
        pipe.close()
    return row


def _rival(name: str) -> str:
    """The contestant of torch for one of fompi."""
    return f"torch {name.split()[-1]}"


def _pipeline_step(pipe: Any, modules: Sequence[Any], parts: Sequence[Any]) -> None:
    for module in modules:
        module.zero_grad()
    pipe.step(parts, parts)


def _all_microbatches(model: Any, parts: Sequence[Any]) -> None:
    model.zero_grad()
    for part in parts:
        x = part.detach().requires_grad_()
        model(x).square().mean().backward()


CASES: tuple[Callable[[Communicator, TcpHosts, int], Row], ...] = (data_parallel, sharded, pipeline)


def compare(comm: Communicator, name: str, ours: Sequence[Any], theirs: Sequence[Any], limit: float = 1e-3) -> None:
    """Raise WrongResult on all ranks if the tensors differ by more than `limit` of the largest element on one."""
    error = max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(ours, theirs, strict=True))
    worst = float(of_all_ranks(comm.link.comm, np.array([error])).max())
    if not worst < limit:
        raise WrongResult(f"fompi and {name} differ by {worst:.2g} of the largest element")


def repeated(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def evaluated(
    what: str,
    comm: Communicator,
    cluster: TcpHosts,
    calls: Mapping[str, Step],
    rounds: int,
    work: float,
    throughput: int,
) -> Row:
    """The row of a case: `work` are the operations of a rank in a step, `throughput` the rows of all ranks."""
    samples = alternate(comm.link.comm, {**calls, PRODUCT: one_product()}, rounds, idle=cluster.idle)
    peak = 2.0 * SIDE**3 / median(samples.pop(PRODUCT))
    ours = [name for name in calls if name.startswith("fompi")]
    row = Row(what, str(cluster), samples, base=ours[0], progress=f"{progress(comm)}; gloo: threads")
    figures = []
    for name in ours:
        seconds = row.median(name)
        figures.append(Figure(f"{name}: exposed / compute", seconds / row.median(COMPUTE) - 1))
        figures.append(Figure(f"{name}: MFU", work / seconds / peak))
        figures.append(Figure(f"{name}: rows per second", throughput / seconds))
        rivals = [rival for rival in calls if rival not in (name, COMPUTE) and rival not in ours]
        if len(ours) > 1:
            rivals = [_rival(name)]
        figures += [row.ratio(rival, name, least=None if cluster.shared else 1.0) for rival in rivals]
    return Row(**{**vars(row), "figures": figures})
