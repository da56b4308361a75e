"""Rates, changes of links, and the cluster as a whole. These values are checked before anything is created."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GOODPUT = 1448 / 1514  # the share of TCP payload in a full Ethernet frame, as tbf counts frames
CORE_BITS = 2_450_000_000  # per core, for all links together; measured: 4.9 Gbit/s on two cores
SUPERPACKET = 70_000  # bytes that the kernel passes on at once; a smaller bucket splits it into frames
FRAMES = 4096  # bytes; a smaller bucket passes nothing
LATENCY = "100ms"  # the longest time in a queue
CONGESTION = ("cubic", "reno")  # the default of Linux; the one that every kernel has
SIZE_SECONDS = 0.067  # a measured message lasts as long as 8 MB at 1 Gbit/s
LEAST_SIZE = 250_000  # bytes; a shorter message measures latency more than the rate
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "KiB": 2**10, "MiB": 2**20}

BAD_INPUT, REFUSED = 2, 3  # exit statuses of netlab itself; any other one is that of the job


class Refused(Exception):
    """An error as one line: the cause and the remedy."""

    def __init__(self, line: str, status: int = BAD_INPUT) -> None:
        super().__init__(line)
        self.status = status


@dataclass(frozen=True)
class Rate:
    """A rate in bits per second, in the notation of tc."""

    bits: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]bit)", text.strip().lower())
        if not match:
            raise Refused(f"'{text}' is not a rate: write it as 250mbit or 1gbit")
        bits = round(float(match[1]) * UNITS[match[2]])
        if not 10**6 <= bits <= 32 * 10**9:
            raise Refused(f"a rate of {text} cannot be shaped faithfully: take 1mbit to 32gbit")
        return cls(bits)

    def __str__(self) -> str:
        unit = max((unit for unit, size in UNITS.items() if self.bits >= size), key=UNITS.__getitem__)
        return f"{self.bits / UNITS[unit]:g}{unit}"

    @property
    def goodput(self) -> float:
        """The bytes per second that a TCP stream carries."""
        return self.bits / 8 * GOODPUT

    def bucket(self, burst: int | None) -> int:
        """The bytes of the token bucket: `burst`, or 1 ms, or 1.5 ms if that is less than a superpacket.

        A deeper bucket would let a message pass above the rate after a pause. A shallower one would lose the tokens
        that a late timer does not use.
        """
        in_a_second = self.bits // 8
        return burst or max(in_a_second // 1000, min(in_a_second * 3 // 2000, SUPERPACKET), FRAMES)

    def shape(self, burst: int | None) -> str:
        """The qdisc for tc."""
        return f"tbf rate {self.bits}bit burst {self.bucket(burst)} latency {LATENCY}"


@dataclass(frozen=True)
class Cores:
    """How much of a core the processes of a host may use together."""

    share: float

    @classmethod
    def parse(cls, text: str) -> Cores:
        number = text.strip().removesuffix("cores")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) or not 0.01 <= float(number) <= 1024:
            raise Refused(f"'{text}' is no number of cores: write it as 0.5, from 0.01 on; in a change as 0.5cores")
        return cls(float(number))

    def __str__(self) -> str:
        return f"{self.share:g}cores"

    @property
    def quota(self) -> tuple[int, int]:
        """Microseconds of all cores in each period, and the period. The kernel takes no quota below 1 ms."""
        period = max(10_000, math.ceil(1000 / self.share))
        return round(self.share * period), period


@dataclass(frozen=True)
class Distance:
    """What a link has beside its rate. In a change, None leaves a part as it was."""

    latency: float | None = None  # seconds of a round trip, as ping counts
    loss: float | None = None  # the share of the packets that are lost on one way

    def __str__(self) -> str:
        latency = [] if self.latency is None else [f"{self.latency * 1e3:g}ms"]
        return ",".join(latency if self.loss is None else [*latency, f"{self.loss * 100:g}%"])


def link_of(text: str) -> tuple[Rate | None, Distance | None]:
    """The rate and the distance of `50mbit,80ms,0.1%`. Each of the three may be left out."""
    words = text.lower().split(",")
    loss = amount(words.pop(), "%", 50) / 100 if words[-1].endswith("%") else None
    latency = amount(words.pop(), "ms", 1000) / 1e3 if words and words[-1].endswith("ms") else None
    rate = Rate.parse(",".join(words)) if words else None
    return rate, None if latency is loss is None else Distance(latency, loss)


def amount(word: str, unit: str, most: int) -> float:
    number = word.strip().removesuffix(unit)
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) or float(number) > most:
        raise Refused(f"'{word}' is not possible: write 80ms for a round trip, 0.1% for a loss, at most {most}{unit}")
    return float(number)


@dataclass(frozen=True)
class Change:
    """A link gets another rate or distance, is cut, or is restored; or a host gets other cores.

    `link` is a host, or `between`: the links between groups.
    """

    link: str
    what: Rate | Cores | str | None  # a rate, cores, "cut" or "restore"; None: only the distance changes
    distance: Distance | None = None

    @classmethod
    def parse(cls, line: str, lab: Lab) -> Change:
        link, what = [*line.split(), "", ""][:2]
        links = [*lab.names, *(["between"] if lab.between else [])]
        if link not in links or len(line.split()) != 2:
            raise Refused(
                f"'{line}' is not a change of a link: write LINK RATE,LATENCY,LOSS, LINK cut, LINK restore or HOST "
                f"0.5cores, with LINK of {', '.join(links)}"
            )
        if what in ("cut", "restore"):
            return cls(link, what)
        if what.endswith("cores"):
            if link == "between" or not lab.cores:
                raise Refused(f"'{line}': only a host has cores that could change: start with --cores 1,1")
            return cls(link, Cores.parse(what))
        rate, distance = link_of(what)
        if distance and not (lab.far if link == "between" else lab.near):
            start = f"--between {lab.between},0ms" if link == "between" else "--latency 0ms"
            raise Refused(f"'{line}': this link has no latency that could change: start with {start}")
        if rate and link != "between":
            rates = [rate if name == link else old for name, old in zip(lab.names, lab.rates, strict=True)]
            check_capacity(rates, lab.capacity)
        return cls(link, rate, distance)

    def __str__(self) -> str:
        return f"{self.link} {','.join(str(part) for part in (self.what, self.distance) if part is not None)}"


@dataclass(frozen=True)
class Lab:
    """The requested cluster."""

    rates: tuple[Rate, ...]  # of each host
    groups: int = 1
    between: Rate | None = None  # the rate of the link from each group to the others
    near: Distance | None = None  # between two hosts
    far: Distance | None = None  # between two groups, beside that
    ranks: int = 0
    size: int | None = None  # bytes of the messages that measure
    burst: int | None = None
    pinned: bool = True  # rank i to core i, modulo cores
    capacity: int = 1 << 62  # bits per second, all hosts together
    congestion: str = CONGESTION[0]  # the congestion control of the hosts' TCP
    cores: tuple[Cores, ...] = ()  # of each host; (): no quota

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"h{host}" for host in range(len(self.rates)))

    def group(self, host: int) -> int:
        return host * self.groups // len(self.rates)

    def slots(self) -> str:
        """The number of ranks per host, in the notation of both launchers."""
        hosts = len(self.rates)
        return ",".join(f"h{i}:{(i + 1) * self.ranks // hosts - i * self.ranks // hosts}" for i in range(hosts))

    def variables(self, cores: int) -> dict[str, str]:
        """Environment variables of the ranks: bits and payload bytes per second of the links, and cores per rank."""
        payload = [f"{rate.goodput:.0f}" for rate in self.rates]
        return {
            "NETLAB_RATES": ",".join(str(rate.bits) for rate in self.rates),
            "NETLAB_PAYLOAD": ",".join(payload) + (f";{self.between.goodput:.0f}" if self.between else ""),
            "NETLAB_CORES_PER_RANK": f"{min(1 if self.pinned else cores, cores / self.ranks):.4g}",
        }

    def expected(self, host: int) -> Rate:
        """The rate from a host to the next one: that of the slowest link between them."""
        ways = [self.rates[host], self.rates[(host + 1) % len(self.rates)]]
        if self.between and self.leaves(host):
            ways.append(self.between)
        return min(ways, key=lambda rate: rate.bits)

    def round_trip(self, host: int) -> float:
        """The seconds from a host to the next one and back."""
        passed = [self.near, self.far if self.leaves(host) else None]
        return sum(distance.latency for distance in passed if distance and distance.latency)

    def way(self, host: int) -> str:
        """The name of the link from a host to the next one."""
        return f"{self.names[host]} -> {self.names[(host + 1) % len(self.names)]}"

    def leaves(self, host: int) -> bool:
        """True if the next host is in another group."""
        return self.group(host) != self.group((host + 1) % len(self.rates))

    def message(self, host: int) -> int:
        """Bytes of the message that measures the links from this host to the next."""
        most = round(Rate(10**9).goodput * SIZE_SECONDS, -6)
        return self.size or int(min(max(self.expected(host).goodput * SIZE_SECONDS, LEAST_SIZE), most))


def lab_of(options: argparse.Namespace) -> Lab:
    """The cluster of these options. Raises Refused if it is impossible."""
    between, far = link_of(options.between) if options.between else (None, None)
    rate, near = link_of(options.latency) if options.latency else (None, None)
    if rate:
        raise Refused(f"--latency {options.latency}: write it as 5ms or 5ms,0.1%, and the rate as --rate {rate}")
    cores = tuple(map(Cores.parse, options.cores.split(","))) if options.cores else ()
    groups, hosts = 1, (len(cores) or None) if options.hosts is None else options.hosts
    if options.groups:
        match = re.fullmatch(r"([0-9]+)x([0-9]+)", options.groups)
        if not match or int(match[1]) < 2 or not int(match[2]):
            raise Refused(f"--groups {options.groups}: write it as 2x4, for two groups of four hosts")
        groups = int(match[1])
        if hosts not in (None, groups * int(match[2])):
            raise Refused(f"--groups {options.groups} makes {groups * int(match[2])} hosts, not {hosts}: drop --hosts")
        hosts = groups * int(match[2])
        if not between:
            raise Refused("--groups needs the rate of the slow link between them: --between 100mbit or 100mbit,80ms")
    elif options.between:
        raise Refused("--between is a link between groups: give --groups 2x2 too")
    if options.rates:
        rates = tuple(Rate.parse(text) for text in options.rates.split(","))
    else:
        rates = (Rate.parse(options.rate),) * (4 if hosts is None else hosts)
    if hosts not in (None, len(rates)):
        raise Refused(f"{hosts} hosts but {len(rates)} rates: give --rates one for each host")
    if not 2 <= len(rates) <= 250:
        raise Refused(f"a cluster of {len(rates)} hosts is not possible: take 2 to 250")
    ranks = len(rates) if options.ranks is None else options.ranks
    if ranks < len(rates):
        raise Refused(f"{ranks} ranks leave some of {len(rates)} hosts without a rank: take fewer hosts")
    capacity = Rate.parse(options.capacity).bits if options.capacity else CORE_BITS * len(os.sched_getaffinity(0))
    check_capacity(rates, capacity)
    congestion = options.congestion
    if congestion is None:
        congestion = CONGESTION[0] if CONGESTION[0] in allowed_congestion_controls() else CONGESTION[1]
    size = size_of(options.size)
    if len(cores) not in (0, len(rates)):
        raise Refused(f"{len(rates)} hosts but {len(cores)} numbers of cores: give --cores one for each host")
    burst, pin = options.burst, options.pin
    return Lab(rates, groups, between, near, far, ranks, size, burst, pin, capacity, congestion, cores)


def allowed_congestion_controls() -> list[str]:
    """The congestion controls that this machine allows in other network namespaces."""
    return Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


def check_capacity(rates: Sequence[Rate], capacity: int) -> None:
    total = sum(rate.bits for rate in rates)
    if total > capacity:
        raise Refused(f"{total / 1e9:g} Gbit/s of all hosts together are more than this machine can carry (about "
                      f"{capacity / 1e9:g}): lower --rate, take fewer hosts, or give --capacity")  # fmt: skip


def size_of(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+)(B|kB|MB|KiB|MiB)?", text)
    if not match or not 10**5 <= (size := int(match[1]) * SIZES[match[2] or "B"]) <= 10**9:
        raise Refused(f"--size {text}: write it as 8MB; 100kB to 1000MB can be measured")
    return size


def planned_change(text: str, lab: Lab) -> tuple[float, Change]:
    seconds, _, change = text.strip().partition(" ")
    try:
        when = float(seconds)
    except ValueError:
        when = -1.0
    if not 0 <= when < float("inf"):
        raise Refused(f"--at '{text}': write it as '2.5 h1 100mbit', the seconds first")
    return when, Change.parse(change, lab)
