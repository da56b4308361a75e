"""How fast messages are between the ranks of a communicator: `fompi.calibrate` makes links of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from fompi.base.errors import WaitTimeout
from fompi.engine.communicator import Communicator
from fompi.model import fit
from fompi.model.fit import PAIR_NBYTES, Topology
from fompi.model.machine import Level
from fompi.mpi import launcher
from fompi.mpi.link import Link
from fompi.runtime.report import quiet
from fompi.tuning.rounds import meet, of_all_ranks

ROUNDS, IDLE_SECONDS, MOST_SECONDS = 5, 0.05, 0.5
"""Of each figure; a pause before each, where a network may have queues; what would take longer is left out."""

PAIR_ROUNDS, ALL_PAIRS = 3, 8
"""How the speed of a pair is taken; of more ranks, not all pairs are looked at."""

SIZES = [1 << n for n in range(10, 23, 2)]
"""Bytes of messages: 1 KiB to 4 MiB."""

LARGEST, LARGEST_ROUNDS = SIZES[-3:], 11
"""What two of these differ in is the bandwidth: a few per cent of one would be all of its error."""

LOST_PACKETS = 1.15
"""A message that takes so many times as long as the quickest of its size lost packets, and TCP noticed late."""

AT_ONCE = (1, 2, 4, 8)
"""So many other ranks are exchanged with at once, to see how many ports there are."""


class Messages:
    """Times of messages over `link`, a communicator that nobody else uses. All methods are collective."""

    def __init__(self, comm: Communicator, link: Link):
        self.link, self.mpi = link, link.comm
        self.rank, self.size, self.timeout = comm.rank, comm.size, comm.engine.timeout
        self.network, self.idle = comm.network, IDLE_SECONDS if comm.network else 0.0
        most = max(*SIZES, *PAIR_NBYTES)
        self.inbox, self.outbox = np.zeros(most, np.uint8), np.ones(most, np.uint8)

    def pairs(self) -> dict[tuple[int, int], float]:
        """Bytes per second of pairs of ranks, each by itself, there and back: by what two sizes differ in.

        None of ranks that share the cores of one host: it would be who has a core just then that tells them apart.
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
            if self.rank in pair:
                short, long = (
                    min(self._there_and_back(pair, nbytes) for _ in range(PAIR_ROUNDS)) for nbytes in PAIR_NBYTES
                )
                seconds[i] = max(long - short, 0.1 * long)  # both are as good as their noise
            meet(self.mpi)
        slowest = of_all_ranks(self.mpi, seconds).max(axis=0)
        return {pair: 2 * (large - small) / s for pair, s in zip(pairs, slowest.tolist(), strict=True)}

    def level(self, found: Topology, number: int) -> Level:
        """The link of this level, while all ranks use it at once, as they do in a collective."""
        ranks = found.groups[number - 1] if number else 1
        every = fit.shift(found, number)
        slow = min(every, key=lambda rank: found.rates[rank])
        sources, dests = ([end] for end in every[self.rank]) if self.rank in every else ([], [])
        latency = self._latency(ranks)
        samples = self._samples(lambda nbytes: self._shift(sources, dests, nbytes), SIZES[-1])
        shared = False
        if number:
            pair = slow, every[slow][1]  # slowed down as all of them together are
            alone = self._samples(lambda nbytes: self._alone(pair, nbytes), samples[-1][0])
            together, by_itself = (some[len(alone) - 1][1] - latency for some in (samples, alone))
            shared = together > (1 + fit.crowd(every, ranks)) / 2 * by_itself
            samples = alone if shared else samples
        full = [(nbytes, latency + max(0.0, seconds - latency) * found.rates[slow]) for nbytes, seconds in samples]
        points = fit.sustained(full, latency)
        (a, y), (b, z) = points[-2:]
        bandwidth = (b - a) / (z - y) if z > y else b / max(z, 1e-9)
        return Level(ranks, latency, bandwidth, shared, points, fit.burst(full, latency))

    def ports(self, whole: int) -> int:
        """How many others of its group of `whole` ranks each rank can exchange with at once."""
        first, nbytes = self.rank - self.rank % whole, len(self.inbox) // AT_ONCE[-1]
        taken = {}
        for count in (n for n in AT_ONCE if n < whole):
            sources, dests = (
                [first + (self.rank - first + way * step) % whole for step in range(1, count + 1)] for way in (-1, 1)
            )
            taken[count] = self._shift(sources, dests, nbytes)
        return fit.ports(taken)

    def _there_and_back(self, pair: tuple[int, int], nbytes: int) -> float:
        first, other = pair
        begun = perf_counter()
        peer = other if self.rank == first else first
        for turn in (first, other):
            if turn == self.rank:
                self._complete([self.mpi.Isend(self.outbox[:nbytes], peer)])
            else:
                self._complete([self.mpi.Irecv(self.inbox[:nbytes], peer)])
        return perf_counter() - begun

    @staticmethod
    def _samples(seconds_of: Callable[[int], float], most: float) -> list[tuple[float, float]]:
        """Seconds by bytes, up to `most` bytes or to what takes too long."""
        samples: list[tuple[float, float]] = []
        for nbytes in SIZES:
            if nbytes <= most and (len(samples) < 2 or 4 * samples[-1][1] <= MOST_SECONDS):
                samples.append((nbytes, seconds_of(nbytes)))
        return samples

    def _latency(self, step: int) -> float:
        """Half of what a byte takes there and back, between ranks 0 and `step`."""
        seconds = np.array([np.inf])
        if self.rank in (0, step):
            seconds[0] = median(self._there_and_back((0, step), 1) for _ in range(20)) / 2
        meet(self.mpi)
        return float(of_all_ranks(self.mpi, seconds).min())

    def _alone(self, pair: tuple[int, int], nbytes: int) -> float:
        """One message from the first to the second, and nobody else.

        With one the other way TCP's acknowledgements queue behind data, and either may take a tenth longer than in the
        middle of a plan, where others are under way too.
        """
        source, dest = pair
        return self._shift([source] * (self.rank == dest), [dest] * (self.rank == source), nbytes)

    def _shift(self, sources: Sequence[int], dests: Sequence[int], nbytes: int) -> float:
        """All ranks at once, each from its sources and to its destinations, if any: seconds of the slowest one."""
        taken = []
        for _ in range(LARGEST_ROUNDS if nbytes in LARGEST else ROUNDS):
            sleep(self.idle)
            meet(self.mpi)
            taken.append(self._exchange(sources, dests, nbytes))
        slowest = of_all_ranks(self.mpi, np.array(taken)).max(axis=0)
        return quiet(slowest[slowest <= LOST_PACKETS * slowest.min()] if nbytes in LARGEST else slowest)

    def _exchange(self, sources: Sequence[int], dests: Sequence[int], nbytes: int) -> float:
        begun = perf_counter()
        requests = [
            self.mpi.Irecv(self.inbox[i * nbytes : (i + 1) * nbytes], source) for i, source in enumerate(sources)
        ]
        requests += [self.mpi.Isend(self.outbox[:nbytes], dest) for dest in dests]
        self._complete(requests)
        return perf_counter() - begun

    def _complete(self, requests: Iterable[Any]) -> None:
        end = perf_counter() + self.timeout
        for request in requests:
            while not request.Test():
                if perf_counter() > end:
                    self.link.given_up.append((request, self.inbox, self.outbox))
                    raise WaitTimeout(f"rank {self.rank} waited {self.timeout:g} s (FOMPI_TIMEOUT) to measure a link")
                os.sched_yield()
