"""Whether a measurement can be used: what others did on the cores meanwhile, and a verdict in words.

load = OtherLoad(mpi)                      # collective; the measurement begins
...
load.cores()                               # collective: how many cores others used, of how many
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from fompi.model.machine import Machine
from fompi.tuning.rounds import of_all_ranks, texts

OTHERS_SHARE, MOST_OTHERS_SHARE = 0.1, 0.4
"""Above the first share of the cores, others disturb a measurement. Above the second, its figures cannot be used."""

KERNELS_FACTOR, MOST_KERNELS_FACTOR = 1.15, 1.5
"""These two limits for kernels that are measured again at the end: how many times as long, or as short, they take."""

LINKS_FACTOR, MOST_LINKS_FACTOR = 1.3, 2.5
"""These two limits for messages that are measured again."""

POSSIBLE = {
    "latency": (1e-8, 1.0), "bandwidth": (1e4, 1e13), "flops_rate": (1e8, 1e15), "memory_rate": (1e7, 1e14),
    "overhead": (1e-8, 1e-2),
}  # fmt: skip
"""The least and the greatest value that a measured field of a Machine can have on a machine that exists."""


class Verdict(NamedTuple):
    """What disturbed a measurement, in words, and what `ruins` it: then its figures cannot be used. () is plausible."""

    ruins: tuple[str, ...] = ()
    disturbs: tuple[str, ...] = ()

    @property
    def is_usable(self) -> bool:
        return not self.ruins

    def __str__(self) -> str:
        what = "; ".join([*self.ruins, *self.disturbs])
        if not what:
            return "plausible: nothing disturbed the measurement"
        if self.is_usable:
            return f"disturbed, but usable: {what}"
        return f"disturbed beyond use: {what}. Measure again when the machine is idle"


def judge(machine: Machine, kernels: float = 1.0, links: float = 1.0, others: float = 0.0, cores: int = 0) -> Verdict:
    """The verdict on a measured machine.

    `kernels` and `links` are the times of kernels and of messages at the end, divided by those before. `others` is how
    many of the `cores` other programs used (0 cores: unknown).
    """
    found: dict[bool, list[str]] = {True: [*_impossible(machine)], False: []}  # by whether it ruins the figures
    if (what := others_in_words(others, cores)) is not None:
        found[others > MOST_OTHERS_SHARE * cores].append(what)
    for name, factor, noted, ruinous in (
        ("kernels", kernels, KERNELS_FACTOR, MOST_KERNELS_FACTOR),
        ("messages", links, LINKS_FACTOR, MOST_LINKS_FACTOR),
    ):
        change = max(factor, 1 / factor) if factor > 0 else inf
        if change > noted:
            found[change > ruinous].append(f"{name} took {round(factor, 2)} times as long at the end as before")
    return Verdict(tuple(found[True]), tuple(found[False]))


def others_in_words(others: float, cores: int) -> str | None:
    """How many of the cores others used, if it is enough to disturb a measurement."""
    disturbs = cores and others > OTHERS_SHARE * cores
    return f"others used {others:.1f} of {cores} core{'s' * (cores > 1)}" if disturbs else None


def _impossible(machine: Machine) -> Iterator[str]:
    for name, (least, most) in POSSIBLE.items():
        figure = getattr(machine, name)
        if not least <= figure <= most and (machine.curve or name not in ("latency", "bandwidth")):  # else: no links
            yield f"{name} {figure:.2g} cannot be"


# ----------------------------------------------------------------------------------------------------- who uses cores


class OtherLoad:
    """How many cores other programs use while the ranks of `comm` (mpi4py) measure. Collective.

    The kernel counts the time in which each core was busy. What the ranks used themselves is taken off.
    """

    def __init__(self, comm: Any):
        self.comm = comm
        self.kernels = texts(comm, _boot())  # ranks with the same one share the counters: lab hosts too
        self.begun = self._counted()

    def cores(self) -> tuple[float, int]:
        """How many cores others used since the start, and of how many, where they used the largest share of them.

        (0, 0) if the kernel does not say.
        """
        return most_loaded(self.kernels, of_all_ranks(self.comm, self._counted() - self.begun))

    def _counted(self) -> np.ndarray:
        """CPU seconds of this rank, the busy seconds of each core, and all seconds of each core (0 if not ours)."""
        return np.array([process_time(), *_core_seconds(os.sched_getaffinity(0))])


MOST_CORES = 1024


def most_loaded(kernels: Iterable[str], counted: np.ndarray) -> tuple[float, int]:
    """From the counts of all ranks (`OtherLoad._counted`), and for each rank the kernel that it runs on."""
    worst, of = 0.0, 0
    named = list(kernels)
    for kernel in dict.fromkeys(named):
        rows = counted[[i for i, name in enumerate(named) if name == kernel]]
        busy, total = rows[:, 1 : 1 + MOST_CORES].max(axis=0), rows[:, 1 + MOST_CORES :].max(axis=0)
        cores = int((total > 0).sum())
        if cores:
            others = max(0.0, float(busy.sum() - rows[:, 0].sum())) / (float(total.sum()) / cores)
            if not of or others / cores > worst / of:
                worst, of = others, cores
    return worst, of


def _core_seconds(own: Iterable[int]) -> list[float]:
    ticks, mine = os.sysconf("SC_CLK_TCK"), set(own)
    busy, total = [0.0] * MOST_CORES, [0.0] * MOST_CORES
    for core, counts in _stat().items():
        if core in mine and core < MOST_CORES:
            user, nice, system, idle, waiting, interrupts, soft, stolen = counts
            busy[core] = (user + nice + system + stolen) / ticks
            total[core] = busy[core] + (idle + waiting + interrupts + soft) / ticks  # interrupts: messages of the ranks
    return [*busy, *total]


def _stat() -> Mapping[int, list[int]]:
    """The counters of each core in /proc/stat. Empty where there are none."""
    counters = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *counts = line.split()
            if name.startswith("cpu") and name != "cpu":
                counters[int(name[3:])] = [*map(int, counts[:8])]
    return {core: counts for core, counts in counters.items() if len(counts) == 8}


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename
