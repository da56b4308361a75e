"""Data parallelism with ZeRO 1 to 3: gradients leave in buckets during the backward, parameters arrive ahead.

    backward   | b3 | b2 | b1 |b0|             forward   | f0 | f1 | f2 | f3 |
    sums            | g3 | g2 |g1|g0|          gathers | a0 | a1 | a2 | a3 |

Rank r owns the r-th run of the elements of a bucket, across parameters. Sums and gathers have a communicator each, and
the calls on it have a fixed order, whatever a rank uses. So ranks that use different parameters never wait in vain:

- Sums leave from the last bucket to the first. A bucket whose gradients are not all there waits for `step`.
- Gathers follow a cycle: the forward (0 to the last bucket) and, for zero=3, the backward (last but one to 0). The exit
  of `no_sync` and `step` finish the cycle on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import partial
from math import isfinite, sqrt
from time import perf_counter
from typing import Any, NoReturn

import numpy as np

from fompi.backends.cuda.failures import OutOfMemory
from fompi.backends.half import storage
from fompi.backends.numbers import constant, fetch, filled, narrow, place, widen
from fompi.backends.wires import Feedback
from fompi.base.call_options import of_carrier
from fompi.base.errors import (
    DeviceError,
    DtypeError,
    FompiError,
    LayoutError,
    MismatchError,
    ShapeError,
    StateError,
    TensorError,
    quoted,
)
from fompi.base.layout import accumulator, offsets
from fompi.base.wires import wire_of
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import ENDS_STEP, agree, begin_agreement
from fompi.ops.operations import all_gather, all_reduce, reduce_scatter
from fompi.parallel.arrays import array_of, borrow_any, call, check_place, lent, read, same_bits, tensor_of
from fompi.parallel.buckets import (
    DTYPES,
    MOST_NAMED,
    Bucket,
    Buckets,
    axes_of,
    borrowed,
    buckets,
    check_axes,
    check_clip,
    check_options,
    check_order,
    clip_factor,
    cut,
    detached,
    held_in_words,
    holders,
    in_less_memory,
    in_words,
    kept_nbytes,
)
from fompi.parallel.leaves import LeafSums, exact_sums
from fompi.parallel.optimizers import SGD, AdamW, Optimizer, State
from fompi.parallel.repeated import Unbound, is_bound, repeated
from fompi.parallel.saved import load_state, whole_state
from fompi.parallel.section import Section
from fompi.plans.tree import Canonical
from fompi.tensors.dlpack import Tensor
from fompi.traces.trace import Trace

__all__ = ["SGD", "AdamW", "Buckets", "DataParallel", "buckets"]

Array = np.ndarray[Any, Any]

REFUSED_STEP = "a refused step"

NOTHING_UPDATED = "No rank has updated anything: leave this batch out, or take a smaller learning rate"


class DataParallel:
    """p -= optimizer(mean of the gradients of all ranks), for each p of `params`; a mean, or a sum if not `average`

        with DataParallel(params, optimizer=AdamW(1e-3), comm=comm, zero=1) as dp:
            for x, target in batches:
                y = forward(dp, x)                     # reads dp["w1"], then dp["w2"], ...
                for name, gradient in backward(dp, y, target):
                    dp.ready(name, gradient)           # its bucket leaves while the backward goes on
                dp.step(clip=1.0)

    `params`: name -> tensor, in the order of first use, the same on all ranks. They are copied, and never written.
    float64, float32, bfloat16 or float16. Half types have a float32 copy in the optimizer.
    `zero`: 0 keeps everything on every rank; 1 shards the state of the optimizer, 2 the gradients too, 3 the parameters
    too. `replicas`: a second axis, whose ranks hold the same shards.
    `replicated`: name -> comm whose ranks hold the parameter alike, so that norms count it once (tensor parallelism).
    Or name -> how many ranks hold each element, with the shape of the parameter.
    `microbatches`: how often a parameter is announced in a step, outside `no_sync`: a pipeline runs all micro-batches
    in one call. The gradient is the sum of these; a bucket leaves with the last one.
    `bucket_nbytes`: most bytes of a bucket, or a cut that `buckets` has returned. `ahead_nbytes`: how much is gathered
    ahead; None is two buckets, or one with zero=3.
    `wire`: what gradients travel in ("bfloat16", "int8", "int4", ...: `fompi.base.wires`); they are added in float32.
    None: as they are. `feedback`: what a message of this rank has lost is added to its gradient of the next step in
    which a rank announces the parameter (error feedback, Seide et al., Interspeech 2014). `state_dict` has it, too.
    `wire_gather`: what parameters travel in, with zero > 0. The optimizer updates them as they are; all ranks compute
    with what messages bring (ZeRO++, arXiv 2306.10209).
    `check_for_nan`: look at every gradient; a NaN or an infinite number is a TensorError that names parameter and rank.
    If only their sum is too large, `step` raises it on all ranks. Nothing is updated then.
    `order`: in which gradients are added. "ranks": in a tree over the ranks. `Canonical(k)`: in a tree over k leaves.
    Then parameters have the same bits on any number of ranks. Leaves are micro-batches: rank r announces a parameter
    once for each leaf of the r-th run of them, in their order. A mean is that of the leaves. It keeps at most log2 of
    the leaves of a rank more gradients. On the host, without `wire` and `replicas`.
    `over`: a communicator or several, of other axes whose ranks hold other parts of the model. `step` takes them too.
    Give them here, so that an error in the first step reaches these ranks at once, and not with the next `step`.

    Creating one, `step` and `close` are collective. If one rank refuses a call, it raises the error once the other
    ranks are at the end of their step, and `step` raises MismatchError there. Gradients are forgotten then, nothing
    else is lost, and the next step may begin. After an error of the optimizer itself no step is possible any more.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        *,
        optimizer: Optimizer,
        comm: Any,
        zero: int = 1,
        replicas: Any = None,
        bucket_nbytes: int | Buckets = 25 << 20,
        average: bool = True,
        replicated: Mapping[str, Any] | None = None,
        microbatches: int = 1,
        wire: str | None = None,
        wire_gather: str | None = None,
        feedback: bool = False,
        ahead_nbytes: int | None = None,
        check_for_nan: bool = False,
        over: Any = (),
        order: Any = "any",
    ):
        carrier = Communicator.of(comm)
        wire, order = of_carrier(carrier, wire, order)
        self.comm = carrier.plain
        self.replicas: Communicator | None = None
        self.zero, self.optimizer, self.check_for_nan = zero, optimizer, check_for_nan
        self.microbatches = microbatches
        self.waited = 0.0  # seconds for which this rank has waited for messages and for other ranks: what was exposed
        tensors: dict[str, Tensor] = {}
        counts: Sequence[int] = ()
        error: Exception | None = None
        words = ""
        self._holders: dict[str, int | Array] = {}
        self._known: tuple[Communicator, ...] = ()  # the axes of a step that names none
        try:
            self.replicas = None if replicas is None else Communicator.of(replicas)
            self._known = axes_of(over)
            check_axes([self.comm, *self._others(), *self._known])
            methods = [getattr(optimizer, name, None) for name in ("state", "update")]
            if isinstance(optimizer, type) or not all(map(callable, methods)):
                raise LayoutError(f"optimizer={optimizer!r} must be an optimizer such as AdamW(1e-3)")
            if not isinstance(replicated or {}, Mapping):
                raise LayoutError(f"replicated={replicated!r} must map names to communicators, or to counts")
            self._holders = {name: holders(name, value) for name, value in (replicated or {}).items()}
            tensors = borrowed(params)
            counts = cut(tensors, bucket_nbytes)
            check_options(zero, self._holders, tensors, wire, wire_gather, feedback, ahead_nbytes, microbatches)
            self.order = check_order(order, tensors, self.comm.size, zero, wire or wire_gather, self.replicas)
            words = in_words(tensors)  # it reads the values
        except Exception as refusal:
            error = refusal
        how = repr(optimizer) if is_dataclass(optimizer) else type(optimizer).__name__
        options = f"zero={zero}, average={average}, wire={wire}, feedback={feedback}, ahead_nbytes={ahead_nbytes}"
        options += f", microbatches={microbatches}" if microbatches != 1 else ""
        options += f", {wire_gather=}" if wire_gather is not None else ""
        options += f", {order=!s}" if order != "any" else ""
        options += "" if self.replicas is None else f", {self.replicas.size} replicas"
        options += f", over={[axis.name for axis in self._known]}" if self._known else ""
        text = f"DataParallel({how}, {options}, buckets of {[*counts]} parameters)"
        text += words + held_in_words(self._holders)
        agree_everywhere([(axis, text) for axis in (self.comm, *self._others())], error)

        self._sums, self._gathers = (
            self.comm.split(0, self.comm.rank, f"{self.comm.name}/{k}") for k in ("sum", "gather")
        )
        gathered = wire_gather if zero else None
        self._sizes = kept_nbytes(tensors)
        self.wire = wire_of(wire, accumulator(next(iter(tensors.values())).dtype))
        self.feedback, self._ahead = bool(feedback), ahead_nbytes
        self.buckets: list[Bucket] = []
        self._states: dict[str, State] = {}
        self._op = "mean" if average and self.wire else "sum"  # the wire may hold a mean whose sum it does not
        self._canonical = Canonical.of(self.order)
        terms = () if self._canonical is None else self._canonical.subtrees(self.comm.size)
        self._is_split = max(map(len, terms), default=1) > 1
        try:
            listed = [*tensors.items()]
            for a, b in itertools.pairwise(offsets(counts)):
                bucket = Bucket(dict(listed[a:b]), self.comm, zero, microbatches, gathered)
                self.buckets.append(bucket)
                if terms:
                    make = partial(filled, bucket.size, bucket.wide, 0, bucket.master)
                    bucket.leaves, bucket.gradient = LeafSums(terms[self.comm.rank], make), None
                if feedback:
                    lost = filled(bucket.size, bucket.wide, 0, bucket.master)
                    bucket.feedback = Feedback(self.wire, self.comm.size, self.comm.rank, lost)
                if zero and bucket.full is not None and is_bound(bucket.full.nbytes):
                    bucket.apart = bucket.shard.copy()
                self._states |= {name: optimizer.state(bucket.master[bucket.own(name)]) for name in bucket.names}
        except OutOfMemory as refusal:
            error = in_less_memory(refusal, self._sizes, zero, self.comm.size)
        except Exception as refusal:
            error = refusal
        agree_everywhere([(axis, "the memory of a DataParallel") for axis in (self.comm, *self._others())], error)
        try:
            for bucket in self.buckets:
                self._prepare(bucket)
        except DeviceError as refusal:  # the other ranks have refused it, too
            raise self._with_remedy(refusal) from refusal
        self._index = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        averaged = self.comm.size * (self.replicas.size if self.replicas else 1)
        if self._canonical is not None:
            averaged = self._canonical.leaves
        self.weight = 1 / averaged if average else 1.0  # of the gradient of a rank, or of a leaf, in an update
        self._scale = self.weight if self._op == "sum" else 1.0
        last = len(self.buckets) - 1
        self._cycle = [*range(last + 1), *(range(last - 1, -1, -1) if zero == 3 else ())] if zero else []
        self._at = 0 if zero == 3 else len(self._cycle)  # the next gather is that of bucket _cycle[_at]
        self._gathered = 0  # gathers started
        self._next = last  # the next bucket that leaves
        self.is_syncing, self._used, self._steps = True, set[str](), 0
        self.forwards = self._answered = 0  # of this step, as a wrapper counts them; and before its last gradient
        self._over = self._known  # the axes of the last step
        self._owed: list[Exception] = []  # errors of first steps, of which axes that are not known yet must hear
        self._agreed = False  # a step has come to its update
        self._left: Section | None = None  # of the last step, of which this rank had done its part
        self._promised: list[Callable[[], object]] = []  # what waits for calls that this rank has refused in advance
        self._torn: BaseException | None = None  # the error of the optimizer in the middle of an update
        self.closed = False

    def _prepare(self, bucket: Bucket) -> None:
        """The calls of the bucket in every step. What zero gives up is not kept by bound calls either."""
        comm, carried = self._sums, {"wire": bucket.wire or None}
        how: dict[str, Any] = {} if self.zero else {"schedule": same_bits(comm)}
        if self.order != "any":
            how = {"order": self.order}
        if self.wire:  # blocks are the parts of the ranks, of which each rank knows what is lost
            how = {"op": self._op, "wire": self.wire, "schedule": "direct", "slices": 1}
        if self.zero < 2 and not self._is_split:
            (gradient,) = bucket.terms()
            x, operation = tensor_of(gradient, bucket.wide), reduce_scatter if self.zero else all_reduce
            bucket.summing = repeated(operation, gradient.nbytes, x, comm=comm, **how)
        elif not self.zero:
            bucket.summing = Unbound(all_reduce, comm, how)
        elif self.zero == 1:
            bucket.summing = Unbound(reduce_scatter, comm, how)
        else:
            out = tensor_of(bucket.sum_shard, bucket.wide)
            bucket.summing = Unbound(reduce_scatter, comm, {"out": out, **how})
        if self.zero in (1, 2):
            assert bucket.full is not None
            x, out = (tensor_of(a, bucket.dtype) for a in (bucket.apart, bucket.full))
            bucket.gathering = repeated(all_gather, bucket.full.nbytes, x, out=out, comm=self._gathers, **carried)
            bucket.first_gathering = Unbound(all_gather, self._gathers, {"out": out, **carried})
        elif self.zero:
            bucket.gathering = Unbound(all_gather, self._gathers, carried)

    # ---------------------------------------------------------------------------------------------- parameters
    def __getitem__(self, name: str) -> Any:
        """The parameter, as a tensor of the kind that was given. Waits if it must; the next bucket is gathered ahead.

        Ask for it in every forward. With zero < 3 it shares the memory of the DataParallel: do not write it.
        """
        self._check_open()
        bucket = self._bucket_of(name)
        try:
            if not bucket.resident and bucket.gather is None:
                i = self._index[name]
                if i not in self._cycle[self._at :]:
                    self._finish_cycle()
                self._gather_until(self._cycle.index(i, self._at))
            self._arrive(bucket)
            self._gather_ahead(bucket.position)
        except Exception as error:
            self._fail(error, begun=not self._is_refused(error))
        assert bucket.full is not None
        a, b = bucket.spans[name]
        array = bucket.full[a:b].reshape(bucket.shapes[name])
        like = bucket.likes[name]
        return lent(array.copy() if like.framework == "jax" else array, like)  # JAX arrays never change

    def release(self, name: str) -> None:
        """The parameter is not needed until its next use. zero=3 forgets a bucket once all its names are released."""
        self._check_open()
        bucket = self._bucket_of(name)
        bucket.held.discard(name)
        if self.zero == 3 and not bucket.held and bucket is not self.buckets[-1]:
            bucket.full, bucket.resident = None, False

    def _gather_until(self, position: int, in_section: bool = False) -> None:
        """Start the gathers of the cycle up to `position`. A section counts unbound calls only."""
        while self._at <= min(position, len(self._cycle) - 1):
            if self.zero == 3 and self._at == 1:
                self._arrive(self.buckets[self._cycle[0]])  # now all ranks have begun this cycle
            bucket = self.buckets[self._cycle[self._at]]
            self._arrive(bucket)
            gathering = bucket.first_gathering if in_section else bucket.gathering
            x = tensor_of(bucket.shard if self.zero == 3 else bucket.shard.copy(), bucket.dtype)
            bucket.position, self._at, self._gathered = self._at, self._at + 1, self._gathered + 1
            bucket.gather = gathering.start(x=x)  # after an error, too, this rank has taken part in it

    def _gather_ahead(self, position: int, in_section: bool = False) -> None:
        """Start what follows the bucket in use: `ahead_nbytes`, or two buckets, which are one with zero=3.

        With two, the ranks agree on one gather while another one moves.
        """
        self._gather_until(self._last_ahead(position), in_section)

    def _last_ahead(self, position: int) -> int:
        """The last position that is gathered ahead while that bucket is in use."""
        window, following = self._ahead or 0, position + 1
        enough = following + (2 if self._ahead is None and self.zero < 3 else 1)
        while 0 < following < len(self._cycle):
            bucket = self.buckets[self._cycle[following]]
            window -= bucket.size * storage(bucket.dtype).itemsize
            following += 1
            if window <= 0 and following >= enough:
                break
        return following - 1

    def _arrive(self, bucket: Bucket) -> None:
        if bucket.gather is not None:
            gather, bucket.gather = bucket.gather, None
            bucket.full = self._wait(gather)
            if bucket.arrived is not None:
                bucket.arrived[...] = bucket.shard
            bucket.resident, bucket.held = True, set(bucket.names)

    def _finish_cycle(self) -> None:
        """Take part in the gathers that this rank has skipped. zero=3 forgets the parameters, and begins anew."""
        self._gather_until(len(self._cycle) - 1)
        for bucket in self.buckets:
            self._arrive(bucket)
        for bucket in self.buckets:
            bucket.position = -1
            if self.zero == 3:
                self._at, bucket.full, bucket.resident = 0, None, False

    def _end_cycle(self) -> None:
        try:
            self._finish_cycle()
        except Exception as error:
            self._fail(error, begun=not self._is_refused(error))

    def _end_cycle_together(self, what: str) -> None:
        """All ranks end it, or none: of a message, one end may be done before the other end fails. Collective."""
        refusal = None
        try:
            self._finish_cycle()
        except Exception as error:
            if self._is_refused(error) or (self._left is not None and self._left.ends_late()):
                self._fail(error, begun=not self._is_refused(error))  # of the step before: others are not here
            refusal = error
            self._give_up_cycle((FompiError, type(error)))
        try:
            text = f"the last gathers before {what} of DataParallel"
            begin_agreement(self.comm, text, refusal, compared=None if refusal is None else ENDS_STEP).values()
        except Exception as error:
            if refusal is None and not getattr(error, "ends_step", False):
                raise  # the ranks have called different things
            self._fail(refusal or error, has_gathered=True)

    def _is_refused(self, error: Exception) -> bool:
        """True if another rank has refused the first gather of a cycle. With zero < 3 no cycle begins with a gather."""
        return self.zero == 3 and getattr(error, "ends_step", False)

    def _wait(self, pending: Any) -> Array:
        begun = perf_counter()
        array: Array = array_of(pending.wait())
        self.waited += perf_counter() - begun
        return array

    # ----------------------------------------------------------------------------------------------- gradients
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are only accumulated inside. With zero=3: one micro-batch in each `with` block."""
        outer, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = outer
        if self.zero == 3:
            self._end_cycle()

    def ready(self, name: str, gradient: Any) -> None:
        """Add `gradient` to that of the parameter. Outside `no_sync` a bucket leaves when all of its are there.

        A parameter is announced once outside `no_sync`, or `microbatches` times. One that this rank does not announce
        has a zero gradient here, and so has one that it announces with None.
        """
        self._check_open()
        bucket = self._bucket_of(name)
        try:
            with np.errstate(all="ignore"):
                self._add(bucket, name, self._fitting(bucket, name, gradient))
        except Exception as error:
            self._fail(error)

    def _add(self, bucket: Bucket, name: str, array: Array | None) -> None:
        """Add a gradient to that of the bucket, and let the buckets leave that are complete."""
        a, b = bucket.spans[name]
        self._answered = self.forwards
        if array is not None:
            self._used.add(name)
        if bucket.leaves is not None:
            leaf = filled(b - a, bucket.wide, 0, bucket.master) if array is None else array
            bucket.leaves.add(name, (a, b), leaf)
        elif array is not None:
            if bucket.gradient is None:
                bucket.gradient = filled(bucket.size, bucket.wide, 0, array)
            into = bucket.gradient[a:b].reshape(array.shape)
            np.add(into, array, out=into)
        if self.is_syncing:
            bucket.missing[name] -= 1
            if not bucket.missing[name]:
                del bucket.missing[name]
                self._leave()

    def _fitting(self, bucket: Bucket, name: str, gradient: Any) -> Array | None:
        """The gradient as an array that can be added, if any. Raises the error with which this rank refuses it."""
        if bucket.sum is not None or bucket.total is not None or (self.is_syncing and name not in bucket.missing):
            raise StateError(
                f"the gradient of {name!r} was announced {'twice' if self.microbatches == 1 else 'too often'} before "
                f"step() on rank {self.comm.rank}: add the terms first, announce all but the last inside no_sync(), or "
                "set microbatches="
            )
        if gradient is None:
            return None
        tensor = borrow_any(detached(gradient), f"the gradient of {name!r}")
        check_place(f"the gradient of {name!r}", tensor.array, bucket.master)
        if tensor.array.shape != bucket.shapes[name]:
            raise ShapeError(f"the gradient of {name!r} has shape {tensor.array.shape}, not {bucket.shapes[name]}")
        if tensor.dtype not in DTYPES or accumulator(tensor.dtype) != bucket.wide:
            raise DtypeError(f"the gradient of {name!r} is {tensor.dtype}, and is added in {bucket.wide}")
        array: Array = widen(tensor.array, tensor.dtype)
        if self.check_for_nan and not read(fetch(np.isfinite(array).all()), self.comm):
            what = "a NaN" if read(fetch(np.isnan(array).any()), self.comm) else "an infinite number"
            raise TensorError(f"the gradient of {name!r} has {what} on rank {self.comm.rank}. {NOTHING_UPDATED}")
        return array

    def _leave(self, most: int | None = None) -> None:
        """Start the sums of the buckets that are complete, in the order of the backward; or of `most` buckets."""
        before = self._next
        while self._next >= 0 and (before - self._next < most if most is not None else self._is_complete):
            bucket = self.buckets[self._next]
            terms = bucket.terms()
            if bucket.feedback is not None:
                bucket.feedback.give_back(terms[0])
            self._next, bucket.sum = self._next - 1, bucket.summing  # after an error, too, this rank has taken part
            x = [tensor_of(term, bucket.wide) for term in terms]
            bucket.summing.start(x=x if self._is_split else x[0])
            for later in self.buckets[self._next + 2 :]:
                if later.sum is not None and later.sum.done():
                    self._collect(later)
                if self.zero == 3:  # the backward has left this bucket
                    later.full, later.resident = None, False

    @property
    def _is_complete(self) -> bool:
        return not self.buckets[self._next].missing

    def _collect(self, bucket: Bucket) -> None:
        """Wait for the sum of a bucket. zero >= 2 forgets the gradient of this rank."""
        if bucket.sum is not None:
            pending, bucket.sum = bucket.sum, None
            bucket.total = self._wait(pending)
            if self.zero >= 2 and bucket.leaves is None:
                bucket.gradient = None

    # ---------------------------------------------------------------------------------------------------- step
    def step(self, clip: float | None = None, over: Any = ()) -> Any:
        """Update the parameters. Returns the norm of the whole gradient, before it is clipped to `clip`.

        The norm of parameters on a device is a tensor there, without dimensions: the host does not wait for it. With
        `check_for_nan` it does.

        `over`: communicators of other axes that hold other parts of the model, if the constructor did not get them.
        The norm counts those too. If it is NaN and there is a `clip`, all gradients become NaN, as in torch.
        A parameter of which no rank has announced a gradient is left alone.
        """
        self._check_open()
        try:
            axes = axes_of(over) or self._known
            if axes != self._over:
                check_axes([self.comm, *self._others(), *axes])
            self._settle(axes)
            check_clip(clip)
            if self._torn is not None:
                raise StateError(
                    f"an earlier step of this DataParallel ended in the middle of its update on rank {self.comm.rank}, "
                    f"with {type(self._torn).__name__}: {self._torn}: make a new one from a checkpoint"
                )
            text = f"step {self._steps} of DataParallel, clip={clip}, over {[axis.name for axis in axes]}"
            text += ", check_for_nan" if self.check_for_nan else ""
            alike = [(axis, f"{text}, {self._optimizer_in_words()}") for axis in (self._gathers, *self._others())]
            alike += [(axis, text) for axis in axes]
            ahead = self._last_ahead(0) + 1
            with np.errstate(all="ignore"):
                self._leave(most=len(self.buckets))
        except Exception as error:
            self._fail(error)
        self._end_cycle()
        begun = perf_counter()
        agree_everywhere(alike, None, self._restart, self._answered)
        self._agreed = True
        self.waited += perf_counter() - begun
        gathered = self._gathered
        try:
            with Section(f"step {self._steps} of DataParallel", told=False) as section:
                for axis in (self._sums, self._gathers, *self._others(), *axes):
                    section.begin(axis)
                try:
                    norm = self._agreed_step(clip)
                finally:
                    self._reset()
                is_finite = not self.check_for_nan or self._is_finite(norm)
                if self.zero in (1, 2) and is_finite:
                    self._forget_parameters()
                    self._gather_until(0, in_section=True)
                    self._gather_ahead(0, in_section=True)
        except Exception as error:
            if self.zero < 3:
                self._gathered = gathered + len(self._cycle)
            self._promise(error, ahead)
            raise
        self._left = section
        if not is_finite:  # all ranks have the same norm, so nobody needs to be told
            raise TensorError(f"the norm of the gradient of all ranks is {norm}. {NOTHING_UPDATED}")
        if self._torn is not None:
            if self.zero in (1, 2):
                self._finish_cycle()  # the other ranks wait for these gathers
            raise self._torn
        if (report := self.comm.engine.report) is not None:
            report.mark(report.updates[id(self)])
        return norm if place(norm) is None else lent(norm, next(iter(self.buckets[0].likes.values())), "float64")

    def _is_finite(self, norm: Any) -> bool:
        return bool(isfinite(norm if place(norm) is None else read(fetch(norm), self.comm)))

    def _agreed_step(self, clip: float | None) -> Any:
        """The step, once all ranks are in it: an error of one rank is one on all. That of the optimizer is kept.

        With `check_for_nan`, a norm that is not finite updates nothing.
        """
        for bucket in reversed(self.buckets):
            self._collect(bucket)
        if self.replicas is not None:
            self._sum_replicas(self.replicas)
        square, flags = self._summed_square_and_flags()
        norm = self._scale * (sqrt(square) if place(square) is None else np.sqrt(square))
        if self.check_for_nan and not self._is_finite(norm):
            return norm
        try:  # nothing is told any more: the other ranks may have updated their part
            used = {name for name, count in zip(self._index, flags, strict=True) if count}
            self._update(used, self._scale * (1.0 if clip is None else clip_factor(norm, clip)))
            for bucket in self.buckets:
                if bucket.feedback is not None:
                    bucket.feedback.keep(slice(*bucket.spans[name]) for name in bucket.names if name not in used)
        except BaseException as error:
            self._torn = error
            if not isinstance(error, Exception):
                raise
        return norm

    def _update(self, used: set[str], factor: Any) -> None:
        for bucket in self.buckets:
            assert bucket.total is not None
            if place(factor) is not None:
                factor = factor.astype(bucket.wide)
            if self.zero < 3:
                bucket.take_what_was_written()
            for name in bucket.names:
                if name in used:
                    own = bucket.own(name)
                    gradient = bucket.total[own] * factor
                    self.optimizer.update(bucket.master[own], gradient, self._states[name])
            if bucket.master is not bucket.shard:
                bucket.shard[...] = narrow(bucket.master, bucket.dtype)

    def _settle(self, axes: tuple[Communicator, ...]) -> None:
        """These are the axes of this step. Those of them that are new hear of first steps that this rank has refused.

        Their ranks wait in such a step, because this rank did not know of them then.
        """
        self._over = axes
        owed, self._owed = self._owed, []
        for error in owed:
            self._refuse(error, axes)

    def _refuse(self, error: Exception, axes: Sequence[Communicator]) -> None:
        """The ranks of these axes hear of a step that this rank has refused."""
        with suppress(FompiError, type(error)):
            agree_everywhere([(axis, REFUSED_STEP) for axis in axes], error)

    def _sum_replicas(self, replicas: Communicator) -> None:
        how: dict[str, Any] = {"comm": replicas, "schedule": same_bits(replicas)}
        if self.wire:
            how |= {"op": self._op, "wire": self.wire, "schedule": "direct"}
        sums = [all_reduce.start(tensor_of(b.total, b.wide), **how) for b in reversed(self.buckets)]
        for bucket, pending in zip(reversed(self.buckets), sums, strict=True):
            bucket.total = self._wait(pending)

    def _summed_square_and_flags(self) -> tuple[Any, Array]:
        """The square of the norm of the whole gradient, and how many ranks have announced each name: alike on all.

        That of a device stays there. The flags are known to the host, and never leave it.
        """
        square: Any = 0.0
        if self._canonical is not None:
            square = self._exact_square()
        elif self.feedback:  # of each parameter: what is given back to one that no rank has announced is not applied
            square = np.concatenate([term.sum().reshape(1) for term in self._squares()])
        else:
            for term in self._squares():
                square = square + (float(term.sum()) if place(term) is None else term.sum())
        flags = np.array([name in self._used for name in self._index], np.float64)
        if place(square) is None and not self.feedback:
            own = np.atleast_1d(np.asarray(square))
            total = all_reduce(np.concatenate([own, flags]), comm=self._sums, schedule=same_bits(self._sums))
            summed, flags = total[: len(own)].copy(), total[len(own) :]
        else:
            own = square.reshape(-1)
            summed = call(all_reduce, own, dtype="float64", comm=self._sums, schedule=same_bits(self._sums))
            flags = all_reduce(flags, comm=self._sums, schedule=same_bits(self._sums))
        if self.replicas is not None:
            flags = all_reduce(flags, comm=self.replicas, schedule=same_bits(self.replicas))
        summed = summed if self.zero else own
        if self.feedback:
            summed = (summed * constant((flags > 0).astype(np.float64), summed)).sum().reshape(1)
        for axis in self._over:
            summed = call(all_reduce, summed, dtype="float64", comm=axis, schedule=same_bits(axis))
        return (float(summed.sum()) if place(summed) is None else summed[0]), flags

    def _squares(self) -> Iterator[Array]:
        """The squares of what this rank owns of the gradient, each in as many parts as ranks hold it."""
        for bucket in self.buckets:
            assert bucket.total is not None
            for name in bucket.names:
                term = np.square(bucket.total[bucket.own(name)], dtype=np.float64)
                count = self._holders.get(name, 1)
                yield term / (count if isinstance(count, int) else constant(count[bucket.elements(name)], term))

    def _exact_square(self) -> Array:
        """The sum of the squares in parts whose sums do not depend on who owns what."""
        greatest = np.zeros(1)
        for term in self._squares():
            greatest = np.maximum(greatest, term.max(initial=0.0))  # a NaN stays one
        for axis in (*([self._sums] if self.zero else []), *self._over):
            greatest = all_reduce(greatest, op="max", comm=axis)
        return exact_sums(self._squares(), float(greatest[0]))

    def _restart(self) -> None:
        """Begin anew after an error. If the step before has failed on another rank, all gather the parameters again."""
        self._reset()
        self.comm.engine.receive_control()
        left, self._left = self._left, None
        if self.zero in (1, 2) and left is not None and left.error is not None:
            self._forget_parameters()

    def _forget_parameters(self) -> None:
        """They are gathered again."""
        self._at = 0
        for bucket in self.buckets:
            bucket.resident = False

    def _promise(self, error: Exception, ahead: int) -> None:
        """This rank has failed in the middle of a step. Others may have done their part of it, and be in the next one.

        So this rank takes part in all of that, refuses it, and waits for nothing. Its next call waits. The section has
        refused the gathers of the other ranks up to position `ahead`.
        """
        refused: list[Any] = []
        if self.zero == 3:
            refused.append(begin_agreement(self._gathers, REFUSED_STEP, error, compared=ENDS_STEP).values)
        else:
            for i in self._cycle[ahead:] if self.zero else ():
                self.buckets[i].gathering.refuse(error)
                refused.append(self.buckets[i].gathering.wait)
        for bucket in reversed(self.buckets):
            bucket.summing.refuse(error)
            refused.append(bucket.summing.wait)
        axes = [*([self._gathers] if self.zero < 3 else []), *self._others(), *self._over]
        refused += [begin_agreement(axis, REFUSED_STEP, error).values for axis in axes]
        self.comm.engine.wake_helper()
        self._promised = refused
        self._reset()
        self._left = None
        if self.zero:
            self._forget_parameters()

    def _keep_promises(self) -> None:
        """Wait until the other ranks have heard of a step that has failed on this one."""
        promised, self._promised = self._promised, []
        for wait in promised:
            with suppress(Exception):
                wait()

    def _reset(self) -> None:
        """Forget the gradients, and what is left of this step."""
        for bucket in self.buckets:
            if bucket.sum is not None:
                with suppress(Exception):  # also of the error that this rank has refused it with
                    self._collect(bucket)
            bucket.sum = bucket.total = None
            if bucket.feedback is not None:
                bucket.feedback.forget()
            bucket.missing = dict.fromkeys(bucket.names, self.microbatches)
            if bucket.leaves is not None:
                bucket.leaves.forget(keeps_memory=self.zero < 2)
            elif self.zero >= 2:
                bucket.gradient = None
            elif bucket.gradient is not None:
                bucket.gradient.fill(0)
        self._used, self._next, self._steps = set(), len(self.buckets) - 1, self._steps + 1
        self.forwards = self._answered = 0

    # ---------------------------------------------------------------------------------------- saved, and loaded
    def state_dict(self, *, parameters: bool = True, rank0_only: bool = False) -> dict[str, Any]:
        """{"parameters": {name: p}, "optimizer": {name: {key: value}}}: all of it, whole, to save it. Collective.

        It does not depend on the number of ranks or on `zero`. Values are copies, in the shape of the parameter and in
        its framework. `optimizer` has what the optimizer keeps, and for half types their float32 copy ("master"). With
        feedback, "feedback" has what the messages of all ranks have lost of the mean, or of the sum if not `average`,
        and the ranks of `replicas` call it too.
        Between two steps only: gradients are not part of it. With `rank0_only`, other ranks than 0 get an empty dict.
        """
        self._check_open()
        self._end_cycle_together("state_dict")
        return whole_state(self, parameters, rank0_only)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned, on any number of ranks. All ranks pass all of it. Collective.

        Without "parameters" only the state of the optimizer is taken. Raises LayoutError for names or keys that are
        missing or unknown, and ShapeError for wrong shapes, on all ranks; nothing is loaded then.
        """
        self._check_open()
        self._end_cycle_together("load_state_dict")
        load_state(self, state)

    # --------------------------------------------------------------------------------------------------- errors
    def _others(self) -> list[Communicator]:
        """The axis of replicas, if there is one."""
        return [] if self.replicas is None else [self.replicas]

    def _optimizer_in_words(self) -> str:
        """What must be the same on all ranks in each step. Other optimizers may hold what differs between the ranks."""
        return repr(self.optimizer) if type(self.optimizer) in (SGD, AdamW) else type(self.optimizer).__name__

    def _bucket_of(self, name: str) -> Bucket:
        if name not in self._index:
            known = ", ".join([*self._index][:MOST_NAMED])
            self._fail(LayoutError(f"there is no parameter {quoted(name, self._index)}; the first ones are {known}"))
        return self.buckets[self._index[name]]

    def refuse(self, error: Exception) -> NoReturn:
        """Raise `error` on this rank, and a MismatchError in `step` on the others. The gradients are forgotten."""
        self._check_open()
        self._fail(error)

    def _fail(self, error: Exception, begun: bool = True, has_gathered: bool = False) -> NoReturn:
        """Take part in the rest of the step, so that all ranks end it, with an error. Then raise `error`.

        `begun` is False if the error came from the first gather of a cycle: then the other ranks have refused it.
        `has_gathered`: no gather of this cycle is left.
        Other axes come last: their ranks may wait for a rank that waits for the sums of this one.
        """
        error = self._with_remedy(error)
        refusals = FompiError, type(error)
        with suppress(*refusals):
            if begun and not has_gathered:
                try:
                    self._finish_cycle()
                except refusals as other:
                    begun = not self._is_refused(other)
                    if begun:
                        self._give_up_cycle(refusals)
            if not begun:
                self._at, self._gathered = 0, self._gathered - 1
            else:
                with suppress(*refusals):
                    begin_agreement(self._gathers, REFUSED_STEP, error, compared=ENDS_STEP).values()
            for bucket in reversed(self.buckets[: self._next + 1]):
                bucket.sum = bucket.summing
                with suppress(*refusals):
                    bucket.summing.refuse(error)
        self._refuse(error, [*self._others(), *self._over])
        if not self._over and not self._agreed:
            self._owed.append(error)
        self._restart()
        raise error

    def _give_up_cycle(self, refusals: tuple[type[Exception], ...]) -> None:
        """Take part in the gathers that are left, although each of them may fail on this rank: the others wait."""
        for _ in range(2 * len(self._cycle)):  # the gather before may raise its error first
            with suppress(*refusals):
                self._gather_until(len(self._cycle) - 1)
                break
        for bucket in self.buckets:
            with suppress(*refusals):
                self._arrive(bucket)
        if self.zero == 3:
            self._at = 0

    def _with_remedy(self, error: Exception) -> Exception:
        """If a device has no more memory: the same with what would fit."""
        cause = error if isinstance(error, OutOfMemory) else error.__cause__
        if not isinstance(cause, OutOfMemory):
            return error
        return in_less_memory(
            cause, self._sizes, self.zero, self.comm.size, max(bucket.nbytes for bucket in self.buckets)
        )

    def _check_open(self) -> None:
        if self.closed:
            raise StateError("this DataParallel is closed")
        if self._promised:
            self._keep_promises()

    # ------------------------------------------------------------------------------------ what is sent, what is kept
    @contextmanager
    def record(self) -> Iterator[list[Trace]]:
        """A list of the traces of the sums and gathers of this rank that were started inside the `with` block.

        What was exposed of them is the difference of `waited`.
        """
        traces: list[Trace] = []
        with self._sums.record() as sums, self._gathers.record() as gathers:
            yield traces
        traces += [*sums, *gathers]

    @property
    def nbytes(self) -> dict[str, int]:
        """The bytes that this rank keeps: of parameters, of gradients, and of the optimizer with its float32 copies.

        Between steps, with n bytes in all on N ranks. With zero=3 parameters in use come on top. Calls for buckets of
        at most 1 MiB are bound, and keep memory of their own for messages.

            zero         0    1    2    3
            parameters   n    n    n    n/N
            gradients    n    n    n/N  n/N
            optimizer    s    s/N  s/N  s/N       s: n for SGD with momentum, 2n for AdamW
        """
        states = (value for state in self._states.values() for value in state.values())
        masters = (b.master for b in self.buckets if b.master is not b.shard)
        of: dict[str, Any] = {
            "parameters": [a for b in self.buckets for a in (b.full, b.shard if self.zero == 3 else None)],
            "gradients": [a for b in self.buckets for a in (b.gradient, b.leaves, b.sum_shard)],
            "optimizer": [*states, *masters],
        }
        return {key: sum(getattr(a, "nbytes", 0) for a in arrays) for key, arrays in of.items()}

    def close(self) -> None:
        """Finish what is in flight on any rank, and free the communicators. Collective."""
        if self.closed:
            return
        self.closed = True
        if max(agree(self.comm, "close of DataParallel", value=int(bool(self._promised)))) and not self._promised:
            with suppress(FompiError):  # another rank has failed in the last step
                self._fail(StateError("close of DataParallel after a step that has failed on another rank"))
        self._keep_promises()
        left = len(self.buckets) - 1 - self._next
        self._leave(most=max(agree(self.comm, "close of DataParallel: sums", value=left)) - left)
        gathered = max(agree(self.comm, "close of DataParallel: gathers", value=self._gathered))
        while self._gathered < gathered:
            self._at %= len(self._cycle)
            self._gather_until(self._at)
        for bucket in self.buckets:
            self._collect(bucket)
            self._arrive(bucket)
            for each in (bucket.summing, bucket.gathering):
                if each is not None:
                    each.close()
        self._sums.close()
        self._gathers.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # after an error the other ranks may never come to close
            self.close()


# ------------------------------------------------------------------------------------------------------- helpers


def agree_everywhere(
    axes: Sequence[tuple[Communicator, str]],
    error: Exception | None,
    forget: Any = lambda: None,
    forwards: int = 0,
) -> None:
    """Raise on all ranks of all axes if one of them has an `error`, or another text than the other ranks of an axis.

    So they do if ranks have run other numbers of `forwards`; 0 is any. An error on one axis is refused on those after
    it. `forget` is called before an error is raised.
    """
    for axis, text in axes:
        try:
            if len({*(counts := agree(axis, text, error, forwards))} - {0}) > 1:
                words = f"{text}: its gradients are of forward {[*counts]} since the step before, rank by rank"
                raise MismatchError(f"{words}: a rank has left out a backward and step(), or has run one forward more")
        except Exception as refused:  # `error` itself may be of any kind
            error = error or refused
    if error is not None:
        forget()
        raise error
