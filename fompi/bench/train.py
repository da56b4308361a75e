"""Steps of a GPT by torch's own classes, over gloo and over fompi: mpirun -n 2 python -m fompi bench train

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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.options import Options
from fompi.bench.rivals.gloo import torch_hosts
from fompi.bench.step import compare
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import Row, alternate

GLOO, OURS = "gloo", "fompi"

Way = Callable[..., tuple[Callable[[], object], Any]]
"""(size, group, rank, ranks) -> a step, and the model whose gradients it makes."""

LEAST = {"DDP": 1.05, "DDP, fp16": 1.05, "FSDP2": 1.6, "1F1B": 1.05}
"""Asked between hosts: fompi is at least this many times as fast as gloo."""

WITHIN, WITHIN_HALF = 1e-3, 4e-3
"""Gradients may differ by this share of the largest one. Those of fp16 are rounded once in each sum."""


class Gpt(NamedTuple):
    """The model, and the tokens of a rank in a step. A pipeline has those of all ranks."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequences: int
    length: int


FULL = Gpt(6, 384, 6, 8192, 4, 64)
"""17 million parameters."""

QUICK = Gpt(2, 32, 2, 64, 2, 8)


def rows(comm: Communicator, options: Options) -> list[Row]:
    ways: dict[str, Way] = {
        "DDP": data_parallel,
        "DDP, fp16": partial(data_parallel, half=True),
        "FSDP2": sharded,
        "1F1B": pipeline,
    }
    with torch_hosts(comm, "train") as (cluster, distributed):
        groups = {GLOO: distributed.group.WORLD, OURS: distributed.new_group(backend="fompi")}
        size = QUICK if options.quick else FULL
        return [_row(comm, cluster, name, ways[name], groups, size, options.rounds) for name in options.each([*ways])]


def _row(
    comm: Communicator,
    cluster: TcpHosts,
    name: str,
    way: Way,
    groups: dict[str, Any],
    size: Gpt,
    rounds: int,
) -> Row:
    calls, gradients = {}, {}
    for contestant, group in groups.items():
        calls[contestant], model = way(size, group, comm.rank, comm.size)
        calls[contestant]()
        held = [p.grad for p in model.parameters()]
        gradients[contestant] = [g.to_local() if hasattr(g, "to_local") else g for g in held]
    compare(comm, name, gradients[OURS], gradients[GLOO], WITHIN_HALF if "fp16" in name else WITHIN)
    samples = alternate(comm.link.comm, calls, rounds, idle=cluster.idle)
    row = Row(name, str(cluster), samples, base=OURS, progress=f"{progress(comm)}; gloo: threads")
    least = None if cluster.shared else LEAST[name]
    return Row(**{**vars(row), "figures": [row.ratio(GLOO, OURS, least=least)]})


def gpt(size: Gpt) -> list[Any]:
    """The parts of a model of random weights: what embeds tokens, the blocks, and what makes the logits."""
    import torch
    from torch import nn

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
    return [Embed(), *blocks, nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary))]


def tokens_of(size: Gpt, sequences: int, seed: int) -> Any:
    import torch

    made = torch.Generator().manual_seed(seed)
    return torch.randint(size.vocabulary, (sequences, size.length + 1), generator=made)


def loss_of(logits: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _step(model: Any, tokens: Any) -> None:
    model.zero_grad()
    loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()


def data_parallel(
    size: Gpt, group: Any, rank: int, ranks: int, half: bool = False, wire: str = ""
) -> tuple[Callable[[], object], Any]:
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from fompi.torch.comm_hook import wire as smaller

    model = nn.parallel.DistributedDataParallel(nn.Sequential(*gpt(size)), process_group=group)
    if half:
        model.register_comm_hook(group, fp16_compress_hook)
    if wire:
        model.register_comm_hook(group, smaller(wire))
    return partial(_step, model, tokens_of(size, size.sequences, rank)), model


def sharded(size: Gpt, group: Any, rank: int, ranks: int) -> tuple[Callable[[], object], Any]:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh, parts = DeviceMesh.from_group(group, "cpu"), gpt(size)
    for block in parts[1:-1]:
        fully_shard(block, mesh=mesh)
    model = fully_shard(nn.Sequential(*parts), mesh=mesh)
    return partial(_step, model, tokens_of(size, size.sequences, rank)), model


def pipeline(size: Gpt, group: Any, rank: int, ranks: int) -> tuple[Callable[[], object], Any]:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    parts = gpt(size)
    stage = nn.Sequential(*parts[len(parts) * rank // ranks : len(parts) * (rank + 1) // ranks])
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, ranks, torch.device("cpu"), group=group), 2 * ranks, loss_fn=loss_of
    )
    tokens = tokens_of(size, size.sequences * ranks, 0)
    given = (tokens[:, :-1],) if rank == 0 else ()
    targets = {"target": tokens[:, 1:]} if rank == ranks - 1 else {}

    def step() -> None:
        stage.zero_grad()
        schedule.step(*given, **targets)

    return step, stage
