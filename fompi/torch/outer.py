"""Outer steps for a training loop of PyTorch: `fompi.torch.DiLoCo` and `LocalSGD`, on `fompi.parallel.outer`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from fompi.base.differences import detail
from fompi.base.errors import LayoutError
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.members.membership import Membership
from fompi.parallel.outer import OuterSteps


class TrainedModule:
    """A module and its optimizer, as outer steps read and write them: by names. `key of NAME` is a moment."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None):
        self.model, self.optimizer = model, optimizer

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _part(self, name: str) -> torch.Tensor | None:
        """What this rank holds of a parameter, or of a moment: None before the optimizer has made it."""
        key, _, of = name.rpartition(" of ")
        parameter = held = self.model.get_parameter(of)
        if key:
            assert self.optimizer is not None
            if not (state := self.optimizer.state.get(parameter)):
                return None
            if key not in state:
                raise LayoutError(f"moments= names {key!r}, but the optimizer keeps {', '.join(state)}")
            held = state[key]
        return _local(held)

    def get(self, name: str) -> torch.Tensor:
        """What this rank holds, on the host. A moment that does not exist is 0."""
        if (part := self._part(name)) is not None:
            return part.cpu()
        return torch.zeros_like(self.get(name.rpartition(" of ")[2]))

    @torch.no_grad()
    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            if (part := self._part(name)) is not None:
                part.copy_(value)

    def is_fresh(self) -> bool:
        """True if the optimizer has no state yet."""
        return self.optimizer is not None and not self.optimizer.state

    def inner_state(self, changed: Mapping[str, torch.Tensor]) -> list[Any]:
        """The state of the optimizer: a list of what it has, and the tensors. Copies."""
        assert self.optimizer is not None
        listed, tensors = list[tuple[str, str, Any]](), list[Any]()
        for name, parameter in self.named().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                listed.append((name, key, None if is_tensor else value))
                if is_tensor:
                    tensors.append(changed.get(f"{key} of {name}", _local(value)).to("cpu", copy=True))
        return [np.frombuffer(json.dumps(listed).encode(), np.uint8), *tensors]

    def take_inner(self, receive: Callable[[Any], Any]) -> None:
        """Take over what `inner_state` of another one has returned, one after the other."""
        assert self.optimizer is not None
        for name, key, value in json.loads(bytes(receive(None))):
            parameter = self.model.get_parameter(name)
            if value is None:
                value = receive(torch.empty(0))
                value = value.to(parameter.device) if value.ndim else value
                if hasattr(parameter, "to_local") and value.ndim:
                    form = {"shape": parameter.shape, "stride": parameter.stride()}  # parts may be uneven
                    value = type(parameter.data).from_local(value, parameter.device_mesh, parameter.placements, **form)
            self.optimizer.state[parameter][key] = value


def _local(held: torch.Tensor) -> torch.Tensor:
    held = held.detach()
    return held.to_local() if hasattr(held, "to_local") else held


class DiLoCo(TrainedModule):
    """theta = alpha theta + (1 - alpha) outer, where outer -= outer_lr (D + outer_momentum v), v = D + outer_momentum v

    D is the mean of outer - theta over the islands along `comm`, of one fragment of `model` at a time. In between the
    islands train by themselves, with any optimizer (DiLoCo, arXiv 2311.08105; Streaming DiLoCo, 2501.18512).

        outer = fompi.torch.DiLoCo(model, optimizer, mesh["islands"], sync_every=30, fragments=2, delay=1)
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            outer.step()                                 # sends nothing, but every sync_every / fragments steps

    sync_every: the inner steps H between two exchanges of a fragment. outer_lr=0.7, outer_momentum=0.9.
    fragments=1: a number P that divides H, to which the modules that own parameters are dealt round robin; or a list of
    lists of modules. Fragment p leaves after the steps t with (t - (p + 1) H / P) mod H = 0.
    delay=0: it is applied this many steps later, less than H / P, and travels behind these steps.
    alpha=0.0: how much of the own parameters stays. 0 replaces them; with 1 nothing is exchanged.
    wire: what differences travel in (`fompi.base.wires`). feedback: give back what messages have lost.
    moments=None: {"exp_avg": 3, "exp_avg_sq": 6} also takes the mean of these moments of the optimizer, each in every
    n-th exchange of its parameter (DES-LOC, arXiv 2505.22549). They have no outer copy, and travel as they are.
    weights="islands": each counts alike in a mean; "rows": by the rows of its steps, `outer.step(rows=len(batch))`.
    on_exchange=None: called with the numbers of each exchange, an `OuterNumbers`: norm, drift, bytes, exposed seconds.

    Parameters that require grad take part; of a DTensor, so of FSDP2 too, the part of this rank. Outer copies are on
    the host, of half types in float32. Buffers stay. `optimizer` may be None, with `ZeroDataParallel` for example: then
    it is not compared. All islands begin with the same parameters: load a checkpoint, or call `torch.manual_seed`.

    `comm` may be what `fompi.islands.join` returns: islands come and go then. A late one begins with the parameters of
    the others, and with the state of an optimizer of theirs if its own has none. Those that are left do an exchange
    that has failed again.

    Creating one is collective. Raises MismatchError on all ranks that differ in what is above, in modules or in the
    optimizer, and in the first `step` if their parameters or steps differ; LayoutError for options that do not fit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        comm: Any = None,
        *,
        fragments: int | Sequence[Sequence[torch.nn.Module]] = 1,
        moments: Mapping[str, int] | None = None,
        **options: Any,
    ):
        super().__init__(model, optimizer)
        self._moments = dict(moments or {})
        text, refusal, values = "", None, dict[str, Any]()
        try:
            if self._moments and optimizer is None:
                raise LayoutError("moments= are those of an optimizer: pass it")
            text = _optimizer_in_words(optimizer)
            owners = _fragments(model, fragments)
            for name in self.named():
                values |= dict.fromkeys([name, *(f"{key} of {name}" for key in self._moments)], self.get(name))
        except Exception as error:
            refusal = error
        if not isinstance(comm, Membership):
            agree(Communicator.of(comm).plain, type(self).__name__, refusal)
        elif refusal is not None:
            raise refusal
        listed = [[*names, *(f"{key} of {name}" for name in names for key in self._moments)] for names in owners]
        averaged = {f"{key} of {name}": n for key, n in self._moments.items() for name in self.named()}
        compared = {"fragments": listed, "averaged": averaged, "compared": f" of a {type(self).__name__}{text}"}
        inner = None if optimizer is None else self
        self.outer = OuterSteps(values, comm=comm, inner=inner, **compared, **options)
        self.take(self.outer.received(self.get))

    def step(self, rows: int = 1) -> None:
        """The inner optimizer has made a step, of so many rows. Raises what the exchange raises, on all ranks."""
        self.take(self.outer.advance(self.get, rows))

    def state_dict(self) -> dict[str, Any]:
        """The state of `fompi.parallel.outer.OuterSteps`: in the middle of a delay, too. Each rank saves its own.

        Save it with `model.state_dict()` and `optimizer.state_dict()`, which differ between islands. A DTensor has the
        part of this rank here.
        """
        return self.outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned on this rank. The next `step` compares it with the other islands."""
        self.outer.load_state_dict(state)

    def close(self) -> None:
        """Free the communicator. Collective. An exchange on its way is not applied."""
        self.outer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.outer.__exit__(*error)


class LocalSGD(DiLoCo):
    """theta = alpha theta + (1 - alpha) mean(theta) over the islands, every `sync_every` steps

    A `DiLoCo` with outer_lr=1 and outer_momentum=0 (Local SGD, arXiv 1805.09767). With `moments` it is DES-LOC.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, comm: Any = None, **options: Any):
        super().__init__(model, optimizer, comm, outer_lr=1.0, outer_momentum=0.0, **options)


def _fragments(model: torch.nn.Module, fragments: int | Sequence[Sequence[torch.nn.Module]]) -> list[list[str]]:
    """The names of the parameters of each fragment. A parameter of several modules belongs to the first one."""
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if not isinstance(fragments, int):
        listed = [
            [trained[id(p)] for part in parts for p in part.parameters() if p.requires_grad] for parts in fragments
        ]
        return [[*dict.fromkeys(names)] for names in listed]
    owned, owners = set[int](), list[list[str]]()
    for module in model.modules():
        mine = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in owned]
        owned |= {id(p) for p in mine}
        owners += [[trained[id(p)] for p in mine]] if mine else []
    if fragments > len(owners):
        raise LayoutError(f"fragments={fragments}: only {len(owners)} modules own parameters that are trained")
    return [[name for names in owners[p::fragments] for name in names] for p in range(fragments)]


def _optimizer_in_words(optimizer: torch.optim.Optimizer | None) -> str:
    """What must be the same of the optimizer on all islands: its class, and the options of its groups."""
    if optimizer is None:
        return ""
    words = detail("optimizer", type(optimizer).__name__)
    for i, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        words += "".join(detail(f"{key} of group {i} of the optimizer", value) for key, value in options.items())
    return words
