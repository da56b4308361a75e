"""Which networks some hosts share, which one is the best, and what is wrong with the others. Pure: values in and out.

networks = shared(interfaces, reached)        # of facts: what the agents say of their interfaces
best = choose(networks)                       # after each pair of hosts was measured over each of them
remarks(networks, best, interfaces, reached)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_interface
from itertools import combinations
from typing import Any, NamedTuple

ALIKE = 1.1
"""Networks whose rates differ by less than this factor are compared by their latency."""

CABLE_SHARE = 0.5
"""A cable should carry at least this share of the rate that its card has agreed on."""


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of a host. `megabits` is the rate that its card says, 0 if it says none."""

    name: str
    address: str  # IPv4, "" without one
    bits: int = 24  # of the address, those of the network
    megabits: int = 0
    is_wireless: bool = False
    is_cable: bool = True  # it has a device: not a bridge, not a tunnel
    is_up: bool = True

    @property
    def subnet(self) -> str:
        return str(ip_interface(f"{self.address}/{self.bits}").network)

    def __str__(self) -> str:
        return f"{self.name} (Wi-Fi)" if self.is_wireless else self.name


class Way(NamedTuple):
    """The measured way between two hosts: seconds of an empty message, bytes per second in both directions."""

    latency: float
    there: float
    back: float

    @property
    def rate(self) -> float:
        return min(self.there, self.back)


class NoWay(NamedTuple):
    """One host does not reach another one: "dropped", "refused", or another error."""

    source: str
    dest: str
    why: str


@dataclass(frozen=True)
class SharedNetwork:
    """A network of several hosts: its subnet, or ROUTED, the interface of each host, and the way of each pair.

    The ways are there once they were measured.
    """

    subnet: str
    ends: Mapping[str, NetworkInterface]
    ways: Mapping[tuple[str, str], Way | NoWay] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the interfaces, each once."""
        return tuple(dict.fromkeys(end.name for end in self.ends.values()))

    @property
    def slowest(self) -> Way | None:
        """The slowest way. None if two hosts do not reach each other."""
        found = [way for way in self.ways.values() if isinstance(way, Way)]
        return min(found, key=lambda way: way.rate) if found and len(found) == len(self.ways) else None

    def __str__(self) -> str:
        return f"{'/'.join(self.names)} {self.subnet}"


ROUTED = "routed"
"""The `subnet` of hosts that share none: each has the address to which ssh goes."""


def interfaces_of(facts: Mapping[str, Any]) -> tuple[NetworkInterface, ...]:
    """The interfaces in the facts of an agent."""
    return tuple(NetworkInterface(**each) for each in facts["interfaces"])


def shared(
    interfaces: Mapping[str, Sequence[NetworkInterface]], reached: Mapping[str, str]
) -> tuple[SharedNetwork, ...]:
    """The networks that all hosts are in, or one that is routed. `reached`: the address to which ssh goes, by host.

    A bridge of containers has the same address on every host: it joins none of them. Of two interfaces of a host in one
    network, as of a notebook with a cable and Wi-Fi, the cable counts.
    """
    if len(interfaces) < 2:
        return ()
    addresses = [each.address for ours in interfaces.values() for each in ours if each.address]
    ends: dict[str, dict[str, NetworkInterface]] = {}
    for host, ours in interfaces.items():
        for each in sorted(ours, key=lambda each: (not each.is_up, each.is_wireless, -each.megabits)):
            if each.address and addresses.count(each.address) == 1 and each.bits < 32:
                ends.setdefault(each.subnet, {}).setdefault(host, each)
    found = [SharedNetwork(subnet, of) for subnet, of in sorted(ends.items()) if len(of) == len(interfaces)]
    if not found:
        routed = {
            host: next(each for each in ours if each.address == reached.get(host))
            for host, ours in interfaces.items()
            if any(each.address == reached.get(host) for each in ours)
        }
        if len(routed) == len(interfaces):
            found = [SharedNetwork(ROUTED, routed)]
    return tuple(found)


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """All pairs of hosts, in rounds in which no host is in two pairs: the circle method of tournaments."""
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([tuple(sorted((a, b), key=hosts.index)) for a, b in pairs if a is not None and b is not None])
        circle[1:] = [circle[-1], *circle[1:-1]]
    return found  # type: ignore[return-value]


def choose(networks: Sequence[SharedNetwork]) -> SharedNetwork | None:
    """The network whose slowest pair of hosts is the fastest; of those alike, the one with the least latency."""
    usable = [(way, network) for network in networks if (way := network.slowest) is not None]
    if not usable:
        return None
    best = max(way.rate for way, _ in usable)
    return min((pair for pair in usable if pair[0].rate * ALIKE >= best), key=lambda pair: pair[0].latency)[1]


def obstacles(network: SharedNetwork) -> Iterator[str]:
    """A line for each host that others do not reach over this network, with the remedy."""
    for dest in network.ends:
        way = next((w for w in network.ways.values() if isinstance(w, NoWay) and w.dest == dest), None)
        if way is not None:
            end = network.ends[dest]
            allow = "" if network.subnet == ROUTED else f" from {network.subnet}"
            firewall = f"on {dest} type `sudo ufw allow{allow}`, or open TCP ports 1024 to 65535 for {way.source}"
            what = {
                "dropped": f"packets from {way.source} to {end.address} ({end}) are dropped: a firewall? {firewall}",
                "refused": f"{end.address} ({end}) refuses connections from {way.source}: a firewall? {firewall}",
            }
            yield f"{dest}: {what.get(way.why, f'{way.source} does not reach {end.address} ({end}): {way.why}')}"


def remarks(
    networks: Sequence[SharedNetwork],
    best: SharedNetwork,
    interfaces: Mapping[str, Sequence[NetworkInterface]],
    reached: Mapping[str, str],
) -> Iterator[str]:
    """What a user should know: names that lead over a slow network, cables below their rate or without addresses."""
    top = best.slowest
    assert top is not None
    for network in networks:
        way = network.slowest
        if way is None:
            yield from obstacles(network)
        elif way.rate * ALIKE < top.rate:
            for host, end in network.ends.items():
                if reached.get(host) == end.address:
                    yield (
                        f"{host} is reached by its name over {end}: {megabits(way.rate)} Mbit/s. "
                        f"The job uses {best.ends[host]}: {megabits(top.rate)}"
                    )
    for host, end in best.ends.items():
        rate = max((way.rate for pair, way in best.ways.items() if host in pair and isinstance(way, Way)))
        if end.is_cable and not end.is_wireless and end.megabits and rate * 8e-6 < CABLE_SHARE * end.megabits:
            yield (
                f"{host}: {end} has agreed on {end.megabits} Mbit/s and carries {megabits(rate)}: "
                "look at the cable, the switch and what else uses them"
            )
    unused = {
        host: [each for each in ours if each.is_cable and each.is_up and not each.address and not each.is_wireless]
        for host, ours in interfaces.items()
    }
    if all(unused.values()):
        faster = min(max(each.megabits for each in ours) for ours in unused.values())
        if faster > ALIKE * top.rate * 8e-6:
            names = ", ".join(f"{ours[0].name} of {host}" for host, ours in unused.items())
            first, other = list(unused)[:2]
            yield (
                f"{best} gives {megabits(top.rate)} Mbit/s. These have a cable of {faster} and no address: {names}. "
                f"On {first} type `sudo ip address add 10.99.0.1/24 dev {unused[first][0].name}`, on {other} "
                f"`sudo ip address add 10.99.0.2/24 dev {unused[other][0].name}`"
            )


def rows(networks: Sequence[SharedNetwork], best: SharedNetwork | None) -> list[list[str]]:
    """A row for each pair of hosts and each network: both interfaces, latency in us, Mbit/s there and back."""
    found = []
    for pair in combinations(next(iter(networks)).ends, 2) if networks else ():
        for network in networks:
            way = network.ways[pair]
            numbers = [way.why, "", ""] if isinstance(way, NoWay) else [
                f"{1e6 * way.latency:.0f}", megabits(way.there), megabits(way.back)
            ]  # fmt: skip
            used = "<- the job uses it" if network is best else ""
            found.append(
                [*pair, *(f"{network.ends[host]} {network.ends[host].address}" for host in pair), *numbers, used]
            )
    return found


COLUMNS = ("from", "to", "over", "and", "latency us", "Mbit/s there", "back", "")


def megabits(rate: float) -> str:
    """Bytes per second as Mbit/s."""
    return f"{8e-6 * rate:.3g}" if rate < 125e6 else f"{8e-6 * rate:.0f}"
