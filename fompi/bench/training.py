"""The models of the suites with PyTorch, and the steps that train them.

| model    | what it is                                                                   | suites             |
|----------|------------------------------------------------------------------------------|--------------------|
| `Blocks` | residual MLP blocks, x + gelu(x @ w1.T) @ w2.T                               | `step`, `ddp`      |
| `Gpt`    | embeddings, blocks of causal attention and an MLP, and what makes the logits | `train`, `smaller` |

A model makes a `TorchTask`: its parts, and what a rank gives and wants. A step trains a task in one of torch's ways.
The same lines run on a group of gloo and on one of the backend "fompi".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from fompi.base.errors import FompiError
from fompi.bench.measure import Bench
from fompi.bench.rivals.gloo import Gloo


@contextmanager
def beside_torch(bench: Bench, suite: str) -> Iterator[tuple[Bench, Any]]:
    """The benchmark beside PyTorch, and `torch.distributed`, whose default group is one of gloo."""
    try:
        import torch.distributed as distributed
    except ImportError:
        raise FompiError(f"bench {suite} compares with PyTorch, which is not installed: pip install torch") from None
    from fompi.torch.autoload import register

    register()
    with closing(Gloo(bench.mpi, bench.cluster.rendezvous())):
        yield replace(bench, moves="gloo: threads"), distributed


# --------------------------------------------------------------------------------------------------------- the models


class TorchTask(NamedTuple):
    """A model in parts, the input of a rank, and `loss(y, wanted)`. FSDP gathers the `blocks` one by one."""

    parts: Sequence[Any]
    blocks: Sequence[Any]
    given: Any
    wanted: Any
    loss: Callable[[Any, Any], Any]

    @property
    def model(self) -> Any:
        import torch

        return torch.nn.Sequential(*self.parts)


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
    def flops(self) -> float:
        """Operations of a forward and a backward."""
        return 6.0 * self.rows * self.depth * 2 * self.width * self.hidden

    def task(self, rank: int, seed: int = 0) -> TorchTask:
        """The input of this rank. Models of one `seed` are the same."""
        import torch
        from torch import nn

        width, hidden = self.width, self.hidden

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

            def forward(self, x: Any) -> Any:
                return x + self.down(nn.functional.gelu(self.up(x)))

        torch.manual_seed(seed)
        blocks = [Block() for _ in range(self.depth)]
        x = torch.randn(self.rows, width, generator=torch.Generator().manual_seed(rank))
        return TorchTask(blocks, blocks, x, x, lambda y, wanted: y.square().mean())


class Gpt(NamedTuple):
    """The model, and the tokens of a rank in a step."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequences: int
    length: int

    def task(self, rank: int) -> TorchTask:
        """The tokens of this rank. All models are the same."""
        import torch
        from torch import nn

        size = self

        class Embed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens = nn.Embedding(size.vocabulary, size.width)
                self.places = nn.Embedding(size.length, size.width)

            def forward(self, tokens: Any) -> Any:
                return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))

        class Decoding(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
                self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
                self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

            def forward(self, x: Any) -> Any:
                qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, size.heads, -1)).permute(2, 0, 3, 1, 4)
                y = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
                x = x + self.out(y.transpose(1, 2).flatten(-2))
                return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

        torch.manual_seed(0)
        blocks = [Decoding() for _ in range(size.layers)]
        head = nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary))
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(size.vocabulary, (size.sequences, size.length + 1), generator=generator)
        return TorchTask([Embed(), *blocks, head], blocks, tokens[:, :-1], tokens[:, 1:], _cross_entropy)


def _cross_entropy(logits: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------------------------------------------- the steps


@dataclass(frozen=True)
class TorchStep:
    """A step of training, and the modules whose gradients it makes."""

    call: Callable[[], object]
    modules: Sequence[Any]

    def __call__(self) -> None:
        for module in self.modules:
            module.zero_grad()
        self.call()

    @property
    def gradients(self) -> list[Any]:
        """Those of this rank: of sharded parameters its part."""
        found = [p.grad for module in self.modules for p in module.parameters()]
        return [g.to_local() if hasattr(g, "to_local") else g for g in found]


def _nothing() -> None:
    pass


def alone(
    task: TorchTask, model: Any = None, then: Callable[[], object] = _nothing, seconds: list[float] | None = None
) -> TorchStep:
    """A forward and a backward of `model`, which may send messages, `then` more. `seconds`: of each backward."""
    model = task.model if model is None else model

    def step() -> None:
        loss = task.loss(model(task.given), task.wanted)
        begun = perf_counter()
        loss.backward()
        if seconds is not None:
            seconds.append(perf_counter() - begun)
        then()

    return TorchStep(step, [model])


def descent(model: Any, learning_rate: float) -> Callable[[], object]:
    """A step of SGD."""
    import torch

    step: Callable[[], object] = torch.optim.SGD(model.parameters(), lr=learning_rate).step
    return step


def data_parallel(
    task: TorchTask, group: Any = None, hook: Callable[..., Any] | None = None, **options: Any
) -> TorchStep:
    """Gradients are averaged in buckets while the backward goes on. `hook`: what sends a bucket."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(task.model, process_group=group, **options)
    if hook is not None:
        model.register_comm_hook(group, hook)
    return alone(task, model)


def averaged_after(task: TorchTask) -> TorchStep:
    """Forward and backward, then one all-reduce of all gradients: no overlap."""
    import torch
    import torch.distributed as distributed

    model, size = task.model, distributed.get_world_size()

    def average() -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        distributed.all_reduce(flat)
        flat /= size
        parts = torch.split(flat, [p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts, strict=True):
            p.grad = part.view_as(p)

    return alone(task, model, average)


def fully_sharded(task: TorchTask, group: Any = None, learning_rate: float = 0.0) -> TorchStep:
    """FSDP2. Each block of the model is a unit, gathered for the forward and again for the backward."""
    import torch.distributed as distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(distributed.group.WORLD if group is None else group, "cpu")
    for block in task.blocks:
        fully_shard(block, mesh=mesh)
    model = fully_shard(task.model, mesh=mesh)
    return alone(task, model, descent(model, learning_rate) if learning_rate else _nothing)


def pipelined(stages: Sequence[Any], task: TorchTask, microbatches: int, group: Any = None) -> TorchStep:
    """All micro-batches through the stages of all ranks: 1F1B, or interleaved if a rank has several stages."""
    import torch
    import torch.distributed as distributed
    from torch.distributed import pipelining

    rank, size = distributed.get_rank(), distributed.get_world_size()
    parts = [
        pipelining.PipelineStage(module, rank + i * size, size * len(stages), torch.device("cpu"), group=group)
        for i, module in enumerate(stages)
    ]
    schedule: Any = (
        pipelining.ScheduleInterleaved1F1B(parts, microbatches, loss_fn=task.loss)
        if len(parts) > 1
        else pipelining.Schedule1F1B(parts[0], microbatches, loss_fn=task.loss)
    )
    given, wanted = (task.given,) if rank == 0 else (), {"target": task.wanted} if rank == size - 1 else {}
    return TorchStep(partial(schedule.step, *given, **wanted), stages)
