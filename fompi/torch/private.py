"""The names of torch that are not public. Checked on torch 2.13.

Other files of fompi use these names through this one. Two have their own: `import fompi` marks a function for the
compiler without torch, and `process_group` has methods that torch calls. `missing` says what a version of torch has
changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from fompi.base.errors import LaunchError, StateError

F = TypeVar("F", bound=Callable[..., Any])

CHECKED = ("2.13",)
"""The versions of torch with which this room has been tested."""

NAMES: tuple[tuple[str, Any, str], ...] = (
    ("torch._C._distributed_c10d.Work", c10d, "Work"),
    ("torch._C._distributed_c10d.Store", c10d, "Store"),
    ("torch.distributed.DistBackendError", dist, "DistBackendError"),
    (
        "torch.distributed.rendezvous._rendezvous_handlers",
        sys.modules["torch.distributed.rendezvous"],
        "_rendezvous_handlers",
    ),
    (
        "torch.distributed.distributed_c10d._resolve_process_group",
        sys.modules["torch.distributed.distributed_c10d"],
        "_resolve_process_group",
    ),
)
"""In words, and where: what must exist."""

WORK: Any = c10d.Work
"""What a backend returns for a call in flight. `torch.distributed.Work` is the same class."""

ALIASES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of a ProcessGroup: the name in torch 2.13, and that in 2.6 to 2.12."""


def group_named(name: str) -> Any:
    """The ProcessGroup with this name: `group.group_name`. Raises LaunchError if there is none."""
    try:
        return sys.modules["torch.distributed.distributed_c10d"]._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise LaunchError(f"torch.distributed has no group of the name {name!r}") from error


def backend_on_host(group: Any) -> Any:
    """The backend that carries out the calls of a ProcessGroup on tensors of the host."""
    return group._get_backend(torch.device("cpu"))


def keep_in_order(operator: Any) -> None:
    """Let a custom operator run, used or not, in the order of the program. Older versions of torch cannot."""
    if hasattr(operator, "register_effect"):
        from torch.library import EffectType

        operator.register_effect(EffectType.ORDERED)


def missing() -> list[str]:
    """The names that this version of torch does not have. "env://" must also have a handler."""
    lost = [f"{words} is gone" for words, place, name in [*NAMES, *_later()] if not hasattr(place, name)]
    return lost or ([] if "env" in _handlers() else ["_rendezvous_handlers has no handler of env:// any more"])


def _later() -> list[tuple[str, Any, str]]:
    """More of NAMES, for `parallel` and `fully_sharded`: they are in modules that torch does not load by itself."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_common
    from torch.distributed.tensor.parallel import style

    names = [
        ("torch.autograd.Variable._execution_engine", torch.autograd.Variable._execution_engine, "queue_callback"),
        ("torch.distributed.fsdp.FSDPModule", FSDPModule, "_get_fsdp_state"),
        ("torch.distributed.fsdp._fully_shard._fsdp_common", _fsdp_common, "DDPMeshInfo"),
    ]
    for kind, methods in STYLES.items():
        names += [(f"torch.distributed.tensor.parallel.{kind}", getattr(style, kind), method) for method in methods]
    return [(f"{words}.{name}", place, name) for words, place, name in names]


def _handlers() -> dict[str, Callable[..., Any]]:
    handlers: dict[str, Callable[..., Any]] = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    return handlers


def extend_env_method(meet: Callable[..., Any]) -> None:
    """Let `env://`, the default init method, use `meet` where torch would raise an error: without MASTER_ADDR."""
    handlers = _handlers()
    known = handlers["env"]

    def env(url: str, **options: Any) -> Any:
        return (known if "MASTER_ADDR" in os.environ else meet)(url, **options)

    handlers["env"] = env


# -------------------------------------------------------------------------------------------------- parallelize_module

STYLES = {
    "ColwiseParallel": ("_apply", "_partition_linear_fn", "_prepare_input_fn", "_prepare_output_fn"),
    "RowwiseParallel": ("_apply", "_partition_linear_fn", "_prepare_input_fn", "_prepare_output_fn"),
    "PrepareModuleInput": ("_apply", "_prepare_input_arg"),
}
"""The methods of the styles of `torch.distributed.tensor.parallel` that are not public."""


def is_plain(style: Any, base: Any) -> bool:
    """True if the class of `style` has no methods of its own in place of those of `base`, a class of torch."""
    names = [name for name in STYLES[base.__name__] if name != "_apply"]
    return all(getattr(type(style), name) is getattr(base, name) for name in names)


def partition(style: Any, module: Any, mesh: Any) -> None:
    """Make the parameters of a Linear DTensors, as `style` wants them."""
    from torch.distributed.tensor import distribute_module

    distribute_module(module, mesh, style._partition_linear_fn)


def prepared_input(style: Any, layout: Any, module: Any, x: Any, mesh: Any) -> Any:
    """x as the hook of torch gives it to a Linear, as a DTensor with `layout`."""
    return style._prepare_input_fn(style.input_layouts, layout, module, (x,), mesh)


def prepared_output(style: Any, module: Any, y: Any, mesh: Any) -> Any:
    """y as the hook of torch returns it from a Linear."""
    return style._prepare_output_fn(style.output_layouts, style.use_local_output, module, y, mesh)


def prepare_argument(style: Any) -> Callable[..., Any]:
    """The method of a PrepareModuleInput that prepares one input: (input, mesh, layout, desired layout) -> input."""
    method: Callable[..., Any] = style._prepare_input_arg
    return method


def replace_argument(style: Any, method: Callable[..., Any]) -> None:
    """Let a PrepareModuleInput prepare each input by `method`."""
    style._prepare_input_arg = method


def run_by_the_compiler(function: F) -> F:
    """Let torch.compile run `function` once, while it reads a call of it. The result is a constant.

    It is `torch.compiler.assume_constant_result`, which imports the whole compiler. That takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def refuse_changed(x: Any) -> None:
    """While torch.compile reads a function: raise StateError if it has changed x in place before."""
    from torch._dynamo.comptime import comptime

    def look(compiler: Any) -> None:
        if compiler.get_local("x").as_fake()._version:
            raise StateError(
                "PrepareModuleInput has gathered an input, but the module changes it in place before a Linear reads "
                "it: write x = x + 1 instead of x += 1"
            )

    comptime(look)


# ------------------------------------------------------------------------------------------------------------ autograd


def before_gradient_is_added(parameter: Any, hook: Callable[[Any], None]) -> Any:
    """Call hook(gradient) before autograd adds a gradient to parameter.grad, behind all hooks of the tensor.

    Returns what must be kept as long as the hook is wanted. It keeps the parameter alive.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_prehook(lambda gradients: hook(gradients[0]))
    return node


def when_gradient_was_added(parameter: Any, hook: Callable[[Any], None]) -> None:
    """Call hook(parameter) when autograd has added to parameter.grad, before such hooks that it has already."""
    earlier = dict(parameter._post_accumulate_grad_hooks or {})
    if earlier:
        parameter._post_accumulate_grad_hooks.clear()
    parameter.register_post_accumulate_grad_hook(hook)
    parameter._post_accumulate_grad_hooks.update(earlier)


# --------------------------------------------------------------------------------------------------------------- FSDP2

ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Public functions whose names torch 2.13 has changed."""


def reads_gradients_at_once(module: Any, dtype: torch.dtype) -> bool:
    """True if FSDP2 reads the gradients of `module` right after their reduce-scatter, whose result has `dtype`."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

    for group in module._get_fsdp_state()._fsdp_param_groups:
        if isinstance(group.mesh_info, DDPMeshInfo) or group._all_reduce_hook is not None:
            return True
        for parameter in group.fsdp_params:
            p = parameter.sharded_param
            if p.grad is not None or p.dtype != dtype or getattr(p, "_post_accumulate_grad_hooks", None):
                return True
    return False


def at_end_of_backward(call: Callable[[], Any]) -> None:
    """Call `call` when the backward that runs in this thread ends. At once if there is none."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    except RuntimeError:  # torch's pipelines reduce gradients outside of a backward
        call()
