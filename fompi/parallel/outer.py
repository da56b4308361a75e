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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numbers import narrow, place, stored, upload, widen
from fompi.base.call_options import wire_on
from fompi.base.differences import detail
from fompi.base.errors import DtypeError, LayoutError, ShapeError, StateError
from fompi.base.layout import accumulator, integer, number, offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree, begin_agreement
from fompi.ops.operations import all_reduce
from fompi.parallel.arrays import borrow, carrying, lent, start_with
from fompi.parallel.buckets import detached
from fompi.parallel.gathers import Waits
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

    def round_of(self, step: int) -> int:
        """The how manieth exchange of its fragment begins after this step: 1, 2, ..."""
        return (step - 1) // self.sync_every + 1


@dataclass(frozen=True)
class OuterRule:
    """v = D + momentum v;  outer -= lr (D + momentum v);  theta = alpha theta + (1 - alpha) outer

    D is the mean of outer - theta over the islands: SGD with the momentum of Nesterov. Raises LayoutError for other
    numbers than lr >= 0, 0 <= momentum < 1 and 0 <= alpha <= 1.
    """

    lr: float = 0.7
    momentum: float = 0.9
    alpha: float = 0.0

    def __post_init__(self) -> None:
        for name, value, fits in (
            ("outer_lr", self.lr, lambda x: x >= 0),
            ("outer_momentum", self.momentum, lambda x: 0 <= x < 1),
            ("alpha", self.alpha, lambda x: 0 <= x <= 1),
        ):
            if (found := number(value)) is None or not fits(found):
                raise LayoutError(f"{name}={value!r} must be a number, outer_lr >= 0, momentum < 1, 0 <= alpha <= 1")

    def update(self, outer: Array, velocity: Array | None, mean: Array) -> None:
        """Write the outer copy and v. None is the v of no momentum."""
        if velocity is None:
            outer -= self.lr * mean
            return
        velocity *= self.momentum
        velocity += mean
        outer -= self.lr * (mean + self.momentum * velocity)

    def blend(self, theta: Array, target: Array) -> Array:
        """alpha theta + (1 - alpha) target, in new memory. What counts nothing may be infinite."""
        if self.alpha in (0, 1):
            return (theta if self.alpha else target).copy()
        return self.alpha * theta + (1 - self.alpha) * target


@dataclass(frozen=True)
class OuterRound:
    """The numbers of one exchange, of what this rank holds.

    `step`: the inner step after which fragment `fragment` was sent. `norm`: of the mean outer gradient. `drift`: of
    what this island has sent minus that mean. `nbytes`: what this rank has sent. `exposed`: the seconds for which it
    has waited.
    """

    step: int
    fragment: int
    norm: float
    drift: float
    nbytes: int
    exposed: float


def dealt(names: Sequence[str], fragments: int | Sequence[Sequence[str]]) -> dict[str, int]:
    """name -> its fragment. A number of fragments deals them round robin. Raises LayoutError."""
    if (number_of := integer(fragments)) is not None:
        count = number_of
        found = {name: i % max(1, count) for i, name in enumerate(names)}
    elif isinstance(fragments, (str, bytes)) or not isinstance(fragments, Sequence):
        raise LayoutError(f"fragments={fragments!r} must be a number, or a list of lists")
    else:
        count, found = len(fragments), {}
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


@dataclass(frozen=True)
class OuterOptions:
    """The keywords of `OuterSteps`, with their defaults. What it means is said there."""

    sync_every: int
    fragments: int | Sequence[Sequence[str]] = 1
    delay: int = 0
    alpha: float = 0.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    averaged: Mapping[str, int] | None = None
    on_round: Callable[[OuterRound], object] | None = None

    @property
    def schedule(self) -> OuterSchedule:
        count: Any = self.fragments if integer(self.fragments) is not None else len(self.fragments)  # type: ignore[arg-type]
        return OuterSchedule(self.sync_every, count, self.delay)

    @property
    def rule(self) -> OuterRule:
        return OuterRule(self.outer_lr, self.outer_momentum, self.alpha)

    def periods(self, names: Iterable[str]) -> dict[str, int]:
        """name -> in every how manieth exchange of its fragment it travels, for what is averaged."""
        known, found = {*names}, dict(self.averaged or {})
        for name, period in found.items():
            if name not in known:
                raise LayoutError(f"averaged= names {name!r}, which is no tensor here")
            if integer(period) is None or period < 1:
                raise LayoutError(f"averaged={{{name!r}: {period!r}}} must be an integer of at least 1")
        return found


class Row:
    """Tensors of one fragment that travel together, one behind the other, in every `period`-th exchange of it.

    `outer` and `velocity` are those of parameters, on the host, in float32 or float64. What is averaged has none.
    """

    def __init__(self, tensors: Mapping[str, Tensor], period: int | None, rule: OuterRule, comm: Communicator):
        first = next(iter(tensors.values()))
        self.dtype, self.period = accumulator(first.dtype), period or 1
        self.framework = "torch" if first.framework == "torch" else "numpy"  # of a state
        self.forms = {name: (tensor.dtype, tensor.array.shape) for name, tensor in tensors.items()}
        ends = offsets(tensor.array.size for tensor in tensors.values())
        self.spans = {name: slice(a, b) for name, (a, b) in zip(tensors, pairwise(ends), strict=True)}
        self.outer = _flat(tensors) if period is None else None
        self.velocity = np.zeros_like(self.outer) if self.outer is not None and rule.momentum else None
        wire = wire_on(comm.how, self.dtype) if period is None else ""
        self.sums = summing(comm.plain, {"wire": wire} if wire else {"order": "ranks"})
        lossy = comm if wire else comm.plain
        self.feedback = feedback_of(lossy, self.dtype, lambda: np.zeros(ends[-1], np.float32))

    def borrowed(self, get: Callable[[str], Any]) -> dict[str, Tensor]:
        """The tensors of the program. Raises ShapeError or DtypeError for those that have become others."""
        found = {}
        for name, (dtype, shape) in self.forms.items():
            found[name] = tensor = borrow(detached(get(name)), f"{name!r}")
            if tensor.array.shape != shape:
                raise ShapeError(f"{name!r} had the shape {shape} before the first step, and has {tensor.array.shape}")
            if accumulator(tensor.dtype) != self.dtype:
                raise DtypeError(f"{name!r} was {dtype} before the first step, and is {tensor.dtype}")
        return found

    def term(self, tensors: Mapping[str, Tensor]) -> Array:
        """What this island adds to the mean: outer - theta, or what is averaged itself."""
        x = _flat(tensors)
        if self.outer is not None:
            np.subtract(self.outer, x, out=x)
        if self.feedback is not None:
            self.feedback.give_back(x)
        return x

    def blended(self, rule: OuterRule, mean: Array, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """name -> the new tensor, from the outer copy or the mean. With alpha=1 there is none."""
        if rule.alpha == 1:
            return {}
        row = rule.blend(_flat(tensors), mean if self.outer is None else self.outer)
        return {name: _like(tensors[name], row[span]) for name, span in self.spans.items()}

    @property
    def kept(self) -> dict[str, Array]:
        """What belongs to the state of these outer steps, by its kind. The same on all islands, but for "feedback"."""
        lost = None if self.feedback is None else self.feedback.lost
        rows = {"outer": self.outer, "momentum": self.velocity, "feedback": lost}
        return {kind: row for kind, row in rows.items() if row is not None}

    def named(self, row: Array) -> dict[str, Array]:
        """name -> its elements of such a row, in its shape."""
        return {name: row[span].reshape(self.forms[name][1]) for name, span in self.spans.items()}

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


def _norm(rows: Iterable[Array]) -> float:
    return float(np.sqrt(sum(np.square(row, dtype=np.float64).sum() for row in rows)))


def _form(name: str, tensor: Tensor, fragment_of: Mapping[str, int], periods: Mapping[str, int]) -> str:
    """What of a parameter must be the same on all islands."""
    often = f", averaged in every {periods[name]}th exchange" if name in periods else ""
    return f"{tensor.dtype} {tensor.array.shape} in fragment {fragment_of[name]}{often}"


@dataclass
class Flight:
    """An exchange on its way: what this island has sent, and the calls; once it has arrived, the means."""

    step: int
    fragment: int
    rows: list[Row]
    sent: list[Array]
    calls: list[Any]
    means: list[Array] | None = None
    numbers: OuterRound | None = None


class OuterSteps:
    """params = inner(params), again and again, with outer steps over the islands along `comm`

        with fompi.parallel.outer.OuterSteps(params, comm=mesh["islands"], sync_every=30, delay=1) as outer:
            for batch in batches:
                params = outer.step(inner(params, batch))

    After step t the exchange of a fragment begins, and after step t + `delay` its mean is applied (`OuterSchedule`,
    `OuterRule`): theta = alpha theta + (1 - alpha) outer. Between two outer steps nothing is sent.

    `params`: name -> tensor of any framework, the same on all islands, copied. float64, float32, bfloat16 or float16;
    outer copies are on the host, of half types in float32. `fragments`: a number, to which names are dealt round
    robin, or a list of lists of names.
    `averaged`: name -> n, for entries of `params` without an outer copy, such as moments: every n-th exchange of their
    fragment, theta = alpha theta + (1 - alpha) mean(theta).
    `wire` (`fompi.base.wires`) is what differences travel in, `feedback` gives back what messages of this island have
    lost. Without a wire all sums are in the order of ranks. What is averaged travels as it is. Where `comm` belongs to
    a mesh with `priority=` that does not name its axis, messages leave behind all others.
    `on_round`: called with an `OuterRound` for each mean that is applied.

    Making one is collective. Raises MismatchError on all ranks if they differ in names, forms, fragments or options;
    and in the first `step`, if the islands begin with different parameters or at different steps.
    """

    def __init__(self, params: Mapping[str, Any], *, comm: Any, **options: Any):
        known = [field.name for field in fields(OuterOptions)]
        given = Communicator.of(comm).plain
        rows: dict[tuple[int, str, int | None], dict[str, Tensor]] = {}
        how: dict[str, Any] = {}
        error: Exception | None = None
        text = ""
        try:
            own = {name: options.pop(name) for name in known if name in options}
            tensors = {name: borrow(detached(x), f"the parameter {name!r}") for name, x in params.items()}
            dtypes = [accumulator(t.dtype) for t in tensors.values()]
            carrier = carrying("OuterSteps", comm, options, dtypes, [*known, "wire", "feedback"])
            if "sync_every" not in own:
                raise LayoutError("sync_every= is missing: the steps between two exchanges of a fragment")
            self.options = OuterOptions(**own)
            self.schedule, self.rule = self.options.schedule, self.options.rule
            fragment_of, periods = dealt([*tensors], self.options.fragments), self.options.periods(tensors)
            for name, tensor in tensors.items():
                key = fragment_of[name], accumulator(tensor.dtype), periods.get(name)
                rows.setdefault(key, {})[name] = tensor
            how = {name: carrier.how[name] for name in ("wire", "feedback") if name in carrier.how}
            text = "".join(
                detail(*words)
                for words in [
                    *{**asdict(self.schedule), **asdict(self.rule), **how}.items(),
                    *((f"parameter {name!r}", _form(name, t, fragment_of, periods)) for name, t in tensors.items()),
                ]
            )
        except Exception as refusal:
            error = refusal
        agree(given, f"OuterSteps{text}", error)
        self.comm = given.split(0, given.rank, f"{given.name}/outer")  # its calls have an order of their own
        self.rows: list[list[Row]] = [[] for _ in range(self.schedule.fragments)]
        for (p, _, period), part in rows.items():
            self.rows[p].append(Row(part, period, self.rule, self.comm.using(**how)))
        self.steps, self.closed = 0, False  # the inner steps until now
        self._flight: Flight | None = None
        self._is_compared, self._waits = False, Waits()

    # -------------------------------------------------------------------------------------------------- the steps
    def step(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """An inner step has made `params`. Returns them with what this outer step changes, in new tensors.

        Raises what the exchange raises, on all ranks. It is left out then: outer copies and parameters stay.
        """
        return {**params, **self.advance(params.__getitem__)}

    def advance(self, get: Callable[[str], Any]) -> dict[str, Any]:
        """`step`, which asks `get(name)` for only the parameters of this step. Returns the new ones."""
        if self.closed:
            raise StateError("these outer steps are closed")
        if not self._is_compared:
            self._compare()
        self.steps += 1
        if self.schedule.begins(self.steps) is not None:
            self._begin(get)
        if self.schedule.applies(self.steps) is None or self._flight is None:
            return {}
        return self._apply(get)

    def _begin(self, get: Callable[[str], Any]) -> None:
        """The fragment of this step leaves."""
        p, count = self.schedule.begins(self.steps), self.schedule.round_of(self.steps)
        assert p is not None
        rows, text = [row for row in self.rows[p] if count % row.period == 0], f"fragment {p} after step {self.steps}"
        try:
            sent = [row.term(row.borrowed(get)) for row in rows]
        except Exception as error:
            self._refuse(text, error, len(rows))
            raise
        calls = [
            start_with(all_reduce, text, x, dtype=row.dtype, op="mean", comm=row.sums)
            for row, x in zip(rows, sent, strict=True)
        ]
        self._flight = Flight(self.steps, p, rows, sent, calls)

    def _refuse(self, text: str, error: Exception, calls: int) -> None:
        """Take part in the next calls of the other islands by an error, so that they do not wait."""
        for _ in range(calls):
            begin_agreement(self.comm, text, error)
        self.comm.engine.wake_helper()

    def _apply(self, get: Callable[[str], Any]) -> dict[str, Any]:
        """The outer step with what has travelled."""
        flight, changed = self._flight, dict[str, Any]()
        assert flight is not None
        means, numbers = self._arrived(flight)
        self._flight = None
        for row, mean in zip(flight.rows, means, strict=True):
            if row.outer is not None:
                self.rule.update(row.outer, row.velocity, mean)
        for row, mean in zip(flight.rows, means, strict=True):
            changed |= row.blended(self.rule, mean, row.borrowed(get))
        if self.options.on_round is not None:
            self.options.on_round(numbers)
        return changed

    def _arrived(self, flight: Flight) -> tuple[list[Array], OuterRound]:
        """The means of an exchange, and its numbers. Waits for them. If that fails, the exchange is left out."""
        if flight.means is not None and flight.numbers is not None:
            return flight.means, flight.numbers
        before = self._waits.seconds
        try:
            means = [self._waits.result(call) for call in flight.calls]
        except BaseException:
            self._drop()
            raise
        for row in flight.rows:
            if row.feedback is not None:
                row.feedback.keep()
        pairs = [(x, m) for row, x, m in zip(flight.rows, flight.sent, means, strict=True) if row.outer is not None]
        numbers = OuterRound(
            flight.step,
            flight.fragment,
            norm=_norm(mean for _, mean in pairs),
            drift=_norm(x - mean for x, mean in pairs),
            nbytes=sum(e.nbytes for call in flight.calls for e in call.trace.events if e.lane.startswith("send")),
            exposed=self._waits.seconds - before,
        )
        flight.means, flight.numbers, flight.sent, flight.calls = means, numbers, [], []
        return means, numbers

    def _drop(self) -> None:
        """Forget an exchange on its way, once its calls have ended."""
        flight, self._flight = self._flight, None
        if flight is not None:
            for call in flight.calls:
                with suppress(Exception):
                    call.wait()
            for row in flight.rows:
                if row.feedback is not None:
                    row.feedback.forget()

    def _compare(self) -> None:
        """All islands have the same outer copies at the same step, or all raise. Once, and after a load."""
        flight = self._flight
        words = detail("steps", self.steps)
        words += detail("on its way", flight and f"fragment {flight.fragment} after step {flight.step}")
        for kind, named in self._kept().items():
            for name, array in named.items():
                if kind != "feedback":
                    words += detail(f"{kind} of {name!r}", "", zlib.crc32(array.tobytes()))
        agree(self.comm, f"the first outer step: all islands begin with the same parameters{words}")
        self._is_compared = True

    # ------------------------------------------------------------------------------------------------- its state
    def _kept(self) -> dict[str, dict[str, Array]]:
        """kind -> name -> a view of what is kept, and of what has arrived."""
        found: dict[str, dict[str, Array]] = {}
        listed = [(kind, row, array) for rows in self.rows for row in rows for kind, array in row.kept.items()]
        if self._flight is not None and self._flight.means is not None:
            listed += [("mean", *pair) for pair in zip(self._flight.rows, self._flight.means, strict=True)]
        for kind, row, array in listed:
            found.setdefault(kind, {}).update(row.named(array))
        return found

    def state_dict(self) -> dict[str, Any]:
        """What these outer steps need to go on, in copies: also in the middle of a delay, whose exchange it waits for.

        {"steps": t, "outer": {name: copy}, "momentum": {name: v}}; with feedback "feedback", what messages of this
        island have lost. With an exchange on its way "mean", what has arrived, and "round", its numbers. Tensors are
        of torch where parameters are, else of NumPy.
        Each rank saves its own, with its parameters and the state of its inner optimizer: they differ between islands.
        """
        state: dict[str, Any] = {"steps": self.steps}
        if self._flight is not None:
            state["round"] = asdict(self._arrived(self._flight)[1])
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
        self.steps, self._flight, self._is_compared = int(state["steps"]), flight, False

    def _read(self, state: Mapping[str, Any]) -> tuple[Flight | None, list[tuple[Row, str, Array]]]:
        """The exchange on its way, and the rows of all that is kept. Raises the error of what does not fit."""
        if not isinstance(state, Mapping) or integer(state.get("steps")) is None:
            raise LayoutError("the state must be what state_dict() of these outer steps has returned")
        found = [(row, kind, row.read(kind, state)) for rows in self.rows for row in rows for kind in row.kept]
        if "round" not in state:
            return None, found
        numbers = OuterRound(**state["round"])
        p, count = self.schedule.begins(numbers.step), self.schedule.round_of(numbers.step)
        if p is None or p != numbers.fragment or not 0 <= state["steps"] - numbers.step < max(1, self.schedule.delay):
            raise LayoutError(f"the state has fragment {numbers.fragment} on its way, which {self.schedule} has not")
        rows = [row for row in self.rows[p] if count % row.period == 0]
        means = [row.read("mean", state) for row in rows]
        return Flight(numbers.step, p, rows, [], [], means, numbers), found

    @property
    def waited(self) -> float:
        """For how many seconds this rank has waited for exchanges: what was exposed."""
        return self._waits.seconds

    def close(self) -> None:
        """Wait for an exchange on its way, which is not applied, and free the communicator. Collective."""
        if not self.closed:
            self.closed = True
            self._drop()
            self.comm.close()

    def __enter__(self) -> OuterSteps:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # after an error the other ranks may never come to close
            self.close()
