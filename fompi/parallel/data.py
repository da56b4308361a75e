"""Data parallelism with ZeRO 1 to 3: gradients leave in buckets during the backward, parameters arrive ahead.

    backward   | b3 | b2 | b1 |b0|             forward   | f0 | f1 | f2 | f3 |
    sums            | g3 | g2 |g1|g0|          gathers | a0 | a1 | a2 | a3 |

Rank r owns the r-th run of the elements of a bucket, across parameters (`buckets`). Sums (`sums`) and gathers
(`gathers`) have a communicator each, and the calls on it have a fixed order, whatever a rank uses. A step ends on other
axes, too (`axes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from math import isfinite, sqrt
from time import perf_counter
from typing import Any, NoReturn

import numpy as np

from fompi.backends.cuda.failures import OutOfMemory
from fompi.backends.numbers import constant, fetch, narrow, place, widen
from fompi.base.call_options import CARRIED
from fompi.base.call_options import in_words as keywords_in_words
from fompi.base.errors import (
    DeviceError,
    DtypeError,
    FompiError,
    LayoutError,
    ShapeError,
    StateError,
    TensorError,
    quoted,
)
from fompi.base.layout import accumulator, offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import ENDS_STEP, agree, begin_agreement
from fompi.ops.operations import all_reduce
from fompi.parallel.arrays import (
    borrow_any,
    call,
    carrying,
    check_place,
    in_leaves,
    lent,
    on_any_ranks,
    read,
    same_bits,
    tensor_of,
)
from fompi.parallel.axes import REFUSED_STEP, Axes, agree_everywhere
from fompi.parallel.buckets import (
    DTYPES,
    MOST_NAMED,
    Buckets,
    Options,
    borrowed,
    buckets,
    check_clip,
    check_order,
    clip_factor,
    cut,
    detached,
    held_in_words,
    in_less_memory,
    in_words,
    kept_nbytes,
)
from fompi.parallel.gathers import Bucket, Gathers, Waits
from fompi.parallel.leaves import exact_sums
from fompi.parallel.optimizers import SGD, AdamW, Optimizer
from fompi.parallel.saved import load_state, parts_of, whole_state
from fompi.parallel.section import Section
from fompi.parallel.shares import DataShares
from fompi.parallel.states import reshard_state
from fompi.parallel.sums import Gradients, Sums, summing
from fompi.tensors.dlpack import Tensor
from fompi.traces.trace import Trace

__all__ = ["SGD", "AdamW", "Buckets", "DataParallel", "buckets"]

Array = np.ndarray[Any, Any]

SAME = object()
"""The ranks that a DataParallel has."""

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
    `wire_gather`: what parameters travel in, with zero > 0 ("bfloat16", "int8", "int4", ...: `fompi.base.wires`). The
    optimizer updates them as they are; all ranks compute with what messages bring (ZeRO++, arXiv 2306.10209).
    `check_for_nan`: look at every gradient; a NaN or an infinite number is a TensorError that names parameter and rank.
    If only their sum is too large, `step` raises it on all ranks. Nothing is updated then.
    `shares`: rows and state of unequal ranks (`fompi.parallel.shares`), {"rows": [...], "state": [...]}, or a list, of
    the rows. A gradient is that of the mean over the rows of its rank, and counts by these: the mean is that over all
    rows. A rank keeps its share of the state, of gradients and parameters where `zero` spreads them. With leaves a rank
    has its share of these.
    `over`: a communicator or several, of other axes whose ranks hold other parts of the model. `step` takes them too.
    Give them here, so that an error in the first step reaches these ranks at once, and not with the next `step`.

    Gradients are summed as `comm` says (`Communicator.using`), or a keyword here of the same name:

    `wire`: what gradients travel in; they are added in float32. A dtype that takes no wire travels as it is.
    `feedback`: what a message of this rank has lost is added to its gradient of the next step in which a rank announces
    the parameter (error feedback, Seide et al., Interspeech 2014). `state_dict` has it, too.
    `order`: in which gradients are added. "ranks": in a tree over the ranks. `Canonical(k)`: in a tree over k leaves.
    Then parameters have the same bits on any number of ranks. Leaves are micro-batches: rank r announces a parameter
    once for each leaf of the r-th run of them, in their order. A mean is that of the leaves. It keeps at most log2 of
    the leaves of a rank more gradients. On the host, without a wire and `replicas`.

    Creating one, `step` and `close` are collective. If one rank refuses a call, it raises the error once the other
    ranks are at the end of their step, and `step` raises MismatchError there. Gradients are forgotten then, nothing
    else is lost, and the next step may begin. After an error of the optimizer itself no step is possible any more.
    """

    def __init__(self, params: Mapping[str, Any], *, optimizer: Optimizer, comm: Any, **options: Any):
        known = [field.name for field in fields(Options)]
        self.optimizer, self.comm = optimizer, Communicator.of(comm).plain
        self.options = Options(**{name: options.pop(name) for name in known if name in options})
        self.zero, self._axes, self._waits = self.options.zero, Axes(self.comm), Waits()
        self._how: Mapping[str, Any] = {}  # the keywords of sums
        self.shares = DataShares()
        tensors: dict[str, Tensor] = {}
        counts: Sequence[int] = ()
        error: Exception | None = None
        words = ""
        try:
            self._axes.learn(self.options.replicas, self.options.over)
            _check_optimizer(optimizer)
            tensors = borrowed(params)
            dtypes = [t.dtype for t in tensors.values()]
            counts = cut([t.array.nbytes for t in tensors.values()], dtypes, self.options.bucket_nbytes)
            self._holders = self.options.holders(tensors)
            self.options.check(tensors)
            carrier = carrying("DataParallel", comm, options, map(accumulator, dtypes), [*CARRIED, *known])
            self.shares = DataShares.of(self.options.shares, self.comm.size)
            self._how = (in_leaves(carrier, self.shares.rows) if self.shares.rows else carrier).how
            if self.shares.state and self._how.get("feedback"):
                raise LayoutError("feedback=True: parts of the state are equal then: leave out shares of the state")
            self._canonical = check_order(self._how, self.options, tensors, self.comm.size)
            words = in_words(tensors) + held_in_words(self._holders)  # it reads the values
        except Exception as refusal:
            error = refusal
        how = repr(optimizer) if is_dataclass(optimizer) else type(optimizer).__name__
        text = f"DataParallel({how}, {self.options}{keywords_in_words(self._how)}{self._axes}{self.shares}"
        text += f", buckets of {[*counts]}"
        agree_everywhere([(axis, f"{text} parameters){words}") for axis in self._axes.shards], error)
        self._sizes = kept_nbytes(tensors)
        self._make_buckets(tensors, counts)
        self._index = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        averaged = self.comm.size * (self._axes.replicas.size if self._axes.replicas else 1)
        if self._canonical is not None:
            averaged = self._canonical.leaves
        self.feedback = any([gradients.feedback for gradients in self.gradients])
        is_by_rows = self.options.average and self._canonical is None  # a leaf has as many rows as any other one
        self._factor = self.shares.factor(self.comm.rank) if is_by_rows else 1.0
        self.weight = 1 / averaged if self.options.average else 1.0  # of the gradient of a rank, or of a leaf
        self._scale = self.weight if self._op == "sum" else 1.0
        self.is_syncing, self._used, self._steps = True, set[str](), 0
        self.forwards = self._answered = 0  # of this step, as a wrapper counts them; and before its last gradient
        self._left: Section | None = None  # of the last step, of which this rank had done its part
        self._promised: list[Callable[[], object]] = []  # what waits for calls that this rank has refused in advance
        self._torn: BaseException | None = None  # the error of the optimizer in the middle of an update
        self.closed = False

    def _make_buckets(self, tensors: Mapping[str, Tensor], counts: Sequence[int]) -> None:
        """Their memory, the state of the optimizer, and the calls of every step. Collective."""
        comm, zero, options = self.comm, self.zero, self.options
        self._sums_comm, self._gathers_comm = (comm.split(0, comm.rank, f"{comm.name}/{k}") for k in ("sum", "gather"))
        gathers = self._gathers_comm.using(wire=options.wire_gather)
        alike = "wire" in self._how or not zero
        sums = summing(self._sums_comm, self._how) if alike else self._sums_comm.using(**self._how)
        self._op = "mean" if options.average and "wire" in self._how else "sum"  # a wire may not hold the sum
        subtrees = [()] * comm.size if self._canonical is None else self._canonical.subtrees(comm.size)
        self.buckets: list[Bucket] = []
        self.gradients: list[Gradients] = []
        error: Exception | None = None
        try:
            listed = [*tensors.items()]
            for a, b in itertools.pairwise(offsets(counts)):
                bucket = Bucket(dict(listed[a:b]), gathers, zero, self.shares)
                self.buckets.append(bucket)
                self.gradients.append(Gradients(bucket, sums, zero, options.microbatches, subtrees[comm.rank]))
                bucket.states = {name: self.optimizer.state(bucket.master[bucket.own(name)]) for name in bucket.names}
            self._gathers = Gathers(gathers, self.buckets, zero, options.ahead_nbytes, self._waits)
            self._sums = Sums(self.gradients[::-1])
        except OutOfMemory as refusal:
            error = in_less_memory(refusal, self._sizes, zero, comm.size)
        except Exception as refusal:
            error = refusal
        agree_everywhere([(axis, "the memory of a DataParallel") for axis in self._axes.shards], error)
        try:
            for gradients in self.gradients:
                gradients.prepare(self._op, max(map(len, subtrees)))
            self._gathers.prepare()
        except DeviceError as refusal:  # the other ranks have refused it, too
            raise self._with_remedy(refusal) from refusal

    # ---------------------------------------------------------------------------------------------- parameters
    def __getitem__(self, name: str) -> Any:
        """The parameter, as a tensor of the kind that was given. Waits if it must; the next bucket is gathered ahead.

        Ask for it in every forward. With zero < 3 it shares the memory of the DataParallel: do not write it.
        """
        self._check_open()
        bucket = self._bucket_of(name)
        try:
            self._gathers.need(self._index[name])
        except Exception as error:
            self._fail(error)
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
            bucket.forget()

    def _end_cycle(self) -> None:
        try:
            self._gathers.finish()
        except Exception as error:
            self._fail(error)

    def _end_cycle_together(self, what: str) -> None:
        """All ranks end it, or none: of a message, one end may be done before the other end fails. Collective."""
        refusal, gathers = None, self._gathers
        try:
            gathers.finish()
        except Exception as error:
            if gathers.is_refused(error) or (self._left is not None and self._left.ends_late()):
                self._fail(error)  # of the step before: others are not here
            refusal = error
            gathers.give_up((FompiError, type(error)))
        try:
            text = f"the last gathers before {what} of DataParallel"
            begin_agreement(self.comm, text, refusal, compared=None if refusal is None else ENDS_STEP).values()
        except Exception as error:
            if refusal is None and not getattr(error, "ends_step", False):
                raise  # the ranks have called different things
            self._fail(refusal or error, has_gathered=True)

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
        self._bucket_of(name)
        gradients = self.gradients[self._index[name]]
        try:
            with np.errstate(all="ignore"):
                array = self._fitting(gradients, name, gradient)
                self._answered = self.forwards
                if array is not None:
                    self._used.add(name)
                    array = array if self._factor == 1.0 else array * array.dtype.type(self._factor)
                gradients.add(name, array)
                if self.is_syncing:
                    gradients.announced(name)
                while self.is_syncing and self._sums.next_is_complete:
                    self._leave()
        except Exception as error:
            self._fail(error)

    def _fitting(self, gradients: Gradients, name: str, gradient: Any) -> Array | None:
        """The gradient as an array that can be added, if any. Raises the error with which this rank refuses it."""
        bucket = gradients.bucket
        if gradients.has_left or (self.is_syncing and name not in gradients.missing):
            often = "twice" if self.options.microbatches == 1 else "too often"
            raise StateError(
                f"the gradient of {name!r} was announced {often} before step() on rank {self.comm.rank}: add the terms "
                "first, announce all but the last inside no_sync(), or set microbatches="
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
        if self.options.check_for_nan and not read(fetch(np.isfinite(array).all()), self.comm):
            what = "a NaN" if read(fetch(np.isnan(array).any()), self.comm) else "an infinite number"
            raise TensorError(f"the gradient of {name!r} has {what} on rank {self.comm.rank}. {NOTHING_UPDATED}")
        return array

    def _leave(self) -> None:
        """The next bucket leaves. The memory of those before it is given back."""
        before = self.gradients[len(self.gradients) - self._sums.left :]
        self._sums.leave()
        for gradients in before:
            if gradients.call.done():
                gradients.collect(self._waits)
            if self.zero == 3:  # the backward has left this bucket
                gradients.bucket.forget()

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
            self._axes.begin_step(over)
            check_clip(clip)
            self._check_whole()
            ahead = self._gathers.last_ahead(0) + 1
            with np.errstate(all="ignore"):
                while self._sums.rest:
                    self._leave()
        except Exception as error:
            self._fail(error)
        self._end_cycle()
        self._agree_on_step(clip)
        started = self._gathers.started
        try:
            with Section(f"step {self._steps} of DataParallel", told=False) as section:
                try:
                    for axis in (self._sums_comm, self._gathers_comm, *self._axes.others, *self._axes.over):
                        section.begin(axis)
                    norm = self._agreed_step(clip)
                finally:
                    self._reset()
                is_finite = not self.options.check_for_nan or self._is_finite(norm)
                if self.zero in (1, 2) and is_finite:
                    self._gathers.begin_anew()
                    self._gathers.start(max(0, self._gathers.last_ahead(0)), in_section=True)
        except Exception as error:
            if self.zero < 3:
                self._gathers.started = started + len(self._gathers.cycle)
            self._promise(error, ahead)
            raise
        self._left = section
        if not is_finite:  # all ranks have the same norm, so nobody needs to be told
            raise TensorError(f"the norm of the gradient of all ranks is {norm}. {NOTHING_UPDATED}")
        if self._torn is not None:
            if self.zero in (1, 2):
                self._gathers.finish()  # the other ranks wait for these gathers
            raise self._torn
        if (report := self.comm.engine.report) is not None:
            report.mark(report.updates[id(self)])
        return norm if place(norm) is None else lent(norm, next(iter(self.buckets[0].likes.values())), "float64")

    def _agree_on_step(self, clip: float | None) -> None:
        """All ranks are in this step, with the same optimizer and axes, or all raise."""
        text = f"step {self._steps} of DataParallel, clip={clip}, over {[axis.name for axis in self._axes.over]}"
        text += ", check_for_nan" if self.options.check_for_nan else ""
        begun = perf_counter()
        try:
            self._axes.agree(self._gathers_comm, text, _compared(self.optimizer), self._answered)
        except Exception:
            self._restart()
            raise
        self._waits.seconds += perf_counter() - begun

    def _check_whole(self) -> None:
        """Raise StateError after a step that has updated only some parameters."""
        if self._torn is not None:
            raise StateError(
                f"an earlier step of this DataParallel ended in the middle of its update on rank {self.comm.rank}, "
                f"with {type(self._torn).__name__}: {self._torn}: make a new one from a checkpoint"
            )

    def _is_finite(self, norm: Any) -> bool:
        return bool(isfinite(norm if place(norm) is None else read(fetch(norm), self.comm)))

    def _agreed_step(self, clip: float | None) -> Any:
        """The step, once all ranks are in it: an error of one rank is one on all. That of the optimizer is kept.

        With `check_for_nan`, a norm that is not finite updates nothing.
        """
        for gradients in reversed(self.gradients):
            gradients.collect(self._waits)
        if self._axes.replicas is not None:
            self._sum_replicas(self._axes.replicas)
        square, flags = self._summed_square_and_flags()
        norm = self._scale * (sqrt(square) if place(square) is None else np.sqrt(square))
        if self.options.check_for_nan and not self._is_finite(norm):
            return norm
        try:  # nothing is told any more: the other ranks may have updated their part
            used = {name for name, count in zip(self._index, flags, strict=True) if count}
            self._update(used, self._scale * (1.0 if clip is None else clip_factor(norm, clip)))
            for gradients in self.gradients:
                gradients.keep(used)
        except BaseException as error:
            self._torn = error
            if not isinstance(error, Exception):
                raise
        return norm

    def _update(self, used: set[str], factor: Any) -> None:
        for gradients in self.gradients:
            bucket, total = gradients.bucket, gradients.total
            assert total is not None
            if place(factor) is not None:
                factor = factor.astype(bucket.wide)
            if self.zero < 3:
                bucket.take_what_was_written()
            for name in bucket.names:
                if name in used:
                    own = bucket.own(name)
                    self.optimizer.update(bucket.master[own], total[own] * factor, bucket.states[name])
            if bucket.master is not bucket.shard:
                bucket.shard[...] = narrow(bucket.master, bucket.dtype)

    def _sum_replicas(self, replicas: Communicator) -> None:
        comm = summing(replicas, {name: value for name, value in self._how.items() if name == "wire"})
        listed = self.gradients[::-1]
        sums = [all_reduce.start(tensor_of(g.total, g.bucket.wide), op=self._op, comm=comm) for g in listed]
        for gradients, pending in zip(listed, sums, strict=True):
            gradients.total = self._waits.result(pending)

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
        comm = self._sums_comm
        flags = np.array([name in self._used for name in self._index], np.float64)
        if place(square) is None and not self.feedback:
            own = np.atleast_1d(np.asarray(square))
            total = all_reduce(np.concatenate([own, flags]), comm=comm, schedule=same_bits(comm))
            summed, flags = total[: len(own)].copy(), total[len(own) :]
        else:
            own = square.reshape(-1)
            summed = call(all_reduce, own, dtype="float64", comm=comm, schedule=same_bits(comm))
            flags = all_reduce(flags, comm=comm, schedule=same_bits(comm))
        for axis in self._axes.others:
            flags = all_reduce(flags, comm=axis, schedule=same_bits(axis))
        summed = summed if self.zero else own
        if self.feedback:
            summed = (summed * constant((flags > 0).astype(np.float64), summed)).sum().reshape(1)
        for axis in self._axes.over:
            summed = call(all_reduce, summed, dtype="float64", comm=axis, schedule=same_bits(axis))
        return (float(summed.sum()) if place(summed) is None else summed[0]), flags

    def _squares(self) -> Iterator[Array]:
        """The squares of what this rank owns of the gradient, each in as many parts as ranks hold it."""
        for gradients in self.gradients:
            bucket, total = gradients.bucket, gradients.total
            assert total is not None
            for name in bucket.names:
                term = np.square(total[bucket.own(name)], dtype=np.float64)
                count = self._holders.get(name, 1)
                yield term / (count if isinstance(count, int) else constant(count[bucket.elements(name)], term))

    def _exact_square(self) -> Array:
        """The sum of the squares in parts whose sums do not depend on who owns what."""
        greatest = np.zeros(1)
        for term in self._squares():
            greatest = np.maximum(greatest, term.max(initial=0.0))  # a NaN stays one
        for axis in (*([self._sums_comm] if self.zero else []), *self._axes.over):
            greatest = all_reduce(greatest, op="max", comm=axis)
        return exact_sums(self._squares(), float(greatest[0]))

    def _reset(self) -> None:
        """Forget the gradients, and what is left of this step."""
        self._sums.forget()
        self._used, self._steps = set(), self._steps + 1
        self.forwards = self._answered = 0

    def _restart(self) -> None:
        """Begin anew after an error. If the step before has failed on another rank, all gather the parameters again."""
        self._reset()
        self.comm.engine.receive_control()
        left, self._left = self._left, None
        if self.zero in (1, 2) and left is not None and left.error is not None:
            self._gathers.begin_anew()

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

    def rebalance(self, shares: Any) -> None:
        """Other shares of rows and state from the next step on: state moves to other ranks, bit by bit. Collective.

        Between two steps. Raises the errors of the constructor on all ranks; nothing changes then.
        """
        self._remake(self.comm, self.zero, shares)

    def reshard(self, comm: Any = SAME, *, zero: int | None = None, shares: Any = None) -> None:
        """Other ranks, another `zero`, other shares from the next step on: state goes to its new owners, bit by bit.

            dp.reshard(zero=3)
            dp.reshard(two if comm.rank < 2 else None)         # from 4 ranks to 2

        `comm` has ranks of this DataParallel: all by default. A rank with None gets nothing, and is closed. Without
        `shares` they are those before on the same ranks, and even on others. Collective over the ranks before, between
        two steps. For more ranks make a DataParallel on all of them, and fill it by `fompi.reshard_state`. Raises the
        errors of the constructor on all ranks; nothing changes then.
        """
        if shares is None and comm is SAME:
            shares = self.options.shares
        self._remake(self.comm if comm is SAME else comm, self.zero if zero is None else zero, shares)

    def _remake(self, comm: Any, zero: int, shares: Any) -> None:
        """Become a DataParallel of these ranks, with what this one has. `comm`: None on ranks that leave."""
        options = {f.name: getattr(self.options, f.name) for f in fields(Options)}
        options |= on_any_ranks(self._how) | {"shares": shares, "zero": zero}
        goes_whole = self.feedback or any(b.arrived is not None or place(b.master) is not None for b in self.buckets)
        state = self.state_dict() if goes_whole else self.checkpoint_parts()
        params = state["parameters"] if goes_whole else {n: b.zeros(n) for b in self.buckets for n in b.names}
        made, error = None, None
        try:
            if comm is not self.comm and (options["replicas"] or options["over"] or options["replicated"]):
                raise LayoutError("replicas=, over= and replicated= are of the ranks before: make another DataParallel")
            if comm is not None:
                made = DataParallel(params, optimizer=self.optimizer, comm=comm, **options)
        except Exception as refusal:
            error = refusal
        agree(self.comm, "reshard of DataParallel", error)
        if not goes_whole:
            reshard_state(state, {} if made is None else made.checkpoint_parts(), comm=self.comm)
        elif made is not None:
            made.load_state_dict(state)
        self.close()
        vars(self).update({} if made is None else vars(made))

    def checkpoint_parts(self, layouts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What this rank has, for `fompi.save` and `fompi.load`. `layouts`: of parameters that are parts themselves."""
        self._check_open()
        self._end_cycle_together("checkpoint")
        return parts_of(self, layouts or {})

    # --------------------------------------------------------------------------------------------------- errors
    def _bucket_of(self, name: str) -> Bucket:
        if name not in self._index:
            known = ", ".join([*self._index][:MOST_NAMED])
            self._fail(LayoutError(f"there is no parameter {quoted(name, self._index)}; the first ones are {known}"))
        return self.buckets[self._index[name]]

    def refuse(self, error: Exception) -> NoReturn:
        """Raise `error` on this rank, and a MismatchError in `step` on the others. The gradients are forgotten."""
        self._check_open()
        self._fail(error)

    def _fail(self, error: Exception, has_gathered: bool = False) -> NoReturn:
        """Take part in the rest of the step, so that all ranks end it, with an error. Then raise `error`.

        `has_gathered`: no gather of this cycle is left.
        """
        begun = has_gathered or not self._gathers.is_refused(error)
        error = self._with_remedy(error)
        refusals = FompiError, type(error)
        with suppress(*refusals):
            begun = begun and (has_gathered or self._gathers.end(refusals))
        if not begun:
            self._gathers.take_back()
        else:
            with suppress(*refusals):  # first, so that the others have a MismatchError, and no error of a sum
                self._refuse_step(error)()
        self._promised = self._sums.refuse(error) + self._axes.refuse(error)
        self._keep_promises()
        self._restart()
        raise error

    def _promise(self, error: Exception, ahead: int) -> None:
        """This rank has failed in the middle of a step. Others may have done their part of it, and be in the next one.

        So this rank takes part in all of that, refuses it, and waits for nothing. Its next call waits. The section has
        refused the gathers of the other ranks up to position `ahead`.
        """
        gathers = self._gathers.refuse(ahead, error) if self.zero < 3 else []
        self._promised = [*gathers, self._refuse_step(error), *self._sums.refuse(error), *self._axes.refuse(error)]
        self.comm.engine.wake_helper()
        self._reset()
        self._left = None
        self._gathers.begin_anew()

    def _refuse_step(self, error: Exception) -> Callable[[], object]:
        """Refuse the agreement of the step; with zero=3, or the first gather of a micro-batch. Returns what waits."""
        return begin_agreement(self._gathers_comm, REFUSED_STEP, error, compared=ENDS_STEP).values

    def _keep_promises(self) -> None:
        """Wait until the other ranks have heard of a step that has failed on this one."""
        promised, self._promised = self._promised, []
        for wait in promised:
            with suppress(Exception):
                wait()

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
        self._keep_promises()

    # ------------------------------------------------------------------------------------ what is sent, what is kept
    @property
    def waited(self) -> float:
        """For how many seconds this rank has waited for messages and for other ranks: what was exposed."""
        return self._waits.seconds

    @contextmanager
    def record(self) -> Iterator[list[Trace]]:
        """A list of the traces of the sums and gathers of this rank that were started inside the `with` block.

        What was exposed of them is the difference of `waited`.
        """
        traces: list[Trace] = []
        with self._sums_comm.record() as sums, self._gathers_comm.record() as gathers:
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
        states = (value for b in self.buckets for state in b.states.values() for value in state.values())
        masters = (b.master for b in self.buckets if b.master is not b.shard)
        of: dict[str, Any] = {
            "parameters": [a for b in self.buckets for a in (b.full, b.shard if self.zero == 3 else None)],
            "gradients": self.gradients,
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
        most = max(agree(self.comm, "close of DataParallel: sums", value=self._sums.left))
        while self._sums.left < most:
            self._leave()
        gathers = self._gathers
        gathers.close(max(agree(self.comm, "close of DataParallel: gathers", value=gathers.started)))
        for gradients in self.gradients:
            gradients.collect(self._waits)
            gradients.call.close()
        self._sums_comm.close()
        self._gathers_comm.close()

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # after an error the other ranks may never come to close
            self.close()


def _check_optimizer(optimizer: Any) -> None:
    methods = [getattr(optimizer, name, None) for name in ("state", "update")]
    if isinstance(optimizer, type) or not all(map(callable, methods)):
        raise LayoutError(f"optimizer={optimizer!r} must be an optimizer such as AdamW(1e-3)")


def _compared(optimizer: Any) -> str:
    """What must be the same on all ranks in each step. Other optimizers may hold what differs between the ranks."""
    return repr(optimizer) if type(optimizer) in (SGD, AdamW) else type(optimizer).__name__
