"""FSDP2 (`fully_shard`) with communication behind the backward, also on the CPU: `fompi.torch.overlap`.

On a GPU, torch lets its collectives run on streams of their own. On the CPU it has no streams: each all-gather and each
reduce-scatter is waited for at once. `set_custom_all_gather` and `set_custom_reduce_scatter`, which are public, take
collectives that do not wait. torch itself waits for a gather where it reads the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fompi.base.errors import StateError
from fompi.torch import private

WITHOUT_DIVISION = (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
"""torch divides the result of any other reduction after it."""


class Unwaited:
    """A collective of FSDP that does not wait, in memory of its own: `call` with the arguments of torch."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.call(*args, **options)


def all_gather(output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    """An all-gather that is waited for where torch copies the parameters out of its result."""
    return private.ALL_GATHER(output_tensor, input_tensor, group=group, async_op=True)


def reduce_scatter(
    module: FSDPModule, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
) -> Any:
    """A reduce-scatter that is waited for at the end of the backward, if nothing reads its result before."""
    is_divided = not any(op == each for each in WITHOUT_DIVISION)
    waits = is_divided or private.reads_gradients_at_once(module, output_tensor.dtype)
    work = private.REDUCE_SCATTER(output_tensor, input_tensor, op, group=group, async_op=not waits)
    if work is not None and not async_op:
        private.at_end_of_backward(work.wait)
    return work


def by_default(model: torch.nn.Module) -> None:
    """`overlap(model)` before the first forward: on the CPU, on groups of fompi, if the program has chosen nothing."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not hasattr(FSDPModule, "set_custom_all_gather") or any(hasattr(module, CHOSEN) for module in modules):
        return
    groups = [group for module in modules for group in private.fsdp_groups(module)]
    if (
        all(private.with_communicator(group.mesh_info.shard_process_group) is not None for group in groups)
        and all(group.device.type == "cpu" for group in groups)
        and all(len(private.fsdp_groups(module)) <= 1 and private.is_untouched(module) for module in modules)
    ):
        overlap(model)


CHOSEN = "_fompi_overlap"
"""An attribute of FSDP modules for which `overlap` was called."""


def overlap(model: torch.nn.Module, enabled: bool = True) -> torch.nn.Module:
    """Let the FSDP modules in `model` communicate while other modules compute.

    On groups of the backend "fompi" on the CPU this is done before the first forward, if the program has chosen neither
    collectives nor prefetches of its own. `overlap(model, False)` before it leaves the model as it is.

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        fompi.torch.overlap(model)

    In the forward each module gathers the parameters of the module behind it, in the order in which they are
    registered. In the backward torch does so. The gradients of a module are reduced until the end of the backward. If
    something reads them before, the module waits for them as without this function. That is so for hybrid sharding,
    gradients that are added to those of an earlier backward, a reduction in another dtype than that of the parameters,
    float16 and float64 (torch divides them itself), and hooks.

    `model` is returned. Raises ValueError, as torch does, for a module with parameters on several meshes. Raises
    StateError on a torch without custom collectives.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        setattr(module, CHOSEN, enabled)
    if not enabled:
        return model
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise StateError(f"fompi.torch.overlap: torch {torch.__version__} has no FSDPModule.set_custom_all_gather")
    for module in modules:
        module.set_custom_all_gather(Unwaited(all_gather))
        module.set_custom_reduce_scatter(Unwaited(partial(reduce_scatter, module)))
    for module, after in pairwise(modules):
        module.set_modules_to_forward_prefetch([after])
    return model
