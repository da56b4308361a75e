"""The messages of a simulation: each occupies the ports of its link, and messages that share a port share its rate.

    message 1   |======|====|           full rate, then half of it
    message 2          |====|======|    half of the rate, then all of it

A message may begin when both ends have posted it. Messages from one rank to another go one after the other.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from fompi.model.machine import LinkModel, Machine

Port = tuple[str, int, int]
"""("out" or "in", number of the level or -1 for the innermost, number of the rank or of the group)."""


class EventQueue:
    """Simulated time in seconds, and what will happen later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Call `action` at `time`. Actions of the same time are called in the order of their registration."""
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self, after_each: Callable[[], object]) -> None:
        """Call all actions in order of time, and `after_each` after every action."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
            after_each()


class Message:
    """A message of `nbytes` between two ranks, `pair`.

    `begins()` is called when it occupies its link, and returns a factor on its duration. `arrives()` is called at its
    end. While the message moves, `remaining` are its seconds at full rate, as of time `since`. It has the share `share`
    of the full rate since then. `changes` counts the changes of this share.
    """

    __slots__ = ("arrives", "begins", "changes", "latency", "nbytes", "pair", "ports", "remaining", "share", "since")

    def __init__(self, pair: tuple[int, int], nbytes: int, begins: Callable[[], float], arrives: Callable[[], object]):
        self.pair, self.nbytes, self.begins, self.arrives = pair, nbytes, begins, arrives
        self.ports: Sequence[Port] = ()
        self.remaining = self.latency = self.share = self.since = 0.0
        self.changes = 0


class Network:
    """The links and ports of the first `step` ranks of a machine. They represent all ranks (see `simulate`)."""

    def __init__(self, machine: Machine, step: int, queue: EventQueue):
        self.machine, self.step, self.queue = machine, step, queue
        self.waiting: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.busy: set[tuple[int, int]] = set()  # pairs of ranks with a message on the way
        self.links: dict[tuple[int, int], tuple[LinkModel, list[Port]]] = {}
        self.messages: defaultdict[Port, dict[Message, None]] = defaultdict(dict)
        self.changed: set[Port] = set()  # ports at which a message has begun or ended at this moment
        # messages that begin at this moment, and the bursts of their links
        self.starting: list[tuple[Message, float]] = []
        # seconds of burst left at a time; the time of the last change
        self.credit: dict[Port, tuple[float, float]] = {}

    def send(self, message: Message) -> None:
        """Both ends have posted `message`. It begins after the earlier messages of its pair."""
        self.waiting[message.pair].append(message)
        self.queue.at(self.queue.now, partial(self._begin_next, message.pair))

    def _begin_next(self, pair: tuple[int, int]) -> None:
        if pair in self.busy or not self.waiting[pair]:
            return
        self.busy.add(pair)
        message = self.waiting[pair].popleft()
        if pair not in self.links:
            link = self.machine.link(*pair)
            self.links[pair] = link, [self._port(*port) for port in link.ports]
        link, message.ports = self.links[pair]
        factor = message.begins()
        message.remaining = link.busy(message.nbytes) * factor
        message.latency = link.level.latency * factor
        if link.level.burst:
            self.starting.append((message, link.level.burst))
        for port in message.ports:
            self.messages[port][message] = None
        message.since = self.queue.now
        self._update(message.ports)

    def _port(self, way: str, number: int, end: int) -> Port:
        """The port of the rank, or of the group, that represents the given one."""
        shared = number >= 0 and self.machine.levels[number].shared
        return way, number, end % (-(-self.step // self.machine.levels[number].ranks) if shared else self.step)

    def _capacity(self, port: Port) -> int:
        """How many messages a port passes at full rate. The ports of one rank on the innermost level count as one."""
        return self.machine.ports if port[1] < 0 else 1

    def _update(self, ports: Sequence[Port]) -> None:
        """Compute the shares at these ports anew, after all that begins or ends at this moment."""
        if not self.changed:
            self.queue.at(self.queue.now, self._settle)
        self.changed.update(ports)

    def _settle(self) -> None:
        """Give each message its share: equal shares at each port, the least over its ports, and at most 1."""
        self._pass_bursts()
        now = self.queue.now
        ports, self.changed = sorted(self.changed), set()
        for message in dict.fromkeys(message for port in ports for message in self.messages[port]):
            share = min(1.0, *(self._capacity(port) / len(self.messages[port]) for port in message.ports))
            if share != message.share:
                message.remaining = max(0.0, message.remaining - (now - message.since) * message.share)
                message.share, message.since, message.changes = share, now, message.changes + 1
                self.queue.at(now + message.remaining / share, partial(self._drained, message, message.changes))

    def _pass_bursts(self) -> None:
        """Subtract from the messages that begin now what their ports pass at once: more after a longer silence.

        They get equal shares of the burst of a port, as they get of its rate (progressive filling).
        """
        now = self.queue.now
        bursts = {port: burst for message, burst in self.starting for port in message.ports}
        filling = [message for message, _ in self.starting]
        new, left = set(filling), {}
        for port, burst in bursts.items():
            credit, changed = self.credit.get(port, (burst, now))
            silent = new.issuperset(self.messages[port])
            left[port] = min(burst, credit + now - changed) if silent else credit
        while filling := [m for m in filling if m.remaining > 0 and all(left[port] > 0 for port in m.ports)]:
            counts = Counter(port for message in filling for port in message.ports)
            shares = {port: left[port] / n for port, n in counts.items()}
            passed = min(*shares.values(), *(message.remaining for message in filling))
            for message in filling:
                message.remaining -= passed
            for port, share in shares.items():
                left[port] = (share - passed) * counts[port]
        self.credit.update((port, (credit, now)) for port, credit in left.items())
        self.starting = []

    def _drained(self, message: Message, changes: int) -> None:
        """The last byte has left the ports, unless the share of the message has changed since this was planned."""
        if message.changes != changes:
            return
        now = self.queue.now
        for port in message.ports:
            del self.messages[port][message]
            if port in self.credit:
                self.credit[port] = self.credit[port][0], now
        self.busy.discard(message.pair)
        self._update(message.ports)
        self._begin_next(message.pair)
        self.queue.at(now + message.latency, message.arrives)
