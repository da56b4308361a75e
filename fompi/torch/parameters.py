"""The parameters of a module that a wrapper has registered, and what the program has done to them since.

| the program does                                                    | the wrapper                                 |
|---------------------------------------------------------------------|---------------------------------------------|
| writes p in place, or gives it other memory (p.data = ...)          | takes the new values                        |
| puts another parameter in its place (`load_state_dict(assign=True)`) | takes that one over, with its values        |
| gives it another name (pruning), or takes it out of the module      | goes on: it knows the object                |
| changes its shape, dtype or device                                  | refuses                                     |
| adds a parameter that requires grad, or lets one require grad       | refuses: other ranks would not know of it   |
| copies the wrapper (`copy.deepcopy`, `AveragedModel`)               | the copy computes, but it does not train    |
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any, Self

import torch
from torch.nn.parameter import is_lazy

from fompi.base.differences import detail
from fompi.base.errors import DtypeError, ShapeError, StateError, TensorError
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.ops.operations import broadcast
from fompi.torch import private


class Parameters:
    """The parameters of `module` that require grad, by their names when it was wrapped."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._forms = {name: _form(p) for name, p in self.named.items()}
        self._addresses: dict[int, int] = {}

    def look(self) -> dict[str, torch.nn.Parameter]:
        """name -> the parameter that has taken the place of a known one since the last look.

        Raises ShapeError, DtypeError, TensorError or StateError for what cannot be taken over.
        """
        listed = dict(self.module.named_parameters())
        known, here = {id(p): name for name, p in self.named.items()}, {id(p) for p in listed.values()}
        replaced = {}
        for name, p in listed.items():
            if id(p) in known:
                self._check(known[id(p)], p)
            elif p.requires_grad:
                before = self.named.get(name)
                if before is None or id(before) in here:
                    raise StateError(
                        f"the parameter {name!r} is new, or requires grad only now: the other ranks would not sum its "
                        "gradient. Change the module before it is wrapped, or wrap it again"
                    )
                self._check(name, p)
                replaced[name] = p
        self.named |= replaced
        for p in self.named.values():
            if self._addresses.get(id(p)) != p.data_ptr():
                private.renew_hooks(p)
                self._addresses[id(p)] = p.data_ptr()
        return replaced

    def _check(self, name: str, p: torch.Tensor) -> None:
        (shape, dtype, device), now = self._forms[name], _form(p)
        words = f"the parameter {name!r} was {{}} when the module was wrapped, and is {{}} now: wrap the module again"
        if now[0] != shape:
            raise ShapeError(words.format(tuple(shape), tuple(now[0])))
        if now[1] != dtype:
            raise DtypeError(words.format(dtype, now[1]))
        if now[2] != device:
            raise TensorError(words.format(f"on {device}", f"on {now[2]}"))


def _form(p: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return p.shape, p.dtype, p.device


class Wrapper(torch.nn.Module):
    """A wrapper of `module` that makes its gradients those of all ranks. A copy of it computes, but does not train."""

    module: torch.nn.Module
    is_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        torch.nn.Module.__init__(made)
        memo[id(self)] = made
        made.module, made.training, made.is_copy = copy.deepcopy(self.module, memo), self.training, True
        return made

    def refuse_copy(self) -> None:
        """Raise StateError if this is a copy."""
        if self.is_copy:
            kind = type(self).__name__
            raise StateError(f"this is a copy of a {kind}, which sums no gradients: train {kind}(copy.module, comm)")


# ---------------------------------------------------------------------------------- what a program calls of a wrapper


def copy_from_rank_0(tensors: Iterable[torch.Tensor], comm: Communicator) -> None:
    """Copy the tensors of rank 0 to all ranks, those of one dtype together."""
    of: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        of.setdefault(tensor.dtype, []).append(tensor.detach())
    for listed in of.values():
        flat = broadcast(torch.cat([t.reshape(-1) for t in listed]), comm=comm)
        begin = 0
        for tensor in listed:
            part = flat[begin : (begin := begin + tensor.numel())]
            tensor.data.copy_(part.view_as(tensor))  # as torch's class: graphs that have saved a buffer stay valid


def enter(module: torch.nn.Module, comm: Communicator, text: str, refusal: Exception | None) -> None:
    """All ranks wrap the same module with the same options, or all raise."""
    words = ""
    try:
        check_module(module)
        words = forms(module)
    except Exception as error:
        refusal = refusal or error
    agree(comm, f"{text}){words}", refusal)


def forms(module: torch.nn.Module, ignored: Collection[str] = ()) -> str:
    """The parameters and buffers in their order, for the ranks to compare."""
    words = ""
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, t in named:
            frozen = ", frozen" * (kind == "parameter" and not t.requires_grad)
            if name not in ignored:
                words += detail(f"{kind} {name!r}", f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}{frozen}")
    return words


def check_module(module: torch.nn.Module) -> None:
    """Raise the error of what cannot be wrapped."""
    if not isinstance(module, torch.nn.Module):
        raise TensorError(f"module={module!r} must be a torch.nn.Module")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ShapeError(f"{name!r} has no shape yet: run the module once before it is wrapped")
    if not any(p.requires_grad for p in module.parameters()):
        raise ShapeError("data parallelism needs at least one parameter that requires grad")
    first = next(module.parameters()).device
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type not in ("cpu", "cuda"):
            raise TensorError(f"{name!r} is on {tensor.device}: data parallelism works on the host and on GPUs")
        if tensor.device != first:
            raise TensorError(f"{name!r} is on {tensor.device}, but the first parameter is on {first}: move the module")
