"""A plan is a value: for every rank its buffers and a list of ops, and nothing else.

Four ops, written by the schedules, read by the verifier, the simulator and the executor:

    x[3]>1                                 Send(1, x[3])         chunk x[3] goes to rank 1
    y[0:2]<1                               Recv(1, y[0:2])
    matmul(x[3], w[0]) -> y[3]             Compute               a kernel; copies and sums are kernels too
    all_gather{x[3] -> y[0:8]}             Collective            the MPI library's own collective

There is no wait: an op may start when all that it needs is there, and `needs.constraints` derives what that is from
what the ops read and write. The k-th Send of a rank to a peer is matched by that peer's k-th Recv from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from fompi.base import layout
from fompi.base.errors import PlanError
from fompi.base.layout import Extents, Sizes, Symbol

MESSAGE_BITS = 12
"""A call has this many tags (as a power of two), the last two of them for its agreement."""

MOST_MESSAGES = (1 << MESSAGE_BITS) - 2
"""A plan may send so many to one peer."""


class Chunk(NamedTuple):
    """Blocks `start` to `stop` of a buffer: one contiguous run of rows."""

    buffer: str
    start: int
    stop: int

    def __str__(self) -> str:
        one = self.stop == self.start + 1
        return f"{self.buffer}[{self.start}]" if one else f"{self.buffer}[{self.start}:{self.stop}]"

    @property
    def blocks(self) -> Iterator[tuple[str, int]]:
        return ((self.buffer, block) for block in range(self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Send:
    dest: int
    chunk: Chunk

    def __str__(self) -> str:
        return f"{self.chunk}>{self.dest}"

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return (self.chunk,)

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Recv:
    source: int
    chunk: Chunk

    def __str__(self) -> str:
        return f"{self.chunk}<{self.source}"

    @property
    def reads(self) -> tuple[Chunk, ...]:
        return ()

    @property
    def writes(self) -> tuple[Chunk, ...]:
        return (self.chunk,)


@dataclass(frozen=True, slots=True)
class Compute:
    """A kernel by its name, on chunks. Which names there are, and what they mean: `fompi.plans.kernels`."""

    kernel: str
    reads: tuple[Chunk, ...]
    writes: tuple[Chunk, ...]

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(map(str, self.reads))}) -> {', '.join(map(str, self.writes))}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of the MPI library over all ranks of the plan; every rank calls them in the same order."""

    name: str
    reads: tuple[Chunk, ...]
    writes: tuple[Chunk, ...]

    def __str__(self) -> str:
        return f"{self.name}{{{', '.join(map(str, self.reads))} -> {', '.join(map(str, self.writes))}}}"


Op = Send | Recv | Compute | Collective

_CHUNK = re.compile(r"(\w+)\[(\d+)(?::(\d+))?\]")


def _chunks(text: str) -> tuple[Chunk, ...]:
    return tuple(map(_chunk, text.split(", "))) if text else ()


def _chunk(text: str) -> Chunk:
    if found := _CHUNK.fullmatch(text):
        return Chunk(found[1], int(found[2]), int(found[3] or int(found[2]) + 1))
    raise PlanError(f"not a chunk: {text!r}")


def parse(text: str) -> Op:
    """The op that prints as `text`: `parse(str(op)) == op`."""
    if message := re.fullmatch(r"(\w+\[[\d:]+\])([<>])(\d+)", text):
        (chunk,) = _chunks(message[1])
        return (Send if message[2] == ">" else Recv)(int(message[3]), chunk)
    if kernel := re.fullmatch(r"(\w+)\((.*)\) -> (.*)", text):
        return Compute(kernel[1], _chunks(kernel[2]), _chunks(kernel[3]))
    if collective := re.fullmatch(r"(\w+)\{(.*) -> (.*)\}", text):
        return Collective(collective[1], _chunks(collective[2]), _chunks(collective[3]))
    raise PlanError(f"not an op: {text!r}")


@dataclass(frozen=True)
class Buffer:
    """Named memory of one rank, in blocks of rows (`layout.AXES`).

    `role` is input (never written), output or scratch; `row` is the shape of one row, or of all of it for a buffer
    of the axis `whole`; `first` is the number of its first block, `count` how many there are.
    """

    name: str
    role: str
    axis: str
    row: tuple[int, ...]
    dtype: str
    first: int
    count: int

    def __getitem__(self, key: int | slice) -> Chunk:
        """`x[3]`, `x[2:5]`, `x[:]`: a chunk, by block numbers."""
        if isinstance(key, int):
            return Chunk(self.name, key, key + 1)
        start = self.first if key.start is None else key.start
        return Chunk(self.name, start, self.first + self.count if key.stop is None else key.stop)

    @property
    def row_nbytes(self) -> int:
        return layout.nbytes(self.row, self.dtype)

    def offsets(self, extents: Extents) -> list[int]:
        """The first row of each block, and the end of the last."""
        if self.axis == "whole":
            return [0, self.row[0] if self.row else 1]
        return layout.offsets(extents.counts(self.axis))

    def shape(self, extents: Extents) -> tuple[int, ...]:
        return self.row if self.axis == "whole" else (sum(extents.counts(self.axis)), *self.row)

    def symbol(self, rank: int, size: int, parts: int, block: int) -> Symbol:
        return layout.symbol(self.axis, rank, size, parts, block)


@dataclass(frozen=True)
class Program:
    """One rank's part of a plan."""

    rank: int
    size: int
    parts: int
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]

    def buffer(self, name: str) -> Buffer:
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise PlanError(f"rank {self.rank} has no buffer {name!r}", self.rank)

    def scratch_nbytes(self, extents: Extents) -> int:
        return sum(layout.nbytes(b.shape(extents), b.dtype) for b in self.buffers if b.role == "scratch")


class Workspace:
    """The buffers of one rank while its program is written: `work.x`, `work["y"]`, `work.scratch(...)`."""

    def __init__(self, rank: int, size: int, parts: int, order: Sequence[int] = ()):
        self.rank, self.size, self.parts = rank, size, parts
        self._order = order
        self._buffers: dict[str, Buffer] = {}

    def dests(self, way: int) -> Sequence[int]:
        """The other ranks, in the order in which this one sends: `rank + way` first and so on, or as the plan says."""
        return self._order or [(self.rank + way * d) % self.size for d in range(1, self.size)]

    def add(self, name: str, role: str, axis: str, row: Sequence[int], dtype: str) -> Buffer:
        numbers = layout.blocks(axis, self.rank, self.size, self.parts)
        buffer = Buffer(name, role, axis, tuple(row), dtype, numbers.start, len(numbers))
        return self._buffers.setdefault(name, buffer)

    def scratch(self, name: str, axis: str, row: Sequence[int], dtype: str) -> Buffer:
        return self.add(name, "scratch", axis, row, dtype)

    def __getitem__(self, name: str) -> Buffer:
        if name not in self._buffers:
            raise PlanError(f"there is no buffer {name!r}; there are {', '.join(self._buffers)}", self.rank)
        return self._buffers[name]

    def program(self, ops: Iterable[Op]) -> Program:
        listed = tuple(ops)  # first: the ops declare scratch as they are written
        for i, op in enumerate(listed):
            if not isinstance(op, Op):
                raise PlanError(f"rank {self.rank}, op {i}: a schedule yields no {op!r}", self.rank, i)
        return Program(self.rank, self.size, self.parts, tuple(self._buffers.values()), listed)


class Programs(Sequence[Program]):
    """The programs of all ranks, each written when it is first asked for."""

    def __init__(self, size: int, write: Callable[[int], Program]):
        self._size, self._write = size, write
        self._written: dict[int, Program] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self[r] for r in range(*rank.indices(self._size)))
        if not 0 <= rank < self._size:
            raise IndexError(rank)
        if rank not in self._written:
            self._written[rank] = self._write(rank)
        return self._written[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def group_of(schedule: str) -> int:
    """Ranks in a group, if the schedule has groups: 4 of 'hierarchical(4)', 1 of 'ring'."""
    ranks = schedule.partition("(")[2][:-1]
    return int(ranks) if ranks.isdecimal() and len(ranks) < 10 else 1


class Pace(NamedTuple):
    """What holds sends back beside their data. `window` bounds those in flight; None: nothing does.

    `by_peer`: those to each peer. `in_step`: those that are not answered: one is, when the receive of the same number
    is done.
    """

    window: int | None = None
    by_peer: bool = False
    in_step: bool = False


IN_STEP = "pairwise"
"""The schedule whose ranks keep in step."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided about one collective, with the compute around it.

    `shares` are the sizes of the parts of a shard, in proportion. `window` bounds the sends that a rank has in flight,
    with groups of ranks those to each peer, or the library's collectives (None: no bound). `sizes` are the rows that
    the plan was made for; the same plan runs with any others. `order` holds the other ranks, in the order in which each
    rank sends to them, if that is not the one of the schedule.
    """

    problem: Any
    schedule: str
    shares: tuple[int, ...]
    sizes: Sizes
    programs: Sequence[Program] = field(hash=False)
    window: int | None = None
    order: tuple[tuple[int, ...], ...] = ()

    @property
    def parts(self) -> int:
        """Blocks per shard."""
        return len(self.shares)

    @property
    def size(self) -> int:
        return len(self.programs)

    @property
    def group(self) -> int:
        return group_of(self.schedule)

    @property
    def pace(self) -> Pace:
        """Of groups by peer: where links differ, the slow ones hold no others up."""
        return Pace(self.window, by_peer=self.group > 1, in_step=self.schedule == IN_STEP)

    @property
    def is_paced(self) -> bool:
        """Whether a send counts as under way until the other end takes it.

        A library may call one done that it has copied, and let more of them go than the window allows. Where the
        window holds one message, or whole shards, it does no harm: none follows that could fill the way of the answer;
        nor where ranks keep in step.
        """
        pace = self.pace
        return pace.by_peer or (self.parts > 1 and (self.window or 0) > 1 and not pace.in_step)

    def extents(self, rank: int, sizes: Sizes | None = None) -> Extents:
        """The rows of every block with these sizes (None: those the plan was made for)."""
        return (sizes or self.sizes).extents(rank, self.shares)

    def with_program(self, program: Program) -> Plan:
        """The same plan with another program for one rank."""
        programs = tuple(program if p.rank == program.rank else p for p in self.programs)
        return replace(self, programs=programs)

    def __str__(self) -> str:
        return grid(self)

    def to_json(self) -> str:
        programs = [
            {"buffers": [asdict(b) for b in p.buffers], "ops": [str(op) for op in p.ops]} for p in self.programs
        ]
        head = {
            "schedule": self.schedule,
            "shares": self.shares,
            "window": self.window,
            "order": self.order,
            "sizes": self.sizes._asdict(),
        }
        return json.dumps({"problem": asdict(self.problem), **head, "programs": programs}, indent=1)


def programs_from_json(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the problem, and those of the Plan, that `Plan.to_json` wrote."""
    try:
        data = json.loads(text)
        size, shares = len(data["programs"]), tuple(map(int, data["shares"]))
        programs = tuple(
            Program(rank, size, len(shares), tuple(_buffer(b) for b in p["buffers"]), tuple(map(parse, p["ops"])))
            for rank, p in enumerate(data["programs"])
        )
        sizes = Sizes(tuple(data["sizes"]["rows"]), tuple(tuple(row) for row in data["sizes"]["pairs"]))
        order = tuple(tuple(map(int, dests)) for dests in data["order"])
        fields = {"schedule": data["schedule"], "shares": shares, "sizes": sizes, "window": data["window"]}
        return data["problem"], {**fields, "programs": programs, "order": order}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"not the JSON of a plan: {type(error).__name__}: {error}") from error


def _buffer(fields: dict[str, Any]) -> Buffer:
    return Buffer(**{**fields, "row": tuple(fields["row"])})


# ------------------------------------------------------------------------------------------------------- the grid


def format_nbytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def cut_in_words(plan: Plan) -> str:
    """'4 parts', or '3 parts 1:2:4' where they are not equal."""
    uneven = f" {':'.join(map(str, plan.shares))}" if len(set(plan.shares)) > 1 else ""
    return f"{plan.parts} part{'s' * (plan.parts != 1)}{uneven}"


def grid(plan: Plan, most_ranks: int = 8) -> str:
    """One column per rank, one line per op, below a line that says what it is and the peak scratch of a rank."""
    shown = [plan.programs[rank] for rank in range(min(plan.size, most_ranks))]
    scratch = max(p.scratch_nbytes(plan.extents(p.rank)) for p in shown)
    paced = "" if plan.window is None else f", window {plan.window}"
    paced += ", peers in an order of their own" if plan.order else ""
    head = f"{plan.problem} by {plan.schedule}: {plan.size} ranks, {cut_in_words(plan)}{paced}, "
    columns = [[f"rank {p.rank}", *map(str, p.ops)] for p in shown]
    height = max(map(len, columns))
    widths = [max(map(len, column)) for column in columns]
    lines = [head + f"scratch {format_nbytes(scratch)} a rank"]
    for i in range(height):
        cells = ((column[i] if i < len(column) else "").ljust(w) for column, w in zip(columns, widths, strict=True))
        lines.append(f"{'' if i == 0 else i - 1:>4}  {'  '.join(cells)}".rstrip())
    if plan.size > most_ranks:
        lines.append(f"      ... and {plan.size - most_ranks} ranks more")
    return "\n".join(lines)
