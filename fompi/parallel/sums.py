"""Sums of gradients over the ranks: each bucket leaves once a step, in a fixed order, as soon as it can.

    backward   | b3 | b2 | b1 |b0|
    sums            | g3 | g2 |g1|g0|

A bucket whose gradients are not all there waits for the end of the step. So ranks that use different parameters never
wait in vain. After an error a rank refuses the sums that are left, and all ranks come to the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numbers import filled
from fompi.backends.wires import Feedback
from fompi.base.call_options import wire_on
from fompi.base.errors import FompiError
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_reduce, reduce_scatter
from fompi.parallel.arrays import same_bits, tensor_of
from fompi.parallel.gathers import Bucket, Waits
from fompi.parallel.leaves import LeafSums
from fompi.parallel.repeated import Unbound, repeated

Array = np.ndarray[Any, Any]


def summing(comm: Communicator, how: Mapping[str, Any]) -> Communicator:
    """`comm` for sums that are alike on all ranks. It carries `how`, but for the schedule.

    With a wire, the blocks of a sum are the parts of the ranks: so each rank knows what it loses.
    """
    if "wire" in how:
        return comm.using(**{**how, "schedule": "direct", "slices": 1})
    return comm.using(**{**how, "schedule": "auto" if "order" in how else same_bits(comm), "slices": None})


def feedback_of(comm: Communicator, dtype: str, lost: Callable[[], Array]) -> Feedback | None:
    """What sums of this dtype lose on this rank, if `comm` carries that it is given back."""
    wire = wire_on(comm.how, dtype)
    return Feedback(wire, comm.size, comm.rank, lost()) if wire and comm.how.get("feedback") else None


class Summed:
    """A sum over the ranks once a step: `call.start(x=terms())`, and `call.wait()` (`fompi.parallel.repeated`)."""

    feedback: Feedback | None = None
    has_left = False

    def __init__(self, call: Any, x: Any, missing: Any):
        self.call, self._x = call, x
        self.missing = missing  # what is still to be announced in this step: a collection

    def terms(self) -> Any:
        """What this rank adds to the sum, as `call` takes it."""
        return self._x

    def forget(self) -> None:
        """The next step begins."""
        self.has_left = False
        if self.feedback is not None:
            self.feedback.forget()


class Sums:
    """The sums of a step, in the order in which they leave. `left` of them have left."""

    def __init__(self, summed: Sequence[Summed]):
        self.summed, self.left = summed, 0

    @property
    def rest(self) -> Sequence[Summed]:
        """Those that have not left."""
        return self.summed[self.left :]

    @property
    def next_is_complete(self) -> bool:
        return self.left < len(self.summed) and not self.summed[self.left].missing

    def leave(self) -> None:
        """The next one leaves, whatever it misses."""
        summed = self.summed[self.left]
        x = summed.terms()
        self.left, summed.has_left = self.left + 1, True  # after an error, too, this rank takes part in it
        summed.call.start(x=x)

    def refuse(self, error: Exception) -> list[Callable[[], object]]:
        """Take part in those that are left, by an error on all ranks. Returns what waits for them."""
        rest, self.left = self.rest, len(self.summed)
        for each in rest:
            with suppress(FompiError, type(error)):
                each.call.refuse(error)
        return [each.call.wait for each in rest]

    def forget(self) -> None:
        """The next step begins."""
        self.left = 0
        for each in self.summed:
            each.forget()


class Gradients(Summed):
    """The gradients of a bucket of `DataParallel`, and their sum, of which a rank gets what it owns.

    `leaves`: instead of one gradient, where the sum has an order of leaves: the terms of this rank are its subtrees.
    """

    def __init__(self, bucket: Bucket, comm: Communicator, zero: int, microbatches: int, subtrees: Sequence[int]):
        self.bucket, self._comm, self._zero, self._microbatches = bucket, comm, zero, microbatches
        self._filled = partial(filled, bucket.size, bucket.wide, 0, bucket.master)
        self.leaves = LeafSums(subtrees, self._filled) if subtrees else None
        self.gradient = self._filled() if zero < 2 and not subtrees else None  # of this rank, all elements
        size = bucket.end - bucket.begin
        self._shard = filled(size, bucket.wide, 0, bucket.master) if zero >= 2 else None  # memory of the sum
        self.total: Array | None = None  # the sum of all ranks, of the elements that this rank owns
        self.missing = dict.fromkeys(bucket.names, microbatches)  # how often each is still to be announced
        self.feedback = feedback_of(comm, bucket.wide, self._filled)

    def prepare(self, op: str, most_terms: int) -> None:
        """The call of every step. Collective. What zero gives up is not kept by a bound call either."""
        self._is_split = most_terms > 1
        operation: Any = reduce_scatter if self._zero else all_reduce
        options: dict[str, Any] = {"op": op}
        if self._zero:
            options["counts"] = [b - a for a, b in pairwise(self.bucket.edges)]
        if self._shard is not None:
            options["out"] = tensor_of(self._shard, self.bucket.wide)
        if self._zero < 2 and not self._is_split:
            (gradient,) = self._terms()
            x = tensor_of(gradient, self.bucket.wide)
            self.call = repeated(operation, gradient.nbytes, x, comm=self._comm, **options)
        else:
            self.call = Unbound(operation, self._comm, options)

    def add(self, name: str, array: Array | None) -> None:
        """Add the gradient of a parameter; None is zero, which is a leaf too."""
        a, b = self.bucket.spans[name]
        if self.leaves is not None:
            zeros = partial(filled, b - a, self.bucket.wide, 0, self.bucket.master)
            self.leaves.add(name, (a, b), zeros() if array is None else array)
        elif array is not None:
            if self.gradient is None:
                self.gradient = self._filled()
            into = self.gradient[a:b].reshape(array.shape)
            np.add(into, array, out=into)

    def announced(self, name: str) -> None:
        self.missing[name] -= 1
        if not self.missing[name]:
            del self.missing[name]

    def _terms(self) -> list[Array]:
        if self.leaves is not None:
            return self.leaves.sums()
        return [self._filled() if self.gradient is None else self.gradient]

    def terms(self) -> Any:
        terms = self._terms()
        if self.feedback is not None:
            self.feedback.give_back(terms[0])
        x = [tensor_of(term, self.bucket.wide) for term in terms]
        return x if self._is_split else x[0]

    def collect(self, waits: Waits) -> None:
        """Wait for the sum, if it has left. zero >= 2 forgets the gradient of this rank."""
        if self.has_left and self.total is None:
            self.total = waits.result(self.call)
            if self._zero >= 2:
                self.gradient = None

    def forget(self) -> None:
        if self.has_left and self.total is None:
            with suppress(Exception):
                self.call.wait()
        super().forget()
        self.total, self.missing = None, dict.fromkeys(self.bucket.names, self._microbatches)
        if self.leaves is not None:
            self.leaves.forget(keeps_memory=self._zero < 2)
        elif self._zero >= 2:
            self.gradient = None
        elif self.gradient is not None:
            self.gradient.fill(0)

    def keep(self, used: Collection[str]) -> None:
        """The sum has updated these parameters. What messages of the others have lost is still to give back."""
        if self.feedback is not None:
            self.feedback.keep(slice(*self.bucket.spans[name]) for name in self.bucket.names if name not in used)

    @property
    def nbytes(self) -> int:
        """Of what this rank keeps between steps."""
        return sum(getattr(kept, "nbytes", 0) for kept in (self.gradient, self.leaves, self._shard))
