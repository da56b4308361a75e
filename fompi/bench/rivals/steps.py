"""Training steps of torch over gloo: DistributedDataParallel, FSDP2, and the pipelines of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Step = Callable[[], Any]


def alone(model: Any, x: Any, learning_rate: float = 0.0) -> Step:
    """A forward and a backward, and a step of SGD if there is a learning rate. Only the model may send messages."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def step() -> Any:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if learning_rate:
            optimizer.step()
        return model

    return step


def data_parallel(model: Any, x: Any, **options: Any) -> Step:
    """Forward and backward. Gradients are averaged in buckets while the backward goes on."""
    from torch.nn.parallel import DistributedDataParallel

    return alone(DistributedDataParallel(model, **options), x)


def averaged_after(model: Any, x: Any) -> Step:
    """Forward and backward, then one all-reduce of all gradients: no overlap."""
    import torch
    import torch.distributed as distributed

    size = distributed.get_world_size()

    def step() -> Any:
        model.zero_grad()
        model(x).square().mean().backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        distributed.all_reduce(flat)
        flat /= size
        parts = torch.split(flat, [p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts, strict=True):
            p.grad = part.view_as(p)
        return model

    return step


def fully_sharded(model: Any, x: Any, learning_rate: float) -> Step:
    """A step of SGD. Each block of the model is a unit, gathered for the forward and again for the backward."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return alone(model, x, learning_rate)


def pipelined(stages: list[Any], x: Any, microbatches: int) -> Step:
    """Forward and backward of all micro-batches: 1F1B, or interleaved if this rank has several stages."""
    import torch
    import torch.distributed as distributed
    from torch.distributed import pipelining

    rank, size = distributed.get_rank(), distributed.get_world_size()
    parts = [
        pipelining.PipelineStage(module, rank + i * size, size * len(stages), torch.device("cpu"))
        for i, module in enumerate(stages)
    ]
    options: dict[str, Any] = {"loss_fn": lambda y, target: y.square().mean()}
    schedule: Any
    if len(parts) > 1:
        schedule = pipelining.ScheduleInterleaved1F1B(parts, microbatches, **options)
    else:
        schedule = pipelining.Schedule1F1B(parts[0], microbatches, **options)

    def step() -> Any:
        for module in stages:
            module.zero_grad()
        args = (x,) if rank == 0 else ()
        schedule.step(*args, **({"target": torch.zeros_like(x), "losses": []} if rank == size - 1 else {}))
        return stages

    return step
