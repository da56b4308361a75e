"""A plan is a value. It holds the buffers and the list of ops of every rank, and nothing else.

There are four ops. Schedules write them; the verifier, the simulator and the executor read them:

    x[3]>1                                 Send(1, x[3])         send chunk x[3] to rank 1
    y[0:2]<1                               Recv(1, y[0:2])       receive chunk y[0:2] from rank 1
    matmul(x[3], w[0]) -> y[3]             Compute               run a kernel; copies and sums are kernels too
    all_gather{x[3] -> y[0:8]}             Collective            call a collective of the MPI library

A kernel may be one of the user (`UserKernel`). Then the op has arguments too: `forward<2, 0>(a[0]) -> b[0]`.

There is no op that waits. `dependencies.constraints` derives from the reads and writes of the ops when each op may
start. The k-th Send of a rank to a peer matches the k-th Recv of that peer from this rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from fompi.base import layout, tables
from fompi.base.errors import PlanError
from fompi.base.layout import Extents, Sizes, Symbol
from fompi.base.wires import WIRES

MESSAGE_BITS = 12
"""A call has 2**MESSAGE_BITS message tags. The last two belong to the handshake.

MPI guarantees 15 bits of tag. The bits that remain tell calls in flight apart.
"""

MOST_MESSAGES = (1 << MESSAGE_BITS) - 2
"""The most messages that a plan may send from one rank to one peer: each has one tag, and two tags are reserved."""


class Chunk(NamedTuple):
    """Blocks `start` to `stop - 1` of a buffer: one contiguous run of rows."""

    buffer: str
    start: int
    stop: int

    def __str__(self) -> str:
        single = self.stop == self.start + 1
        return f"{self.buffer}[{self.start}]" if single else f"{self.buffer}[{self.start}:{self.stop}]"

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
    """A kernel by name, on chunks. `fompi.plans.kernels` defines the names, or `Plan.kernels` declares them.

    `args` are numbers for a kernel of the user. They tell it which of its calls this is.
    """

    kernel: str
    reads: tuple[Chunk, ...]
    writes: tuple[Chunk, ...]
    args: tuple[int, ...] = ()

    def __str__(self) -> str:
        args = f"<{', '.join(map(str, self.args))}>" if self.args else ""
        return f"{self.kernel}{args}({', '.join(map(str, self.reads))}) -> {', '.join(map(str, self.writes))}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of the MPI library over all ranks of the plan. All ranks call collectives in the same order."""

    name: str
    reads: tuple[Chunk, ...]
    writes: tuple[Chunk, ...]

    def __str__(self) -> str:
        return f"{self.name}{{{', '.join(map(str, self.reads))} -> {', '.join(map(str, self.writes))}}}"


Op = Send | Recv | Compute | Collective


@dataclass(frozen=True)
class UserKernel:
    """A kernel that the user's program provides when the plan is bound: `kernels={name: function}`.

    It is called as `function(args, reads, writes)` with the arguments of the op and lists of arrays. To the verifier
    its results are opaque. They depend on the name, the arguments and the operands, and on nothing else. A chunk that
    it reads and writes is a sum, to which it adds a term.

    `seconds[i]` is the time of a call with i as its first argument. One entry: the time of every call. Empty: the time
    is not known, and the plan cannot be simulated.

    With `beside` a call is one call of each of these two kernels, side by side. Its results are theirs. Its arguments
    are those of the first one, those of the second one (equally many), and how many chunks the first one reads and
    writes. Without seconds of its own it takes as long as both.
    """

    name: str
    seconds: tuple[float, ...] = ()
    beside: tuple[UserKernel, ...] = ()

    def calls(self, op: Compute) -> list[Compute]:
        """The calls of which `op` consists: itself, or those of the kernels in `beside`."""
        if not self.beside:
            return [op]
        try:
            (first, second), (*args, reads, writes) = self.beside, op.args
        except ValueError as error:
            raise PlanError(f"{op}: {self.name!r} takes the arguments of two kernels, and two counts") from error
        half = len(args) // 2
        return [
            Compute(first.name, op.reads[:reads], op.writes[:writes], tuple(args[:half])),
            Compute(second.name, op.reads[reads:], op.writes[writes:], tuple(args[half:])),
        ]

    def seconds_of(self, op: Compute) -> float:
        if self.beside and not self.seconds:
            return sum(kernel.seconds_of(call) for kernel, call in zip(self.beside, self.calls(op), strict=True))
        if not self.seconds:
            raise PlanError(f"the seconds of the kernel {self.name!r} are not known: declare them to simulate the plan")
        if len(self.seconds) == 1:
            return self.seconds[0]
        if not op.args or op.args[0] >= len(self.seconds):
            raise PlanError(
                f"the kernel {self.name!r} has seconds for {len(self.seconds)} first arguments, not for {op}"
            )
        return self.seconds[op.args[0]]


@dataclass(frozen=True)
class Buffer:
    """Named memory of one rank, in blocks of rows (`layout.AXES`).

    `role` is input (never written), output, scratch, or inout: an input that the result is written over. `row` is the
    shape of one row; for the axis `whole` it is the shape of the buffer. `first` is the number of the first block,
    `count` the number of blocks. `place` is "host" for page-locked host memory, where the others are on a device. With
    a `wire` it holds blocks of such rows as messages carry them: bytes, of which the shape counts each one.
    """

    name: str
    role: str
    axis: str
    row: tuple[int, ...]
    dtype: str
    first: int
    count: int
    place: str = ""
    wire: str = ""

    def __getitem__(self, key: int | slice) -> Chunk:
        """The chunk of these block numbers: `x[3]`, `x[2:5]`, `x[:]`."""
        if isinstance(key, int):
            return Chunk(self.name, key, key + 1)
        start = self.first if key.start is None else key.start
        return Chunk(self.name, start, self.first + self.count if key.stop is None else key.stop)

    @property
    def is_input(self) -> bool:
        return self.role in ("input", "inout")

    @property
    def is_output(self) -> bool:
        return self.role in ("output", "inout")

    @property
    def row_nbytes(self) -> int:
        """The bytes between two places of `offsets`."""
        return 1 if self.wire else layout.nbytes(self.row, self.dtype)

    def offsets(self, extents: Extents) -> list[int]:
        """The first row of each block, and the end of the last block. With a wire, the first byte of each."""
        if self.axis == "whole":
            return [0, self.counted(1) if self.wire else self.row[0] if self.row else 1]
        counts = extents.counts(self.axis)
        return layout.offsets(map(self.counted, counts) if self.wire else counts)

    def shape(self, extents: Extents) -> tuple[int, ...]:
        return self.row if self.axis == "whole" and not self.wire else self.shape_of(self.offsets(extents)[-1])

    def shape_of(self, count: int) -> tuple[int, ...]:
        """The shape of `count` rows. With a wire, of as many bytes."""
        return (count,) if self.wire else (count, *self.row)

    def counted(self, rows: int) -> int:
        """The rows of a block of `rows` rows. With a wire, its bytes."""
        return WIRES[self.wire].nbytes(rows * prod(self.row)) if self.wire else rows

    def symbol(self, rank: int, size: int, parts: int, block: int) -> Symbol:
        return layout.symbol(self.axis, rank, size, parts, block)


@dataclass(frozen=True)
class Program:
    """The part of a plan that belongs to one rank."""

    rank: int
    size: int
    parts: int
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]

    def buffer(self, name: str) -> Buffer:
        if (found := self._by_name.get(name)) is None:
            raise PlanError(f"rank {self.rank} has no buffer {name!r}", self.rank)
        return found

    @cached_property
    def _by_name(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in reversed(self.buffers)}

    def scratch_nbytes(self, extents: Extents) -> int:
        return sum(layout.nbytes(b.shape(extents), b.dtype) for b in self.buffers if b.role == "scratch")


class Workspace:
    """The buffers of one rank while its program is written: `work["x"]`, `work.scratch(...)`."""

    def __init__(self, rank: int, size: int, parts: int, experts: int = 0):
        self.rank, self.size, self.parts, self.experts = rank, size, parts, experts
        self._buffers: dict[str, Buffer] = {}
        self._instead: dict[str, Buffer] = {}

    def dests(self, way: int) -> Sequence[int]:
        """The other ranks in the order in which this rank sends: rank + way, rank + 2 way, ... for way = 1 or -1."""
        return [(self.rank + way * d) % self.size for d in range(1, self.size)]

    def add(self, name: str, role: str, axis: str, row: Sequence[int], dtype: str) -> Buffer:
        numbers = layout.blocks(axis, self.rank, self.size, self.parts, self.experts)
        buffer = Buffer(name, role, axis, tuple(row), dtype, numbers.start, len(numbers))
        return self._buffers.setdefault(name, buffer)

    def scratch(self, name: str, axis: str, row: Sequence[int], dtype: str) -> Buffer:
        """A scratch buffer. A second call with the same name returns the same buffer."""
        return self.add(name, "scratch", axis, row, dtype)

    def use_instead(self, name: str, buffer: Buffer) -> None:
        """From now on `work[name]` is `buffer`."""
        self._instead[name] = buffer

    def __getitem__(self, name: str) -> Buffer:
        if name in self._instead:
            return self._instead[name]
        if name not in self._buffers:
            raise PlanError(f"unknown buffer {name!r}; known: {', '.join(self._buffers)}", self.rank)
        return self._buffers[name]

    def program(self, ops: Iterable[Op]) -> Program:
        """The program of these ops."""
        program_ops = tuple(ops)  # runs the schedule, which declares scratch buffers as it goes
        for i, op in enumerate(program_ops):
            if not isinstance(op, Op):
                text = f"a schedule must yield Send, Recv, Compute or Collective, not {op!r}"
                raise PlanError(f"rank {self.rank}, op {i}: {text}", self.rank, i)
        return Program(self.rank, self.size, self.parts, tuple(self._buffers.values()), program_ops)


class Programs(Sequence[Program]):
    """The programs of all ranks. Each program is written when it is read for the first time."""

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


def group_size(schedule: str) -> int:
    """The number of ranks in a group: 4 for 'hierarchical(4)'. It is 1 for a schedule without groups, as 'ring'."""
    ranks = schedule.partition("(")[2][:-1]
    return int(ranks) if ranks.isdecimal() and len(ranks) < 10 else 1


class Pace(NamedTuple):
    """Limits on sends and kernels, in addition to the data that they need.

    `window` is the greatest number of sends in flight (None: no limit). With `by_peer` the limit holds for each peer
    separately. With `in_step` a send stays in flight until the receive of the same number is done. With `in_order` the
    kernels of a rank run in program order, also if a later one could start earlier.
    """

    window: int | None = None
    by_peer: bool = False
    in_step: bool = False
    in_order: bool = False


PAIRWISE = "pairwise"
"""The schedule in which all ranks proceed in step."""


@dataclass(frozen=True)
class Plan:
    """All decisions about one collective and the compute around it.

    `shares` are the relative sizes of the parts of a shard. `window` limits how many sends, or collectives of the MPI
    library, a rank has in flight (None: no limit); a schedule with groups has this limit for each peer. `sizes` are
    the rows that the plan was made for; the plan runs with any other rows too. `kernels` declares the kernels of the
    user. With `in_order` the kernels of a rank run in program order. With a wire, each term of a result is rounded at
    most `roundings` times.
    """

    problem: Any
    schedule: str
    shares: tuple[int, ...]
    sizes: Sizes
    programs: Sequence[Program] = field(hash=False)
    window: int | None = None
    kernels: tuple[UserKernel, ...] = ()
    in_order: bool = False
    roundings: int = 0

    @property
    def parts(self) -> int:
        """Blocks per shard, or per pair of ranks."""
        return len(self.shares) * int(self.problem.runs)

    @property
    def size(self) -> int:
        return len(self.programs)

    @property
    def group_size(self) -> int:
        return group_size(self.schedule)

    @property
    def pace(self) -> Pace:
        """The limits on sends. With groups they hold by peer, so that slow links do not delay fast ones."""
        by_peer, in_step = self.group_size > 1, self.schedule == PAIRWISE
        return Pace(self.window, by_peer, in_step, self.in_order)

    def kernel(self, name: str) -> UserKernel | None:
        """The kernel of the user with this name, or None."""
        return next((kernel for kernel in self.kernels if kernel.name == name), None)

    @property
    def is_paced(self) -> bool:
        """True if a send stays in flight until its receiver takes it (a synchronous send).

        An MPI library may complete a send as soon as it has copied the message. Then more messages are on their way
        than the window allows. This does no harm if the window holds one message, or if messages are whole shards: no
        further message can fill the link in front of a reply. It does no harm either if ranks proceed in step.
        """
        pace = self.pace
        return pace.by_peer or (self.parts > 1 and (self.window or 0) > 1 and not pace.in_step)

    def extents(self, rank: int, sizes: Sizes | None = None) -> Extents:
        """The rows of every block for these sizes (None: the sizes that the plan was made for)."""
        problem = self.problem
        return (sizes or self.sizes).extents(rank, self.shares, problem.experts, not problem.multiplies_first)

    @property
    def subtree_nbytes(self) -> int:
        """The bytes that all ranks send more than in the order of ranks: of all subtrees of a rank but its first."""
        if not self.problem.is_split:
            return 0
        total = 0
        for program in self.programs:
            extents = self.extents(program.rank)
            for op in program.ops:
                if isinstance(op, Send) and _FURTHER_TERM.fullmatch(op.chunk.buffer):
                    buffer = program.buffer(op.chunk.buffer)
                    counts = extents.counts(buffer.axis)[op.chunk.start - buffer.first : op.chunk.stop - buffer.first]
                    total += layout.nbytes(buffer.shape_of(sum(counts)), buffer.dtype)
        return total

    def __str__(self) -> str:
        return grid(self)

    def _repr_html_(self) -> str:
        above, numbers, columns, below = _cells(self, is_whole=False)
        names = ["op", *(column[0] for column in columns)]
        rows: list[Sequence[object]] = [*zip(numbers, *(column[1:] for column in columns), strict=True)]
        if left := max(len(p.ops) for p in self.programs[: len(columns)]) - len(numbers):
            rows[-LAST_OPS:-LAST_OPS] = [["...", f"{left} more ops", *[""] * (len(columns) - 1)]]
        return tables.html(*above, tables.Table(names, rows), *below)

    def to_json(self) -> str:
        """The plan as JSON text."""
        programs = [
            {"buffers": [asdict(b) for b in p.buffers], "ops": [str(op) for op in p.ops]} for p in self.programs
        ]
        head: dict[str, Any] = {
            "schedule": self.schedule,
            "shares": self.shares,
            "window": self.window,
            "sizes": self.sizes._asdict(),
        }
        if self.kernels or self.in_order:
            head |= {"kernels": [asdict(kernel) for kernel in self.kernels], "in_order": self.in_order}
        if self.roundings:
            head["roundings"] = self.roundings
        return json.dumps({"problem": asdict(self.problem), **head, "programs": programs}, indent=1)


# ------------------------------------------------------------------------------------------------------- the grid


def format_nbytes(count: float) -> str:
    """Bytes in a unit that people read: '3.0 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def parts_in_words(plan: Plan) -> str:
    """'4 parts' for equal parts, '3 parts 1:2:4' for others."""
    uneven = f" {':'.join(map(str, plan.shares))}" if len(set(plan.shares)) > 1 else ""
    return f"{plan.parts} part{'s' * (plan.parts != 1)}{uneven}"


MOST_RANKS, MOST_OPS = 4, 40
"""The text of a plan has at most this many columns and lines of ops."""

LAST_OPS = 8
"""Of a plan with more ops the text shows this many at the end, and the first ones."""

NOTATION = {
    Send: "a[0]>1 sends block 0 of a to rank 1",
    Recv: "a[0]<1 receives it from rank 1",
    Compute: "f(a) -> b runs kernel f",
    Collective: "f{a -> b} calls f of MPI",
}
"""What each kind of op looks like."""


def grid(plan: Plan, is_whole: bool = False) -> str:
    """The text of a plan: problem, schedule and peak scratch, the notation, then one column per rank.

    Later ranks and the middle of a long plan are left out, unless `is_whole`.
    """
    above, numbers, columns, below = _cells(plan, is_whole)
    height = max(len(p.ops) for p in plan.programs[: len(columns)])
    widths = [max(map(len, column)) for column in columns]
    lines = [*above]
    for number, *cells in zip([None, *numbers], *columns, strict=True):
        if number == height - LAST_OPS and len(numbers) < height:
            lines.append(f"      ... {height - len(numbers)} more ops")
        start = "" if number is None else number
        lines.append(f"{start:>4}  {'  '.join(map(str.ljust, cells, widths))}".rstrip())
    return "\n".join([*lines, *(f"      {line}" for line in below)])


def _cells(plan: Plan, is_whole: bool) -> tuple[list[str], list[int], list[list[str]], list[str]]:
    """What `grid` shows: the lines above it, the numbers of the ops, a column for each rank, the lines below it."""
    count = plan.size if is_whole else min(plan.size, MOST_RANKS)
    shown = [plan.programs[rank] for rank in range(count)]
    height = max(len(p.ops) for p in shown)
    numbers = [*range(height)]
    if height > MOST_OPS and not is_whole:
        del numbers[MOST_OPS - LAST_OPS : -LAST_OPS]
    columns = [[f"rank {p.rank}", *(str(p.ops[i]) if i < len(p.ops) else "" for i in numbers)] for p in shown]
    kinds = {type(op) for p in shown for op in p.ops}
    notation = "; ".join(text for kind, text in NOTATION.items() if kind in kinds)
    below = []
    if left := plan.size - count:
        below.append(f"... and {left} more rank{'s' * (left > 1)}")
    return [*filter(None, [_head(plan, shown), notation])], numbers, columns, below


_FURTHER_TERM = re.compile(r"(x|partial)[1-9]\d*")
"""The buffers of the terms of a rank after its first one, where it has several subtrees of a sum."""


def _head(plan: Plan, shown: Sequence[Program]) -> str:
    scratch = max(p.scratch_nbytes(plan.extents(p.rank)) for p in shown)
    paced = "" if plan.window is None else f", window {plan.window}"
    if more := plan.subtree_nbytes:
        paced += f", subtrees are {format_nbytes(more)} more to send"
    head = f"{plan.problem} by {plan.schedule}: {plan.size} ranks, {parts_in_words(plan)}{paced}, "
    return head + f"scratch {format_nbytes(scratch)} per rank"
