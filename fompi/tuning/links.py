"""The times of messages between the ranks of a communicator. `fompi.calibrate` makes the links of a machine from them.

docs/inside/planner.md says which measurement led to which choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fompi.base.errors import WaitTimeout
from fompi.engine.communicator import Communicator
from fompi.model import fit
from fompi.model.fit import PAIR_NBYTES, Topology
from fompi.model.machine import Level
from fompi.mpi import launcher
from fompi.mpi.link import Link
from fompi.runtime.report import lower_quartile
from fompi.tuning.rounds import alternate, meet, of_all_ranks

ROUNDS = 5
"""How often each time is taken."""

IDLE_SECONDS = 0.05
"""Silence before each message over a network, in seconds, so that its queues are empty."""

MOST_SECONDS = 0.5
"""Larger messages are left out if they would take longer than this, in seconds."""

PAIR_ROUNDS = 3
"""How often a message between two ranks is timed to compare pairs. The least time counts."""

ALL_PAIRS = 8
"""With more ranks than this, only pairs at distances of a power of two are measured."""

SIZES = [1 << n for n in range(10, 23, 2)]
"""Bytes of the messages: 1 KiB to 4 MiB."""

LARGEST, LARGEST_ROUNDS = SIZES[-3:], 11
"""The largest sizes are timed more often.

The bandwidth follows from the difference of two of them. So a small error in one time is a large error of the
bandwidth.
"""

LOST_PACKETS = 1.15
"""A large message that takes this many times as long as the fastest of its size is dropped.

It lost packets, and TCP noticed late.
"""

AT_ONCE = (1, 2, 4, 8)
"""Numbers of peers with which a rank exchanges messages at once. They show how many ports it has."""


class LinkMeter:
    """Measures messages over `link`, a communicator that nobody else uses. All methods are collective.

    `proceed` is called on all ranks before each measurement. It may raise an error, on all of them.
    """

    def __init__(self, comm: Communicator, link: Link, proceed: Callable[[], None] = lambda: None):
        self.link, self.mpi, self.proceed = link, link.comm, proceed
        self.rank, self.size, self.timeout = comm.rank, comm.size, comm.engine.timeout
        self.network, self.idle = comm.network, IDLE_SECONDS if comm.network else 0.0
        most = max(*SIZES, *PAIR_NBYTES)
        self.inbox, self.outbox = np.zeros(most, np.uint8), np.ones(most, np.uint8)

    def pairs(self) -> dict[tuple[int, int], float]:
        """Bytes per second of pairs of ranks, one pair at a time: from the times of two sizes, there and back.

        Empty if ranks on one host share cores. There the times would depend on which rank has a core at that moment.
        """
        if not self.network and of_all_ranks(self.mpi, np.array([launcher.cores_per_rank()])).min() < 1:
            return {}
        if self.size <= ALL_PAIRS:
            pairs = [(a, b) for a in range(self.size) for b in range(a + 1, self.size)]
        else:
            steps = [1 << i for i in range(self.size.bit_length()) if 1 << i < self.size]
            pairs = [(a, a + step) for step in steps for a in range(self.size - step)]
        small, large = PAIR_NBYTES
        seconds = np.zeros(len(pairs))
        for i, pair in enumerate(pairs):
            self.proceed()
            if self.rank in pair:
                short, long = (
                    min(self._there_and_back(pair, nbytes) for _ in range(PAIR_ROUNDS)) for nbytes in PAIR_NBYTES
                )
                seconds[i] = max(long - short, 0.1 * long)  # noise may be as large as the difference
            meet(self.mpi)
        slowest = of_all_ranks(self.mpi, seconds).max(axis=0)
        return {pair: 2 * (large - small) / s for pair, s in zip(pairs, slowest.tolist(), strict=True)}

    def level(self, topology: Topology, number: int) -> Level:
        """The link of this level of the topology, while all ranks use it at once, as in a collective.

        Level 0 is the link between single ranks. A link that a group shares is measured by one message alone.
        """
        ranks = topology.groups[number - 1] if number else 1
        partners = fit.exchange_rings(topology, number)  # rank -> (source, dest)
        slow = min(partners, key=lambda rank: topology.rates[rank])
        sources, dests = ([partner] for partner in partners[self.rank]) if self.rank in partners else ([], [])
        latency = self._latency(ranks)
        samples = self._samples(lambda nbytes: self._shift(sources, dests, nbytes), SIZES[-1])
        shared = False
        if number:
            pair = slow, partners[slow][1]  # the slowest rank, because it also limits all of them together
            alone = self._samples(lambda nbytes: self._one_way(pair, nbytes), samples[-1][0])
            seconds_together, seconds_alone = (times[len(alone) - 1][1] - latency for times in (samples, alone))
            shared = seconds_together > (1 + fit.most_in_group(partners, ranks)) / 2 * seconds_alone
            samples = alone if shared else samples
        rate = topology.rates[slow]
        full_rate = [(nbytes, latency + max(0.0, seconds - latency) * rate) for nbytes, seconds in samples]
        points = fit.sustained(full_rate, latency)
        return Level(ranks, latency, fit.bandwidth(points), shared, points, fit.burst(full_rate, latency))

    def ports(self, group: int) -> int:
        """With how many peers in its group of `group` ranks each rank can exchange messages at full rate at once."""
        first, nbytes = self.rank - self.rank % group, len(self.inbox) // AT_ONCE[-1]
        taken = {}
        for count in (n for n in AT_ONCE if n < group):
            sources, dests = (
                [first + (self.rank - first + way * step) % group for step in range(1, count + 1)] for way in (-1, 1)
            )
            taken[count] = self._shift(sources, dests, nbytes)
        return fit.ports(taken)

    def _there_and_back(self, pair: tuple[int, int], nbytes: int) -> float:
        """Seconds of a message from the first rank of the pair to the second, and of one back. Only these two call."""
        first, other = pair
        begun = perf_counter()
        peer = other if self.rank == first else first
        for sender in (first, other):
            if sender == self.rank:
                self._complete([self.mpi.Isend(self.outbox[:nbytes], peer)])
            else:
                self._complete([self.mpi.Irecv(self.inbox[:nbytes], peer)])
        return perf_counter() - begun

    @staticmethod
    def _samples(seconds_of: Callable[[int], float], most: float) -> list[tuple[float, float]]:
        """(bytes, seconds) of all SIZES up to `most` bytes, without those that would take longer than MOST_SECONDS."""
        samples: list[tuple[float, float]] = []
        for nbytes in SIZES:
            if nbytes <= most and (len(samples) < 2 or 4 * samples[-1][1] <= MOST_SECONDS):
                samples.append((nbytes, seconds_of(nbytes)))
        return samples

    def _latency(self, step: int) -> float:
        """Seconds of a message of one byte between ranks 0 and `step`: half of the time there and back."""
        seconds = np.array([np.inf])
        if self.rank in (0, step):
            seconds[0] = median(self._there_and_back((0, step), 1) for _ in range(20)) / 2
        meet(self.mpi)
        return float(of_all_ranks(self.mpi, seconds).min())

    def _one_way(self, pair: tuple[int, int], nbytes: int) -> float:
        """Seconds of one message from the first rank of the pair to the second, while no other message moves.

        With a message the other way, TCP's acknowledgements would queue behind data. Then both may take a tenth longer
        than in the middle of a plan.
        """
        source, dest = pair
        return self._shift([source] * (self.rank == dest), [dest] * (self.rank == source), nbytes)

    def _shift(self, sources: Sequence[int], dests: Sequence[int], nbytes: int) -> float:
        """Seconds of the slowest rank while all ranks receive from their sources and send to their dests at once."""
        self.proceed()
        exchange = partial(self._exchange, sources, dests, nbytes)
        rounds = LARGEST_ROUNDS if nbytes in LARGEST else ROUNDS
        slowest = np.array(alternate(self.mpi, {"": exchange}, rounds, warmup=0, idle=self.idle)[""])
        return lower_quartile(slowest[slowest <= LOST_PACKETS * slowest.min()] if nbytes in LARGEST else slowest)

    def _exchange(self, sources: Sequence[int], dests: Sequence[int], nbytes: int) -> None:
        """All messages of this rank at once, until they are done."""
        requests = [
            self.mpi.Irecv(self.inbox[i * nbytes : (i + 1) * nbytes], source) for i, source in enumerate(sources)
        ]
        requests += [self.mpi.Isend(self.outbox[:nbytes], dest) for dest in dests]
        self._complete(requests)

    def _complete(self, requests: Iterable[Any]) -> None:
        """Wait for the requests. Raises WaitTimeout after the timeout of the engine."""
        end = perf_counter() + self.timeout
        for request in requests:
            while not request.Test():
                if perf_counter() > end:
                    self.link.given_up.append((request, self.inbox, self.outbox))
                    raise WaitTimeout(
                        f"rank {self.rank}: a message to measure a link is not done after {self.timeout:g} s "
                        "(FOMPI_TIMEOUT)"
                    )
                os.sched_yield()
