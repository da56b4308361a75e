"""Modules of `fompi.torch.nn` on other ranks or with other shares: parameters move, and what an optimizer keeps.

A module is made anew on the device meta, which says who will have what. Then the tensors move, and take the places of
those before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch

from fompi.base.errors import LayoutError
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.parallel import section
from fompi.parallel.arrays import borrow_any
from fompi.parallel.checkpoints import Held, Placed, told, within
from fompi.parallel.section import in_section
from fompi.parallel.states import move
from fompi.torch.sharded import Sharded


@in_section("reshard")
def reshard(
    module: torch.nn.Module,
    comm: Any,
    *,
    shares: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    over: Any = None,
) -> None:
    """The modules of `fompi.torch.nn` in `module` go to the ranks of `comm`: parts of parameters move, bit by bit

        nn.reshard(model, mesh["tp"], optimizer=optimizer, over=world)     # from 4 ranks to 2 x 2
        nn.reshard(model, two if world.rank < 2 else None, over=world)     # to ranks 0 and 1

    A rank with comm=None gets nothing: its parameters and buffers are on the device meta, and come back by a later
    call. `over` is the communicator of all ranks that take part, by default that of the modules. Other parameters and
    buffers of `module` are the same on all ranks: those on meta get them from the first rank that has them. Without
    `shares` parts are even. Collective, between two steps. What `optimizer` keeps moves, too: numbers, and tensors in
    the shape of a part. Other parameters take the place of those before, in the modules and in the optimizer. A wrapper
    of data parallelism must be made anew. Raises the errors of the modules on all ranks; nothing has changed then.
    """
    parts = [each for each in module.modules() if isinstance(each, Sharded) and each.arguments]
    inside = {id(each) for part in parts for each in part.modules()}
    if not parts or [each for each in module.modules() if getattr(each, "layouts", None) and id(each) not in inside]:
        raise LayoutError(
            "reshard takes modules of fompi.torch.nn. Make others anew on the new ranks, and let "
            "fompi.reshard_state fill them"
        )
    plain = {name: t for named in (module.named_parameters(), module.named_buffers()) for name, t in named}
    _move_parts(module, parts, (comm, shares), optimizer, parts[0].comm.plain if over is None else over, plain)


@in_section("rebalance")
def rebalance(module: torch.nn.Module, shares: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
    """The modules of `fompi.torch.nn` in `module` get other shares: `reshard` to the same ranks

    if step % 100 == 0:
        rebalance(model, fompi.balance(comm, sizes), optimizer)
    """
    parts = [each for each in module.modules() if isinstance(each, Sharded) and each.counts]
    for comm in dict.fromkeys(each.comm.plain for each in parts):
        own = [each for each in parts if each.comm.plain is comm]
        _move_parts(module, own, (comm, shares), optimizer, comm, {})


CHANGED = ("layouts", "arguments", "counts", "comm", "shares", "options", "_order", "_leaves")
"""What other ranks or shares change in a module."""


def _move_parts(
    module: torch.nn.Module,
    parts: Sequence[Sharded],
    to: tuple[Any, Any],
    optimizer: torch.optim.Optimizer | None,
    over: Any,
    plain: Mapping[str, torch.Tensor],
) -> None:
    """These parts of `module` go to other ranks, or get other shares: `to`. `plain`: tensors that all ranks have alike.

    Collective over `over`.
    """
    group, (comm, shares) = Communicator.of(over), to
    made: list[Any] = [None] * len(parts)
    error: Exception | None = None
    try:
        if comm is not None:
            made = [part.again(comm, shares) for part in parts]
    except Exception as refusal:
        error = refusal
    agree(group, f"reshard of {len(parts)} modules", error)
    section.begin(group)
    pairs = [pair for part, new in zip(parts, made, strict=True)
             for pair in zip(part.modules(), repeat(None) if new is None else new.modules(), strict=False)]  # fmt: skip
    pairs = [(old, new) for old, new in pairs if isinstance(old, Sharded)]
    layouts = {id(old._parameters[name]): (layout, old.comm.rank, new and (new.layouts[name], new.comm.rank))
               for old, new in pairs for name, layout in old.layouts.items()}  # fmt: skip
    named = {name: Travelling(t, not t.is_meta, t.is_meta and comm is not None) for name, t in plain.items()}
    for name, p in module.named_parameters():
        if id(p) in layouts:
            layout, rank, after = layouts[id(p)]
            here, there = layout.placed(rank), after and after[0].placed(after[1])
            local = after[0].shape_on(after[1]) if after else ()
            named[name] = Travelling(p, not p.is_meta, bool(after), (layout.shape, here, there, local))
    found = travel(named, optimizer, group)
    takes_place = dict[int, Any]()
    for name, (old, *_) in named.items():
        if name in found or comm is None:
            new, kept = found.get(name, (torch.empty_like(old, device="meta"), {}))
            device = parts[0].factory["device"] if old.is_meta else old.device
            own = new if comm is None else new.to(device)
            own = torch.nn.Parameter(own, old.requires_grad) if isinstance(old, torch.nn.Parameter) else own
            takes_place[id(old)] = own
            if optimizer is not None:
                optimizer.state.pop(old, None)
                optimizer.state |= {own: {k: on_device(v, own.device) for k, v in kept.items()}} if kept else {}
    tables = [table for each in module.modules() for table in (each._parameters, each._buffers)]
    for table in tables:
        table.update({key: takes_place[id(t)] for key, t in table.items() if id(t) in takes_place})
    for group_of in optimizer.param_groups if optimizer is not None else ():
        group_of["params"] = [takes_place.get(id(p), p) for p in group_of["params"]]
    for old, new in pairs:
        vars(old).update({key: value for key, value in vars(new).items() if key in CHANGED} if new else {})


def on_device(value: Any, device: torch.device) -> Any:
    """What an optimizer keeps, where its parameter is. Numbers stay on the host."""
    return value.to(device) if isinstance(value, torch.Tensor) and value.dim() else value


class Travelling(NamedTuple):
    """A tensor that this rank has, or gets, or neither: then it only says that there is one.

    `parts`: the shape of the full tensor, which boxes of it this rank has and gets, and the shape of what it gets.
    None: it is whole on each rank, and the same.
    """

    tensor: torch.Tensor
    is_here: bool
    is_wanted: bool
    parts: tuple[Sequence[int], Placed, Placed | None, Sequence[int]] | None = None

    def held(self, tensor: torch.Tensor, is_new: bool) -> Held:
        """`tensor` of the host, which is as the one that is here, or as the new one."""
        if self.parts is None:
            return Held(tensor, of_first=True)
        shape, *placed, _ = self.parts
        array = borrow_any(tensor.detach(), "a parameter").array
        return Held(tensor, shape, *within(array, array.shape, slice(0, array.size), placed[is_new] or ()))


def travel(
    named: Mapping[str, Travelling], optimizer: torch.optim.Optimizer | None, comm: Communicator
) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """name -> the new tensor, on the host, and what the optimizer keeps for it: of what this rank wants. Collective."""
    source, target = dict[str, Held](), dict[str, Held]()
    forms: dict[str, Any] = {}
    for name, each in named.items():
        if each.is_here:
            source[name] = each.held(each.tensor.detach().cpu(), False)
            forms[name] = {}
            for key, value in (optimizer.state.get(each.tensor, {}) if optimizer is not None else {}).items():
                forms[name][key] = _form_of(name, key, value, each.tensor)
                if forms[name][key][0] == "part":
                    source[f"{name} {key}"] = each.held(value.detach().cpu(), False)
    known: dict[str, Any] = {}
    for table in told(forms, comm):
        known = table | {name: kept for name, kept in known.items() if kept or name not in table}
    if bad := [kept for of in known.values() for kept in of.values() if kept[0] == "no part"]:
        raise LayoutError(bad[0][1])
    found = dict[str, tuple[torch.Tensor, dict[str, Any]]]()
    for name, each in named.items():
        if each.is_wanted:
            local = each.tensor.shape if each.parts is None else each.parts[-1]
            made = torch.empty(tuple(local), dtype=each.tensor.dtype, device="cpu")
            target[name], kept = each.held(made, True), dict[str, Any]()
            for key, (kind, value, dtype) in known.get(name, {}).items():
                kept[key] = value
                if kind == "number":
                    kept[key] = torch.tensor(value, dtype=getattr(torch, dtype), device="cpu")
                if kind == "part":
                    kept[key] = torch.empty(tuple(local), dtype=getattr(torch, dtype), device="cpu")
                    target[f"{name} {key}"] = each.held(kept[key], True)
            found[name] = made, kept
    move(source, target, comm)
    return found


def _form_of(name: str, key: str, value: Any, tensor: torch.Tensor) -> tuple[str, Any, str]:
    """What other ranks must know of something that an optimizer keeps."""
    if not isinstance(value, torch.Tensor):
        return "value", value, ""
    dtype = str(value.dtype).removeprefix("torch.")
    if value.shape == tensor.shape and value.dim():
        return "part", None, dtype
    if value.dim() == 0:
        return "number", value.item(), dtype
    words = f"the optimizer keeps {key!r} of {name!r} in the shape {tuple(value.shape)}, not in that of the parameter"
    return "no part", words, dtype
