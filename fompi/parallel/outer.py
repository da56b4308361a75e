"""Outer steps: islands train by themselves, and exchange a fragment of their parameters every few steps.

    sync_every=4, fragments=2, delay=1
    inner step    1    2    3    4    5    6    7    8
    begins             0         1         0         1         the mean of fragment 0, of fragment 1, ...
    applies                 0         1         0         1    one step later, behind which it has travelled

An island is what one rank of `comm` belongs to: this rank alone, or all ranks along the other axes of a mesh, each with
its own part of the model. `OuterSchedule` says what happens after which step, `OuterRule` what is computed.
Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), DES-LOC (2505.22549).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from fompi.backends.numbers import narrow, place, stored, upload, widen
from fompi.backends.wires import Feedback
from fompi.base.call_options import wire_on
from fompi.base.differences import detail
from fompi.base.errors import LayoutError, PeerError, ShapeError, StateError, WaitTimeout
from fompi.base.layout import accumulator, integer, number, offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree, begin_agreement
from fompi.members.membership import Membership
from fompi.ops.messages import recv, send
from fompi.ops.operations import all_gather, all_reduce, broadcast
from fompi.parallel.arrays import array_of, borrow, carrying, lent, start_with
from fompi.parallel.buckets import detached
from fompi.parallel.sums import feedback_of, summing
from fompi.tensors.dlpack import Tensor, lend

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class OuterSchedule:
    """What begins and what is applied after inner step t = 1, 2, ... H is `sync_every`, P the number of fragments.

        (t - (p + 1) H / P) mod H = 0        the exchange of fragment p begins
        t + delay                            its mean is applied

    P divides H, and delay < H / P: so at most one fragment travels. Raises LayoutError for other numbers.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if integer(value) is None or value < least:
                raise LayoutError(f"{name}={value!r} must be an integer of at least {least}")
        if self.sync_every % self.fragments:
            raise LayoutError(f"sync_every={self.sync_every} must be a multiple of the {self.fragments} fragments")
        if self.delay >= self.stride:
            why = f"a fragment is exchanged every {self.stride} steps"
            raise LayoutError(f"delay={self.delay} must be less than {self.stride}: {why}")

    @property
    def stride(self) -> int:
        """The steps from one exchange to the next one, of another fragment."""
        return self.sync_every // self.fragments

    def begins(self, step: int) -> int | None:
        """The fragment whose exchange begins after this step, if any."""
        count, left = divmod(step, self.stride)
        return None if left or count < 1 else (count - 1) % self.fragments

    def applies(self, step: int) -> int | None:
        """The fragment that is applied after this step, if any."""
        return self.begins(step - self.delay)


@dataclass(frozen=True)
class OuterRule:
    """v = D + momentum v;  outer -= lr (D + momentum v);  theta = alpha theta + (1 - alpha) outer

    D is the mean of outer - theta over the islands: SGD with the momentum of Nesterov. Raises LayoutError for other
    numbers than lr >= 0, 0 <= momentum < 1 and 0 <= alpha <= 1.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    alpha: float = 0.0

    def __post_init__(self) -> None:
        for name, fits in (
            ("outer_lr", lambda x: x >= 0),
            ("outer_momentum", lambda x: 0 <= x < 1),
            ("alpha", lambda x: 0 <= x <= 1),
        ):
            if (found := number(value := getattr(self, name))) is None or not fits(found):
                raise LayoutError(f"{name}={value!r} must be a number, outer_lr >= 0, momentum < 1, 0 <= alpha <= 1")
            object.__setattr__(self, name, found)  # a number of NumPy would widen arrays

    def update(self, outer: Array, velocity: Array | None, mean: Array) -> None:
        """Write the outer copy and v. None is the v of no momentum."""
        for part in _parts(outer):
            if velocity is None:
                outer[part] -= self.outer_lr * mean[part]
                continue
            v = velocity[part]
            v *= self.outer_momentum
            v += mean[part]
            outer[part] -= self.outer_lr * (mean[part] + self.outer_momentum * v)

    def blend(self, theta: Array, target: Array) -> Array:
        """alpha theta + (1 - alpha) target, in new memory. With alpha=0 theta may be infinite."""
        if self.alpha == 0:
            return target.copy()
        return self.alpha * theta + (1 - self.alpha) * target


@dataclass(frozen=True)
class OuterNumbers:
    """The numbers of one exchange, of what this rank holds.

    `step`: the inner step after which fragment `fragment` was sent. `islands`: how many have added to the mean. `norm`:
    of the mean outer gradient. `drift`: of what this island has sent minus that mean. `nbytes`: what this rank has
    sent. `exposed`: the seconds for which it has waited.
    """

    step: int
    fragment: int
    islands: int
    norm: float
    drift: float
    nbytes: int
    exposed: float


OF_RULE = ("outer_lr", "outer_momentum", "alpha")
OPTIONS = ("sync_every", "fragments", "delay", *OF_RULE, "averaged", "weights", "on_exchange", "compared", "inner")
"""The keywords of `OuterSteps`, besides those of its sums."""


def _count(fragments: int | Sequence[Sequence[str]]) -> int:
    return len(fragments) if isinstance(fragments, Sequence) else fragments


def dealt(names: Sequence[str], fragments: int | Sequence[Sequence[str]]) -> dict[str, int]:
    """name -> its fragment. A number of fragments deals them round robin. Raises LayoutError."""
    count = _count(fragments)
    if not isinstance(fragments, Sequence):
        found = {name: i % count for i, name in enumerate(names)}
    else:
        found = {}
        for p, listed in enumerate(fragments):
            for name in listed:
                if name not in names or name in found:
                    why = "is in two fragments" if name in found else "is no parameter that is trained"
                    raise LayoutError(f"fragments: {name!r} {why}")
                found[name] = p
        if missing := [name for name in names if name not in found]:
            raise LayoutError(f"fragments: {missing[0]!r} is in none of them")
    if empty := {*range(count)} - {*found.values()}:
        raise LayoutError(f"fragments: number {min(empty)} of {count} has no parameter")
    return {name: found[name] for name in names}


class OuterRow:
    """Tensors of one fragment that travel together, one behind the other, in every `period`-th exchange of it.

    `outer` and `velocity` are those of parameters, on the host, in float32 or float64. What is averaged has none.
    """

    sums: Communicator
    feedback: Feedback | None = None
    before: Array | None = None  # the outer copy before this island, which was slow, took over another one

    def __init__(self, tensors: Mapping[str, Tensor], period: int | None, rule: OuterRule):
        first = next(iter(tensors.values()))
        self.dtype, self.period = accumulator(first.dtype), period or 1
        self.framework = "torch" if first.framework == "torch" else "numpy"  # of a state
        self.forms = {name: (tensor.dtype, tensor.array.shape) for name, tensor in tensors.items()}
        ends = offsets(tensor.array.size for tensor in tensors.values())
        self.spans = {name: slice(a, b) for name, (a, b) in zip(tensors, pairwise(ends), strict=True)}
        self.size = ends[-1]
        self.outer = _flat(tensors) if period is None else None
        self.velocity = np.zeros_like(self.outer) if self.outer is not None and rule.outer_momentum else None

    def meet(self, comm: Communicator) -> None:
        """From now on the islands are those of `comm`. What messages have lost before is still to give back."""
        wire = self.wire = wire_on(comm.how, self.dtype) if self.outer is not None else ""
        self.sums = summing(comm.plain, {"wire": wire} if wire else {"order": "ranks"})
        before, lossy = self.feedback, comm if wire else comm.plain
        self.feedback = feedback_of(lossy, self.dtype, lambda: np.zeros(self.size, np.float32))
        if before is not None and self.feedback is not None:
            self.feedback.lost[...] = before.lost

    def borrowed(self, get: Callable[[str], Any]) -> dict[str, Tensor]:
        """The tensors of the program. Raises ShapeError for those that have become others."""
        found = {}
        for name, (dtype, shape) in self.forms.items():
            found[name] = tensor = borrow(detached(get(name)), f"{name!r}")
            if tensor.array.shape != shape or accumulator(tensor.dtype) != self.dtype:
                now = f"{tensor.dtype} {tensor.array.shape}"
                raise ShapeError(f"{name!r} was {dtype} {shape} before the first step, and is {now}")
        return found

    def term(self, tensors: Mapping[str, Tensor]) -> Array:
        """What this island adds to the mean: outer - theta, or what is averaged itself."""
        x = _flat(tensors)
        if self.outer is not None:
            np.subtract(self.outer, x, out=x)
        return x

    def sent(self, term: Array) -> Array:
        """What it sends of it: with what messages have lost before, if there is feedback."""
        if self.feedback is not None:
            self.feedback.give_back(term := term.copy())
        return term

    def blended(self, rule: OuterRule, mean: Array, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """name -> the new tensor, from the outer copy or the mean."""
        target = mean if self.outer is None else self.outer
        row = rule.blend(_flat(tensors) if rule.alpha else target, target)  # with alpha=0 nothing of theta counts
        return {name: _like(tensors[name], row[span]) for name, span in self.spans.items()}

    @property
    def kept(self) -> dict[str, Array]:
        """What belongs to the state of these outer steps, by its kind. The same on all islands, but for "feedback"."""
        lost = None if self.feedback is None else self.feedback.lost
        rows = {"outer": self.outer, "momentum": self.velocity, "feedback": lost}
        return {kind: row for kind, row in rows.items() if row is not None}

    def read(self, kind: str, state: Mapping[str, Any]) -> Array:
        """The row of this kind in a state. Raises LayoutError or ShapeError."""
        found = []
        for name, (_, shape) in self.forms.items():
            if name not in state.get(kind, ()):
                raise LayoutError(f"the state has no {kind!r} of {name!r}: it is that of other outer steps")
            tensor = borrow(state[kind][name], f"the {kind!r} of {name!r}")
            if tensor.array.shape != shape or tensor.dtype != self.dtype:
                has = f"{tensor.dtype} {tensor.array.shape}"
                raise ShapeError(f"the {kind!r} of {name!r} in the state is {has}, not {self.dtype} {shape}")
            found.append(_on_host(tensor).reshape(-1))
        return np.concatenate(found)


def _flat(tensors: Mapping[str, Tensor]) -> Array:
    """Their elements in one row, on the host, in the dtype of sums. A copy."""
    return np.concatenate([_on_host(tensor).reshape(-1) for tensor in tensors.values()])


def _on_host(tensor: Tensor) -> Array:
    array = tensor.array if place(tensor.array) is None else stored(tensor.array).get()
    return widen(array, tensor.dtype)


def _like(tensor: Tensor, values: Array) -> Any:
    """Values of the host as a tensor like this one, in new memory, rounded to its dtype."""
    values = values.reshape(tensor.array.shape)
    here = values if place(tensor.array) is None else upload(values, tensor.array)
    return lent(narrow(here, tensor.dtype), tensor)


PART = 1 << 15
"""Long rows are computed in parts of so many elements: what comes in between stays in the cache of a core."""


def _parts(row: Array) -> Iterator[slice]:
    return (slice(begin, begin + PART) for begin in range(0, len(row), PART))


def _norm(rows: Iterable[Array]) -> float:
    wide = (row.astype(np.float64) for row in rows)
    return float(np.sqrt(sum(float(x @ x) for x in wide)))


MOST_MISSED = 64
"""An island that lacks more exchanges than these was in none of them."""

HERE, NEW, BEHIND, SLOW = "here", "new", "behind", "slow"
"""An island in a meeting: it has what all have; it has just started; it lacks an exchange to which it has added; it
lacks exchanges that others made without it."""


def roles_of(table: Array, farthest: Array, ended: Array) -> list[str]:
    """The role of each island, whose row has: exchanges, steps, the exchange on its way, ..., the epoch of its sum, ...

    The last word of a row: steps that it did not make, where it has been in no exchange since it was new. It is new
    again: some of the others may not know that it was. `ended`: the epochs in which the last exchanges of the farthest
    one have ended.
    """
    roles = []
    for exchanges, steps, _, _, sent, _, skipped in table.tolist():
        missed = int(farthest[0]) - exchanges
        has_added = 0 < missed <= len(ended) and 0 < sent == ended[-missed]
        is_new = farthest[1] > 0 and (steps == 0 or skipped > 0 == farthest[6])
        roles.append(NEW if is_new else HERE if missed == 0 else BEHIND if has_added else SLOW)
    return roles


@dataclass
class OuterExchange:
    """An exchange on its way: what this island adds, and the calls. `arrived`: the means, and the numbers."""

    step: int
    fragment: int
    rows: list[OuterRow]
    terms: Sequence[Array] = ()
    sent: Sequence[Array] = ()
    calls: Sequence[Any] = ()
    arrived: tuple[list[Array], OuterNumbers] | None = None
    weight: int = 1  # of what this island adds. 0: it came too late to add something
    vote: Any = None  # the call in which islands tell their weights, and whether they should meet anew
    epoch: int = 0  # in which it was sent


class OuterCopies:
    """What one island keeps of its outer steps, and computes by itself. It sends nothing.

    `params` and the other arguments are those of `OuterSteps`. `forms`: name -> [dtype, shape, fragment, period].
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        fragments: int | Sequence[Sequence[str]] = 1,
        averaged: Mapping[str, int] | None = None,
        weights: str = "islands",
        **options: Any,
    ):
        tensors = {name: borrow(detached(x), f"the parameter {name!r}") for name, x in params.items()}
        periods = dict(averaged or {})
        self.rule = OuterRule(**{name: options.pop(name) for name in OF_RULE if name in options})
        self.schedule = OuterSchedule(fragments=_count(fragments), **{"sync_every": None, **options})
        if weights not in ("islands", "rows"):
            raise LayoutError(f"weights={weights!r} must be 'islands' or 'rows'")
        fragment_of = dealt([*tensors], fragments)
        for name, often in periods.items():
            if name not in tensors or (integer(often) or 0) < 1:
                raise LayoutError(f"averaged={{{name!r}: {often!r}}} must be a parameter, and an integer >= 1")
        rows: dict[tuple[int, str, int | None], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key = fragment_of[name], accumulator(tensor.dtype), periods.get(name)
            rows.setdefault(key, {})[name] = tensor
        self.rows: list[list[OuterRow]] = [[] for _ in range(self.schedule.fragments)]
        for (p, _, period), part in rows.items():
            self.rows[p].append(OuterRow(part, period, self.rule))
        self.forms: dict[str, Any] = {
            name: [t.dtype, [*t.array.shape], fragment_of[name], periods.get(name)] for name, t in tensors.items()
        }
        self.weights = weights
        self.steps = 0  # the inner steps until now
        self._applied = [0] * self.schedule.fragments  # exchanges: an island that has left one out is refused
        self._trained = [0] * self.schedule.fragments  # rows since the last exchange of each fragment
        self._flight: OuterExchange | None = None
        self._has_received = False

    @property
    def all_rows(self) -> list[OuterRow]:
        return [row for rows in self.rows for row in rows]

    def _rows_now(self, p: int, applied: Sequence[int]) -> list[OuterRow]:
        """What travels in the next exchange of a fragment, of which some were applied."""
        return [row for row in self.rows[p] if (applied[p] + 1) % row.period == 0]

    def exchange(self, step: int) -> OuterExchange:
        """The exchange that begins after this step, without what this island adds to it."""
        p = self.schedule.begins(step)
        assert p is not None
        return OuterExchange(step, p, self._rows_now(p, self._applied))

    def left(self, get: Callable[[str], Any]) -> OuterExchange:
        """The exchange that begins now, with what this island adds to it."""
        flight = self.exchange(self.steps)
        flight.terms = [row.term(row.borrowed(get)) for row in flight.rows]
        if self.weights == "rows":
            flight.weight, self._trained[flight.fragment] = self._trained[flight.fragment], 0
            flight.terms = [term * term.dtype.type(flight.weight) for term in flight.terms]
        return flight

    def idle(self, step: int) -> OuterExchange:
        """The exchange after this step, to which this island comes too late to add something."""
        flight = self.exchange(step)
        flight.weight, flight.terms = 0, [np.zeros(row.size, row.dtype) for row in flight.rows]
        return flight

    def outer_step(self, flight: OuterExchange, means: Sequence[Array], get: Callable[[str], Any]) -> dict[str, Any]:
        """The outer step with these means. Returns the new tensors."""
        changed: dict[str, Any] = {}
        self._applied[flight.fragment] += 1
        for row, mean in zip(flight.rows, means, strict=True):
            if row.outer is not None:
                self.rule.update(row.outer, row.velocity, mean)
        for row, mean in zip(flight.rows, means, strict=True):
            changed |= row.blended(self.rule, mean, row.borrowed(get))
        return changed

    def shared(self) -> list[Array]:
        """What is the same on all islands: outer copies and momentum."""
        return [array for row in self.all_rows for kind, array in row.kept.items() if kind != "feedback"]

    def sha256(self, fragment: int) -> str:
        """Of the outer copies and the momentum of a fragment."""
        kept = [array for row in self.rows[fragment] for kind, array in row.kept.items() if kind != "feedback"]
        return sha256(b"".join(array.tobytes() for array in kept)).hexdigest()

    def take_over(self, shared: Sequence[Array], applied: Sequence[int], keeps: bool) -> None:
        """The outer copies and the momentum of another island. `keeps`: what this one has trained counts from there."""
        for row in self.all_rows:
            if row.outer is not None:
                before = row.outer.copy() if row.before is None and not self._has_received else row.before
                row.before = before if keeps else None
        for array, new in zip(self.shared(), shared, strict=True):
            array[...] = new
        if (flight := self._flight) is not None and keeps:
            self._trained[flight.fragment] += flight.weight
        self._applied, self._flight, self._has_received = [*applied], None, True

    def received(self, get: Callable[[str], Any]) -> dict[str, Any]:
        """The parameters that this island has to take over, because it came late, in new tensors. Once.

        They are those of the outer copies; of an island that was only slow, its own ones, moved as the outer copies.
        """
        if not self._has_received:
            return {}
        self._has_received, found = False, dict[str, Any]()
        for row in self.all_rows:
            if row.outer is not None:
                tensors = row.borrowed(get)
                values = row.outer if row.before is None else _flat(tensors) + (row.outer - row.before)
                found |= {name: _like(tensors[name], values[span]) for name, span in row.spans.items()}
                row.before = None
        return found


class OuterSteps(OuterCopies):
    """params = inner(params), again and again, with outer steps over the islands along `comm`

        with fompi.parallel.outer.OuterSteps(params, comm=mesh["islands"], sync_every=30, delay=1) as outer:
            for batch in batches:
                params = outer.step(inner(params, batch))

    After step t the exchange of a fragment begins, and after step t + `delay` its mean is applied (`OuterSchedule`,
    `OuterRule`): theta = alpha theta + (1 - alpha) outer. Between two outer steps nothing is sent; with alpha=1 never.

    `params`: name -> tensor of any framework, the same on all islands, copied. float64, float32, bfloat16 or float16;
    outer copies are on the host, of half types in float32. `fragments`: a number, to which names are dealt round
    robin, or a list of lists of names.
    `averaged`: name -> n, for entries of `params` without an outer copy, such as moments: every n-th exchange of their
    fragment, theta = alpha theta + (1 - alpha) mean(theta).
    `wire` (`fompi.base.wires`) is what differences travel in, `feedback` gives back what messages of this island have
    lost. Without a wire all sums are in the order of ranks. What is averaged travels as it is. Where `comm` belongs to
    a mesh with `priority=` that does not name its axis, messages leave behind all others.
    `weights`: "islands", each counts alike in a mean; "rows", by the rows that it has trained: `step(params, rows=n)`.
    `on_exchange`: called with an `OuterNumbers` for each mean that is applied. `compared`: a text that must be the same
    on all islands, too.

    `comm` may be a `fompi.members.Membership` (`fompi.islands.join`): then islands come and go. Those that are left do
    an exchange that has failed again, from the same differences. A late one gets the outer copies (`received`), and the
    state of an optimizer by `inner` (`fompi.torch.outer.TrainedModule`). What a slow one has trained is not lost.

    Making one is collective. Raises MismatchError on all ranks if they differ in names, forms, fragments or options;
    and in the first `step`, if the islands begin with different parameters or at different steps.
    """

    def __init__(self, params: Mapping[str, Any], *, comm: Any, **options: Any):
        self._membership = comm if isinstance(comm, Membership) else None
        comm = comm.join() if isinstance(comm, Membership) else comm
        given = Communicator.of(comm).plain
        self._text, self._how = "", dict[str, Any]()
        error: Exception | None = None
        try:
            own = {name: options.pop(name) for name in OPTIONS if name in options}
            self._on_exchange, own_text = own.pop("on_exchange", None), own.pop("compared", "")
            self._inner: Any = own.pop("inner", None)
            super().__init__(params, **own)
            dtypes = [row.dtype for row in self.all_rows]
            carrier = carrying("OuterSteps", comm, options, dtypes, [*OPTIONS, "wire", "feedback"])
            self._how = {name: carrier.how[name] for name in ("wire", "feedback") if name in carrier.how}
            words = asdict(self.schedule) | asdict(self.rule) | {"weights": self.weights} | self._how
            for name, (dtype, shape, fragment, period) in self.forms.items():
                form = f"{dtype} {tuple(shape)} in fragment {fragment}"
                words[f"parameter {name!r}"] = form + (f", averaged: {period}" if period else "")
            self._text = "".join(detail(*pair) for pair in words.items()) + own_text
        except Exception as refusal:
            error = refusal
        self.closed = self._is_compared = False
        self._role = HERE  # in the last meeting
        self._late = 0  # the step of the exchange to which this island came too late to add to it
        self._skipped = 0  # steps that it did not make, because it was new. 0 after its first exchange
        self._ended = [0] * MOST_MISSED  # the epochs in which the last exchanges have come to their end
        self._given: list[tuple[Any, Array]] = []  # what travels to islands that came late
        self._changed: dict[str, Any] = {}  # by the exchange that is applied now
        if self._membership is None:
            self._enter(given, error)
            return
        if error is None:
            words = {"parameters": self.forms, "weights": self.weights, "how": self._how}
            self._membership.note("outer", **asdict(self.schedule), **asdict(self.rule), **words)
        self._meet(given, error)

    def _enter(self, given: Communicator, error: Exception | None = None) -> None:
        """The islands are those of `given` from now on. Collective."""
        agree(given, f"OuterSteps{self._text}", error)
        if self._membership is None:  # its calls have an order of their own
            given = given.split(0, given.rank, f"{given.name}/outer")
        self.comm = given
        for row in self.all_rows:
            row.meet(self.comm.using(**self._how))
        if self._membership is not None:
            self._catch_up(self._membership)

    def _meet(self, comm: Communicator | None = None, error: Exception | None = None) -> None:
        """The islands that are here go on together, in the next epoch or in that of `comm`. Collective."""
        assert self._membership is not None
        while True:
            self._stop()
            comm = comm or self._membership.join()
            lost: Exception | None = None
            try:
                self._enter(comm, error)
            except (PeerError, WaitTimeout) as again:  # one of them is lost again
                lost, comm = again, None
            if not self._membership.on_any_rank(lost):
                return

    def _reliably(self, act: Callable[[], object]) -> bool:
        """`act()`. If an island is lost, those that are left meet in the next epoch, and do it again.

        False: others have done it by then, and this island has taken over what came of it.
        """
        if self._membership is None:
            act()
            return True
        while True:
            lost: Exception | None = None
            try:
                act()
            except (PeerError, WaitTimeout) as error:
                lost = error
            if not self._membership.on_any_rank(lost):
                return True
            if self._flight is not None:  # another rank of this island lacks it
                self._flight.arrived = None
            self._meet()
            if self._role != HERE:
                return False

    def _stop(self) -> None:
        """The calls of the exchange on its way have ended, or will not. What it adds is kept."""
        self._given.clear()
        if (flight := self._flight) is not None and flight.arrived is None:
            flight.sent, flight.calls, flight.vote = (), (), None
            for row in flight.rows:
                if row.feedback is not None:
                    row.feedback.forget()

    def _catch_up(self, membership: Membership) -> None:
        """Islands that are behind take over what the farthest one has: outer copies and their momentum. Collective.

        All compare what they have, before that travels: the farthest one sends it while the others go on.
        """
        flight = self._flight or OuterExchange(0, 0, [])
        sent = flight.epoch if flight.weight else 0
        lacks = self._inner is not None and (self._skipped > 0 or self._inner.is_fresh())
        words = (sum(self._applied), self.steps, flight.step, self._late, sent, lacks, self._skipped)
        table = np.asarray(all_gather(np.array([words], np.int64), comm=self.comm))
        root = max(range(len(table)), key=lambda r: (table[r, 0], table[r, 6] == 0, table[r, 1], -r))
        known = np.array([*self._applied, *self._ended, *self._sums_of_bits()], np.int64)
        known = np.asarray(broadcast(known, root=root, comm=self.comm))
        applied, ended, bits = np.split(known, [len(self._applied), len(self._applied) + MOST_MISSED])
        roles = roles_of(table, table[root], ended)
        role = self._role = roles[self.comm.rank]
        now = int(table[root, 2])  # the exchange that is on its way
        self._compare(None if role == HERE else (applied, bits))
        start = int(table[root, 1])
        if now:
            start = min(start, now + self.schedule.delay - 1)  # its next step may apply it
        if self.comm.rank == root:
            for rank in [rank for rank, other in enumerate(roles) if other != HERE]:
                self._give(rank, bool(table[rank, 5]))
        elif role != HERE:
            shared = [np.asarray(recv(root, comm=self.comm)) for _ in self.shared()]
            self.take_over(shared, applied.tolist(), keeps=role == SLOW)
            if lacks:
                self._inner.take_inner(lambda like: recv(root, like=like, comm=self.comm))
            self._ended = ended.tolist()
        is_new = np.array([role == NEW for role in roles])
        table[is_new, 1] -= table[is_new, 6]
        if role == NEW:
            self._skipped, self._trained = start - int(table[self.comm.rank, 1]), [0] * self.schedule.fragments
        if role in (NEW, SLOW):
            self.steps, self._late, self._flight = start, now, self.idle(now) if now else None
        of_all = dict(zip(("applied", "steps", "lacks"), table[:, [0, 1, 5]].T.tolist(), strict=True))
        membership.note("epoch", islands=membership.names, roles=roles, root=root, start=start, **of_all)

    def _give(self, rank: int, with_inner: bool) -> None:
        """Send this island what it lacks, as it is now, while this one goes on."""
        held = [array.copy() for array in self.shared()]
        if with_inner:
            held += self._inner.inner_state(self._changed)
        self._given += [(send.start(array, rank, comm=self.comm), array) for array in held]

    def step(self, params: Mapping[str, Any], rows: int = 1) -> dict[str, Any]:
        """An inner step has made `params`. Returns them with what this outer step changes, in new tensors.

        `rows`: those that it has trained, with weights="rows".
        Raises what the exchange raises, on all ranks. It is left out then: outer copies and parameters stay.
        """
        return {**params, **self.advance(params.__getitem__, rows)}

    def advance(self, get: Callable[[str], Any], rows: int = 1) -> dict[str, Any]:
        """`step`, which asks `get(name)` for only the parameters of this step. Returns the new ones."""
        if self.closed:
            raise StateError("these outer steps are closed")
        if not self._is_compared:
            self._compare()
        self.steps += 1
        self._trained = [before + rows for before in self._trained]
        if self.rule.alpha == 1:  # these islands train alone
            return {}
        step = self.steps
        is_on_its_way = self._flight is not None and self._flight.step == step
        if self.schedule.begins(step) is not None and not is_on_its_way:
            self._begin(get)
        goes_on, changed = True, dict[str, Any]()
        if self._flight is not None and not self._flight.calls and self._flight.arrived is None:
            goes_on = self._reliably(self._send)
        if goes_on and self.schedule.applies(step) is not None:
            changed = self._apply(get)
        return changed | self.received(lambda name: changed[name] if name in changed else get(name))

    def _begin(self, get: Callable[[str], Any]) -> None:
        """The fragment of this step leaves."""
        try:
            self._flight = self.left(get)
        except Exception as error:
            flight = self.exchange(self.steps)
            self._refuse(self._in_words(flight), error, len(flight.rows))
            raise

    def _in_words(self, flight: OuterExchange) -> str:
        done = self._applied[flight.fragment]
        return f"fragment {flight.fragment} after step {flight.step} and {done} of its exchanges"

    def _send(self) -> None:
        """The exchange on its way has its calls."""
        flight = self._flight
        if flight is None or flight.calls or flight.arrived is not None:
            return
        text = self._in_words(flight)
        flight.sent = [row.sent(x) for row, x in zip(flight.rows, flight.terms, strict=True)]
        op = "mean" if self._membership is None and self.weights == "islands" else "sum"
        flight.calls = [
            start_with(all_reduce, text, x, dtype=row.dtype, op=op, comm=row.sums)
            for row, x in zip(flight.rows, flight.sent, strict=True)
        ]
        if self._membership is not None:
            flight.epoch = self._membership.number
        if self._membership is not None or self.weights == "rows":
            changed = self._membership is not None and self._membership.changed
            flight.vote = all_gather.start(np.array([[flight.weight, changed]], np.int64), comm=self.comm)

    def _refuse(self, text: str, error: Exception, calls: int) -> None:
        """Take part in the next calls of the other islands by an error, so that they do not wait."""
        for _ in range(calls):
            begin_agreement(self.comm, text, error)
        self.comm.engine.wake_helper()

    def _apply(self, get: Callable[[str], Any]) -> dict[str, Any]:
        """The outer step with what has travelled."""
        flight = self._arrived()
        if flight is None or flight.arrived is None:
            return {}
        self._flight, (means, numbers) = None, flight.arrived
        self._changed = self.outer_step(flight, means, get)
        if self._on_exchange is not None:
            self._on_exchange(numbers)
        if self._membership is not None:
            self._end(self._membership, flight, numbers)
        changed, self._changed = self._changed, {}
        return changed

    def _end(self, membership: Membership, flight: OuterExchange, numbers: OuterNumbers) -> None:
        """Note an exchange, and meet if some have come, or have left."""
        self._ended, self._skipped = [*self._ended[1:], flight.epoch], 0
        self._given = [(call, array) for call, array in self._given if not call.done]
        if membership.log is not None:
            weights, here = flight.vote.result[:, 0].tolist(), {"bytes": numbers.nbytes}
            known = {"step": flight.step, "fragment": flight.fragment, "exchange": sum(self._applied)}
            membership.note("exchange", **known, weights=weights, sha256=self.sha256(flight.fragment), here=here)
        if membership.on_any_rank(flight.vote.result[:, 1].any()):  # only the first rank of an island sees who is here
            self._meet()

    def _arrived(self) -> OuterExchange | None:
        """The exchange on its way, once it is here on all ranks of this island. None: there is none."""
        flight = self._flight if self._reliably(self._receive) else None
        for row in [] if flight is None else flight.rows:
            if row.feedback is not None:
                row.feedback.keep()
        return flight

    def _receive(self) -> None:
        """Wait for an exchange on its way: the means, and the numbers. If that fails, the exchange is left out."""
        flight = self._flight
        if flight is None or flight.arrived is not None:
            return
        self._send()
        begun = perf_counter()
        try:
            means = [array_of(call.wait()) for call in flight.calls]
            weights = [1] * self.comm.size if flight.vote is None else flight.vote.wait()[:, 0].tolist()
        except BaseException:
            if self._membership is None:
                self._drop()
            raise
        if flight.vote is not None:
            means = [mean / mean.dtype.type(max(1, sum(weights))) for mean in means]
        exposed = perf_counter() - begun
        of_outer = [each for each in zip(flight.rows, flight.sent, means, strict=True) if each[0].outer is not None]
        pairs = [(x[part], mean[part]) for _, x, mean in of_outer for part in _parts(mean)]
        weight = max(1, flight.weight)
        numbers = OuterNumbers(
            *(flight.step, flight.fragment),
            norm=_norm(mean for _, mean in pairs),
            drift=_norm((x if weight == 1 else x / x.dtype.type(weight)) - mean for x, mean in pairs),
            islands=sum(weight > 0 for weight in weights),
            nbytes=sum(e.nbytes for call in flight.calls for e in call.trace.events if e.lane.startswith("send")),
            exposed=exposed,
        )
        flight.arrived, flight.sent, flight.calls = (means, numbers), (), ()

    def _drop(self) -> None:
        """Forget an exchange on its way, once its calls have ended."""
        flight, self._flight = self._flight, None
        if flight is not None:
            for call in [*flight.calls, *([] if flight.vote is None else [flight.vote])]:
                with suppress(Exception):
                    call.wait()
            for row in flight.rows:
                if row.feedback is not None:
                    row.feedback.forget()

    def _compare(self, of_others: tuple[Array, Array] | None = None) -> None:
        """All islands have the same outer copies at the same step, or all raise. Once, and after a load.

        `of_others`: how often fragments were applied, and the sums of the bits, of what this island is to take over.
        """
        flight = self._flight
        applied, bits = of_others or (self._applied, self._sums_of_bits())
        words = detail("exchanges of each fragment", [*map(int, applied)])
        if self._membership is None:  # else islands may be some steps apart
            words += detail("steps", self.steps)
            words += detail("on its way", flight and f"fragment {flight.fragment} after step {flight.step}")
        for (name, _), bits_of_it in zip(self._shared_parts(), bits, strict=True):
            words += detail(name, "", int(bits_of_it))
        agree(self.comm, f"the first outer step: all islands begin with the same parameters{words}")
        self._is_compared = True

    def _sums_of_bits(self) -> list[int]:
        """A number for each part of what islands share, by which they compare it."""
        return [zlib.crc32(array.tobytes()) for _, array in self._shared_parts()]

    def _shared_parts(self) -> list[tuple[str, Array]]:
        """What is the same on all islands: what it is, and its elements."""
        own = ("feedback",) if self._membership is None else ("feedback", "mean")
        kept = {kind: named for kind, named in self._kept().items() if kind not in own}
        return [(f"{kind} of {name!r}", x) for kind, named in kept.items() for name, x in named.items()]

    # ------------------------------------------------------------------------------------------------- its state
    def _kept(self) -> dict[str, dict[str, Array]]:
        """kind -> name -> a view of what is kept, and of what has arrived."""
        found: dict[str, dict[str, Array]] = {}
        listed = [(kind, row, array) for rows in self.rows for row in rows for kind, array in row.kept.items()]
        if (flight := self._flight) is not None and flight.arrived is not None:
            listed += [("mean", row, mean) for row, mean in zip(flight.rows, flight.arrived[0], strict=True)]
        for kind, row, array in listed:
            parts = {name: array[span].reshape(row.forms[name][1]) for name, span in row.spans.items()}
            found.setdefault(kind, {}).update(parts)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What these outer steps need to go on, in copies: also in the middle of a delay, whose exchange it waits for.

        "outer" and "momentum" of each parameter; with feedback "feedback", what messages of this island have lost. With
        an exchange on its way "mean" and "numbers", what has arrived. "steps", and how often each fragment was
        "applied". Tensors are of torch where parameters are, else of NumPy.
        Each rank saves its own, with its parameters and the state of its inner optimizer: they differ between islands.
        """
        if self._flight is not None:
            self._arrived()
        state: dict[str, Any] = {"steps": self.steps, "applied": [*self._applied]}
        if self.weights == "rows":
            state["trained"] = [*self._trained]
        if (flight := self._flight) is not None and flight.arrived is not None:
            state["numbers"] = asdict(flight.arrived[1])
        of = {name: row for rows in self.rows for row in rows for name in row.forms}
        for kind, named in self._kept().items():
            state[kind] = {name: lend(a.copy(), of[name].dtype, of[name].framework) for name, a in named.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned on this rank. The next `step` compares it with the other islands.

        Raises LayoutError or ShapeError for a state of other outer steps. Nothing is loaded then, and the next `step`
        of the other islands, if they have loaded theirs, raises a MismatchError.
        """
        try:
            flight, found = self._read(state)
        except Exception as error:
            self._refuse("load_state_dict", error, 1)
            self._is_compared = False
            raise
        self._drop()
        for row, kind, array in found:
            row.kept[kind][...] = array
        self.steps, self._applied = int(state["steps"]), [*state["applied"]]
        self._trained = [*state.get("trained", self._trained)]
        if self._membership is not None:
            self._membership.note("loaded", step=self.steps)
        self._flight, self._is_compared = flight, False

    def _read(self, state: Mapping[str, Any]) -> tuple[OuterExchange | None, list[tuple[OuterRow, str, Array]]]:
        """The exchange on its way, and the rows of all that is kept. Raises the error of what does not fit."""
        if not isinstance(state, Mapping) or len(state.get("applied", ())) != self.schedule.fragments:
            raise LayoutError("the state must be what state_dict() of these outer steps has returned")
        found = [(row, kind, row.read(kind, state)) for rows in self.rows for row in rows for kind in row.kept]
        if "numbers" not in state:
            return None, found
        numbers = OuterNumbers(**state["numbers"])
        p = self.schedule.begins(numbers.step)
        if p is None or p != numbers.fragment or not 0 <= state["steps"] - numbers.step < max(1, self.schedule.delay):
            raise LayoutError(f"the state has fragment {numbers.fragment} on its way, which {self.schedule} has not")
        rows = self._rows_now(p, state["applied"])
        arrived = [row.read("mean", state) for row in rows], numbers
        return OuterExchange(numbers.step, p, rows, arrived=arrived), found

    def close(self) -> None:
        """Wait for an exchange on its way, which is not applied, and free the communicator. Collective."""
        if not self.closed:
            self.closed = True
            if self._membership is not None:
                for call, _ in self._given:
                    with suppress(Exception):
                        call.wait()
                self._stop()
                self._membership.leave()
                return
            self._drop()
            self.comm.close()

    def __enter__(self) -> OuterSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # after an error the other ranks may never come to close
            self.close()
