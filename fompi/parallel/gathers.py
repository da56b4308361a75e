"""Gathers of parameters ahead of their use, in a cycle that is the same on all ranks.

    forward    | f0 | f1 | f2 | f3 |
    gathers      a0 | a1 | a2 | a3 |

A cycle is the forward (0 to the last bucket) and, for zero=3, the backward (last but one to 0). A rank makes all calls
of it, whatever it uses. The exit of `no_sync` and `step` finish the cycle on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from fompi.backends.half import storage
from fompi.backends.numbers import narrow, place, widen
from fompi.backends.wires import carry
from fompi.base.call_options import wire_on
from fompi.base.layout import accumulator, in_common, offsets
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_gather
from fompi.parallel.arrays import array_of, lent, tensor_of
from fompi.parallel.optimizers import State
from fompi.parallel.repeated import Unbound, is_bound, repeated
from fompi.parallel.shares import DataShares
from fompi.tensors.dlpack import Tensor

Array = np.ndarray[Any, Any]


class Waits:
    """For how many seconds this rank has waited for results."""

    seconds = 0.0

    def result(self, pending: Any) -> Array:
        begun = perf_counter()
        array: Array = array_of(pending.wait())
        self.seconds += perf_counter() - begun
        return array


class Bucket:
    """Parameters of one dtype, one behind the other. This rank owns the elements `begin` to `end`.

    If gathers carry fewer bits, `full` has what they bring, and `master` the parameters themselves.
    """

    def __init__(self, params: dict[str, Tensor], comm: Communicator, zero: int, shares: DataShares):
        self.names, self.shapes = [*params], {name: t.array.shape for name, t in params.items()}
        self.likes = {name: without_memory(t) for name, t in params.items()}
        self.dtype = next(iter(params.values())).dtype
        self.wide = accumulator(self.dtype)  # the dtype of gradients and of what the optimizer updates
        edges = offsets(t.array.size for t in params.values())
        self.spans = dict(zip(params, pairwise(edges), strict=True))
        self.size = edges[-1]
        self.nbytes = self.size * storage(self.wide).itemsize  # of all its gradients
        self.edges = shares.edges(self.size, comm.size) if zero else [0, self.size]  # of what each rank owns
        self.begin, self.end = self.edges[comm.rank : comm.rank + 2] if zero else (0, self.size)
        full = np.concatenate([t.array.reshape(-1) for t in params.values()])
        self.full: Array | None = full if zero < 3 else None
        self.shard = full[self.begin : self.end] if zero < 3 else full[self.begin : self.end].copy()
        self.wire = wire_on(comm.how, self.dtype) if zero else ""  # of gathers
        self.arrived = self.shard.copy() if self.wire and zero < 3 else None  # the shard, as the last gather brought it
        self.master = self.shard if self.wide == self.dtype else widen(self.shard, self.dtype)
        if self.arrived is not None and self.master is self.shard:
            self.master = self.shard.copy()
        self.states: dict[str, State] = {}  # of the optimizer
        self.is_here = self._keeps_all = zero < 3
        self.held: set[str] = set()  # not released since they arrived
        self.position = -1  # of the last gather in the cycle
        self.in_flight: Any = None  # a gather
        self._call: Any = None  # of every cycle
        self._first: Any = None  # instead, where it begins in `step`: a section counts unbound calls only
        self._apart: Array | None = None  # input and result of a bound call share no memory
        if zero and self.full is not None and is_bound(self.full.nbytes):
            self._apart = self.shard.copy()

    def prepare(self, comm: Communicator) -> None:
        """The calls of every cycle. Collective."""
        if self.full is None:
            self._call = self._first = Unbound(all_gather, comm, {})
            return
        x, out = (tensor_of(a, self.dtype) for a in (self.shard if self._apart is None else self._apart, self.full))
        self._call = repeated(all_gather, self.full.nbytes, x, out=out, comm=comm)
        self._first = Unbound(all_gather, comm, {"out": out})

    def gather(self, position: int, in_section: bool) -> None:
        """Start the gather of this position of the cycle."""
        x = tensor_of(self.shard.copy() if self._keeps_all else self.shard, self.dtype)
        self.position = position
        self.in_flight = (self._first if in_section else self._call).start(x=x)

    def arrive(self, waits: Waits) -> None:
        """Wait for the gather in flight."""
        if self.in_flight is not None:
            gather, self.in_flight = self.in_flight, None
            self.full = waits.result(gather)
            if self.arrived is not None:
                self.arrived[...] = self.shard
            self.is_here, self.held = True, set(self.names)

    def refuse(self, error: Exception) -> Callable[[], object]:
        """Take part in the next gather by an error. Returns what waits for it."""
        self._call.refuse(error)
        return self._call.wait

    def forget(self) -> None:
        """The parameters are gathered before their next use. zero=3 gives their memory back."""
        self.is_here = False
        if not self._keeps_all:
            self.full = None

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    def zeros(self, name: str) -> Any:
        """A tensor like this parameter on the host. It takes no memory: its pages are never written."""
        return lent(np.zeros(self.shapes[name], storage(self.dtype)), self.likes[name])

    def own(self, name: str) -> slice:
        """The part of a parameter that this rank owns: a slice of the shard."""
        return in_common(self.spans[name], (self.begin, self.end))[1]

    def elements(self, name: str) -> slice:
        """The part of a parameter that this rank owns: a slice of the flat parameter."""
        return in_common(self.spans[name], (self.begin, self.end))[0]

    def take_what_was_written(self) -> None:
        """Where the program has written a parameter, its copy in `master` takes the number."""
        if self.master is self.shard or self.full is None:
            return
        bits, known = f"u{self.shard.itemsize}", self.arrived
        if known is None:
            known = narrow(self.master, self.dtype)
        written = self.shard.view(bits) != known.view(bits)
        if place(written) is not None or written.any():
            np.copyto(self.master, widen(self.shard, self.dtype), where=written)

    def carry(self) -> None:
        """The parameters become what gathers would bring of them."""
        if self.arrived is not None:
            assert self.full is not None
            carry(self.wire, self.full, self.dtype, self.edges)
            self.arrived[...] = self.shard

    def part_of(self, name: str, rank: int) -> slice:
        """The part of a parameter that `rank` owns: a slice of the flat parameter."""
        return in_common(self.spans[name], self.edges[rank : rank + 2])[0]


def without_memory(tensor: Tensor) -> Tensor:
    """What `lent` must know of a tensor."""
    host = None if tensor.host is None else np.empty(0)
    return replace(tensor, array=None, owner=None, host=host)


class Gathers:
    """The gathers of all buckets. The next one is that of bucket `cycle[at]`; this rank has started `started`."""

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket], zero: int, ahead: int | None, waits: Waits):
        self.comm, self.buckets, self.zero, self._ahead, self._waits = comm, buckets, zero, ahead, waits
        back = range(len(buckets) - 2, -1, -1) if zero == 3 else ()
        self.cycle = [*range(len(buckets)), *back] if zero else []
        self.at = 0 if zero == 3 else len(self.cycle)
        self.started = 0

    def prepare(self) -> None:
        """The calls of every cycle. Collective."""
        for bucket in self.buckets if self.zero else ():
            bucket.prepare(self.comm)

    def need(self, i: int) -> None:
        """The parameters of bucket i are here, and those that follow are on their way."""
        bucket = self.buckets[i]
        if not bucket.is_here and bucket.in_flight is None:
            if i not in self.cycle[self.at :]:
                self.finish()
            self.start(self.cycle.index(i, self.at))
        bucket.arrive(self._waits)
        self.start(self.last_ahead(bucket.position))

    def start(self, position: int, in_section: bool = False) -> None:
        """Start the gathers of the cycle up to `position`."""
        while self.at <= min(position, len(self.cycle) - 1):
            if self.zero == 3 and self.at == 1:
                self.buckets[self.cycle[0]].arrive(self._waits)  # now all ranks have begun this cycle
            bucket = self.buckets[self.cycle[self.at]]
            bucket.arrive(self._waits)
            self.at, self.started = self.at + 1, self.started + 1  # after an error, too, this rank has taken part
            bucket.gather(self.at - 1, in_section)

    def last_ahead(self, position: int) -> int:
        """The last position that is gathered ahead while this one is in use.

        It is `ahead_nbytes` away, or two buckets, which are one with zero=3. With two, the ranks agree on one gather
        while another one moves.
        """
        window, following = self._ahead or 0, position + 1
        enough = following + (2 if self._ahead is None and self.zero < 3 else 1)
        while 0 < following < len(self.cycle):
            bucket = self.buckets[self.cycle[following]]
            window -= bucket.size * storage(bucket.dtype).itemsize
            following += 1
            if window <= 0 and following >= enough:
                break
        return following - 1

    def finish(self) -> None:
        """Take part in the gathers that this rank has skipped. zero=3 forgets the parameters, and begins anew."""
        self.start(len(self.cycle) - 1)
        for bucket in self.buckets:
            bucket.arrive(self._waits)
        for bucket in self.buckets:
            bucket.position = -1
        if self.zero == 3:
            self.begin_anew()

    def begin_anew(self) -> None:
        """All parameters are gathered again."""
        if self.zero:
            self.at = 0
            for bucket in self.buckets:
                bucket.forget()

    def is_refused(self, error: Exception) -> bool:
        """True if another rank has refused the first gather of a cycle. With zero < 3 no cycle begins with a gather."""
        return self.zero == 3 and getattr(error, "ends_step", False)

    def end(self, refusals: tuple[type[Exception], ...]) -> bool:
        """Take part in the rest of the cycle, whatever fails. False if another rank has refused its first gather."""
        try:
            self.finish()
        except refusals as error:
            if self.is_refused(error):
                return False
            self.give_up(refusals)
        return True

    def give_up(self, refusals: tuple[type[Exception], ...]) -> None:
        """Take part in the gathers that are left, although each of them may fail on this rank: the others wait."""
        for _ in range(2 * len(self.cycle)):  # the gather before may raise its error first
            with suppress(*refusals):
                self.start(len(self.cycle) - 1)
                break
        for bucket in self.buckets:
            with suppress(*refusals):
                bucket.arrive(self._waits)
        if self.zero == 3:
            self.at = 0

    def take_back(self) -> None:
        """The first gather of this cycle was none: it has met the refusal of another rank."""
        self.at, self.started = 0, self.started - 1

    def refuse(self, position: int, error: Exception) -> list[Callable[[], object]]:
        """Refuse the gathers of the cycle from `position` on. Returns what waits for them."""
        return [self.buckets[i].refuse(error) for i in self.cycle[position:]]

    def close(self, most: int) -> None:
        """Take part until `most` are started, and wait for them. Collective."""
        while self.started < most:
            self.at %= len(self.cycle)
            self.start(self.at)
        for bucket in self.buckets:
            bucket.arrive(self._waits)
            bucket.close()
