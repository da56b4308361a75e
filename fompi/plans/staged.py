"""Plans for buffers on a device: messages that go through host memory, and products of half types.

    plan = staged(plan)                             # all messages
    plan = staged(plan, lambda rank, peer: ...)     # those between ranks for which this is True
    plan = staged(plan, lambda rank, peer: ..., n)  # and all messages of at most n bytes, of the sizes of the plan
    plan = for_device(plan, lambda rank, peer: ...) # the same, and weights of half type are not widened

Each buffer that such a message reads or writes gets a mirror in host memory. A `download` comes before a send, an
`upload` after a receive. Data that is received and sent on (a ring) leaves from the mirror, without a download.
Collectives of the MPI library always work on mirrors. Downloads and uploads are kernels as others, so a staged plan is
verified, simulated and run as any other plan.

The host widens a weight of half type once, before its products. A device multiplies half types as they are, several
times as fast, and adds up in float32. A product of two half types is exact in float32, so the terms are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fompi.base.errors import PlanError
from fompi.base.layout import HALF, Extents, accumulator, nbytes
from fompi.plans.plan import Buffer, Chunk, Collective, Compute, Op, Plan, Program, Programs, Recv, Send

Pairs = Callable[[int, int], bool]

_SUFFIX = "_host"


def _all_pairs(rank: int, peer: int) -> bool:
    return True


def staged(plan: Plan, pairs: Pairs = _all_pairs, below: int = 0) -> Plan:
    """`plan` with the messages between `pairs`, and all collectives, through host memory.

    With `below` also all messages of at most this many bytes. Both ends of a message have the same, so both ranks stage
    it. What is staged already stays as it is.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"staged takes a fompi.Plan, not {plan!r}")

    def program(rank: int) -> Program:
        return _Stager(plan.programs[rank], pairs, below, plan.extents(rank) if below else None).program()

    return replace(plan, programs=Programs(plan.size, program))


def for_device(plan: Plan, pairs: Pairs = _all_pairs, below: int = 0) -> Plan:
    """The plan as a device runs it: `staged`, with products of half types."""
    programs = Programs(plan.size, lambda rank: _narrowed(plan.programs[rank]))
    return staged(replace(plan, programs=programs), pairs, below)


def _narrowed(program: Program) -> Program:
    """`program` without the copies that widen weights of half type. Its products read the weights themselves."""
    writes = Counter(chunk.buffer for op in program.ops for chunk in op.writes)
    copies = [op for op in program.ops if _widens(program, op) and writes[op.writes[0].buffer] == 1]
    if not copies:
        return program
    weights = {op.writes[0].buffer: op.reads[0].buffer for op in copies}
    ops = tuple(
        replace(op, reads=tuple(c._replace(buffer=weights.get(c.buffer, c.buffer)) for c in op.reads))
        if isinstance(op, Compute)
        else op
        for op in program.ops
        if op not in copies
    )
    return replace(program, buffers=tuple(b for b in program.buffers if b.name not in weights), ops=ops)


def _widens(program: Program, op: Op) -> bool:
    if not isinstance(op, Compute) or op.kernel != "copy":
        return False
    weight, wide = program.buffer(op.reads[0].buffer), program.buffer(op.writes[0].buffer)
    is_weight = weight.role == "input" and weight.axis in ("whole", "experts") and weight.dtype in HALF
    return is_weight and wide.role == "scratch" and wide.axis == weight.axis and wide.dtype == accumulator(weight.dtype)


def is_mirror(buffer: Buffer) -> bool:
    return buffer.place == "host"


class _Stager:
    """Rewrites the program of one rank."""

    def __init__(self, program: Program, pairs: Pairs, below: int, extents: Extents | None):
        self._program, self._pairs, self._below, self._extents = program, pairs, below, extents
        self._current: set[tuple[str, int]] = set()  # blocks whose mirror has the same content

    def program(self) -> Program:
        ops = tuple(self._ops())
        used = {chunk.buffer for op in ops for chunk in (*op.reads, *op.writes)}
        used -= {buffer.name for buffer in self._program.buffers}
        mirrors = [_mirror(b) for b in self._program.buffers if b.name + _SUFFIX in used]
        return replace(self._program, buffers=(*self._program.buffers, *mirrors), ops=ops)

    def _ops(self) -> Iterator[Op]:
        for op in self._program.ops:
            if not isinstance(op, Compute) and self._is_staged(op):
                for chunk in op.reads:
                    yield from self._down(chunk)
                reads, writes = _mirrored(op.reads), _mirrored(op.writes)
                if isinstance(op, Send | Recv):
                    yield replace(op, chunk=(*reads, *writes)[0])
                else:
                    yield Collective(op.name, reads, writes)
                for chunk, mirror in zip(op.writes, writes, strict=True):
                    yield Compute("upload", (mirror,), (chunk,))
                    self._current.update(chunk.blocks)
            else:
                yield op
                self._current.difference_update(block for chunk in op.writes for block in chunk.blocks)

    def _is_staged(self, op: Send | Recv | Collective) -> bool:
        if any(is_mirror(self._program.buffer(chunk.buffer)) for chunk in (*op.reads, *op.writes)):
            return False
        if isinstance(op, Collective):
            return True
        peer = op.dest if isinstance(op, Send) else op.source
        return self._pairs(self._program.rank, peer) or (self._extents is not None and self._nbytes(op) <= self._below)

    def _nbytes(self, op: Send | Recv) -> int:
        """The bytes of a message."""
        assert self._extents is not None
        buffer = self._program.buffer(op.chunk.buffer)
        first, last = (buffer.offsets(self._extents)[at - buffer.first] for at in (op.chunk.start, op.chunk.stop))
        return nbytes(buffer.shape_of(last - first), buffer.dtype)

    def _down(self, chunk: Chunk) -> Iterator[Op]:
        if not self._current.issuperset(chunk.blocks):
            yield Compute("download", (chunk,), _mirrored((chunk,)))
            self._current.update(chunk.blocks)


def _mirror(buffer: Buffer) -> Buffer:
    return replace(buffer, name=buffer.name + _SUFFIX, role="scratch", place="host")


def _mirrored(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    return tuple(chunk._replace(buffer=chunk.buffer + _SUFFIX) for chunk in chunks)
