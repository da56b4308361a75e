"""Machine: what messages and kernels cost, as values. Presets, and JSON files of the same fields.

`python -m fompi calibrate` measures one; a preset says where its numbers come from.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import inf
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

from fompi.base import file_checks
from fompi.base.errors import LayoutError
from fompi.base.file_checks import Points
from fompi.base.layout import COLLECTIVES

MOST_PORTS, MOST_RANKS, LEAST_SHARE, LEAST_POLL = 1 << 16, 1 << 40, 1e-6, 1e-9
_WHOLE = {"ports": (1, MOST_PORTS), "natives_ranks": (0, MOST_RANKS), "lanes": (1, 2)}
"""What a file may say: the least and the most."""

NO_PACKING = 1e300
"""The rate of a library whose products pack nothing, as far as anybody could tell."""


def at(points: Points, x: float) -> float:
    """The curve at x; below its first point it is level."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    i = min(bisect_right(points, (x, inf)), len(points) - 1)
    (a, y), (b, z) = points[i - 1], points[i]
    return y + (z - y) * (x - a) / (b - a)


class Level(NamedTuple):
    """The link between groups of `ranks` consecutive ranks; inside of a group, that of the level below.

    `shared`: the ranks of a group have one port between them, not one each. After as many seconds of silence what the
    link carries in `burst` seconds passes at once: a token bucket, by which clouds and `tc` hold a link to its rate.
    """

    ranks: int
    latency: float
    bandwidth: float
    shared: bool = False
    curve: Points = ()  # seconds by bytes, if it was sampled
    burst: float = 0.0

    @property
    def fastest(self) -> float:
        """Bytes per second at best: the bandwidth, or what the curve comes to, in the message that it suits best."""
        if not self.curve:
            return self.bandwidth
        (first, least), *more = self.curve
        if not more or (not first and least < self.latency):  # level from there on, or below the latency at first
            return inf
        rates = [nbytes / (s - self.latency) if s > self.latency else inf for nbytes, s in self.curve if nbytes]
        (a, y), (b, z) = ((0.0, self.latency), *self.curve)[-2:]
        return max([*rates, (b - a) / (z - y) if z > y else inf])


class Link(NamedTuple):
    """What a message from one rank to another takes by itself, and the ports that it goes through."""

    level: Level
    ports: tuple[tuple[str, int, int], ...]  # (out or in, number of the level, rank or group)
    rate: float  # of the slower end: 1 where nothing is wrong

    def busy(self, nbytes: float) -> float:
        """Seconds for which it occupies its ports. A slow end stretches the bytes, not what a message costs."""
        _, latency, bandwidth, _, curve, _ = self.level
        seconds = max(0.0, at(curve, nbytes) - latency) if curve else nbytes / bandwidth
        if self.rate == 1.0:
            return seconds
        return seconds + (1 / self.rate - 1) * nbytes / self.level.fastest

    def seconds(self, nbytes: float) -> float:
        return self.level.latency + self.busy(nbytes)


@dataclass(frozen=True)
class Machine:
    """Seconds, bytes and floating-point operations per second, of one rank and of the links that it has.

    A message takes `latency + nbytes / bandwidth`, or what the sampled `curve` says. A port carries one message at full
    rate, several at equal shares; messages to one peer go one after the other. A port that was silent passes what it
    carries in `burst` seconds at once. A rank has so many `ports` out and in: as many messages at full rate, each to
    another peer (several network cards, a mesh). `levels` are slower links between groups of ranks, the innermost
    first. `rates[rank]`: the share of its bandwidth that a rank has (1 beyond).

    A kernel takes `overhead + max(flops / flops_rate, nbytes / memory_rate)`, and a product `packed / pack_rate` more,
    where `packed` are the bytes of what it multiplies: a library packs both in every call, the whole weight too, so
    many small calls cost more.

    On a core that kernels and messages share (`lanes` = 1), a message takes `cpu_message + nbytes * cpu_byte` from
    the kernel that runs (a collective of the library as many as it has peers, there and back), a sum its own time,
    and it looks for what has come every `poll` seconds. With two lanes sums run beside kernels, and messages cost them
    nothing. `natives` are the library's collectives: seconds by bytes of the largest rank, read and written, while
    all ranks wait for it, and `natives_behind` one after the other while they compute, polls among them; both on
    `natives_ranks` ranks (0: on any number). Without a curve they take one latency a rank, the bytes through the
    outermost link and, on one lane, the sums. `native_share` of a message moves by itself, while all ranks stay out of
    MPI.

    Raises LayoutError with the field that cannot be.
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
    natives: Mapping[str, Points] = field(default_factory=dict)
    natives_behind: Mapping[str, Points] = field(default_factory=dict)
    native_share: float = 0.0
    ports: int = 1
    natives_ranks: int = 0
    burst: float = 0.0

    def __post_init__(self) -> None:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in _checked(given, inf).items():  # what is infinitely fast costs nothing
            object.__setattr__(self, name, value)

    @cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __hash__(self) -> int:  # part of a key: worked out once
        return self._hash

    @property
    def innermost(self) -> Level:
        """The link between ranks of one group."""
        return Level(1, self.latency, self.bandwidth, False, self.curve, self.burst)

    def link(self, source: int, dest: int) -> Link:
        number, level = -1, self.innermost
        for i, outer in enumerate(self.levels):
            if source // outer.ranks != dest // outer.ranks:
                number, level = i, outer
        ends = [end // level.ranks if level.shared else end for end in (source, dest)]
        return Link(level, (("out", number, ends[0]), ("in", number, ends[1])), min(map(self.rate, (source, dest))))

    def rate(self, rank: int) -> float:
        return self.rates[rank] if rank < len(self.rates) else 1.0

    def slowest(self, ranks: int) -> float:
        """The least rate of so many ranks."""
        return min(self.rates[:ranks], default=1.0)

    def at_slowest(self, ranks: int) -> Machine:
        """As if all of so many ranks were as slow as the slowest of them: then they do the same."""
        slowest = self.slowest(ranks)
        return self if slowest == 1.0 else replace(self, rates=(slowest,) * ranks)

    def kernel(self, flops: float, nbytes: float, packed: float = 0) -> float:
        return self.overhead + max(flops / self.flops_rate, nbytes / self.memory_rate) + packed / self.pack_rate

    def sampled(self, name: str, ranks: int, behind: bool = False) -> Points:
        """The curve of a collective of the library on so many ranks, if there is one."""
        curves = self.natives_behind if behind else self.natives
        return curves.get(name, ()) if self.natives_ranks in (0, ranks) else ()

    def native(self, name: str, nbytes: float, ranks: int, behind: bool = False, again: bool = False) -> float:
        """A collective of the library; `nbytes` are those that the rank with most reads and writes.

        `behind` a kernel it moves by itself, or when somebody polls now and then. `again`: right after another one. The
        curve says what one takes after a rest, when buffers swallow small ones at once; then they take what the link
        does.
        """
        if ranks == 1:  # a copy
            return self.overhead + nbytes / self.memory_rate
        level = next((outer for outer in reversed(self.levels) if ranks > outer.ranks), self.innermost)
        link = Link(level, (), self.slowest(ranks))
        points = (self.sampled(name, ranks, True) if behind else ()) or self.sampled(name, ranks)
        if points:
            least = link.busy(nbytes * _moved_share(name, ranks)) if again else 0.0
            return max(at(points, nbytes), least)
        moves = level.latency * (ranks - 1) + link.busy(nbytes) * (level.ranks if level.shared else 1)
        return moves + self.native_sums(name, nbytes, ranks)

    def native_sums(self, name: str, nbytes: float, ranks: int) -> float:
        """What of that a core has to sum, which it shares with kernels; a curve that was measured does not tell."""
        if self.lanes == 2 or name not in ("all_reduce", "reduce_scatter") or self.sampled(name, ranks):
            return 0.0
        summed = nbytes * _moved_share(name, ranks) / (2 if name == "all_reduce" else 1)
        return 3 * summed / self.memory_rate

    def __str__(self) -> str:
        lines = [self.name, self.source]
        for i, level in enumerate((self.innermost, *self.levels)):
            where = f"between groups of {level.ranks}" if i else "between ranks"
            shared = ", shared by the group" if level.shared else ""
            ports = "" if i or self.ports == 1 else f", {self.ports} ports a rank"
            burst = f", after silence {1e3 * level.burst:.3g} ms of that at once" if level.burst else ""
            lines.append(f"{where}: {1e6 * level.latency:.3g} us, {_rate(level.fastest, 'B/s')}{ports}{shared}{burst}")
        if self.rates:
            slow = ", ".join(f"rank {i} {rate:.0%}" for i, rate in enumerate(self.rates) if rate < 1)
            lines.append(f"slower: {slow}")
        packing = f", operands packed at {_rate(self.pack_rate, 'B/s')}" if self.pack_rate < NO_PACKING else ""
        kernels = f"{_rate(self.flops_rate, 'FLOP/s')}, {_rate(self.memory_rate, 'B/s')}"
        lines.append(f"kernels: {1e6 * self.overhead:.3g} us and {kernels}{packing}")
        if self.lanes == 1:
            cost = f"{1e6 * self.cpu_message:.3g} us and {1e9 * self.cpu_byte:.3g} ns a byte"
            lines.append(
                f"one core for kernels and messages: each end costs {cost}, a poll every {1e3 * self.poll:g} ms"
            )
        if self.native_share:
            lines.append(f"of a message {self.native_share:.0%} moves by itself")
        for name, points in self.natives.items():
            most, seconds = points[-1]
            lines.append(f"the library's {name}: {1e3 * seconds:.3g} ms for {_rate(most, 'B')}")
        return "\n".join(line for line in lines if line)

    @cached_property
    def digest(self) -> str:
        """Some letters that tell it from others."""
        return blake2b(self.to_json().encode(), digest_size=6).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> Machine:
        """What `to_json` wrote. Raises LayoutError with the field that cannot be."""
        found = _checked(file_checks.parsed(text))
        if (found.get("natives") or found.get("natives_behind")) and "natives_ranks" not in found:
            raise LayoutError("natives_ranks is missing: natives are those of so many ranks; calibrate again")
        return Machine(**found)

    def part(self, ranks: Sequence[int], world: int) -> Machine:
        """The machine that these of its `world` ranks make by themselves, numbered anew: an axis of a mesh.

        Evenly spaced ranks keep their groups; others have the slowest link that is between any two of them.
        """
        if list(ranks) == list(range(world)):
            return self
        rates = tuple(map(self.rate, ranks)) if self.rates else ()
        every = [self.innermost, *self.levels]
        crossed = [level for level in every if len({rank // level.ranks for rank in ranks}) > 1]
        inner, levels = crossed[-1] if crossed else self.innermost, []
        steps = {b - a for a, b in pairwise(ranks)}
        step = max(steps, default=1)
        even = len(steps) == 1 and step > 0 and all(step % n == 0 or n % step == 0 for n in (e.ranks for e in every))
        if even and ranks[0] % max(step, crossed[-1].ranks) < step:  # their groups begin where the machine's do
            inner = next(level for level in reversed(every) if level.ranks <= step)
            levels = [level._replace(ranks=level.ranks // step) for level in every if level.ranks > step]
        return replace(
            self,
            latency=inner.latency,
            bandwidth=inner.bandwidth,
            curve=inner.curve,
            burst=inner.burst,
            levels=tuple(level for level in levels if level.ranks < len(ranks)),
            rates=rates,
            ports=self.ports if inner == self.innermost else 1,
            natives={},
            natives_behind={},
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def of(machine: Machine | str | Path) -> Machine:
        """`machine` as it is, or the one that is loaded by this name."""
        return machine if isinstance(machine, Machine) else Machine.load(machine)

    @staticmethod
    def load(name: str | Path) -> Machine:
        """A preset by its name, or a file that `save` wrote. Raises LayoutError with the path and the field."""
        if not isinstance(name, (str, Path)):
            raise LayoutError(f"a machine is loaded by the name of a preset or of a file, not by {name!r}")
        if str(name) in PRESETS:
            return PRESETS[str(name)]
        path = Path(name)
        try:
            text = file_checks.read(path) if path.is_file() else None
        except OSError as error:
            raise LayoutError(f"the machine {str(name)!r} cannot be read: {error.strerror}") from None
        if text is None:
            raise LayoutError(f"no machine {str(name)!r}: neither a file nor one of {', '.join(PRESETS)}")
        try:
            return Machine.from_json(text)
        except LayoutError as error:
            raise LayoutError(f"{path}: {error}") from None


def _moved_share(name: str, ranks: int) -> float:
    """Of the bytes that a rank reads and writes in a collective, those that must reach it, or leave it."""
    if name == "broadcast":
        return 1.0
    whole = {"all_reduce": ranks, "all_to_all": 2 * ranks}.get(name, ranks + 1)
    return (ranks - 1) / whole


def _rate(value: float, unit: str) -> str:
    """4.5 GB/s"""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


# ------------------------------------------------------------------------------------------------------------- files

_FIELDS = ", ".join(f.name for f in fields(Machine))


def _checked(data: Any, fastest: float = file_checks.MOST_SPEED) -> dict[str, Any]:
    """The fields of a Machine from those of a file or of a Machine. Raises LayoutError for what cannot be."""
    if not isinstance(data, dict):
        raise LayoutError(f"a machine is an object with the fields {_FIELDS}")
    if unknown := set(data) - {f.name for f in fields(Machine)}:
        raise LayoutError(f"unknown field {shown(min(unknown))}; a machine has {_FIELDS}")
    found: dict[str, Any] = {}
    for known in fields(Machine):
        if known.name in data:
            found[known.name] = _field(known.name, data[known.name], fastest)
        elif known.default is MISSING and known.default_factory is MISSING:
            raise LayoutError(f"{known.name} is missing; a machine has {_FIELDS}")
    return found


def _field(name: str, value: Any, fastest: float) -> Any:
    if name in ("name", "source"):
        return file_checks.line(name, value)
    if name == "curve":
        return _curve(name, value)
    if name == "levels":
        return _levels(value, fastest)
    if name == "rates":
        every = enumerate(file_checks.listed(name, value))
        return tuple(file_checks.number(f"rates[{i}]", rate, LEAST_SHARE, 1.0) for i, rate in every)
    if name in ("natives", "natives_behind"):
        return _natives(name, value)
    if name == "native_share":
        return file_checks.number(name, value, 0.0, 1.0)
    if name == "poll":
        return file_checks.seconds(name, value) and file_checks.number(
            name, value, LEAST_POLL, file_checks.MOST_SECONDS
        )
    if name in _WHOLE:
        return file_checks.whole(name, value, *_WHOLE[name])
    if name.endswith(("rate", "width")):
        return file_checks.speed(name, value, fastest)
    return file_checks.seconds(name, value)


def _curve(name: str, value: Any) -> Points:
    """What was sampled of a link, if it was."""
    return file_checks.points(name, value) if file_checks.listed(name, value) else ()


def _natives(name: str, value: Any) -> dict[str, Points]:
    if not isinstance(value, Mapping):
        raise LayoutError(f"{name} must be an object of curves, not {shown(value)}")
    if wrong := set(value) - set(COLLECTIVES):
        raise LayoutError(f"{name} has no {shown(min(wrong))}; the collectives are {', '.join(COLLECTIVES)}")
    return {key: file_checks.points(f"{name}.{key}", points) for key, points in value.items()}


def _levels(value: Any, fastest: float) -> tuple[Level, ...]:
    levels: list[Level] = []
    for i, given in enumerate(file_checks.listed("levels", value)):
        name = f"levels[{i}]"
        if not isinstance(given, (list, tuple)) or not 3 <= len(given) <= 6:
            raise LayoutError(f"{name} must be [ranks, latency, bandwidth, shared, curve, burst], not {shown(given)}")
        ranks, latency, bandwidth, shared, curve, burst = [*given, *[False, [], 0.0][len(given) - 3 :]]  # type: ignore[misc]
        ranks = file_checks.whole(f"{name}.ranks", ranks, 1, MOST_RANKS)
        if levels and (ranks % levels[-1].ranks or ranks == levels[-1].ranks):
            raise LayoutError(f"{name}: groups of {ranks} ranks are not made of groups of {levels[-1].ranks}")
        latency = file_checks.seconds(f"{name}.latency", latency)
        bandwidth = file_checks.speed(f"{name}.bandwidth", bandwidth, fastest)
        shared, curve = file_checks.truth(f"{name}.shared", shared), _curve(f"{name}.curve", curve)
        burst = file_checks.seconds(f"{name}.burst", burst)
        levels.append(Level(ranks, latency, bandwidth, shared, curve, burst))
    return tuple(levels)


PRESETS = {
    m.name: m
    for m in (
        Machine(
            "gigabit", 50e-6, 118e6, 5e10, 1e10, 2e-6,
            "1 Gbit/s Ethernet, of which TCP leaves 118 MB/s; assumed: one core a rank with AVX2, round numbers",
        ),
        Machine(
            "laptop", 2e-6, 4e9, 5e10, 1e10, 2e-6,
            "assumed: shared memory and one core a rank with AVX2, round numbers",
        ),
        Machine(
            "h100-nvlink", 3e-6, 400e9, 6e14, 3e12, 4e-6,
            "NVIDIA H100 SXM data sheet: NVLink 450 GB/s each way, 989 TFLOP/s bf16, 3.35 TB/s; assumed: nine tenths "
            "of links and memory, six tenths of operations, 3 us a message, 4 us a launch",
            lanes=2,
        ),
        Machine(
            "h100-ndr", 3e-6, 400e9, 6e14, 3e12, 4e-6,
            "nodes of 8 H100 SXM as in h100-nvlink, InfiniBand NDR: 400 Gbit/s a GPU; assumed: 6 us a message between",
            levels=(Level(8, 6e-6, 48e9),),
            lanes=2,
        ),
        Machine(
            "a800-nvlink", 3e-6, 170e9, 2.2e14, 1.6e12, 4e-6,
            "NVIDIA A800 SXM data sheet: NVLink 200 GB/s each way, 312 TFLOP/s bf16, 2 TB/s; assumed: 85 % of links, "
            "80 % of memory, 70 % of operations, 3 us a message, 4 us a launch",
            lanes=2,
        ),
        Machine(
            "a800-hdr", 3e-6, 170e9, 2.2e14, 1.6e12, 4e-6,
            "nodes of 8 A800 SXM as in a800-nvlink, InfiniBand HDR: 200 Gbit/s a GPU; assumed: 6 us a message between",
            levels=(Level(8, 6e-6, 24e9),),
            lanes=2,
        ),
        Machine(
            "rtx4090-pcie", 10e-6, 12e9, 1.4e14, 0.8e12, 4e-6,
            "NVIDIA RTX 4090 data sheet: PCIe 4.0 x16, 32 GB/s, no peer access; 165 TFLOP/s fp16, 1 TB/s; assumed: "
            "12 GB/s by host memory, 85 % of operations, 80 % of memory, 10 us a message, 4 us a launch",
            lanes=2,
        ),
    )
}  # fmt: skip
