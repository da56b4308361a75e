"""The models of the suites with PyTorch, and the steps that train them.

| model    | what it is                                                       | suites             |
|----------|------------------------------------------------------------------|--------------------|
| `Blocks` | residual MLP blocks, x + gelu(x @ w1.T) @ w2.T                   | `step`, `ddp`      |
| `Gpt`    | embeddings, blocks with attention, and what makes the logits     | `programs`         |
|          | the same blocks, of which a rank has some heads and columns      | `decode`           |

A model makes a `TorchTask`: its parts, and what a rank gives and wants. A step trains a task in one of torch's ways.
The same lines run on a group of gloo and on one of the backend "fompi".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# --------------------------------------------------------------------------------------------------------- the models


class Block(nn.Module):
    """x + mlp(x), behind x + attention(x) if there are heads. Then the input of both is normalised."""

    def __init__(self, width: int, hidden: int, heads: int = 0, head_dim: int = 0):
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.heads, self.head_dim = heads, head_dim
        if heads:
            self.qkv, self.out = linear(width, 3 * heads * head_dim), linear(heads * head_dim, width)
        self.up, self.down = linear(width, hidden), linear(hidden, width)

    def attention(self, x: Any, cache: Any = None, at: int = 0) -> Any:
        """Over these tokens. With a cache of keys and values they stand at `at`, behind those that it holds."""
        x = functional.layer_norm(x, x.shape[-1:])
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).movedim(-3, 0).transpose(-3, -2)
        if cache is None:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            until = at + len(x)
            cache[0, :, at:until], cache[1, :, at:until] = k, v
            k, v = cache[:, :, :until]
            sees = torch.ones(len(x), until, dtype=torch.bool).tril(at) if len(x) > 1 else None
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return self.out(y.transpose(-3, -2).flatten(-2))

    def mlp(self, x: Any) -> Any:
        return self.down(functional.gelu(self.up(functional.layer_norm(x, x.shape[-1:]) if self.heads else x)))

    def forward(self, x: Any) -> Any:
        if self.heads:
            x = x + self.attention(x)
        return x + self.mlp(x)


class TokenEmbedding(nn.Module):
    """Of tokens and of their places."""

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))


class TorchTask(NamedTuple):
    """A model in parts, the input of a rank, and `loss(y, wanted)`. FSDP gathers the `blocks` one by one."""

    parts: Sequence[Any]
    blocks: Sequence[Any]
    given: Any
    wanted: Any
    loss: Callable[[Any, Any], Any]

    @property
    def model(self) -> Any:
        return nn.Sequential(*self.parts)


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
        torch.manual_seed(seed)
        blocks = [Block(self.width, self.hidden) for _ in range(self.depth)]
        x = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(rank))
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
        torch.manual_seed(0)
        blocks = [Block(self.width, 4 * self.width, self.heads, self.width // self.heads) for _ in range(self.layers)]
        head = nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, self.vocabulary))
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(self.vocabulary, (self.sequences, self.length + 1), generator=generator)
        parts = [TokenEmbedding(self.vocabulary, self.length, self.width), *blocks, head]
        return TorchTask(parts, blocks, tokens[:, :-1], tokens[:, 1:], _cross_entropy)


def _cross_entropy(logits: Any, targets: Any) -> Any:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


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
    step: Callable[[], object] = torch.optim.SGD(model.parameters(), lr=learning_rate).step
    return step


def data_parallel(
    task: TorchTask, group: Any = None, hook: Callable[..., Any] | None = None, **options: Any
) -> TorchStep:
    """Gradients are averaged in buckets while the backward goes on. `hook`: what sends a bucket."""
    model = DistributedDataParallel(task.model, process_group=group, **options)
    if hook is not None:
        model.register_comm_hook(group, hook)
    return alone(task, model)


def averaged_after(task: TorchTask) -> TorchStep:
    """Forward and backward, then one all-reduce of all gradients: no overlap."""

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
    mesh = DeviceMesh.from_group(distributed.group.WORLD if group is None else group, "cpu")
    for block in task.blocks:
        fully_shard(block, mesh=mesh)
    model = fully_shard(task.model, mesh=mesh)
    return alone(task, model, descent(model, learning_rate) if learning_rate else _nothing)


def pipelined(stages: Sequence[Any], task: TorchTask, microbatches: int, group: Any = None) -> TorchStep:
    """All micro-batches through the stages of all ranks: 1F1B, or interleaved if a rank has several stages."""
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
