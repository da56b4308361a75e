"""Data parallelism for a training loop of PyTorch: gradients are averaged while the backward goes on.

    model = fompi.torch.DistributedDataParallel(module, comm)
    optimizer = torch.optim.AdamW(model.parameters())
    ...
    loss(model(x)).backward()                        # p.grad is the mean over the ranks when this returns
    optimizer.step()

    backward   | b3 | b2 | b1 |b0|
    sums            | g3 | g2 |g1|g0|

The gradients of a bucket are views of one flat tensor, which is summed in place. Buckets leave in a fixed order, the
last parameters first. Those whose gradients are not all there leave at the end of the backward. So ranks that use
different parameters never wait in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fompi.base.errors import FompiError, LayoutError, PeerError, ShapeError, StateError, TensorError, in_words
from fompi.base.layout import integer
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree, digest
from fompi.ops.operations import all_reduce, broadcast
from fompi.parallel.arrays import same_bits, start_labelled
from fompi.parallel.buckets import cut_by_bytes
from fompi.parallel.data import DataParallel
from fompi.tensors import dlpack
from fompi.torch import private
from fompi.torch.checkpoint import layouts_of
from fompi.torch.nn import replicated
from fompi.torch.parameters import Parameters, Wrapper


class Bucket:
    """Parameters of one dtype. `flat` has their gradients, and for each a number > 0 if some rank has used it.

    Gradients of a half type are also added up in float32, in `wide`. autograd adds them to p.grad, which rounds each
    sum. As long as nobody else writes p.grad, the sum in float32 replaces it when the bucket leaves.
    """

    def __init__(self, names: list[str], parameters: list[torch.nn.Parameter]):
        self.names, self.parameters = names, parameters
        ends = list(accumulate((p.numel() for p in parameters), initial=0))
        dtype, runs = parameters[0].dtype, list(pairwise(ends))
        self.flat = torch.zeros(ends[-1] + len(parameters), dtype=dtype)
        self.used = self.flat[ends[-1] :]
        self.views = [self.flat[a:b].view_as(p) for p, (a, b) in zip(parameters, runs, strict=True)]
        self.is_half = dtype in (torch.bfloat16, torch.float16)
        wide = torch.zeros(ends[-1] if self.is_half else 0)
        self.wide = [wide[a:b].view_as(p) for p, (a, b) in zip(parameters, runs, strict=True)] if self.is_half else []
        self.held: dict[int, list[Any]] = {}  # what the hooks on a parameter need, and its handles
        self.seen: dict[int, tuple[int, int]] = {}  # p.grad that has the sum of `wide`: its address and version
        self.missing = set(range(len(parameters)))  # no gradient in this backward yet
        self.sum: Any = None

    def listen(self, i: int, ready: Callable[[torch.Tensor], None]) -> None:
        """Let autograd call `ready` when the gradient of parameter i is complete, and `add` and `added` before.

        The hooks of the program change the gradient before, or p.grad after.
        """
        parameter, held = self.parameters[i], list[Any]()
        if self.is_half:
            held.append(private.before_gradient_is_added(parameter, lambda gradient: self.add(i, gradient)))
            held.append(private.when_gradient_was_added(parameter, lambda _: self.added(i)))
        held.append(parameter.register_post_accumulate_grad_hook(ready))
        self.held[i] = held

    def take_over(self, i: int, parameter: torch.nn.Parameter, ready: Callable[[torch.Tensor], None]) -> None:
        """`parameter` has taken the place of parameter i."""
        self.forget(i)
        self.parameters[i] = parameter
        self.listen(i, ready)

    def forget(self, i: int) -> None:
        """Listen to parameter i no more."""
        for held in self.held.pop(i, []):
            if hasattr(held, "remove"):
                held.remove()

    @torch.no_grad()
    def add(self, i: int, gradient: torch.Tensor | None) -> None:
        """Add a gradient of half type in float32, before autograd adds it to p.grad."""
        if gradient is None or gradient.layout != torch.strided:
            return
        before, wide = self.parameters[i].grad, self.wide[i]
        if before is None:
            wide.zero_()
        elif self.seen.get(i) != _written(before):  # the program has written it, or it was summed over the ranks
            wide.copy_(before)
        wide.add_(gradient)

    def added(self, i: int) -> None:
        """autograd has added the gradient to p.grad."""
        gradient = self.parameters[i].grad
        if gradient is not None:
            self.seen[i] = _written(gradient)

    def take(self, i: int) -> None:
        """The gradient of parameter i becomes a view of the bucket."""
        parameter, view = self.parameters[i], self.views[i]
        if parameter.grad is None:
            view.zero_()
        elif self.is_half and self.seen.get(i) == _written(parameter.grad):
            view.copy_(self.wide[i])
            parameter.grad = view.detach()  # the program may give p.grad other data
        elif parameter.grad.data_ptr() != view.data_ptr() or parameter.grad.stride() != view.stride():
            view.copy_(parameter.grad)
            parameter.grad = view.detach()
        self.used[i] = parameter.grad is not None

    def settle(self) -> None:
        """Wait for the sum. The gradients become the mean. A parameter that no rank has used keeps none."""
        self.sum.wait()
        used = self.used.ne(0).tolist()
        for parameter, view, is_used in zip(self.parameters, self.views, used, strict=True):
            if is_used:
                parameter.grad = view.detach()

    def reset(self) -> None:
        if self.sum is not None:
            self.seen.clear()
        self.missing, self.sum = set(range(len(self.parameters))), None


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the tensor is, and how often it was written."""
    return tensor.data_ptr(), tensor._version


class DistributedDataParallel(Wrapper):
    """module, whose p.grad is the mean over the ranks of `comm` when loss.backward() returns

    As `torch.nn.parallel.DistributedDataParallel`: an unedited training loop, any optimizer, `no_sync()`, and
    `ddp.module` for the state dict without the prefix "module.". `comm`: a Communicator, an MPI.Comm, or None for all
    ranks. Creating one is collective; it copies the parameters and buffers of rank 0 to all ranks.

    bucket_nbytes: the most bytes of a bucket of gradients. broadcast_buffers: each forward in training mode copies the
    buffers of rank 0, such as the statistics of a batch norm.

    A parameter that some rank does not use in a backward has a zero gradient there. One that no rank uses keeps
    `grad=None`. The same parameters need not be used in every step, and nothing must be announced. Gradients of half
    types are added up in float32, over micro-batches and over the ranks, and rounded once each time.

    All ranks must run the same number of backward passes outside `no_sync`. The sums carry the number of the step and
    of the backward within it, so ranks that come to differ get a MismatchError that says which rank is where. A step
    begins with the first forward after parameters were written.

    Parameters that take the place of others are taken over, others are refused (`fompi.torch.parameters`). An error in
    a forward or a backward of one rank, outside of `no_sync`, ends that backward on all ranks by an error.

    Raises MismatchError on all ranks whose modules differ in names, shapes or dtypes, and TensorError for parameters
    that are not on the CPU, and for sparse gradients.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Any = None,
        *,
        bucket_nbytes: int = 25 << 20,
        broadcast_buffers: bool = True,
    ):
        super().__init__()
        self.module, self.broadcast_buffers = module, broadcast_buffers
        group = Communicator.of(comm)
        refusal = None
        if integer(bucket_nbytes) is None or bucket_nbytes < 1:
            refusal = LayoutError(f"bucket_nbytes={bucket_nbytes!r} must be an integer of at least 1")
        _enter(module, group, f"DistributedDataParallel({bucket_nbytes=}, {broadcast_buffers=}", refusal)
        self.comm = group.split(0, group.rank, f"{group.name}/gradients")  # its calls have an order of their own
        _copy_from_rank_0([*module.parameters(), *module.buffers()], self.comm)
        self._known = Parameters(module)
        names, parameters = [*self._known.named], [*self._known.named.values()]
        counts = cut_by_bytes([p.numel() * p.element_size() for p in parameters], bucket_nbytes)
        changes = {i for i in range(1, len(parameters)) if parameters[i].dtype != parameters[i - 1].dtype}
        edges = sorted({0, *changes, *accumulate(counts)})
        self._buckets = [
            Bucket(names[a:b], parameters[a:b]) for a, b in reversed([*pairwise(edges)])
        ]  # in the order in which they leave
        self._left = 0  # this many have left
        self._is_syncing, self._is_queued = True, False
        self._step = self._backward = 0  # the step, and the backward passes in it that have summed
        self._versions: int | None = None  # of all parameters, at the last forward. None after an error: count anew
        self._is_looked_at = True  # nothing can have changed since the last backward
        for bucket in self._buckets:
            for i in range(len(bucket.parameters)):
                bucket.listen(i, self._hook(bucket, i))

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.training:
            self.refuse_copy()
        if not torch.is_grad_enabled() or self.is_copy or self.comm.closed:
            return self.module(*args, **options)
        if self._is_queued:  # the last backward was ended by an exception
            self._end_by(StateError("the backward before was ended by an exception"))
        if not self._is_syncing:
            return self.module(*args, **options)
        try:
            self._look()
            if self.broadcast_buffers and self.training:
                _copy_from_rank_0(self.module.buffers(), self.comm)
            return self.module(*args, **options)
        except BaseException as error:  # the other ranks wait in their backward
            self._end_by(error)
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are only added up on this rank inside. The next backward outside averages the sums."""
        self.refuse_copy()
        outer, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = outer

    def close(self) -> None:
        """Free the communicator of the gradients. Collective. The module stays."""
        self.refuse_copy()
        self._is_syncing = False
        for bucket in self._buckets:
            for i in [*bucket.held]:
                bucket.forget(i)
        self.comm.close()

    def _look(self) -> None:
        """Take over what the program has changed since the last step, or refuse it on all ranks."""
        versions = sum(p._version for p in self._known.named.values())
        if versions != self._versions:
            self._step = 1 if self._versions is None else self._step + 1
            self._versions, self._backward, self._is_looked_at = versions, 0, False
        if self._is_looked_at:
            return
        try:
            replaced = self._known.look()
        except FompiError as error:
            if self.broadcast_buffers and self.training and any(True for _ in self.module.buffers()):
                broadcast.refuse(error, self.comm)  # the other ranks wait for it in their forward
            raise
        for bucket in self._buckets:
            for i, name in enumerate(bucket.names):
                if name in replaced:
                    bucket.take_over(i, replaced[name], self._hook(bucket, i))
        self._is_looked_at = True

    # ------------------------------------------------------------------------------------------------- backward
    def _hook(self, bucket: Bucket, i: int) -> Any:
        @torch.no_grad()
        def ready(parameter: torch.Tensor) -> None:
            """Called by autograd when the gradient of the parameter is complete."""
            if not self._is_syncing:
                return
            if not self._is_queued:
                private.at_end_of_backward(self._finish)
                self._is_queued, self._begun_at = True, self.comm.calls
                self._backward += 1
            try:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise TensorError(
                        f"the gradient of {bucket.names[i]!r} is sparse: make its embedding with sparse=False"
                    )
                if bucket.sum is not None:
                    raise StateError(
                        f"the gradient of {bucket.names[i]!r} changed after its bucket had left: use "
                        "torch.utils.checkpoint with use_reentrant=False, or no_sync()"
                    )
                bucket.take(i)
                bucket.missing.discard(i)
                while self._left < len(self._buckets) and not self._buckets[self._left].missing:
                    self._leave()
            except BaseException as error:
                self._end_by(error)
                raise

        return ready

    def _leave(self) -> None:
        """Start the sum of the next bucket."""
        bucket = self._buckets[self._left]
        for i in bucket.missing:  # not in this backward; it may have a gradient of an earlier one
            bucket.take(i)
        label = f"of bucket {self._left} in backward {self._backward} of step {self._step}"
        how: dict[str, Any] = {"op": "mean", "out": bucket.flat, "schedule": same_bits(self.comm)}
        bucket.sum = start_labelled(all_reduce, label, bucket.flat, comm=self.comm, **how)  # it rounds a half type once
        self._left += 1

    def _finish(self) -> None:
        """The end of a backward: the other buckets leave, and all sums arrive."""
        try:
            while self._left < len(self._buckets):
                self._leave()
            for bucket in self._buckets:
                bucket.settle()
        except BaseException as error:
            self._end_by(error)
            raise
        self._forget()

    def _forget(self) -> bool:
        """Wait for the sums that are in flight, and be ready for the next backward. True: none was refused."""
        is_right = True
        for bucket in self._buckets:
            if bucket.sum is not None:
                try:
                    bucket.sum.wait()
                except FompiError:
                    is_right = False
            bucket.reset()
        self._left, self._is_queued, self._is_looked_at = 0, False, False
        return is_right

    def _end_by(self, error: BaseException) -> None:
        """Refuse the sums of this backward that have not left, so that all ranks end it with an error."""
        begun_at = self._begun_at if self._is_queued else self.comm.calls
        left = begun_at + len(self._buckets) - self.comm.calls
        refusal = error if isinstance(error, Exception) else PeerError(in_words(error), self.comm.rank)
        for _ in range(left):
            with suppress(Exception):
                all_reduce.refuse(refusal, self.comm)
        if not self._forget() or left:  # all ranks have an error, and count steps anew
            self._versions = None


class ZeroDataParallel(Wrapper):
    """module, trained by a `fompi.parallel.data.DataParallel`: each rank has a part of the state of the optimizer

        model = fompi.torch.ZeroDataParallel(module, comm, optimizer=fompi.parallel.data.AdamW(1e-3), zero=1)
        loss(model(x)).backward()                    # buckets of gradients leave meanwhile
        norm = model.step(clip=1.0)                  # instead of optimizer.step() and zero_grad()

    zero: 0, 1 or 2. The other options are those of `DataParallel` too; `replicated` is by default that of
    `fompi.torch.nn.replicated`. The parameters of the module are views of its buckets. Hooks announce the gradients, so
    p.grad is None after a backward. For zero=3 use `DataParallel` itself.

    overlap: a step returns while parameters are still gathered, and each module waits for its own ones before its
    forward. Then do not read or write parameters after a step in another way than by a forward of the module that holds
    them, `state_dict()` or `load_state_dict()`: call `wait()` first.

    What the program writes to parameters between two steps is taken over, also new parameters in the place of others;
    what cannot be is refused (`fompi.torch.parameters`). `optimizer_state_dict` has the whole state of the optimizer.

    Creating one, `step` and `close` are collective. The parameters and buffers of rank 0 are copied to all ranks. The
    errors are those of `DataParallel` and of `DistributedDataParallel`.
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
        self.module, self.comm, self.overlap = module, Communicator.of(comm), bool(overlap)
        refusal = None
        if zero not in (0, 1, 2):
            refusal = LayoutError(f"zero={zero!r} must be 0, 1 or 2: for 3 use fompi.parallel.data.DataParallel")
        _enter(module, self.comm, f"ZeroDataParallel({zero=}, overlap={self.overlap}", refusal)
        self._known = Parameters(module)
        _copy_from_rank_0([*module.parameters(), *module.buffers()], self.comm)
        named = self._known.named
        if options.get("replicated") is None:
            options["replicated"] = {name: held for name, held in replicated(module).items() if name in named}
        self.parallel = DataParallel(named, optimizer=optimizer, comm=self.comm, zero=zero, **options)
        self._handles: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._views: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, parameter in named.items():
                self._views[name] = self.parallel[name]
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
        for parameter in self._known.named.values():
            dlpack.mark_written(parameter)
        self._is_looked_at = False
        if not self.overlap:
            self.wait()
        return norm

    def optimizer_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """name -> what the optimizer keeps for the parameter: whole, for any number of ranks. Collective.

        Save it beside `module.state_dict()`, or beside `nn.full_state_dict(module)`: parts of parameters become whole
        ones here, too. Values are those of `DataParallel.state_dict`.
        """
        self.refuse_copy()
        layouts, state = layouts_of(self.module), self.parallel.state_dict(parameters=False, rank0_only=False)
        found = state["optimizer"]
        for name, kept in found.items():
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
        self.parallel.load_state_dict({"optimizer": parts})

    @torch.no_grad()
    def wait(self, names: Iterable[str] | None = None) -> None:
        """Wait until these parameters have arrived (None: all of them)."""
        self.refuse_copy()
        if not self.parallel.closed:
            for name in self._known.named if names is None else names:
                self.parallel[name]

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
                if name in replaced or not _is_view(parameter, self._views[name]):
                    self.parallel[name]  # wait until nothing is gathered there
                    self._views[name].copy_(parameter)
                    self._take(name, parameter)
        except Exception as error:
            self.parallel.refuse(error)
        self._is_looked_at = True

    def _take(self, name: str, parameter: torch.nn.Parameter) -> None:
        """The parameter becomes a view of its bucket, and its gradient is announced."""
        parameter.data = self._views[name]
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


# ------------------------------------------------------------------------------------------------------- helpers


def _is_view(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    return parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride()


def _copy_from_rank_0(tensors: Iterable[torch.Tensor], comm: Communicator) -> None:
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


def _enter(module: torch.nn.Module, comm: Communicator, text: str, refusal: Exception | None) -> None:
    """All ranks wrap the same module with the same options, or all raise."""
    listed = []
    try:
        _check(module)
        named = (*module.named_parameters(), *module.named_buffers())
        listed = [f"{name} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for name, t in named]
    except Exception as error:
        refusal = refusal or error
    agree(comm, f"{text}, {len(listed)} tensors ({digest(str(listed)):x}))", refusal)


def _check(module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TensorError(f"module={module!r} must be a torch.nn.Module")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ShapeError(f"{name!r} has no shape yet: run the module once before it is wrapped")
    if not any(p.requires_grad for p in module.parameters()):
        raise ShapeError("data parallelism needs at least one parameter that requires grad")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise TensorError(f"{name!r} is on {tensor.device}: data parallelism works on the host")
