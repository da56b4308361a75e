"""Plans whose messages carry fewer bits: `encoded(plan)`, for a problem with a wire (`fompi.base.wires`).

Each buffer that a message reads or writes gets a mirror that holds its blocks in their form on the wire. An
`encode(a) -> m` comes before a send, a `decode(m) -> b` after a receive; where what arrives is only added to a sum, a
`decode_add(m, b) -> c`. So an encoded plan is verified, simulated and run as any other plan.

* A block that only passes through a rank (all-gather in a ring) is not encoded again: its mirror is sent on.
* Where all ranks get the same result, they get the same bits. The rank that has computed a block, or owns it, decodes
  its own message, and keeps that.
* What arrives in a half type and is summed in float32 is decoded to float32.

Source of the wire with scales for runs of elements: block-wise quantization (Dettmers et al., arXiv 2110.02861), in
collectives ZeRO++ (arXiv 2306.10209) and EQuARX (arXiv 2506.17615).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fompi.base.errors import PlanError
from fompi.base.layout import HALF, accumulator
from fompi.plans.plan import Buffer, Chunk, Collective, Compute, Op, Plan, Program, Programs, Recv, Send
from fompi.plans.problems import Problem

Block = tuple[str, int]


def encoded(plan: Plan, roundings: int) -> Plan:
    """`plan` with messages in the form of `plan.problem.wire`. A term is rounded at most `roundings` times.

    Raises PlanError, now or when a program is read, if it has a collective of the MPI library.
    """
    problem = plan.problem

    def write(rank: int) -> Program:
        program = _Encoder(plan.programs[rank], problem).program()
        return program if plan.kernels else _with_sums(program)  # a kernel of the user gets what was declared

    programs = Programs(plan.size, write)
    return replace(plan, programs=programs, roundings=roundings if plan.size > 1 else 0)


class _Encoder:
    """Rewrites the program of one rank."""

    def __init__(self, program: Program, problem: Problem):
        self._program, self._wire = program, problem.wire
        self._result = problem.replicated
        self._sent = {block for op in program.ops if isinstance(op, Send) for block in op.chunk.blocks}
        self._last_write = {b: i for i, op in enumerate(program.ops) for chunk in op.writes for b in chunk.blocks}
        self._current: set[Block] = set()  # blocks whose mirror has the same content

    def program(self) -> Program:
        ops = tuple(self._ops())
        used = {chunk.buffer for op in ops for chunk in (*op.reads, *op.writes)}
        mirrors = [self._mirror(b) for b in self._program.buffers if self._name(b.name) in used]
        return replace(self._program, buffers=(*self._program.buffers, *mirrors), ops=ops)

    def _ops(self) -> Iterator[Op]:
        for i, op in enumerate(self._program.ops):
            if isinstance(op, Collective):
                why = "a collective of the MPI library cannot carry a wire"
                raise PlanError(f"rank {self._program.rank}, op {i}, {op}: {why}", self._program.rank, i)
            if isinstance(op, Send):
                for block in op.chunk.blocks:
                    yield from self._encode(block, i)
                yield Send(op.dest, self._mirrored(op.chunk))
            elif isinstance(op, Recv):
                yield Recv(op.source, self._mirrored(op.chunk))
                for block in op.chunk.blocks:
                    yield self._decode(block, block)
                self._current.update(op.chunk.blocks)
            elif self._is_own_copy(op):
                for source, target in self._copied(op):
                    yield from self._encode(source, i)
                    yield self._decode(source, target)
                    self._current.discard(target)
            else:
                yield op
                self._current.difference_update(block for chunk in op.writes for block in chunk.blocks)

    def _encode(self, block: Block, i: int) -> Iterator[Op]:
        """Bring the mirror of a block up to date, before op `i`. The rank keeps what the others get of a result."""
        if block in self._current:
            return
        yield Compute(f"encode_{self._wire}", (_one(block),), (self._mirrored(_one(block)),))
        self._current.add(block)
        if block[0] == self._result and self._last_write.get(block, -1) < i:
            yield self._decode(block, block)

    def _decode(self, source: Block, target: Block) -> Op:
        return Compute(f"decode_{self._wire}", (self._mirrored(_one(source)),), (_one(target),))

    def _is_own_copy(self, op: Compute) -> bool:
        """True for a copy to a result that all ranks get, of something that is sent."""
        if op.kernel not in ("copy", "pack") or {chunk.buffer for chunk in op.writes} != {self._result}:
            return False
        return all(source in self._sent for source, _ in self._copied(op))

    @staticmethod
    def _copied(op: Compute) -> Iterator[tuple[Block, Block]]:
        for read, write in zip(op.reads, op.writes, strict=True):
            yield from zip(read.blocks, write.blocks, strict=True)

    def _name(self, buffer: str) -> str:
        return f"{buffer}_{self._wire}"

    def _mirror(self, buffer: Buffer) -> Buffer:
        return replace(buffer, name=self._name(buffer.name), role="scratch", dtype="uint8", wire=self._wire)

    def _mirrored(self, chunk: Chunk) -> Chunk:
        return chunk._replace(buffer=self._name(chunk.buffer))


def _one(block: Block) -> Chunk:
    return Chunk(block[0], block[1], block[1] + 1)


def _with_sums(program: Program) -> Program:
    """`program` where what is decoded is wide, and where it is added at once if nothing else reads it."""
    decoded = {op.writes[0].buffer for op in program.ops if isinstance(op, Compute) and _decodes(op)}
    others = {
        chunk.buffer
        for op in program.ops
        if not (isinstance(op, Compute) and _decodes(op))
        for chunk in (*op.writes, *(op.reads if isinstance(op, Send) else ()))
    }
    buffers = [
        replace(b, dtype=accumulator(b.dtype))
        if b.name in decoded - others and b.role == "scratch" and b.dtype in HALF
        else b
        for b in program.buffers
    ]
    program = replace(program, buffers=tuple(buffers))
    ops = _fused(program)
    used = {chunk.buffer for op in ops for chunk in (*op.reads, *op.writes)}
    kept = tuple(b for b in program.buffers if b.role != "scratch" or b.name in used)
    return replace(program, buffers=kept, ops=tuple(ops))


def _decodes(op: Compute) -> bool:
    return op.kernel.startswith("decode_")


def _fused(program: Program) -> Sequence[Op]:
    """The ops with a decode and the sum that alone reads it as one kernel."""
    reads = Counter(b for op in program.ops for chunk in op.reads for b in chunk.blocks)
    writes = Counter(b for op in program.ops for chunk in op.writes for b in chunk.blocks)
    scratch = {b.name for b in program.buffers if b.role == "scratch"}
    decoded: dict[Chunk, Chunk] = {}  # what only one op reads, and its form on the wire
    for op in program.ops:
        if isinstance(op, Compute) and _decodes(op) and op.writes[0].buffer in scratch:
            (block,) = op.writes[0].blocks
            if reads[block] == writes[block] == 1:
                decoded[op.writes[0]] = op.reads[0]
    ops: list[Op] = []
    added: set[Chunk] = set()
    for op in program.ops:
        if isinstance(op, Compute) and op.kernel == "add" and len(op.writes) == 1:
            known = [k for k in (1, 0) if op.reads[k] in decoded]
            wide = {program.buffer(c.buffer).dtype for c in (*op.reads, *op.writes)} == {"float32"}
            if known and wide:
                arrived, other = op.reads[known[0]], op.reads[1 - known[0]]
                wire = program.buffer(decoded[arrived].buffer).wire
                ops.append(Compute(f"decode_add_{wire}", (decoded[arrived], other), op.writes))
                added.add(arrived)
                continue
        ops.append(op)
    return [op for op in ops if not (isinstance(op, Compute) and _decodes(op) and op.writes[0] in added)]
