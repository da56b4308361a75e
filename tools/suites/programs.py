"""Whole programs by torch's own classes, over gloo and over fompi.

    mpirun -n 2 python -m fompi bench tools/suites/programs.py

The two contestants run the same lines, on a group of gloo and on one of the backend "fompi". What they compute is
compared before the timing.

| row                | what it is                                                                                  |
|--------------------|---------------------------------------------------------------------------------------------|
| `DDP`              | a GPT under `DistributedDataParallel`                                                       |
| `DDP, fp16`        | the same with torch's `fp16_compress_hook`                                                  |
| `nanoGPT`          | its trainer's step: two accumulations, `no_sync`, clipping by the norm, AdamW, a mean loss  |
| `FSDP2`            | `fully_shard` of each block, then of the model                                              |
| `1F1B`             | `Schedule1F1B` of torch.distributed.pipelining, a stage on each rank, two microbatches each |
| `interleaved 1F1B` | `ScheduleInterleaved1F1B`, two stages on each rank                                          |
| `GNN`              | three layers of a graph: an all-to-all of the borders before each, and in the backward      |
| `RL`               | each tensor of a policy broadcast, rollouts, rewards gathered, one all-reduce a gradient    |
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from c10d import beside_torch, compare
from fompi.bench.measure import Bench
from fompi.tuning.rounds import Row
from means import repeated
from training import Gpt, TorchStep, data_parallel, fully_sharded, pipelined

GLOO, OURS = "gloo", "fompi"

LEAST = {
    "DDP": 1.0, "DDP, fp16": 1.0, "nanoGPT": 0.98, "FSDP2": 1.6, "1F1B": 1.0, "interleaved 1F1B": 0.98,
    "GNN": 0.98, "RL": 0.98,
}  # fmt: skip
"""Asked: fompi is at least this many times as fast as gloo."""

WITHIN, WITHIN_HALF = 1e-3, 4e-3
"""Gradients may differ by this share of the largest one. Those of fp16 are rounded once in each sum."""

FULL = Gpt(6, 384, 6, 8192, 4, 64)
"""17 million parameters."""

QUICK = Gpt(2, 32, 2, 64, 2, 8)

NODES, BORDER, FEATURES, GRAPH_LAYERS = 256, 32, 64, 3
"""Of a rank's part of the graph: its nodes, those that each other rank sees, and the numbers of each."""

STEPS_AT_ONCE = 10
"""So many small steps are one sample."""

OBSERVED, HIDDEN, ACTIONS, STEPS = 32, 64, 8, 16
"""A policy of four layers, and the steps of a rollout."""


def rows(bench: Bench) -> list[Row]:
    with beside_torch(bench) as (beside, group):
        groups = {GLOO: dist.group.WORLD, OURS: group}
        return beside.rows({way: partial(_row, way=way, groups=groups) for way in LEAST})


def _row(bench: Bench, way: str, groups: dict[str, Any]) -> Row:
    steps = {name: _step(bench, way, group) for name, group in groups.items()}
    for step in steps.values():
        step()
    compare(bench, way, steps[OURS].gradients, steps[GLOO].gradients, WITHIN_HALF if "fp16" in way else WITHIN)
    times = STEPS_AT_ONCE if way in ("GNN", "RL") and not bench.quick else 1
    row = bench.row(way, {name: partial(repeated, step, times) for name, step in steps.items()}, base=OURS)
    return replace(row, figures=[row.ratio(GLOO, OURS, least=LEAST[way])])


def _step(bench: Bench, way: str, group: Any) -> TorchStep:
    rank, ranks, size = bench.comm.rank, bench.comm.size, QUICK if bench.quick else FULL
    if way == "GNN":
        return graph(rank, ranks, group)
    if way == "RL":
        return policy(rank, ranks, group)
    if way.endswith("1F1B"):
        task = size._replace(sequences=size.sequences * ranks).task(0)
        stages = ranks * (2 if way.startswith("interleaved") else 1)
        cuts = [len(task.parts) * at // stages for at in range(stages + 1)]
        parts = [task.parts[cuts[at] : cuts[at + 1]] for at in range(rank, stages, ranks)]
        return pipelined([task._replace(parts=part).model for part in parts], task, 2 * ranks, group)
    task = size.task(rank)
    if way == "FSDP2":
        return fully_sharded(task, group)
    if way == "nanoGPT":
        return trainer(task, group)
    return data_parallel(task, group, fp16_compress_hook if "fp16" in way else None)


def trainer(task: Any, group: Any, accumulations: int = 2) -> TorchStep:
    """Micro-batches, summed over the ranks after the last one; the norm of all gradients; AdamW; the loss."""
    model = DistributedDataParallel(task.model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        for at in range(accumulations):
            with nullcontext() if at == accumulations - 1 else model.no_sync():
                loss = task.loss(model(task.given), task.wanted) / accumulations
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)

    return TorchStep(step, [model])


class _Halo(torch.autograd.Function):
    """The borders of all other ranks, and in the backward the gradients of the own one."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        dx = torch.empty_like(dy[0])
        dist.all_to_all_single(dx, dy[0].contiguous(), group=ctx.group)
        return dx, None


def graph(rank: int, ranks: int, group: Any) -> TorchStep:
    """Layers of a graph whose nodes are spread over the ranks, and small gradients summed by DDP."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(2 * FEATURES, FEATURES) for _ in range(GRAPH_LAYERS))
    generator = torch.Generator().manual_seed(rank)
    nodes = torch.randn(NODES, FEATURES, generator=generator)
    seen = torch.randint(NODES, (ranks * BORDER,), generator=generator)
    near = torch.rand(NODES, ranks * BORDER, generator=generator).softmax(1)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.relu(layer(torch.cat([x, near @ _Halo.apply(x[seen], group)], 1)))
            return x

    model = DistributedDataParallel(Graph(), process_group=group)
    return TorchStep(lambda: model(nodes).square().mean().backward(), [model])


def policy(rank: int, ranks: int, group: Any) -> TorchStep:
    """A step of REINFORCE, as programs write it that know no DDP: many small messages."""
    torch.manual_seed(0)
    sizes = [OBSERVED, HIDDEN, HIDDEN, HIDDEN, ACTIONS]
    model = nn.Sequential(*(part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())))
    observed = torch.randn(STEPS, OBSERVED, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        for p in model.parameters():
            dist.broadcast(p.data, 0, group=group)
        chances = model(observed).log_softmax(1)
        reward = chances.detach().max(1).values.sum().reshape(1)
        rewards = [torch.empty(1) for _ in range(ranks)]
        dist.all_gather(rewards, reward, group=group)
        (chances[:, 0].sum() * (reward - torch.cat(rewards).mean() + 1)[0]).backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=group)

    return TorchStep(step, [model])
