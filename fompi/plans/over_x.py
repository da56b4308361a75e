"""Plans whose result is written over x: `over_x(plan)`.

What was y is x then, and a copy of x to the same place of y is gone. An op that writes a block of y now waits for the
messages and sums that read this block of x. So it is a plan as others: the dependencies, the proof and the twin know
nothing of it.
"""

from __future__ import annotations

from dataclasses import replace

from fompi.base.errors import PlanError
from fompi.plans.kernels import in_place
from fompi.plans.plan import Chunk, Compute, Op, Plan, Program, Programs, Recv, Send

OPERATIONS = ("all_reduce", "broadcast")
"""Their y has the rows of x on every rank."""


def over_x(plan: Plan) -> Plan:
    """`plan` with the buffer x in place of y. Its role is "inout".

    Raises PlanError, now or when a program is read, if some op needs what is in x after another one has written y.
    """
    problem = plan.problem
    if problem.operation not in OPERATIONS or problem.packed or problem.over_x:
        raise PlanError(f"{problem}: its result cannot be written over x")
    programs = Programs(plan.size, lambda rank: _over_x(plan.programs[rank]))
    return replace(plan, problem=replace(problem, over_x=True), programs=programs)


def _over_x(program: Program) -> Program:
    written: set[int] = set()  # blocks of x
    ops: list[Op] = []
    for i, op in enumerate(program.ops):
        if _stays(op):
            continue
        wanted = {b for chunk in op.reads if chunk.buffer == "x" for b in range(chunk.start, chunk.stop)}
        if wanted & written or not _may_overlap(op):
            raise PlanError(f"rank {program.rank}, op {i}, {op}: it needs x, which is overwritten", program.rank, i)
        written |= {b for chunk in op.writes if chunk.buffer == "y" for b in range(chunk.start, chunk.stop)}
        if isinstance(op, (Send, Recv)):
            ops.append(replace(op, chunk=_renamed(op.chunk)))
        else:
            ops.append(replace(op, reads=tuple(map(_renamed, op.reads)), writes=tuple(map(_renamed, op.writes))))
    buffers = tuple(replace(b, role="inout") if b.name == "x" else b for b in program.buffers if b.name != "y")
    return replace(program, buffers=buffers, ops=tuple(ops))


def _renamed(chunk: Chunk) -> Chunk:
    return chunk._replace(buffer="x") if chunk.buffer == "y" else chunk


def _stays(op: Op) -> bool:
    """True for a copy of x to the same place of y."""
    if not isinstance(op, Compute) or op.kernel != "copy":
        return False
    return (op.reads[0].buffer, op.writes[0].buffer) == ("x", "y") and op.reads[0][1:] == op.writes[0][1:]


def _may_overlap(op: Op) -> bool:
    """False if the op reads x and writes a part of y there, and is no sum in place. Nor is a collective of MPI."""
    pairs = [
        (r, w)
        for r, read in enumerate(op.reads)
        for w, write in enumerate(op.writes)
        if (read.buffer, write.buffer) == ("x", "y") and read.start < write.stop and write.start < read.stop
    ]
    return not pairs or (
        isinstance(op, Compute) and all(op.reads[r][1:] == op.writes[w][1:] and in_place(op, r, w) for r, w in pairs)
    )
