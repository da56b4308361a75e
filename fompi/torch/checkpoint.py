"""The whole model of sharded modules: its state dict, the norm of its gradient, and what several ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import sqrt
from typing import Any

import numpy as np
import torch

from fompi.base.differences import MOST_NAMED, detail
from fompi.base.errors import LayoutError, ShapeError, TensorError
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_reduce
from fompi.parallel import section
from fompi.parallel.arrays import borrow_any, leaves_of, same_bits
from fompi.parallel.axes import agree_everywhere
from fompi.parallel.buckets import clip_factor
from fompi.parallel.checkpoints import Held, within
from fompi.parallel.leaves import exact_sums
from fompi.parallel.section import in_section
from fompi.torch.sharded import PartLayout, Sharded

# ------------------------------------------------------------------------------------------------------ state dicts


@in_section("full_state_dict")
def full_state_dict(module: torch.nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """module.state_dict() of the unsharded model: the same names, whole parameters, bit by bit, copied

    `module` may hold modules of `fompi.torch.nn` anywhere. The state of other modules is taken as it is: it is the same
    on all ranks. With `rank0_only`, ranks that are not rank 0 of every communicator of the modules get an empty dict.
    Collective. Raises ShapeError if a parameter has not the shape that its module gave it.
    """
    state, layouts = module.state_dict(), layouts_of(module)
    _agree("full_state_dict", module, layouts, lambda: _check_parts(state, layouts))
    keeps = not rank0_only or all(comm.rank == 0 for comm, _ in layouts.values())
    full = {}
    for name, value in state.items():
        if name in layouts:
            comm, layout = layouts[name]
            value = layout.unshard(value, comm)
        elif isinstance(value, torch.Tensor) and keeps:
            value = value.clone()
        if keeps:
            full[name] = value
    return full


@in_section("load_full_state_dict")
def load_full_state_dict(
    module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False
) -> Any:
    """module.load_state_dict(the part of this rank of `state`)

    `state` has the names and shapes of the unsharded model: a checkpoint of it, or what `full_state_dict` returned on
    any number of ranks. All ranks pass all of it. `strict` and `assign` are those of torch. Collective. Raises
    LayoutError for names that are missing or unknown, ShapeError for wrong shapes, and TensorError for values that are
    no tensors; nothing is loaded then.
    """
    layouts, own = layouts_of(module), module.state_dict()

    def check() -> None:
        missing, unknown = [n for n in own if n not in state], [n for n in state if n not in own]
        if strict and (missing or unknown):
            words = (f"{len(names)} {kind} names: {', '.join(names[:MOST_NAMED])}" for kind, names in
                     (("missing", missing), ("unknown", unknown)) if names)  # fmt: skip
            raise LayoutError(f"the state has {' and '.join(words)}")
        for name, value in state.items():
            here = own.get(name)
            expected = layouts[name][1].shape if name in layouts else getattr(here, "shape", None)
            if name in own and expected is not None and not isinstance(value, torch.Tensor):
                raise TensorError(f"{name!r} has type {type(value).__name__}, but the model has a tensor there")
            if name in own and expected is not None and tuple(value.shape) != tuple(expected):
                raise ShapeError(f"{name!r} has the shape {tuple(value.shape)}, but the model has {tuple(expected)}")

    _agree("load_full_state_dict", module, layouts, check)
    parts = {
        name: layouts[name][1].shard(value, layouts[name][0].rank) if name in layouts else value
        for name, value in state.items()
    }
    return module.load_state_dict(parts, strict=strict, assign=assign)


def parts_of(module: Any) -> dict[str, Any]:
    """What this rank has of module.state_dict(): parameters, and of what is no parameter that of the first rank."""
    if not isinstance(module, torch.nn.Module):
        raise TensorError(f"{type(module).__name__} is no module: a state takes its state_dict()")
    layouts, own = layouts_of(module), {name for name, _ in module.named_parameters(remove_duplicate=False)}
    _check_all_known(module, layouts)
    found: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if name in layouts:
            (comm, layout), array = layouts[name], borrow_any(value.detach(), name).array
            pieces = within(array, array.shape, slice(0, array.size), layout.placed(comm.rank))
            found[name] = Held(value, layout.shape, *pieces)
        else:
            found[name] = Held(value, of_first=name not in own) if isinstance(value, torch.Tensor) else value
    return found


PRUNED = ("_orig", "_mask")
"""What `torch.nn.utils.prune` appends to the name of a parameter: both have the layout of the parameter."""


def layouts_of(module: torch.nn.Module) -> dict[str, tuple[Communicator, PartLayout]]:
    """The parameters that `Sharded` modules hold, by all their names in `module.state_dict()`.

    A layout belongs to a parameter, whatever its name is now.
    """
    found: dict[str, tuple[Communicator, PartLayout]] = {}  # without what calls of the module carry
    held: dict[int, tuple[Communicator, PartLayout]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        if part_layouts := getattr(part, "layouts", None):  # `parallelize_module` deals them to others, too
            for name, layout in part_layouts.items():
                for own in (name, *(name + end for end in PRUNED if name not in part._parameters)):
                    found[before + own] = part.comm.plain, layout
                    if (parameter := part._parameters.get(own)) is not None:
                        held[id(parameter)] = part.comm.plain, layout
    return found | {n: held[id(p)] for n, p in module.named_parameters(remove_duplicate=False) if id(p) in held}


def _check_all_known(module: torch.nn.Module, layouts: Mapping[str, tuple[Communicator, PartLayout]]) -> None:
    """Raise LayoutError for what a `Sharded` module holds without a layout.

    A parametrization, such as a weight norm, has computed it from the part of this rank.
    """
    inside = [prefix for prefix, part in module.named_modules(remove_duplicate=False) if getattr(part, "layouts", None)]
    for name in module.state_dict():
        if name not in layouts and any(not prefix or name.startswith(f"{prefix}.") for prefix in inside):
            raise LayoutError(
                f"{name!r} has no layout, but its module holds parts of parameters: remove the parametrization, or say "
                "in module.layouts which part each rank has"
            )


def _agree(
    what: str,
    module: torch.nn.Module,
    layouts: Mapping[str, tuple[Communicator, PartLayout]],
    check: Callable[[], None],
) -> None:
    """All ranks of all communicators go on, or all raise."""
    error: Exception | None = None
    try:
        check()
        _check_all_known(module, layouts)
    except Exception as refusal:
        error = refusal
    axes = [*dict.fromkeys(comm for comm, _ in layouts.values())]
    shapes = "".join(detail(f"parameter {name!r}", tuple(layout.shape)) for name, (_, layout) in layouts.items())
    text = f"{what} of {len(layouts)} sharded parameters{shapes}"
    agree_everywhere([(axis, text) for axis in axes], error)
    for axis in axes:
        section.begin(axis)


def _check_parts(state: Mapping[str, Any], layouts: Mapping[str, tuple[Communicator, PartLayout]]) -> None:
    for name, (comm, layout) in layouts.items():
        if name in state and tuple(state[name].shape) != (shape := layout.shape_on(comm.rank)):
            raise ShapeError(f"{name!r} has the shape {tuple(state[name].shape)}, but its module gave it {shape}")


# ----------------------------------------------------------------------------------------------------- gradients


def replicated(module: torch.nn.Module) -> dict[str, Any]:
    """Which parameters of these modules several ranks hold: for `DataParallel(replicated=...)`

    name -> the communicator, if all its ranks hold the parameter: a norm, a row-parallel bias, a router, a shared
    expert. Or name -> how many ranks hold each element, where they differ: the shared key/value heads. Only names of
    modules of `fompi.torch.nn`.
    """
    found: dict[str, Any] = {}
    layouts = layouts_of(module)
    _check_all_known(module, layouts)
    for name, (comm, layout) in layouts.items():
        if layout.dim is None:
            found[name] = comm
        elif max(counts := layout.holders(comm.rank), default=1) > 1:
            shape = layout.shape_on(comm.rank)
            found[name] = counts.view(*(-1 if i == layout.dim else 1 for i in range(len(shape)))).expand(shape)
    return found


@in_section("clip_grad_norm_")
def clip_grad_norm_(module: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` of the unsharded model: the norm before, and gradients of at most `max_norm`

    What several ranks hold counts once. Gradients of other modules count on each rank as they are: they must be the
    same on all ranks. A norm that is NaN makes all gradients NaN, as in torch. Collective; the same norm on all ranks.
    If a module has an order of leaves, the sum of squares is exact: its bits do not depend on the number of ranks.
    Raises LayoutError if `max_norm` is no number of at least 0, and MismatchError if it is not the same on all ranks.
    """
    layouts, most = layouts_of(module), float("nan")
    with suppress(TypeError, ValueError):
        most = float(max_norm)

    def check() -> None:
        if not most >= 0:
            raise LayoutError(f"max_norm={max_norm!r} must be a number of at least 0")
        _check_parts(dict(_gradients(module)), layouts)

    _agree(f"clip_grad_norm_ with max_norm={most}", module, layouts, check)
    exact = any(isinstance(m, Sharded) and leaves_of(m.comm) for m in module.modules())
    parts: dict[Communicator, list[tuple[PartLayout, torch.Tensor]]] = {comm: [] for comm, _ in layouts.values()}
    total, gradients = 0.0, []
    for name, gradient in _gradients(module):
        gradients.append(gradient)
        if name in layouts:
            comm, layout = layouts[name]
            parts[comm].append((layout, gradient))
        else:
            total += float(gradient.double().square().sum())
    for comm, own in parts.items():
        total += _sum_of_squares(own, comm, exact)
    norm = torch.tensor(sqrt(total), dtype=torch.float64)
    factor = clip_factor(float(norm), most)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm


def _sum_of_squares(parts: list[tuple[PartLayout, torch.Tensor]], comm: Communicator, exact: bool) -> float:
    """The sum of the squares of the full tensors that have these parts here. Exact: whoever holds what."""
    if exact:
        greatest = np.zeros(1)
        for layout, part in parts:
            greatest = np.maximum(greatest, layout.squares(part, comm.rank).cpu().numpy().max(initial=0.0))  # NaN stays
        greatest = all_reduce(greatest, op="max", comm=comm)
        squares = (layout.squares(part, comm.rank).cpu().numpy() for layout, part in parts)
        sums = exact_sums(squares, float(greatest[0]))
    else:
        sums = np.array([sum((float(layout.squares(part, comm.rank).sum()) for layout, part in parts), 0.0)])
    return float(all_reduce(sums, comm=comm, schedule=same_bits(comm)).sum())


def _gradients(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad
