"""Training steps against torch over gloo.

    mpirun -n 2 python -m fompi bench tools/suites/step.py

The model is a stack of residual MLP blocks, on real kernels of torch with one thread per rank. All contestants of a row
have the same model, the same rows and the same optimizer. Their gradients or parameters are compared before the timing.

| row | fompi | rivals |
|---|---|---|
| data parallel | `fompi.torch.DistributedDataParallel` | torch's; one all-reduce after the backward |
| parameters sharded | `DataParallel(zero=3)` | FSDP2, gathered again for the backward |
| pipeline | `fompi.torch.Pipeline`, 1F1B and interleaved | torch's 1F1B and interleaved 1F1B |

`compute alone` is the step of a rank without messages; of a pipeline, all micro-batches through the stages of a rank.
`MFU` is the share of the speed of one large product on this machine, measured in the same rounds.

On a device (`--device`) a row is a step by fompi with its kernels alone and its messages alone, as in `parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu

from c10d import beside_torch, compare
from fompi.bench.measure import Bench, Call
from fompi.parallel.data import SGD, DataParallel
from fompi.torch import DistributedDataParallel, Pipeline
from fompi.tuning.rounds import Figure, Row
from parallel import of_device
from strategy import MICROBATCHES, pipeline, zero_1
from training import Blocks, TorchStep, alone, averaged_after, data_parallel, descent, fully_sharded, pipelined

MODEL, RATE = Blocks(8, 512, 1024, 256), 1e-3
PIPELINES = ("1F1B", "1f1b", 1), ("eager 1F1B", "eager-1f1b", 1), ("interleaved", "interleaved", 2)
PRODUCT, SIDE = "one product", 1024
COMPUTE = "compute alone"


def rows(bench: Bench) -> list[Row]:
    cases = {"data parallel": averaged, "parameters sharded": sharded, "pipeline": pipelines}
    with beside_torch(bench) as (beside, _):
        return beside.rows(dict([*cases.items()][: 1 if bench.quick else None]))


def rows_on_device(bench: Bench) -> list[Row]:
    name = f"a step of a pipeline, {MICROBATCHES} micro-batches"
    return of_device(bench, {"a step with ZeRO-1": zero_1, name: pipeline})


def averaged(bench: Bench) -> Row:
    """Data parallelism."""
    rank = bench.comm.rank
    task = MODEL.task(rank)
    calls = {
        "fompi": alone(task, DistributedDataParallel(task.model, bench.comm)),
        "torch DDP": data_parallel(MODEL.task(rank)),
        "all-reduce after the backward": averaged_after(MODEL.task(rank)),
        COMPUTE: alone(MODEL.task(rank)),
    }
    for call in calls.values():
        call()
    ours, *others, _ = calls
    for name in others:
        compare(bench, name, calls[ours].gradients, calls[name].gradients)
    return evaluated(bench, "data parallel", calls, MODEL.flops, MODEL.rows * bench.comm.size)


def sharded(bench: Bench) -> Row:
    tasks = [MODEL.task(bench.comm.rank) for _ in range(3)]
    params = {name: p.detach() for name, p in tasks[0].model.named_parameters()}
    nbytes = 4 * 2 * MODEL.width * MODEL.hidden  # a bucket is a block, as is a unit of FSDP
    with DataParallel(params, optimizer=SGD(RATE), comm=bench.comm, zero=3, bucket_nbytes=nbytes) as dp:
        theirs, compute = fully_sharded(tasks[1], learning_rate=RATE), tasks[2].model
        calls: dict[str, Call] = {
            "fompi": partial(sharded_step, dp, tasks[0].given),
            "FSDP2": theirs,
            COMPUTE: alone(tasks[2], compute, descent(compute, RATE)),
        }
        for call in calls.values():
            call()
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in theirs.modules[0].parameters()]
        compare(bench, "FSDP2", [dp[name].clone() for name in params], whole)
        return evaluated(bench, "parameters sharded", calls, MODEL.flops, MODEL.rows * bench.comm.size)


def sharded_step(dp: DataParallel, x: Any) -> None:
    """A step with gathered weights, which are forgotten after each use: forward and backward written out."""
    kept = []
    for i in range(MODEL.depth):
        names = f"{i}.up.weight", f"{i}.down.weight"
        up, down = map(dp.__getitem__, names)
        z = x @ up.T
        kept.append((x, z))
        x = x + gelu(z) @ down.T
        del up, down
        for name in names:
            dp.release(name)
    dy = 2 / x.numel() * x
    for i in reversed(range(MODEL.depth)):
        names = f"{i}.up.weight", f"{i}.down.weight"
        (x, z), (up, down) = kept.pop(), map(dp.__getitem__, names)
        dz = torch.ops.aten.gelu_backward(dy @ down, z)
        dp.ready(names[1], dy.T @ gelu(z))
        dp.ready(names[0], dz.T @ x)
        dy = dy + dz @ up
        del up, down
    dp.step()


def pipelines(bench: Bench) -> Row:
    """1F1B, also with forwards that run ahead, and interleaved, with half of the blocks in each of two chunks."""
    rank, size = bench.comm.rank, bench.comm.size
    model = MODEL._replace(depth=MODEL.depth // 2, rows=MODEL.rows * MICROBATCHES // 2)  # blocks of a rank
    task = model.task(0)
    parts = task.given.chunk(MICROBATCHES)
    calls: dict[str, Call] = {}
    pipes = []
    for name, schedule, chunks in PIPELINES:
        chunk = model._replace(depth=model.depth // chunks)
        ours, theirs = ([chunk.task(0, rank + i * size).model for i in range(chunks)] for _ in range(2))
        pipe = Pipeline(
            ours,
            comm=bench.comm,
            microbatches=MICROBATCHES,
            schedule=schedule,
            activations=tuple(parts[0].shape),
            loss=task.loss,
        )
        pipes.append(pipe)
        mine, rival = TorchStep(partial(pipe.step, parts, parts), ours), pipelined(theirs, task, MICROBATCHES)
        calls[f"fompi {name}"] = mine
        calls.setdefault(_rival(name), rival)
        mine()
        rival()
        scaled = [g / MICROBATCHES for g in mine.gradients]  # torch's schedules divide by the micro-batches
        compare(bench, _rival(name), scaled, rival.gradients)
    calls[COMPUTE] = TorchStep(partial(_all_microbatches, task.model, parts, task.loss), [task.model])
    row = evaluated(bench, "pipeline", calls, model.flops, model.rows)
    for pipe in pipes:
        pipe.close()
    return row


def _rival(name: str) -> str:
    """The contestant of torch for one of fompi."""
    return f"torch {name.split()[-1]}"


def _all_microbatches(model: Any, parts: Sequence[Any], loss: Any) -> None:
    for part in parts:
        x = part.detach().requires_grad_()
        loss(model(x), x).backward()


def evaluated(bench: Bench, what: str, calls: Mapping[str, Call], work: float, throughput: int) -> Row:
    """The row of a case: `work` are the operations of a rank in a step, `throughput` the rows of all ranks."""
    a, b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    samples = bench.times({**calls, PRODUCT: lambda: a @ b})
    peak = 2.0 * SIDE**3 / median(samples.pop(PRODUCT))
    ours = [name for name in calls if name.startswith("fompi")]
    row = bench.row_of(what, samples, base=ours[0])
    figures = []
    for name in ours:
        seconds = row.median(name)
        figures.append(Figure(f"{name}: exposed / compute", seconds / row.median(COMPUTE) - 1))
        figures.append(Figure(f"{name}: MFU", work / seconds / peak))
        figures.append(Figure(f"{name}: rows per second", throughput / seconds))
        rivals = [rival for rival in calls if rival != COMPUTE and rival not in ours]
        if len(ours) > 1:
            rivals = [_rival(name)]
        figures += [row.ratio(rival, name, least=bench.asked(1.0)) for rival in rivals]
    return replace(row, figures=figures)
