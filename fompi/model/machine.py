"""Machines: what messages and kernels cost, as numbers. There are presets, and JSON files with the same fields.

`fompi calibrate` measures a machine. The `source` of a preset says where its numbers come from.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

from fompi.base import file_checks
from fompi.base.errors import LayoutError, meant, quoted
from fompi.base.file_checks import Points
from fompi.base.layout import COLLECTIVES

MOST_PORTS, MOST_RANKS, MOST_WAVE, LEAST_SHARE, LEAST_POLL = 1 << 16, 1 << 40, 1 << 40, 1e-6, 1e-9
_INTEGERS = {
    "ports": (1, MOST_PORTS),
    "collectives_ranks": (0, MOST_RANKS),
    "lanes": (1, 2),
    "wave": (0, MOST_WAVE),
    "staged": (0, MOST_RANKS),
    "staged_below": (0, MOST_WAVE),
}
"""The least and the greatest value of each integer in a file.

LEAST_SHARE is the least of `rates`. LEAST_POLL is the least `poll` that is not 0, in seconds.
"""

NO_PACKING = 1e300
"""The `pack_rate` of a BLAS whose packing takes no measurable time: a rate at which packing costs nothing."""

NO_BUS = 1e300
"""The `copy_rate` of a machine whose kernels run on the host."""

NO_LIMIT = 1e300
"""The `memory` of a machine whose memory is not known."""

SPEED_WIDTH, MOST_FASTER = 1024, 1e6
"""The rows and columns of the weight of the products in `speeds`, and the greatest share of speed in a file."""


def interpolate(points: Points, x: float) -> float:
    """The value of a curve at x: linear between points and beyond the last one, level below the first one."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    i = min(bisect_right(points, (x, inf)), len(points) - 1)
    (a, y), (b, z) = points[i - 1], points[i]
    return y + (z - y) * (x - a) / (b - a)


class Level(NamedTuple):
    """The link between groups of `ranks` consecutive ranks. Ranks of the same group use the next inner level.

    A message takes `latency + nbytes / bandwidth` seconds, or what the sampled `curve` says: points (bytes, seconds).
    `shared`: all ranks of a group share one port. Else each rank has its own port.

    `burst`: after a silence of `burst` seconds, a port passes at once what it carries in that time. After a shorter
    silence it passes less. This is a token bucket. Clouds and the Linux tool `tc` limit links by token buckets.
    """

    ranks: int
    latency: float
    bandwidth: float
    shared: bool = False
    curve: Points = ()
    burst: float = 0.0

    @property
    def fastest(self) -> float:
        """The highest rate in bytes per second: the bandwidth, or the highest rate of any message by the curve."""
        if not self.curve:
            return self.bandwidth
        (first, least), *more = self.curve
        if not more or (not first and least < self.latency):  # level, or below the latency: some messages take no time
            return inf
        rates = [nbytes / (s - self.latency) if s > self.latency else inf for nbytes, s in self.curve if nbytes]
        (a, y), (b, z) = ((0.0, self.latency), *self.curve)[-2:]
        return max([*rates, (b - a) / (z - y) if z > y else inf])


class LinkModel(NamedTuple):
    """The link from one rank to another: its level, its ports, and the rate of its slower end (1: full speed)."""

    level: Level
    ports: tuple[tuple[str, int, int], ...]  # ("out" or "in", number of the level, number of the rank or group)
    rate: float

    def busy(self, nbytes: float) -> float:
        """Seconds for which a message occupies its ports. A slow end needs more time per byte, not more per message."""
        _, latency, bandwidth, _, curve, _ = self.level
        seconds = max(0.0, interpolate(curve, nbytes) - latency) if curve else nbytes / bandwidth
        if self.rate == 1.0:
            return seconds
        return seconds + (1 / self.rate - 1) * nbytes / self.level.fastest

    def seconds(self, nbytes: float) -> float:
        """Seconds from the start of a message to its arrival, if no other message uses its ports."""
        return self.level.latency + self.busy(nbytes)


@dataclass(frozen=True)
class Machine:
    """One rank and its links. Times are in seconds, rates in bytes or floating-point operations per second.

    **Links.** A message between ranks of one innermost group takes `latency + nbytes / bandwidth`, or what the sampled
    `curve` says. A port carries one message at full rate, or several at equal shares. Messages from one rank to another
    go one after the other. After silence a port passes at once what it carries in `burst` seconds (see `Level`). A rank
    can send to `ports` peers at full rate, and receive from as many (several network cards, or a mesh). `levels` are
    slower links between groups of ranks, the innermost first. `rates[rank]` is the share of its bandwidth that a rank
    has. It is 1 for ranks beyond the list.

    **Kernels.** A kernel takes `overhead + max(flops / flops_rate, nbytes / memory_rate)`. A product takes
    `packed / pack_rate` more. `packed` are the bytes of both operands: a BLAS packs both in every call, also the whole
    weight. Hence many small calls cost more than one large call. A GPU computes `wave` elements of a product at once, a
    tile on each of its processors. The last wave takes as long as a full one. A copy from or to a device takes at least
    `nbytes / copy_rate`; both directions run at the same time.

    **Devices.** The host needs `launch` seconds to enqueue a kernel or a copy, one after the other. A kernel that waits
    for one of another stream begins `event` seconds after its end. The host sees the end of a kernel `poll` seconds
    later, so a message leaves then. Ranks that are not in one group of `staged` consecutive ranks exchange messages
    through host memory, with copies down and up (`fompi.plans.staged`). 1: all do. 0: none does. Messages of at most
    `staged_below` bytes do in any case: there this is faster than a copy between the devices. One kernel may compute
    all products that a bound plan sends, and announce each of them while it runs. It computes with the share
    `announced` of `flops_rate`, and there is one call, and one last wave, for all of them. 0: this is not known.

    `memory` are the bytes of a rank. `fompi.layouts` leaves out what does not fit.

    **Unequal ranks.** `speeds[rank]` says how fast the kernels of a rank are: the share of the speed above, or a curve
    of points (rows, seconds) of products in float32 with a weight of 1024 x 1024 that no cache holds. So products of
    few rows run at the speed of the memory. `memories[rank]` are the bytes of a rank, and at `disk_rates[rank]` bytes
    per second it reads again what does not fit (0: it cannot). Ranks beyond a list have the speed 1, `memory`, and no
    disk. `fompi.balance` deals by these; simulations of plans take all ranks as equally fast.

    **Messages during kernels.** With `lanes` = 1, kernels and messages share one core. Each message takes `cpu_message
    + nbytes * cpu_byte` from the kernel that runs. A collective of the library counts as two messages per peer. A sum
    takes its own time from the kernel. The rank sees arrived messages every `poll` seconds. With `lanes` = 2, sums run
    during kernels, and messages cost kernels nothing. `unaided_share` is the share of a message that moves while no
    rank calls MPI.

    **Collectives of the MPI library.** `collectives` are curves of seconds by bytes, while all ranks wait. The bytes
    are those that the largest rank reads and writes. `collectives_behind` are the curves of collectives that follow
    each other while kernels run. They include the delays of polls. Both hold for `collectives_ranks` ranks, or for any
    number of ranks if that is 0. Without a curve a formula takes its place: one latency per peer, the bytes through the
    outermost link and, on one lane, the sums.

    Raises LayoutError, with the name of the field, for a wrong value.
    """

    name: str
    latency: float
    bandwidth: float
    flops_rate: float
    memory_rate: float
    overhead: float
    source: str = ""
    curve: Points = ()
    levels: tuple[Level, ...] = ()
    rates: tuple[float, ...] = ()
    pack_rate: float = NO_PACKING
    lanes: int = 1
    cpu_message: float = 0.0
    cpu_byte: float = 0.0
    poll: float = 0.0
    collectives: Mapping[str, Points] = field(default_factory=dict)
    collectives_behind: Mapping[str, Points] = field(default_factory=dict)
    unaided_share: float = 0.0
    ports: int = 1
    collectives_ranks: int = 0
    burst: float = 0.0
    copy_rate: float = NO_BUS
    memory: float = NO_LIMIT
    wave: int = 0
    launch: float = 0.0
    event: float = 0.0
    staged: int = 0
    staged_below: int = 0
    announced: float = 0.0
    speeds: tuple[float | Points, ...] = ()
    memories: tuple[float, ...] = ()
    disk_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in _checked(given, inf).items():  # a rate may be infinite: then it costs nothing
            object.__setattr__(self, name, value)

    @cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __hash__(self) -> int:  # machines are keys of caches, so the hash is computed once
        return self._hash

    @property
    def innermost(self) -> Level:
        """The link between ranks of one innermost group."""
        return Level(1, self.latency, self.bandwidth, False, self.curve, self.burst)

    def with_links(self, innermost: Level, levels: Sequence[Level], **changes: Any) -> Machine:
        """This machine with other links, and other changes."""
        _, latency, bandwidth, _, curve, burst = innermost
        inner: dict[str, Any] = {"latency": latency, "bandwidth": bandwidth, "curve": curve, "burst": burst}
        return replace(self, **inner, levels=tuple(levels), **changes)

    def link(self, source: int, dest: int) -> LinkModel:
        """The link between two ranks: the outermost level that separates them."""
        number, level = -1, self.innermost
        for i, outer in enumerate(self.levels):
            if source // outer.ranks != dest // outer.ranks:
                number, level = i, outer
        ends = [end // level.ranks if level.shared else end for end in (source, dest)]
        return LinkModel(
            level, (("out", number, ends[0]), ("in", number, ends[1])), min(map(self.rate, (source, dest)))
        )

    def rate(self, rank: int) -> float:
        """The share of its bandwidth that a rank has."""
        return self.rates[rank] if rank < len(self.rates) else 1.0

    def slowest(self, ranks: int) -> float:
        """The least rate of the first `ranks` ranks."""
        return min(self.rates[:ranks], default=1.0)

    def slowness(self, rank: int, rows: float) -> float:
        """How many times as long a product of `rows` rows takes on a rank, as `kernel` says."""
        speed = self.speeds[rank] if rank < len(self.speeds) else 1.0
        if isinstance(speed, float):
            return 1 / speed
        elements = SPEED_WIDTH * SPEED_WIDTH
        return interpolate(speed, rows) / self.kernel(2 * rows * elements, 4 * (elements + 2 * rows * SPEED_WIDTH))

    def memory_of(self, rank: int) -> float:
        """The bytes of a rank."""
        return self.memories[rank] if rank < len(self.memories) else self.memory

    def disk_rate(self, rank: int) -> float:
        """The bytes per second at which a rank reads what does not fit into its memory. 0: it cannot."""
        return self.disk_rates[rank] if rank < len(self.disk_rates) else 0.0

    def at_slowest(self, ranks: int) -> Machine:
        """This machine with the slowest rate for each of the first `ranks` ranks. Then all ranks do the same."""
        slowest = self.slowest(ranks)
        return self if slowest == 1.0 else replace(self, rates=(slowest,) * ranks)

    def kernel(self, flops: float, nbytes: float, packed: float = 0, elements: float = 0, products: int = 1) -> float:
        """Seconds of a kernel: its operations, the bytes that it reads and writes, and the bytes that it packs.

        `elements` is the size of the result of a product. A kernel may compute several equal `products` one by one.
        """
        if self.wave and elements:
            flops *= products * self.wave * ceil(elements / (products * self.wave)) / elements
        return self.overhead + max(flops / self.flops_rate, nbytes / self.memory_rate) + packed / self.pack_rate

    @cached_property
    def announcing(self) -> Machine:
        """This machine for products of one kernel that announces them: none has a call, or a last wave, of its own."""
        rate = self.flops_rate * (self.announced or 1.0)
        return replace(self, flops_rate=rate, overhead=0.0, wave=0, pack_rate=NO_PACKING)

    def last_wave(self, elements: float, flops: float) -> float:
        """Seconds for which some processors idle at the end of products of `elements` and `flops`, in one kernel."""
        if not (self.wave and elements):
            return 0.0
        missing = self.wave * ceil(elements / self.wave) / elements - 1
        return missing * flops / self.flops_rate / (self.announced or 1.0)

    def is_staged(self, rank: int, peer: int) -> bool:
        """True if messages between these ranks go through host memory. The ranks have devices then."""
        return self.staged > 0 and rank // self.staged != peer // self.staged

    def copy(self, nbytes: float) -> float:
        """Seconds of a copy of `nbytes` from or to a device."""
        return max(self.kernel(0, 2 * nbytes), self.overhead + nbytes / self.copy_rate)

    def sampled(self, name: str, ranks: int, behind: bool = False) -> Points:
        """The curve of a collective of the library on `ranks` ranks, or (). `behind`: while kernels run."""
        curves = self.collectives_behind if behind else self.collectives
        return curves.get(name, ()) if self.collectives_ranks in (0, ranks) else ()

    def library(self, name: str, nbytes: float, ranks: int, behind: bool = False, again: bool = False) -> float:
        """Seconds of a collective of the library. `nbytes` is what the largest rank reads and writes.

        `behind`: kernels run, so it moves only by itself and at polls. `again`: it follows another collective at once.
        Curves are measured after a rest, when the buffers of the network take in small messages at once. Without a rest
        the collective takes at least the time of its bytes on the link.
        """
        if ranks == 1:  # a copy
            return self.overhead + nbytes / self.memory_rate
        level = next((outer for outer in reversed(self.levels) if ranks > outer.ranks), self.innermost)
        link = LinkModel(level, (), self.slowest(ranks))
        points = (self.sampled(name, ranks, True) if behind else ()) or self.sampled(name, ranks)
        if points:
            least = link.busy(nbytes * _moved_share(name, ranks)) if again else 0.0
            return max(interpolate(points, nbytes), least)
        moves = level.latency * (ranks - 1) + link.busy(nbytes) * (level.ranks if level.shared else 1)
        return moves + self.library_sums(name, nbytes, ranks)

    def library_sums(self, name: str, nbytes: float, ranks: int) -> float:
        """The seconds of `library` that the core of the kernels spends on sums. They are 0 if a curve was measured."""
        if self.lanes == 2 or name not in ("all_reduce", "reduce_scatter") or self.sampled(name, ranks):
            return 0.0
        summed = nbytes * _moved_share(name, ranks) / (2 if name == "all_reduce" else 1)
        return 3 * summed / self.memory_rate

    def __str__(self) -> str:
        lines = [self.name, self.source]
        for i, level in enumerate((self.innermost, *self.levels)):
            where = f"between groups of {level.ranks} ranks" if i else "between ranks"
            shared = ", one port per group" if level.shared else ""
            ports = "" if i or self.ports == 1 else f", {self.ports} ports per rank"
            burst = f", a burst of {1e3 * level.burst:.3g} ms after silence" if level.burst else ""
            lines.append(f"{where}: {1e6 * level.latency:.3g} us, {_rate(level.fastest, 'B/s')}{ports}{shared}{burst}")
        if self.rates:
            slow = ", ".join(f"rank {i} at {rate:.0%}" for i, rate in enumerate(self.rates) if rate < 1)
            lines.append(f"slow ranks: {slow}")
        packing = f", operands packed at {_rate(self.pack_rate, 'B/s')}" if self.pack_rate < NO_PACKING else ""
        kernels = f"{_rate(self.flops_rate, 'FLOP/s')}, {_rate(self.memory_rate, 'B/s')}"
        lines.append(f"kernels: {1e6 * self.overhead:.3g} us per call, {kernels}{packing}")
        if self.wave:
            lines.append(f"products: {_rate(self.wave, 'elements')} at once")
        if self.launch:
            costs = f"{1e6 * self.launch:.3g} us per launch, {1e6 * self.event:.3g} us between streams"
            lines.append(f"device: {costs}, the host sees an end {1e6 * self.poll:.3g} us later")
        if self.announced:
            lines.append(f"one kernel that announces its products computes at {self.announced:.0%} of this rate")
        if self.staged:
            lines.append(f"through host memory: messages between groups of {self.staged} rank{'s' * (self.staged > 1)}")
        if self.staged_below:
            lines.append(f"through host memory: messages of up to {_rate(self.staged_below, 'B')}")
        if self.copy_rate < NO_BUS:
            lines.append(f"copies from and to the device: {_rate(self.copy_rate, 'B/s')} each way")
        if self.memory < NO_LIMIT:
            lines.append(f"memory: {_rate(self.memory, 'B')} per rank")
        for name, values, unit in (("memory", self.memories, "B"), ("disks", self.disk_rates, "B/s")):
            lines += [f"{name} of the ranks: {', '.join(_rate(value, unit) for value in values)}"] * bool(values)
        if self.speeds:
            rows = [1, max([*(curve[-1][0] for curve in self.speeds if not isinstance(curve, float)), 1.0])]
            few, many = ([f"{1 / self.slowness(rank, n):.2g}" for rank in range(len(self.speeds))] for n in rows)
            more = f"; of {rows[1]:g} rows {', '.join(many)}" * (rows[1] > 1)
            lines.append(f"speeds of the ranks: products of one row {', '.join(few)}{more}")
        if self.lanes == 1:
            cost = f"{1e6 * self.cpu_message:.3g} us and {1e9 * self.cpu_byte:.3g} ns per byte"
            poll = f"a poll every {1e3 * self.poll:g} ms"
            lines.append(f"one core for kernels and messages: each end of a message costs {cost}, {poll}")
        if self.unaided_share:
            lines.append(f"{self.unaided_share:.0%} of a message moves while no rank calls MPI")
        for name, points in self.collectives.items():
            most, seconds = points[-1]
            lines.append(f"the library's {name}: {1e3 * seconds:.3g} ms for {_rate(most, 'B')}")
        return "\n".join(line for line in lines if line)

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits that identify this machine."""
        return blake2b(self.to_json().encode(), digest_size=6).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> Machine:
        """A machine from the text of `to_json`. Raises LayoutError, with the name of the field, for a wrong value."""
        values = _checked(file_checks.parse_json(text))
        if (values.get("collectives") or values.get("collectives_behind")) and "collectives_ranks" not in values:
            raise LayoutError(
                "collectives_ranks is missing: on how many ranks collectives were measured; calibrate again"
            )
        return Machine(**values)

    def part(self, ranks: Sequence[int], world: int) -> Machine:
        """The machine of some of its `world` ranks, for example of one axis of a mesh. They are numbered from 0.

        Evenly spaced ranks keep their groups. For other ranks, every link is the slowest link between any two of them.
        """
        if list(ranks) == list(range(world)):
            return self
        rates = tuple(map(self.rate, ranks)) if self.rates else ()
        unequal = {
            "speeds": tuple(self.speeds[rank] if rank < len(self.speeds) else 1.0 for rank in ranks),
            "memories": tuple(map(self.memory_of, ranks)),
            "disk_rates": tuple(map(self.disk_rate, ranks)),
        }
        own = {name: values for name, values in unequal.items() if getattr(self, name)}
        all_levels = [self.innermost, *self.levels]
        crossed = [level for level in all_levels if len({rank // level.ranks for rank in ranks}) > 1]
        inner, levels = crossed[-1] if crossed else self.innermost, []
        steps = {b - a for a, b in pairwise(ranks)}
        step = max(steps, default=1)
        divides = (step % level.ranks == 0 or level.ranks % step == 0 for level in all_levels)
        even = len(steps) == 1 and step > 0 and all(divides)
        if even and ranks[0] % max(step, crossed[-1].ranks) < step:  # aligned with the groups
            inner = next(level for level in reversed(all_levels) if level.ranks <= step)
            levels = [level._replace(ranks=level.ranks // step) for level in all_levels if level.ranks > step]
        levels = [level for level in levels if level.ranks < len(ranks)]
        ports = self.ports if inner == self.innermost else 1
        return self.with_links(inner, levels, rates=rates, ports=ports, collectives={}, collectives_behind={}, **own)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def of(machine: Machine | str | Path) -> Machine:
        """`machine` itself, or the machine that `load` finds under this name."""
        return machine if isinstance(machine, Machine) else Machine.load(machine)

    @staticmethod
    def load(name: str | Path) -> Machine:
        """A preset by its name, or a machine file by its path. Raises LayoutError with the path and the field."""
        if not isinstance(name, (str, Path)):
            raise LayoutError(f"Machine.load takes the name of a preset or the path of a file, not {name!r}")
        if str(name) in PRESETS:
            return PRESETS[str(name)]
        path = Path(name)
        try:
            if path.is_file():
                return Machine.from_json(file_checks.read(path))
        except LayoutError as error:
            raise LayoutError(f"{path}: {error}") from None
        except OSError as error:
            raise LayoutError(f"the machine {str(name)!r} cannot be read: {error.strerror}") from None
        raise LayoutError(
            f"no machine {quoted(str(name), PRESETS)}: no such file, and the presets are {', '.join(PRESETS)}"
        )


def _moved_share(name: str, ranks: int) -> float:
    """Of the bytes that a rank reads and writes in a collective: the share that must enter it, or leave it."""
    if name == "broadcast":
        return 1.0
    whole = {"all_reduce": ranks, "all_to_all": 2 * ranks}.get(name, ranks + 1)
    return (ranks - 1) / whole


def _rate(value: float, unit: str) -> str:
    """A rate or an amount with a prefix: 4.5e9 of "B/s" is "4.5 GB/s"."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


# ------------------------------------------------------------------------------------------------------------- files

_NAMES = [f.name for f in fields(Machine)]
_FIELDS = ", ".join(_NAMES)


def _checked(data: Any, fastest: float = file_checks.MOST_SPEED) -> dict[str, Any]:
    """The fields of a Machine, checked and converted. Raises LayoutError, with the name of the field."""
    if not isinstance(data, dict):
        raise LayoutError(f"a machine must be an object with the fields {_FIELDS}")
    if unknown := set(data) - {*_NAMES}:
        raise LayoutError(f"unknown field {shown(min(unknown))}{meant(min(unknown), _NAMES)}; the fields are {_FIELDS}")
    values: dict[str, Any] = {}
    for known in fields(Machine):
        if known.name in data:
            values[known.name] = _field(known.name, data[known.name], fastest)
        elif known.default is MISSING and known.default_factory is MISSING:
            raise LayoutError(f"{known.name} is missing; the fields of a machine are {_FIELDS}")
    return values


def _field(name: str, value: Any, fastest: float) -> Any:
    if name in ("name", "source"):
        return file_checks.line(name, value)
    if name == "curve":
        return _curve(name, value)
    if name == "levels":
        return _levels(value, fastest)
    if name == "rates":
        rates = enumerate(file_checks.sequence(name, value))
        return tuple(file_checks.number(f"rates[{i}]", rate, LEAST_SHARE, 1.0) for i, rate in rates)
    if name == "speeds":
        return tuple(_speed(f"speeds[{i}]", speed) for i, speed in enumerate(file_checks.sequence(name, value)))
    if name in ("memories", "disk_rates"):
        least, each = float(name == "memories"), enumerate(file_checks.sequence(name, value))
        return tuple(min(NO_LIMIT, file_checks.number(f"{name}[{i}]", one, least, inf)) for i, one in each)
    if name in ("collectives", "collectives_behind"):
        return _library_curves(name, value)
    if name == "unaided_share":
        return file_checks.number(name, value, 0.0, 1.0)
    if name == "announced":
        share = file_checks.number(name, value, 0.0, 1.0)
        return share and file_checks.number(name, share, LEAST_SHARE, 1.0)
    if name == "poll":
        return file_checks.seconds(name, value) and file_checks.number(
            name, value, LEAST_POLL, file_checks.MOST_SECONDS
        )
    if name in _INTEGERS:
        return file_checks.integer(name, value, *_INTEGERS[name])
    if name == "memory":
        return min(NO_LIMIT, file_checks.number(name, value, 1.0, inf))
    if name.endswith(("rate", "width")):
        return file_checks.speed(name, value, fastest)
    return file_checks.seconds(name, value)


def _speed(name: str, value: Any) -> float | Points:
    """A share of the speed of the machine, or a curve of seconds above 0 by rows."""
    if not isinstance(value, (list, tuple)):
        return file_checks.number(name, value, LEAST_SHARE, MOST_FASTER)
    curve = file_checks.points(name, value)
    file_checks.number(f"{name}[0][1]", curve[0][1], 1 / file_checks.MOST_SECONDS, file_checks.MOST_SECONDS)
    return curve


def _curve(name: str, value: Any) -> Points:
    """The curve of a link. An empty one means that none was sampled."""
    return file_checks.points(name, value) if file_checks.sequence(name, value) else ()


def _library_curves(name: str, value: Any) -> dict[str, Points]:
    if not isinstance(value, Mapping):
        raise LayoutError(f"{name} must be an object with a curve for each collective, not {shown(value)}")
    if wrong := set(value) - set(COLLECTIVES):
        raise LayoutError(
            f"{name}: no collective {shown(min(wrong))}{meant(min(wrong), COLLECTIVES)}; known {', '.join(COLLECTIVES)}"
        )
    return {key: file_checks.points(f"{name}.{key}", points) for key, points in value.items()}


def _levels(value: Any, fastest: float) -> tuple[Level, ...]:
    levels: list[Level] = []
    for i, given in enumerate(file_checks.sequence("levels", value)):
        name = f"levels[{i}]"
        if not isinstance(given, (list, tuple)) or not 3 <= len(given) <= 6:
            raise LayoutError(f"{name} must be [ranks, latency, bandwidth, shared, curve, burst], not {shown(given)}")
        ranks, latency, bandwidth, shared, curve, burst = [*given, *[False, [], 0.0][len(given) - 3 :]]  # type: ignore[misc]
        ranks = file_checks.integer(f"{name}.ranks", ranks, 1, MOST_RANKS)
        if levels and (ranks % levels[-1].ranks or ranks == levels[-1].ranks):
            raise LayoutError(
                f"{name}: {ranks} ranks must be several times the {levels[-1].ranks} ranks of the level before"
            )
        latency = file_checks.seconds(f"{name}.latency", latency)
        bandwidth = file_checks.speed(f"{name}.bandwidth", bandwidth, fastest)
        shared, curve = file_checks.boolean(f"{name}.shared", shared), _curve(f"{name}.curve", curve)
        burst = file_checks.seconds(f"{name}.burst", burst)
        levels.append(Level(ranks, latency, bandwidth, shared, curve, burst))
    return tuple(levels)


TILE = 128 * 128
"""The elements that one processor of a GPU computes at once in the presets: a common size of tiles of cuBLAS."""

PRESETS = {
    m.name: m
    for m in (
        Machine(
            "gigabit", 50e-6, 118e6, 5e10, 1e10, 2e-6,
            "1 Gbit/s Ethernet, 118 MB/s with TCP; assumed: one core per rank with AVX2, round numbers",
        ),
        Machine(
            "laptop", 2e-6, 4e9, 5e10, 1e10, 2e-6,
            "assumed: shared memory, one core per rank with AVX2, round numbers",
        ),
        Machine(
            "laptops", 1e-3, 30e6, 1e11, 2e10, 2e-6,
            "assumed: four laptops in one wireless network, 30 MB/s; one reads 20 GB/s of memory and computes 100 "
            "GFLOP/s, the others less, round numbers",
            speeds=(1.0, 0.5, 0.5, 0.25), memories=(16e9, 16e9, 8e9, 8e9), disk_rates=(2e9, 2e9, 1e9, 5e8),
        ),
        Machine(
            "h100-nvlink", 3e-6, 400e9, 6e14, 3e12, 4e-6,
            "NVIDIA H100 SXM data sheet: NVLink 450 GB/s each way, 989 TFLOP/s bf16, 80 GB at 3.35 TB/s; assumed: 90 % "
            "of links and memory, 60 % of operations, 3 us per message, 4 us per launch, 50 GB/s to the host",
            lanes=2, copy_rate=50e9, memory=80e9, wave=132 * TILE,
        ),
        Machine(
            "h100-ndr", 3e-6, 400e9, 6e14, 3e12, 4e-6,
            "nodes of 8 H100 SXM as in h100-nvlink, InfiniBand NDR: 400 Gbit/s per GPU; assumed: 6 us per message "
            "between nodes",
            levels=(Level(8, 6e-6, 48e9),),
            lanes=2, copy_rate=50e9, memory=80e9, wave=132 * TILE,
        ),
        Machine(
            "a800-nvlink", 3e-6, 170e9, 2.2e14, 1.6e12, 4e-6,
            "NVIDIA A800 SXM data sheet: NVLink 200 GB/s each way, 312 TFLOP/s bf16, 80 GB at 2 TB/s; assumed: 85 % of "
            "links, 80 % of memory, 70 % of operations, 3 us per message, 4 us per launch, 24 GB/s to the host",
            lanes=2, copy_rate=24e9, memory=80e9, wave=108 * TILE,
        ),
        Machine(
            "a800-hdr", 3e-6, 170e9, 2.2e14, 1.6e12, 4e-6,
            "nodes of 8 A800 SXM as in a800-nvlink, InfiniBand HDR: 200 Gbit/s per GPU; assumed: 6 us per message "
            "between nodes",
            levels=(Level(8, 6e-6, 24e9),),
            lanes=2, copy_rate=24e9, memory=80e9, wave=108 * TILE,
        ),
        Machine(
            "rtx4090-pcie", 10e-6, 12e9, 1.4e14, 0.8e12, 4e-6,
            "NVIDIA RTX 4090 data sheet: PCIe 4.0 x16, 32 GB/s, no peer access; 165 TFLOP/s fp16, 24 GB at 1 TB/s; "
            "assumed: 12 GB/s through host memory, 85 % of operations, 80 % of memory, 10 us per message, 4 us per "
            "launch",
            lanes=2, copy_rate=24e9, memory=24e9, wave=128 * TILE,
        ),
    )
}  # fmt: skip
