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

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from fompi.base.call_options import in_words as keywords_in_words
from fompi.base.errors import FompiError, LayoutError, MismatchError, PeerError, StateError, TensorError, in_words
from fompi.base.layout import offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import Agreement, agree, begin_agreement
from fompi.ops.operations import all_reduce, broadcast
from fompi.parallel.arrays import carrying
from fompi.parallel.buckets import Buckets, cut
from fompi.parallel.repeated import repeated
from fompi.parallel.shares import DataShares
from fompi.parallel.sums import Summed, Sums, feedback_of, summing
from fompi.plans.problems import order_of
from fompi.tensors import dlpack
from fompi.torch import private
from fompi.torch.parameters import Parameters, Wrapper, check_module, copy_from_rank_0, enter


class GradientBucket(Summed):
    """Parameters of one dtype. `flat` has their gradients, and for each a number > 0 if some rank has used it.

    Messages have `own`, which is the same memory until the program moves p.grad (`share_memory_`). Then it is copied.

    If messages carry fewer bits, these numbers are in `used`, which is summed apart: they would be the scale of others.

    Gradients of a half type are also added up in float32, in `wide`. autograd adds them to p.grad, which rounds each
    sum. As long as nobody else writes p.grad, the sum in float32 replaces it when the bucket leaves.
    """

    factor = 1.0  # what the gradients of this rank are multiplied by: ranks may have unequal rows

    def __init__(self, parameters: dict[str, torch.nn.Parameter], comm: Communicator, used: torch.Tensor | None):
        self.names, self.parameters = [*parameters], [*parameters.values()]
        ends = offsets(p.numel() for p in self.parameters)
        dtype, runs = self.parameters[0].dtype, list(pairwise(ends))
        self.dtype = str(dtype).removeprefix("torch.")
        count = ends[-1] + (len(parameters) if used is None else 0)
        memory = np.zeros(count * self.parameters[0].element_size(), np.uint8)  # torch frees nothing of it
        self.flat, self.own = (torch.from_numpy(memory).view(dtype) for _ in range(2))
        self.used = self.flat[ends[-1] :] if used is None else used
        self.parts = [slice(a, b) for a, b in runs]
        self.views = [self.flat[a:b].view_as(p) for p, (a, b) in zip(self.parameters, runs, strict=True)]
        self.is_half = dtype in (torch.bfloat16, torch.float16)
        wide = torch.zeros(ends[-1] if self.is_half else 0)
        self.wide = [wide[a:b].view_as(v) for v, (a, b) in zip(self.views, runs, strict=True)] if self.is_half else []
        self.held: dict[int, list[Any]] = {}  # what the hooks on a parameter need, and its handles
        self.seen: dict[int, tuple[int, int]] = {}  # p.grad that has the sum of `wide`: its address and version
        self.missing = set(range(len(parameters)))  # no gradient in this backward yet
        self.feedback = feedback_of(comm, self.dtype, lambda: np.zeros(ends[-1], np.float32))
        self.call = repeated(all_reduce, memory.nbytes, self.own, op="mean", out=self.own, comm=comm)

    def listen(self, i: int, parameter: torch.nn.Parameter, ready: Callable[[torch.Tensor], None]) -> None:
        """Let autograd call `ready` when the gradient of parameter i is complete, and `add` and `added` before.

        It is `parameter` from now on. The hooks of the program change the gradient before, or p.grad after.
        """
        self.leave_alone(i)
        self.parameters[i], held = parameter, list[Any]()
        if self.is_half:
            held.append(private.before_gradient_is_added(parameter, lambda gradient: self.add(i, gradient)))
            held.append(private.when_gradient_was_added(parameter, lambda _: self.added(i)))
        held.append(parameter.register_post_accumulate_grad_hook(ready))
        self.held[i] = held

    def leave_alone(self, i: int) -> None:
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

    @property
    def has_moved(self) -> bool:
        return self.flat.data_ptr() != self.own.data_ptr()

    def terms(self) -> torch.Tensor:
        for i in self.missing:  # not in this backward; it may have a gradient of an earlier one
            self.take(i)
        if self.has_moved:
            self.own.copy_(self.flat)
        if self.factor != 1.0:  # `used` stays as it is
            self.own[: self.parts[-1].stop].mul_(self.factor)
        if self.feedback is not None:
            self.feedback.give_back(dlpack.borrow(self.own).array, self.dtype)
        return self.own

    def settle(self) -> None:
        """The gradients become the mean, which is here. A parameter that no rank has used keeps none."""
        dlpack.mark_written(self.flat)
        if self.has_moved:
            self.flat.copy_(self.own)
        used = self.used.ne(0).tolist()
        if self.feedback is not None:
            self.feedback.keep(part for part, is_used in zip(self.parts, used, strict=True) if not is_used)
        for parameter, view, is_used in zip(self.parameters, self.views, used, strict=True):
            if is_used:
                parameter.grad = view.detach()

    def forget(self) -> None:
        if self.has_left:
            self.seen.clear()
        self.missing = set(range(len(self.parameters)))
        super().forget()


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the tensor is, and how often it was written."""
    return tensor.data_ptr(), tensor._version


class DistributedDataParallel(Wrapper):
    """module, whose p.grad is the mean over the ranks of `comm` when loss.backward() returns

    As `torch.nn.parallel.DistributedDataParallel`: an unedited training loop, any optimizer, `no_sync()`, and
    `ddp.module` for the state dict without the prefix "module.". `comm`: a Communicator, an MPI.Comm, or None for all
    ranks. Creating one is collective; it copies the parameters and buffers of rank 0 to all ranks.

    bucket_nbytes: the most bytes of a bucket of gradients. broadcast_buffers: each forward in training mode copies the
    buffers of rank 0, such as the statistics of a batch norm. Gradients are summed as `comm` says
    (`Communicator.using`), or a keyword here of the same name: wire is what they travel in ("bfloat16", "int8", ...:
    `fompi.base.wires`); with feedback, what messages of this rank have lost is added to its next gradients;
    order="ranks" adds those of the ranks in a tree (`fompi.plans.tree`).

    shares: how many rows each rank has in a step, if not all have as many: what `fompi.balance(..., task="train")`
    returns, or a number for each rank. The loss of a rank is the mean over its own rows, and the gradient is that of
    the mean over all rows. A rank may have none.

    A parameter that some rank does not use in a backward has a zero gradient there. One that no rank uses keeps
    `grad=None`. The same parameters need not be used in every step, and nobody announces them. Gradients of half
    types are added up in float32, over micro-batches and over the ranks, and rounded once each time.

    Outside `no_sync` all ranks must run the same forwards in training mode, and the same backward passes. In each
    backward they compare the number of the step, of the backward within it and of the forward it goes through, besides
    the sums. So ranks that come to differ get a MismatchError that says which rank is where. A step begins with the
    first forward after parameters were written. In evaluation mode, or without gradients, a rank may run more forwards
    than others.

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
        bucket_nbytes: int | Buckets = 25 << 20,
        broadcast_buffers: bool = True,
        shares: Any = None,
        **how: Any,
    ):
        super().__init__()
        self.module, self.broadcast_buffers = module, broadcast_buffers
        group, refusal, counts = Communicator.of(comm).plain, None, list[int]()
        self.shares = DataShares()
        try:
            check_module(module)
            self._known = Parameters(module)
            parameters = self._known.named.values()
            self.shares = DataShares.of(shares, group.size)
            dtypes = [str(p.dtype).removeprefix("torch.") for p in parameters]
            how = dict(carrying("DistributedDataParallel", comm, how, dtypes).how)
            counts = cut([p.numel() * p.element_size() for p in parameters], dtypes, bucket_nbytes)
            order = order_of(how.get("order", "any"))
            if order not in ("any", "ranks") or (order == "ranks" and "wire" in how):
                why = "must be 'any', or 'ranks' without a wire; leaves: ZeroDataParallel"
                raise LayoutError(f"order={order} {why}")
        except Exception as error:
            refusal = error
        words = f"DistributedDataParallel({bucket_nbytes=}, {broadcast_buffers=}{keywords_in_words(how)}{self.shares}"
        enter(module, group, words, refusal)
        self.comm = group.split(0, group.rank, f"{group.name}/gradients")  # its calls have an order of their own
        copy_from_rank_0([*module.parameters(), *module.buffers()], self.comm)
        named = [*self._known.named.items()]
        flags = torch.zeros(len(named), dtype=torch.uint8) if "wire" in how else None
        summed = summing(self.comm, how)
        self._buckets = [
            GradientBucket(dict(named[a:b]), summed, None if flags is None else flags[a:b])
            for a, b in reversed([*pairwise(offsets(counts))])
        ]
        self._sums = Sums([*self._buckets])
        if flags is not None:  # they leave last, at the end of a backward
            used = all_reduce.bind(flags, op="max", out=flags, comm=self.comm)
            self._sums = Sums([*self._buckets, Summed(used, flags, missing=["the end"])])
        self._is_syncing = True
        self._agreement: Agreement | None = None  # on which backward this is, while there is one
        self._step = self._backward = 0  # the step, and the backward passes in it that have summed
        self._forwards = [0, 0]  # of this step, with gradients: in evaluation, and in training
        self._forward = (0, 0, "no forward")  # the last one: its step, its number in it, and both in words
        self._reached: dict[tuple[int, int, str], Any] = {}  # those that this backward goes through, the last one first
        self._versions: int | None = None  # of all parameters, at the last forward. None after an error: count anew
        self._is_looked_at = True  # nothing can have changed since the last backward
        for bucket in self._buckets:
            bucket.factor = self.shares.factor(group.rank)
            for i, parameter in enumerate(bucket.parameters):
                bucket.listen(i, parameter, self._hook(bucket, i))

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.training:
            self.refuse_copy()
        if not torch.is_grad_enabled() or self.is_copy or self.comm.closed:
            return self.module(*args, **options)
        if self._agreement is not None:  # the last backward was ended by an exception
            self._end_by(StateError("the backward before was ended by an exception"))
        if not self._is_syncing:
            return self.module(*args, **options)
        try:
            self._look()
            if self.broadcast_buffers and self.training:
                copy_from_rank_0(self.module.buffers(), self.comm)
            return self._counted(self.module(*args, **options))
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

    def rebalance(self, shares: Any) -> None:
        """Other shares of rows from the next backward on. Collective. Wrong ones are refused on all ranks."""
        found, refusal = self.shares, None
        try:
            found = DataShares.of(shares, self.comm.size)
        except LayoutError as error:
            refusal = error
        agree(self.comm, f"rebalance{found}", refusal)
        self.shares = found
        for bucket in self._buckets:
            bucket.factor = found.factor(self.comm.rank)

    def close(self) -> None:
        """Free the communicator of the gradients. Collective. The module stays."""
        self.refuse_copy()
        self._is_syncing = False
        for bucket in self._buckets:
            for i in [*bucket.held]:
                bucket.leave_alone(i)
        for summed in self._sums.summed:
            summed.call.close()
        self.comm.close()

    def _look(self) -> None:
        """Take over what the program has changed since the last step, or refuse it on all ranks."""
        versions = sum(p._version for p in self._known.named.values())
        if versions != self._versions:
            self._step = 1 if self._versions is None else self._step + 1
            self._versions, self._backward, self._is_looked_at = versions, 0, False
            self._forwards = [0, 0]
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
                    bucket.listen(i, replaced[name], self._hook(bucket, i))
        self._is_looked_at = True

    def _counted(self, output: Any) -> Any:
        """The output of a forward, of which a backward through it says the number.

        Forwards in evaluation count apart: a rank may have more of them than others.
        """
        self._forwards[self.training] += 1
        words = f"forward {self._forwards[self.training]} of step {self._step}"
        words += "" if self.training else " in evaluation"
        self._forward = self._step, sum(self._forwards), words
        self._reached.clear()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._reached.__setitem__, self._forward))  # which raises nothing
        return output

    # ------------------------------------------------------------------------------------------------- backward
    def _hook(self, bucket: GradientBucket, i: int) -> Any:
        @torch.no_grad()
        def ready(parameter: torch.Tensor) -> None:
            """Called by autograd when the gradient of the parameter is complete."""
            if not self._is_syncing:
                return
            try:
                if self._agreement is None:
                    private.at_end_of_backward(self._finish)
                    self._begin()
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise TensorError(
                        f"the gradient of {bucket.names[i]!r} is sparse: make its embedding with sparse=False"
                    )
                if bucket.has_left:
                    raise StateError(
                        f"the gradient of {bucket.names[i]!r} changed after its bucket had left: use "
                        "torch.utils.checkpoint with use_reentrant=False, or no_sync()"
                    )
                bucket.take(i)
                bucket.missing.discard(i)
                while self._sums.next_is_complete:
                    self._sums.leave()
            except BaseException as error:
                self._end_by(error)
                raise

        return ready

    def _begin(self, refusal: Exception | None = None) -> None:
        """The ranks compare which backward this is, at the same time as its sums."""
        self._backward += 1
        words = f"the gradients of backward {self._backward} of step {self._step}"
        words += f", through {max(self._reached, default=self._forward)[-1]}"
        self._agreement = begin_agreement(self.comm, words, refusal)

    def _finish(self) -> None:
        """The end of a backward: the other buckets leave, and all sums arrive."""
        assert self._agreement is not None
        try:
            while self._sums.rest:
                self._sums.leave()
            self._agreement.values()
            for summed in self._sums.summed:
                summed.call.wait()
            for bucket in self._buckets:
                bucket.settle()
        except BaseException as error:
            self._end_by(error)
            raise
        self._reset()

    def _reset(self) -> None:
        """Be ready for the next backward."""
        self._sums.forget()
        self._agreement, self._is_looked_at = None, False
        self._reached.clear()

    def _end_by(self, error: BaseException) -> None:
        """Refuse the sums of this backward that have not left, so that all ranks end it with an error."""
        refusal = error if isinstance(error, Exception) else PeerError(in_words(error), self.comm.rank)
        is_right = not self._sums.rest and not isinstance(error, MismatchError)  # that one is on all ranks
        with suppress(FompiError, type(refusal)):
            if self._agreement is None:
                self._begin(refusal)
            if self._agreement is not None:
                self._agreement.values()
        self._sums.refuse(refusal)
        for summed in self._sums.summed:
            try:
                summed.call.wait()
            except (FompiError, type(refusal)):
                is_right = False
        if not is_right:  # all ranks have an error, and count steps anew
            self._versions = None
        self._reset()
