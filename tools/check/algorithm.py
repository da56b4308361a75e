"""A schedule of another system: on each rank threads, each of which does its steps one after the other.

A step may take a message from the connection of its thread, read a chunk, write one, and send. `MEANING` says which of
these each kind of step does. A connection (source, dest, channel) is a queue: the k-th message that is sent is the k-th
that is taken.
"""

from __future__ import annotations

from typing import NamedTuple

from fompi.base.errors import FompiError

Connection = tuple[int, int, int]
"""(source, dest, channel)."""

Term = tuple[int, int]
"""(rank, chunk of its input)."""

StepKey = tuple[int, int, int]
"""(rank, thread, number) of a step."""


class ScheduleError(FompiError):
    """A file that is no schedule, or has something in it that is not known: it is neither right nor wrong."""


class Kind(NamedTuple):
    """What a step does: result = message, + source, + dest (those that it has); then it writes and sends the result."""

    receives: bool = False
    reads: bool = False
    adds: bool = False  # to what is in the destination
    writes: bool = False
    sends: bool = False


class Region(NamedTuple):
    """`length` chunks of a buffer of the rank: "input", "output" or "scratch"."""

    buffer: str
    first: int
    length: int

    def __str__(self) -> str:
        last = "" if self.length == 1 else f":{self.first + self.length}"
        return f"{self.buffer}[{self.first}{last}]"

    @property
    def chunks(self) -> list[tuple[str, int]]:
        return [(self.buffer, i) for i in range(self.first, self.first + self.length)]


class Step(NamedTuple):
    """One step. `after` are (thread, number) of steps of the same rank that must be done before."""

    rank: int
    thread: int
    number: int
    name: str  # its kind, in the words of the file
    kind: Kind
    source: Region
    dest: Region
    after: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> StepKey:
        return self.rank, self.thread, self.number

    def __str__(self) -> str:
        return f"rank {self.rank}, thread block {self.thread}, step {self.number} ({self.name})"


class Thread(NamedTuple):
    """The steps of a thread, and the connections that it takes messages from and sends to."""

    rank: int
    number: int
    takes: Connection | None
    sends: Connection | None
    steps: tuple[Step, ...]


class Algorithm(NamedTuple):
    """A schedule for `ranks` ranks. `chunks` are those of the whole tensor, which is `per_rank` chunks for each rank.

    `in_place`: the input and the output are one buffer, called "output". Of an all-gather the input is the part of
    the rank, of a reduce-scatter the output. `sizes[rank]` are how many chunks each buffer has.
    """

    name: str
    collective: str
    ranks: int
    chunks: int
    in_place: bool
    threads: tuple[Thread, ...]
    sizes: tuple[dict[str, int], ...]

    @property
    def steps(self) -> list[Step]:
        return [step for thread in self.threads for step in thread.steps]

    @property
    def per_rank(self) -> int:
        return self.chunks // self.ranks

    def before(self, rank: int) -> dict[tuple[str, int], tuple[int, int]]:
        """Where each chunk of the input of a rank lies: (rank, number of the chunk in the input of the rank)."""
        name = "output" if self.in_place else "input"
        count, first = self.chunks, 0
        if self.collective == "all_gather":
            count, first = self.per_rank, rank * self.per_rank if self.in_place else 0
        return {(name, first + i): (rank, i) for i in range(count)}

    def after(self, rank: int) -> dict[tuple[str, int], list[tuple[int, int]]]:
        """The terms (rank, chunk of its input) whose sum each chunk of the output of a rank must hold."""
        n, ranks = self.per_rank, range(self.ranks)
        if self.collective == "all_reduce":
            return {("output", i): [(r, i) for r in ranks] for i in range(self.chunks)}
        if self.collective == "all_gather":
            return {("output", r * n + i): [(r, i)] for r in ranks for i in range(n)}
        if self.collective == "all_to_all":
            return {("output", r * n + i): [(r, rank * n + i)] for r in ranks for i in range(n)}
        first = rank * n if self.in_place else 0
        return {("output", first + i): [(r, rank * n + i) for r in ranks] for i in range(n)}
