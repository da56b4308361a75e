"""The pass of torch.compile that fuses products with collectives ("async tensor parallelism"), on fompi.

    with fompi.torch.fused_compile(mesh):
        compiled = torch.compile(model)                  # a model that torch's parallelize_module has sharded
        compiled(x).sum().backward()                     # the first step compiles; later steps may be outside

torch replaces an all-gather before products, and a product before a reduce-scatter, by operators that it has for CUDA
only. `fused_compile` turns the pass on and gives these operators kernels for the CPU:

| torch.ops.symm_mem | fompi |
|---|---|
| fused_all_gather_matmul | all_gather_matmul_many, which gathers once for several weights |
| fused_matmul_reduce_scatter | matmul_reduce_scatter |

`fompi.torch.install` needs no inductor, fuses biases and weight gradients, too, and is the first choice. This way needs
no change in the model's modules: what counts is the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fompi.torch import private
from fompi.torch.operators import communicator

OPS = torch.ops.fompi


@contextmanager
def fused_compile(*groups: Any) -> Iterator[None]:
    """In this block inductor fuses products with the collectives of these groups, and fompi carries them out.

    A group is a ProcessGroup on the backend "fompi", its name, or a DeviceMesh of one dimension. All that is compiled
    in the block is concerned, by the default backend of torch.compile. What the block has compiled stays as it is.
    `fused_calls` counts the calls. Not thread-safe.
    Raises LaunchError for a group of another backend, and LayoutError for a mesh of several dimensions.
    """
    names = []
    for group in groups:
        communicator(group)  # it refuses what is not ours
        names.append(group if isinstance(group, str) else getattr(group, "get_group", lambda g=group: g)().group_name)
    _register()
    with private.fuses_products(names):
        yield


def _gather_products(
    x: Tensor, ws: list[Tensor], dim: int, group: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """full = all_gather(x, dim); (full, [full @ w for w in ws])"""
    dim %= x.dim()
    if dim == x.dim() - 1:  # it is multiplied over: no row is whole before all is there
        full = OPS.all_gather(x, dim=dim, comm=group).contiguous()
        return (full if return_A else None), [full @ w for w in ws]
    if return_A or len(ws) > 1:
        full, products = OPS.all_gather_matmul_many(x, ws, [], dim, comm=group)
        return (_rows_first(full, dim) if return_A else None), [_rows_first(y, dim) for y in products]
    return None, [_rows_first(OPS.all_gather_matmul(x, ws[0], None, dim, comm=group), dim)]


def _rows_first(y: Tensor, dim: int) -> Tensor:
    """y with the strides that the compiler expects: those of a tensor whose first dimension was `dim`."""
    return y.movedim(dim, 0).contiguous().movedim(0, dim)


def _product_scatter(x: Tensor, w: Tensor, reduce_op: str, dim: int, group: str) -> Tensor:
    """reduce_scatter(x @ w, dim)"""
    op, dim = {"avg": "mean"}.get(reduce_op, reduce_op), dim % x.dim()
    if op not in ("sum", "mean") or dim == x.dim() - 1:
        return OPS.reduce_scatter(x @ w, dim=dim, op=op, comm=group).contiguous()
    y: Tensor = OPS.matmul_reduce_scatter(x, w, None, dim, comm=group)
    return (y / communicator(group).size if op == "mean" else y).contiguous()


KERNELS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _gather_products,
    "fused_matmul_reduce_scatter": _product_scatter,
}
_registered: list[Any] = []
"""The library that holds the kernels, from the first block on: torch drops them with it."""


def _register() -> None:
    if not _registered:
        library = private.symmetric_memory_kernels()
        for name, kernel in KERNELS.items():
            library.impl(name, torch.no_grad()(kernel), "CPU")
        _registered.append(library)
