"""ZeRO for a training loop of PyTorch: `fompi.torch.ZeroDataParallel`, on `fompi.parallel.data`.

model = fompi.torch.ZeroDataParallel(module, comm, optimizer=AdamW(1e-3), zero=2)
...
loss(model(x)).backward()                        # sums of gradients leave meanwhile
model.step(clip=1.0)                             # the optimizer, on this rank's part
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fompi.base.errors import LayoutError, StateError
from fompi.engine.communicator import Communicator
from fompi.parallel.data import SAME, DataParallel
from fompi.tensors import dlpack
from fompi.torch.checkpoint import layouts_of, parts_of
from fompi.torch.nn import replicated
from fompi.torch.parameters import Parameters, Wrapper, copy_from_rank_0, enter

FEEDBACK = "feedback"
"""The key of what messages have lost."""


class ZeroDataParallel(Wrapper):
    """module, trained by a `fompi.parallel.data.DataParallel`: each rank has a part of the state of the optimizer

        model = fompi.torch.ZeroDataParallel(module, comm, optimizer=fompi.parallel.data.AdamW(1e-3), zero=1)
        loss(model(x)).backward()                    # buckets of gradients leave meanwhile
        norm = model.step(clip=1.0)                  # instead of optimizer.step() and zero_grad()

    zero: 0, 1 or 2. The other options are those of `DataParallel` too; `replicated` is by default that of
    `fompi.torch.nn.replicated`. The parameters of the module are views of its buckets; where the program gives one
    other memory (`module.share_memory()`), its numbers are copied. Hooks announce the gradients, so p.grad is None
    after a backward. For zero=3 use `DataParallel` itself.

    overlap: a step returns while parameters are still gathered, and each module waits for its own ones before its
    forward. Then do not read or write parameters after a step in another way than by a forward of the module that holds
    them, `state_dict()` or `load_state_dict()`: call `wait()` first.

    What the program writes to parameters between two steps is taken over, also new parameters in the place of others;
    what cannot be is refused (`fompi.torch.parameters`). `optimizer_state_dict` has the whole state of the optimizer.

    Creating one, `step` and `close` are collective. A rank that leaves out a backward and `step()` is refused on all
    ranks in the next step: its gradients would be those of another batch. The parameters and buffers of rank 0 are
    copied to all ranks. The errors are those of `DataParallel` and of `DistributedDataParallel`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Any = None,
        *,
        optimizer: Any,
        zero: int = 1,
        overlap: bool = False,
        **options: Any,
    ):
        super().__init__()
        carrier = Communicator.of(comm)
        self.module, self.comm, self.overlap = module, carrier.plain, bool(overlap)
        refusal = None
        if zero not in (0, 1, 2):
            refusal = LayoutError(f"zero={zero!r} must be 0, 1 or 2: for 3 use fompi.parallel.data.DataParallel")
        enter(module, self.comm, f"ZeroDataParallel({zero=}, overlap={self.overlap}", refusal)
        self._known = Parameters(module)
        copy_from_rank_0([*module.parameters(), *module.buffers()], self.comm)
        named = self._known.named
        if options.get("replicated") is None:
            options["replicated"] = {name: held for name, held in replicated(module).items() if name in named}
        self.parallel = DataParallel(named, optimizer=optimizer, comm=carrier, zero=zero, **options)
        self._handles: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._places: dict[str, Sequence[dlpack.TensorPlace]] = {}  # of the parameters as views of their buckets
        self._late: set[str] = set()  # those that nobody has waited for since the last step
        with torch.no_grad():
            for name, parameter in named.items():
                self._take(name, parameter)
        self._is_looked_at = True
        if self.overlap:
            for part in module.modules():
                part.register_forward_pre_hook(self._wait_for)
            module.register_state_dict_pre_hook(lambda *_: self.wait())
            module.register_load_state_dict_pre_hook(lambda *_: self.wait())

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.training:
            self.refuse_copy()
        if torch.is_grad_enabled() and not self.is_copy and not self._is_looked_at and not self.parallel.closed:
            self._look()
        if self.training and torch.is_grad_enabled() and self.parallel.is_syncing:
            self.parallel.forwards += 1
        return self.module(*args, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients are only added up on this rank inside."""
        self.refuse_copy()
        return self.parallel.no_sync()

    @torch.no_grad()
    def step(self, clip: float | None = None, over: Any = ()) -> float:
        """Update the parameters. Returns the norm of the gradient before it is clipped, as `DataParallel.step`."""
        self.refuse_copy()
        self._look()
        if alone := [name for name, p in self._known.named.items() if p.grad is not None]:
            for name in alone:
                self._known.named[name].grad = None
            self.parallel.refuse(
                StateError(
                    f"{alone[0]!r} has a gradient that no hook has announced, because p.grad was written or the "
                    "parameter was replaced after the last forward: call the wrapper, and not model.module"
                )
            )
        norm = self.parallel.step(clip, over)
        for name, parameter in self._known.named.items():
            dlpack.mark_written(parameter)
            self._late.add(name)
        self._is_looked_at = False
        if not self.overlap:
            self.wait()
        return norm

    def optimizer_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """name -> what the optimizer keeps for the parameter: whole, for any number of ranks. Collective.

        Save it with `module.state_dict()`, or with `nn.full_state_dict(module)`: parts of parameters become whole
        ones here, too. Values are those of `DataParallel.state_dict`. With feedback, what was lost is among them.
        """
        self.refuse_copy()
        layouts, state = layouts_of(self.module), self.parallel.state_dict(parameters=False, rank0_only=False)
        found = state["optimizer"]
        for name, kept in found.items():
            if FEEDBACK in state:
                kept[FEEDBACK] = state[FEEDBACK][name]
            if name in layouts:
                axis, layout = layouts[name]
                shape = layout.shape_on(axis.rank)
                kept |= {k: layout.unshard(t, axis) for k, t in kept.items() if tuple(getattr(t, "shape", ())) == shape}
        return {} if rank0_only and self.comm.rank else found

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `optimizer_state_dict` has returned. Load the parameters before. All ranks pass all of it.

        Collective. Raises the errors of `DataParallel.load_state_dict`.
        """
        self.refuse_copy()
        layouts, parts = layouts_of(self.module), dict[str, Any](state)
        for name, kept in state.items():
            if name in layouts and isinstance(kept, Mapping):
                axis, layout = layouts[name]
                parts[name] = {
                    k: layout.shard(t, axis.rank) if tuple(getattr(t, "shape", ())) == layout.shape else t
                    for k, t in kept.items()
                }
        self.wait()
        lost = {name: kept[FEEDBACK] for name, kept in parts.items() if isinstance(kept, Mapping) and FEEDBACK in kept}
        for name in lost:
            parts[name] = {key: value for key, value in parts[name].items() if key != FEEDBACK}
        self.parallel.load_state_dict({"optimizer": parts} | ({FEEDBACK: lost} if lost else {}))

    def checkpoint_parts(self) -> dict[str, Any]:
        """What this rank has, for `fompi.save` and `fompi.load`."""
        self.refuse_copy()
        self.wait()
        layouts = {n: (layout.shape, layout.placed(axis.rank)) for n, (axis, layout) in layouts_of(self.module).items()}
        parts = self.parallel.checkpoint_parts(layouts)
        return {"module": parts_of(self.module) | parts["parameters"], "optimizer": parts["optimizer"]}

    def rebalance(self, shares: Any) -> None:
        """Other shares of rows and state from the next step on (`DataParallel.rebalance`). Collective."""
        self.refuse_copy()
        self.parallel.rebalance(shares)
        self._take_all()

    def reshard(self, comm: Any = SAME, *, zero: int | None = None, shares: Any = None) -> None:
        """Other ranks, another `zero`, other shares (`DataParallel.reshard`). Collective.

        On a rank that leaves the wrapper is closed, and the module stays. Buffers are those of each rank.
        """
        self.refuse_copy()
        if zero == 3:
            raise LayoutError("zero=3 is for fompi.parallel.data.DataParallel: a module has all its parameters")
        self.wait()
        self.parallel.reshard(comm, zero=zero, shares=shares)
        self.comm = self.parallel.comm
        if not self.parallel.closed:
            self._take_all()

    @torch.no_grad()
    def _take_all(self) -> None:
        for name, parameter in self._known.named.items():
            self._take(name, parameter)

    @torch.no_grad()
    def wait(self, names: Iterable[str] | None = None) -> None:
        """Wait until these parameters have arrived (None: all of them)."""
        self.refuse_copy()
        if not self.parallel.closed:
            for name in self._known.named if names is None else names:
                view = self.parallel[name]
                if name in self._late and dlpack.moved(self._places[name]):
                    self._known.named[name].copy_(view)
                self._late.discard(name)

    def close(self) -> None:
        """Free the communicators. Collective. The module stays."""
        self.wait()
        self.parallel.close()

    @torch.no_grad()
    def _look(self) -> None:
        """Take over what the program has changed since the last step, or refuse it on all ranks."""
        try:
            replaced = self._known.look()
            for name, parameter in self._known.named.items():
                if name in replaced:
                    self.parallel[name].copy_(parameter)
                    self._late.discard(name)
                    self._take(name, parameter)
                elif dlpack.moved(self._places[name]):
                    self.wait([name])
                    self.parallel[name].copy_(parameter)
        except Exception as error:
            self.parallel.refuse(error)
        self._is_looked_at = True

    def _take(self, name: str, parameter: torch.nn.Parameter) -> None:
        """The parameter becomes a view of its bucket, and its gradient is announced."""
        parameter.data = self.parallel[name]
        self._places[name] = dlpack.places({name: parameter})
        self._names[id(parameter)] = name
        if name in self._handles:
            self._handles[name].remove()
        self._handles[name] = parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _wait_for(self, part: torch.nn.Module, *_: Any) -> None:
        """The forward of a part of the module begins: its parameters must be here."""
        if not self.parallel.closed:
            self.wait([self._names[id(p)] for p in part.parameters(recurse=False) if id(p) in self._names])

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def ready(parameter: torch.Tensor) -> None:
            if not self.parallel.closed:
                gradient, parameter.grad = parameter.grad, None
                self.parallel.ready(name, gradient)

        return ready
