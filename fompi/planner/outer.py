"""The smallest period of outer steps that hides their messages on the link between islands, on paper.

H is `sync_every`, P `fragments` (`fompi.parallel.outer`), K the islands, s the seconds of an inner step.

    bytes    = 2 (K - 1) / K |theta| b / P            of a fragment, of an island, b by the wire
    exchange = HOPS latencies + time of bytes / USED
    exposed  = max(0, exchange - delay s)             in H / P steps
    DDP      = s + max(0, exchange - 2/3 s)           with all gradients in place of a fragment

A period fits if P divides H, delay < H / P, exposed <= EXPOSED s, and DELAYS delay <= H. Time of sums is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fompi.base import tables
from fompi.base.errors import LayoutError
from fompi.base.layout import integer, number
from fompi.base.wires import WIRES, wire_of
from fompi.model.machine import Level, LinkModel, Machine
from fompi.planner.layers import Transformer
from fompi.planner.layout import MOST_RANKS, layouts, model_of
from fompi.planner.step import GRADIENT
from fompi.traces.timeline import timelines
from fompi.traces.trace import Event, Trace

EXPOSED, DELAYS, BACKWARD, MOST_DRAWN = 0.01, 10, 2 / 3, 100_000
"""The share of a step that an exchange may take. The least H / delay: with alpha=0 the inner steps of a delay are
replaced, so at most a tenth. The share of a step behind which DDP sums gradients. The most steps of a picture."""

HOPS, USED = 7, 0.7
"""Messages one after the other: an agreement, and two of the sum, each announced and asked for. The share of its rate
that a long link carries meanwhile: the least that was seen between hosts of `fompi.lab`."""

TRIED = ("", "bfloat16", "int8", "int4")
COLUMNS = ("wire", "H", "P", "delay", "exchange s", "GB a day", "GB at once", "DDP: s a step")
"""The wires that are compared: each other one has as many bits as one of them. The heads of the table."""


@dataclass(frozen=True)
class OuterPeriod:
    """The numbers of a `fompi.parallel.outer.OuterSchedule`, and what they cost. The wire "" is none.

    Seconds: `seconds` of an inner step, `exchange` of a fragment on the link, `exposed` after the delay, `gradients` of
    all of them on the link, `ddp_seconds` of a step of DDP. An island sends `nbytes` for a fragment, `nbytes_a_day`.
    """

    wire: str
    sync_every: int
    fragments: int
    delay: int
    seconds: float
    exchange: float
    exposed: float
    nbytes: float
    nbytes_a_day: float
    gradients: float
    ddp_seconds: float

    @property
    def row(self) -> tuple[object, ...]:
        """The cells of a table with the heads COLUMNS. GB at once are those of a fragment."""
        numbers = self.exchange, self.nbytes_a_day / 1e9, self.nbytes / 1e9, self.ddp_seconds
        return (self.wire or "none", self.sync_every, self.fragments, self.delay, *(f"{n:.4g}" for n in numbers))

    def trace(self) -> Trace:
        """One period of an island, whose first exchange is that of the last fragment before. Raises LayoutError."""
        if self.sync_every > MOST_DRAWN:
            raise LayoutError(f"a period of {self.sync_every} steps is not drawn: at most {MOST_DRAWN} are")
        stride, events = self.sync_every // self.fragments, []
        for i in range(self.fragments):
            begun, fragment = i * (stride * self.seconds + self.exposed), f"fragment {(i - 1) % self.fragments}"
            events += [Event(0, "link", -1, fragment, begun, begun + self.exchange, round(self.nbytes))]
            for k in range(stride):
                start = begun + k * self.seconds + self.exposed * (k >= self.delay)
                events += [Event(0, "compute", -1, f"step {i * stride + k + 1}", start, start + self.seconds)]
        return Trace("predicted", f"outer steps, {self.sync_every} inner steps", tuple(events))

    def picture(self) -> str:
        """The text of an SVG file: this period, and below it one step of DDP."""
        step, begun = Event(0, "compute", -1, "step", 0.0, self.seconds), (1 - BACKWARD) * self.seconds
        ddp = Trace("predicted", "", (step, Event(0, "link", -1, "gradients", begun, begun + self.gradients)))
        return timelines({(own := self.trace()).title: own, "DDP, one step": ddp})


@dataclass(frozen=True)
class OuterPeriods:
    """The smallest period for each wire, the smallest H first."""

    title: str
    best: tuple[OuterPeriod, ...]
    remark: str

    @property
    def parts(self) -> list[str | tables.Table]:
        """The title, a row for each wire, and the remark."""
        return [self.title, tables.Table(COLUMNS, [each.row for each in self.best], COLUMNS[1:]), self.remark]

    def __str__(self) -> str:
        return tables.text(*self.parts)


def outer_period(
    machine: Machine | str,
    model: str | Transformer,
    *,
    islands: int,
    ranks: int = 1,
    between: tuple[float, float] | None = None,
    seconds: float | None = None,
    wire: str | None = None,
    **layout: int | str | None,
) -> OuterPeriods:
    """outer_period("h100-ndr", "llama-8b", islands=4, ranks=8, between=(6e6, 0.08)).best[0].sync_every

    The smallest H, then the smallest delay, then the fewest fragments of outer steps that expose nothing on the link
    between islands of `ranks` ranks, with each wire or with the given one. `fompi/planner/outer.py` has the formulas.

    `between`: the bytes per second from an island to the others, and the seconds of a round trip. Without it the link
    of the machine from rank 0 to rank `ranks` is taken. `seconds`: those of an inner step; each parameter travels once.
    Without them the step is that of the best of `fompi.layouts(model, ranks, machine, **layout)`. Each rank sends what
    it holds then: if zero is not 3, copies of data parallelism too.

    Raises LayoutError for numbers out of range, DtypeError for a wire that is none.
    """
    machine, (name, sizes) = Machine.of(machine), model_of(model)
    for what, value in (("islands", islands), ("ranks", ranks)):
        if not 1 <= (integer(value) or 0) <= MOST_RANKS:
            raise LayoutError(f"{what}={value!r} must be an integer from 1 to {MOST_RANKS}")
    link, held, inside = machine.link(0, ranks), sizes.parameters, ""
    if between is not None:  # all ranks of an island share it
        is_pair = isinstance(between, (tuple, list)) and len(between) == 2
        rate, round_trip = map(number, between) if is_pair else (None, None)
        if rate is None or round_trip is None or rate < 1 or round_trip < 0:
            raise LayoutError(f"between={between!r} must be bytes per second, 1 or more, and seconds of a round trip")
        link = LinkModel(Level(ranks, round_trip / 2, rate, shared=True), (), 1.0)
    if seconds is None:
        best = layouts(sizes, ranks, machine, top=1, **layout).best[0]  # type: ignore[arg-type]
        seconds, at, experts = best.seconds, best.layout, sizes.layers * sizes.experts * sizes.ffn_weights
        if at.zero < 3:  # all parameters are on each rank of dp and cp, but for experts, which are dealt over ep
            held = at.dp * at.cp * (held - experts + experts // at.ep)
        inside = f"; inside, on {machine.name}: dp x tp x pp x ep x cp = {at} ({at.how})"
    elif (number(seconds) or 0.0) < 1e-9 or layout:
        raise LayoutError(f"seconds={seconds!r} must be a number of at least 1e-9, without options of a layout")
    count = f"{islands} island{'s' * (islands > 1)} of {ranks} rank{'s' * (ranks > 1)}"
    between_them = f"{8e-6 * link.level.bandwidth:.4g} Mbit/s and {2e3 * link.level.latency:.3g} ms between"
    title = f"{name} in {count}, {seconds:.4g} s a step, {between_them}{inside}"
    ports = ranks / link.level.ranks if link.level.shared else ranks
    most = max(1, sizes.parameters // (sizes.hidden * max(sizes.vocabulary, sizes.ffn)))  # fragments of modules

    def exchange(nbytes: float) -> float:
        return HOPS * link.level.latency + link.busy(nbytes / ports) / USED if nbytes else 0.0

    found = []
    for each in TRIED if wire is None else (wire_of(wire, "float32"),):
        sent = 2 * (islands - 1) / islands * (WIRES[each].each if each else GRADIENT)  # bytes of a parameter
        times = [exchange(sent * held / p) for p in range(1, most + 1)]
        period, delay, fragments = smallest(seconds, times)
        taken, nbytes, gradients = times[fragments - 1], sent * held / fragments, exchange(sent * sizes.parameters)
        exposed = max(0.0, taken - delay * seconds)
        a_day = 86400 * nbytes / (period / fragments * seconds + exposed)
        costs = seconds, taken, exposed, nbytes, a_day, gradients, seconds + max(0.0, gradients - BACKWARD * seconds)
        found.append(OuterPeriod(each, period, fragments, delay, *costs))
    found.sort(key=lambda period: (period.sync_every, period.delay, period.fragments))
    remark = f"predicted by formulas; at most {EXPOSED:.0%} of a step is exposed, and H is at least {DELAYS} delays"
    if held > sizes.parameters:
        remark += f"; {held / sizes.parameters:.3g} copies of the parameters travel, zero=3 sends one"
    return OuterPeriods(title, tuple(found), remark)


def smallest(step: float, exchanges: Sequence[float]) -> tuple[int, int, int]:
    """H, delay and P: the smallest H, then the smallest delay, then P. `exchanges`: the seconds with P = 1, 2, ..."""
    found = []
    for fragments, seconds in enumerate(exchanges, 1):
        delay = max(0, ceil(seconds / step - EXPOSED))  # a longer one needs a longer period
        stride = max(delay + 1, -(-DELAYS * delay // fragments))
        found.append((fragments * stride, delay, fragments))
    return min(found)
