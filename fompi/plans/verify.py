"""Is a plan right? `verify(plan)` walks it without data, and raises PlanError with rank, op and chunk if it is not.

It verifies these properties for every number of rows and for every interleaving of the lanes:

* Each send has its receive, with the same rows, shape and dtype. All ranks call collectives in the same order.
* No op reads a block before it is written. No op writes an input. No op writes a block that it reads, except a sum in
  place.
* No kernel of the user is called twice with the same arguments.
* The plan ends, even if every send waits for its receive and every collective waits for all ranks.
* At the end every output block holds the sum of exactly the terms that the operation defines. Results of half type
  were rounded once.
* Where the problem asks for an order, sums have added their terms in its tree (`fompi.plans.tree`), not only the same
  terms.
* Where messages have a wire, no term is rounded more often than the plan says. What all ranks get alike is one message,
  decoded by all of them, so that it has the same bits everywhere.

One execution of the plan is enough. What an op waits for follows from everything that it reads and writes
(`dependencies.constraints`). So two ops that touch the same block, one of them writing, never run at the same time.
And the start of one op never prevents the start of another. So either all interleavings end in the same state, or none
ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from fompi.base import layout
from fompi.base.errors import PlanError
from fompi.base.layout import AXES, COLLECTIVES, HALF, NATIVE_SUMS, Symbol
from fompi.plans.conditions import after, before
from fompi.plans.dependencies import Frontier, constraints
from fompi.plans.kernels import (
    DECODE,
    DECODE_ADD,
    ENCODE,
    GROUPED,
    MOVES,
    ORDERED_PAIRS,
    Term,
    Value,
    aligned,
    evaluate,
    evaluate_opaque,
    exact,
    find,
    fits,
    in_place,
    is_known,
    is_opaque,
    is_result,
    is_rounded,
    total,
)
from fompi.plans.plan import Chunk, Collective, Compute, Op, Plan, Program, Recv, Send

Partner = tuple[int, int]
"""A send or a receive, as (rank, op)."""


def verify(plan: Plan) -> None:
    """Raise PlanError if the plan is wrong, else return None. This takes about 10 us per op."""
    if not isinstance(plan, Plan):
        raise PlanError(f"verify takes a fompi.Plan, not {plan!r}")
    for rank, program in enumerate(plan.programs):
        _check_program(plan, rank, program)
        for i, op in enumerate(program.ops):
            _check_op(plan, program, i, op)
        _check_calls(plan, program)
    partners = _match(plan)
    _check_collectives(plan)
    values = _Execution(plan, partners).run()
    for program, held in zip(plan.programs, values, strict=True):
        _check_outputs(plan, program, held)
    if plan.problem.wire and plan.size > 1:
        _check_replicated(plan, values)


def values_at_the_end(plan: Plan) -> list[dict[tuple[str, int], Value]]:
    """The values of all blocks of each rank at the end of a plan that is right."""
    return _Execution(plan, _match(plan)).run()


def flaw(written: Callable[[], Plan]) -> Exception | None:
    """The error in the plan that `written` returns, or the error that `written` raises. None if the plan is right."""
    try:
        verify(written())
    except Exception as error:
        return error
    return None


# ------------------------------------------------------------------------------------------------ one op, one rank


def _error(rank: int, op: int, text: object, chunk: object, why: str) -> PlanError:
    return PlanError(f"rank {rank}, op {op}, {text}: {why}", rank, op, str(chunk))


def _first(op: Op) -> Chunk | str:
    """The chunk that an error names when the op as a whole is wrong."""
    chunks = (*op.writes, *op.reads)
    return chunks[0] if chunks else ""


def _check_program(plan: Plan, rank: int, program: Program) -> None:
    """Check that the program belongs to this rank and has the buffers of the problem."""
    if (program.rank, program.size, program.parts) != (rank, plan.size, plan.parts) or plan.size != plan.problem.size:
        here = f"rank {rank} of {plan.size} with {plan.parts} parts"
        there = f"rank {program.rank} of {program.size} with {program.parts} parts"
        why = f"the problem has {plan.problem.size} ranks" if here == there else f"its program is for {there}"
        raise PlanError(f"{here}: {why}", rank)
    for kernel in plan.kernels:
        if is_known(kernel.name):
            raise PlanError(f"the plan declares a kernel {kernel.name!r}, but fompi has one of this name", rank)
    buffers = {b.name: b for b in program.buffers}
    for wanted in plan.problem.workspace(rank, plan.parts).program(()).buffers:
        found = buffers.get(wanted.name)
        same_ndim = found is not None and len(found.row) == len(wanted.row)  # ranks may differ in columns
        if found is None or not same_ndim or replace(found, row=wanted.row) != wanted:
            why = f"the problem needs {wanted}, but the program has {found}"
            raise PlanError(f"rank {rank}: {why}", rank, chunk=str(wanted[:]))
    for b in program.buffers:
        numbers = range(b.first, b.first + b.count)
        experts = plan.problem.experts[rank] if plan.problem.experts else 0
        if b.axis not in AXES or numbers != layout.blocks(b.axis, rank, plan.size, plan.parts, experts):
            why = f"{b[:]} are not the blocks of a buffer with the axis {b.axis!r}"
            raise PlanError(f"rank {rank}: {why}", rank, chunk=str(b[:]))
        if b.wire not in ("", plan.problem.wire) or (b.wire and (b.role, b.dtype) != ("scratch", "uint8")):
            raise PlanError(f"rank {rank}: {b[:]} cannot have the wire {b.wire!r}", rank, chunk=str(b[:]))
        if b.dtype not in (plan.problem.dtype, plan.problem.accumulator) and not b.wire:
            why = f"{b[:]} has the dtype {b.dtype}, which a plan for {plan.problem.dtype} cannot use"
            raise PlanError(f"rank {rank}: {why}", rank, chunk=str(b[:]))


def _check_op(plan: Plan, program: Program, i: int, op: Op) -> None:
    rank, names = program.rank, {b.name: b for b in program.buffers}
    if not op.reads and not op.writes:
        raise _error(rank, i, op, "", "it reads nothing and writes nothing")
    for chunk in (*op.reads, *op.writes):
        buffer = names.get(chunk.buffer)
        if buffer is None:
            raise _error(rank, i, op, chunk, f"unknown buffer {chunk.buffer!r}")
        if not buffer.first <= chunk.start < chunk.stop <= buffer.first + buffer.count:
            raise _error(rank, i, op, chunk, f"{chunk} is outside the blocks of this rank, {buffer[:]}")
    for chunk in op.writes:
        if names[chunk.buffer].role == "input":
            raise _error(rank, i, op, chunk, f"{chunk} is an input; inputs must not be written")
    _check_overlaps(plan, rank, i, op)
    if isinstance(op, (Send, Recv)):
        peer = op.dest if isinstance(op, Send) else op.source
        if not 0 <= peer < program.size or peer == rank:
            raise _error(rank, i, op, op.chunk, f"{peer} is not another rank of {program.size}")
    elif isinstance(op, Compute):
        if plan.kernel(op.kernel) is None:
            _check_kernel(program, i, op)
    elif op.name not in COLLECTIVES:
        raise _error(rank, i, op, _first(op), f"unknown collective {op.name!r}")
    elif op.name in ("reduce_scatter", "all_reduce") and any(
        names[c.buffer].dtype not in NATIVE_SUMS for c in op.reads
    ):
        raise _error(rank, i, op, _first(op), f"MPI libraries do not sum {names[op.reads[0].buffer].dtype} correctly")


def _check_calls(plan: Plan, program: Program) -> None:
    """Check that no kernel of the user is called twice with the same arguments: it may change what the user holds."""
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    for i, op in enumerate(program.ops):
        if isinstance(op, Compute) and op.args and plan.kernel(op.kernel) is not None:
            other = seen.setdefault((op.kernel, op.args), i)
            if other != i:
                raise _error(program.rank, i, op, _first(op), f"op {other} is the same call; a call must be made once")


def _check_overlaps(plan: Plan, rank: int, i: int, op: Op) -> None:
    """Check that the op writes no block twice and no block that it reads, except for sums in place."""
    for w, written in enumerate(op.writes):
        for other in op.writes[:w]:
            if _overlap(written, other):
                raise _error(rank, i, op, written, f"{written} is written twice")
        for r, read in enumerate(op.reads):
            if _overlap(written, read):
                same = written == read and isinstance(op, Compute)
                own = same and plan.kernel(op.kernel) is not None  # type: ignore[union-attr]
                if not own and not (same and is_known(op.kernel) and in_place(op, r, w)):  # type: ignore[arg-type,union-attr]
                    raise _error(rank, i, op, written, f"{written} is written while the op reads {read}")


def _overlap(a: Chunk, b: Chunk) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


def _check_kernel(program: Program, i: int, op: Compute) -> None:
    rank = program.rank
    if not is_known(op.kernel):
        raise _error(rank, i, op, _first(op), f"unknown kernel {op.kernel!r}")
    kernel, groups = find(op.kernel), aligned(op)
    _check_wires(program, i, op)
    if not groups or (kernel.reduces and len(op.writes) != 1):
        raise _error(rank, i, op, _first(op), "the kernel does not take this number of operands")
    first = [_symbols(program, chunk) for chunk in groups[0]]
    for group in groups[1:]:
        if [_symbols(program, chunk) for chunk in group] != first:
            raise _error(rank, i, op, group[0], "its operands do not have equally many rows")
    for chunk in (*kernel.wholes(op.reads), *(op.writes if kernel.reduces else ())):
        axis = program.buffer(chunk.buffer).axis
        if op.kernel in GROUPED and (axis != "experts" or chunk.stop - chunk.start != len(groups[0])):
            raise _error(rank, i, op, chunk, f"{chunk} does not have a matrix for each of {len(groups[0])} runs")
        if op.kernel not in GROUPED and axis != "whole":
            raise _error(rank, i, op, chunk, f"{chunk} has rows, but the kernel takes an operand without rows there")
    if not fits(op, lambda chunk: program.buffer(chunk.buffer).row):
        rows = ", ".join(f"{chunk} {list(program.buffer(chunk.buffer).row)}" for chunk in (*op.reads, *op.writes))
        raise _error(rank, i, op, _first(op), f"the shapes of the rows do not match: {rows}")


def _check_wires(program: Program, i: int, op: Compute) -> None:
    """Check that only kernels of wires touch what is on a wire: one block, and of the wire that they know."""
    if op.kernel in ("download", "upload") and program.buffer(op.reads[0].buffer).wire:
        return  # a message, as it is
    to, of = ENCODE.get(op.kernel, ""), DECODE.get(op.kernel, "") or DECODE_ADD.get(op.kernel, "")
    wanted = [*[of] * bool(of), *[""] * (len(op.reads) - bool(of)), *[to] * len(op.writes)]
    for chunk, wire in zip((*op.reads, *op.writes), wanted, strict=True):
        if program.buffer(chunk.buffer).wire != wire:
            what = f"has the wire {program.buffer(chunk.buffer).wire}" if not wire else f"does not have the wire {wire}"
            raise _error(program.rank, i, op, chunk, f"{chunk} {what}")
        if (to or of) and chunk.stop - chunk.start != 1:
            raise _error(program.rank, i, op, chunk, f"{chunk} is not one block")


def _symbols(program: Program, chunk: Chunk) -> list[Symbol]:
    buffer = program.buffer(chunk.buffer)
    return [buffer.symbol(program.rank, program.size, program.parts, b) for b in range(chunk.start, chunk.stop)]


# ------------------------------------------------------------------------------------------- messages between ranks


def _match(plan: Plan) -> dict[Partner, Partner]:
    """The partner of every send and receive. Raises PlanError if one has no partner or does not match it."""
    sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    recvs: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for program in plan.programs:
        for i, op in enumerate(program.ops):
            if isinstance(op, Send):
                sends[program.rank, op.dest].append(i)
            elif isinstance(op, Recv):
                recvs[op.source, program.rank].append(i)
    partners: dict[Partner, Partner] = {}
    for source, dest in sorted(sends.keys() | recvs.keys()):
        out, into = sends[source, dest], recvs[source, dest]
        for i, j in zip(out, into, strict=False):
            a, b = plan.programs[source], plan.programs[dest]
            _check_same_rows(a, i, a.ops[i].reads[0], b, j, b.ops[j].writes[0])
            partners[source, i], partners[dest, j] = (dest, j), (source, i)
        for rank, ops, partner_ops, verb in ((source, out, into, "receives"), (dest, into, out, "sends")):
            if len(ops) > len(partner_ops):
                i, peer = ops[len(partner_ops)], dest if rank == source else source
                op = plan.programs[rank].ops[i]
                raise _error(rank, i, op, _first(op), f"rank {peer} never {verb} it")
    return partners


def _check_same_rows(source: Program, i: int, out: Chunk, dest: Program, j: int, into: Chunk) -> None:
    a, b = source.buffer(out.buffer), dest.buffer(into.buffer)
    if _symbols(source, out) != _symbols(dest, into):
        why = f"{out} has other rows than {into} on rank {dest.rank}, op {j}, {dest.ops[j]}"
        raise _error(source.rank, i, source.ops[i], out, why)
    if (a.row, a.dtype, a.wire) != (b.row, b.dtype, b.wire):
        why = f"{out} is {a.dtype}{list(a.row)}, but {into} on rank {dest.rank}, op {j}, is {b.dtype}{list(b.row)}"
        raise _error(source.rank, i, source.ops[i], out, why)


def _check_collectives(plan: Plan) -> None:
    """Check that the k-th collective is the same on all ranks, and that its chunks match."""
    by_rank = [[(i, op) for i, op in enumerate(p.ops) if isinstance(op, Collective)] for p in plan.programs]
    for rank, local in enumerate(by_rank):
        for k in range(max(len(local), len(by_rank[0]))):
            here = local[k][1].name if k < len(local) else "none"
            first = by_rank[0][k][1].name if k < len(by_rank[0]) else "none"
            if here != first:
                at, (other, name) = (rank, (0, first)) if k < len(local) else (0, (rank, here))
                i, op = by_rank[at][k]
                why = f"this is collective {k} of this rank, but collective {k} of rank {other} is {name}"
                raise _error(at, i, op, _first(op), why)
    for calls in zip(*by_rank, strict=True):
        for rank, (i, op) in enumerate(calls):
            _check_arity(plan, rank, i, op)
        for rank in range(plan.size):
            _check_collective(plan, rank, calls)


def _check_arity(plan: Plan, rank: int, i: int, op: Collective) -> None:
    """Check how many chunks the collective reads and writes."""
    size = plan.size
    reads, writes = {
        "all_gather": (1, size),
        "all_to_all": (size, size),
        "reduce_scatter": (1, 1),
        "all_reduce": (1, 1),
        "broadcast": (1, 0) if rank == plan.problem.root else (0, 1),
    }[op.name]
    if (len(op.reads), len(op.writes)) != (reads, writes):
        raise _error(rank, i, op, _first(op), f"{op.name} must read {reads} and write {writes} chunks on this rank")
    if op.name == "reduce_scatter" and (op.reads[0].stop - op.reads[0].start) % size:
        raise _error(rank, i, op, op.reads[0], f"{op.reads[0]} cannot be divided equally among {size} ranks")


def _check_collective(plan: Plan, rank: int, calls: Sequence[tuple[int, Collective]]) -> None:
    """Check that the data that this rank gets has the rows, shape and dtype of the chunks that it writes."""
    size, program, (i, op) = plan.size, plan.programs[rank], calls[rank]
    for source, (j, other) in enumerate(calls):
        sender = plan.programs[source]
        if op.name == "all_gather":
            _check_same_rows(sender, j, other.reads[0], program, i, op.writes[source])
        elif op.name == "all_to_all":
            _check_same_rows(sender, j, other.reads[rank], program, i, op.writes[source])
        elif op.name == "reduce_scatter":
            _check_same_rows(sender, j, _piece(other.reads[0], rank, size), program, i, op.writes[0])
        elif op.writes and other.reads:
            _check_same_rows(sender, j, other.reads[0], program, i, op.writes[0])


def _piece(chunk: Chunk, rank: int, size: int) -> Chunk:
    """The blocks of `chunk` for `rank`, if all ranks get equally many."""
    count = (chunk.stop - chunk.start) // size
    return chunk._replace(start=chunk.start + rank * count, stop=chunk.start + (rank + 1) * count)


# ----------------------------------------------------------------------------------------------------- execution


class _Execution:
    """Runs all ranks on values without data.

    An op starts as soon as it may. A message is done when its send and its receive have started.
    """

    def __init__(self, plan: Plan, partners: dict[Partner, Partner]):
        self.plan, self.partners = plan, partners
        self.limits = [constraints(p.ops, plan.pace) for p in plan.programs]
        self.frontiers = [Frontier(c) for c in self.limits]
        self.started: list[set[int]] = [set() for _ in plan.programs]
        self.done: list[set[int]] = [set() for _ in plan.programs]
        self.values = [before(plan.problem, p) for p in plan.programs]
        self.at_collective: defaultdict[int, list[Partner]] = defaultdict(list)
        self.passed = [count() for _ in plan.programs]

    def run(self) -> list[dict[tuple[str, int], Value]]:
        """The values of all blocks of each rank at the end. Raises PlanError if an op is never done."""
        ready = deque((rank, i) for rank, f in enumerate(self.frontiers) for i in f.begin())
        while ready:
            rank, i = ready.popleft()
            self.started[rank].add(i)
            ready.extend((rank, next_op) for next_op in self.frontiers[rank].started(i))
            for done_rank, done in self._complete(rank, i):
                self.done[done_rank].add(done)
                ready.extend((done_rank, next_op) for next_op in self.frontiers[done_rank].done(done))
        self._check_ended()
        return self.values

    def _complete(self, rank: int, i: int) -> Sequence[Partner]:
        """The ops that are done now that this op has started."""
        op = self.plan.programs[rank].ops[i]
        if isinstance(op, Compute):
            if (own := self.plan.kernel(op.kernel)) is not None:
                results = []
                for call in own.calls(op):
                    results += evaluate_opaque(call, lambda chunk: self._read(rank, i, chunk))
            else:
                ordered = bool(self.plan.problem.order)
                results = evaluate(op, lambda chunk: self._operand(rank, i, op, chunk), (rank, i), ordered)
            self._write(rank, op.writes, results)
            return [(rank, i)]
        if isinstance(op, Collective):
            k = next(self.passed[rank])
            self.at_collective[k].append((rank, i))
            if len(self.at_collective[k]) < self.plan.size:
                return ()
            self._collective(sorted(self.at_collective[k]))
            return self.at_collective.pop(k)
        peer, j = self.partners[rank, i]
        if j not in self.started[peer]:
            return ()
        (source, s), (dest, d) = ((rank, i), (peer, j)) if isinstance(op, Send) else ((peer, j), (rank, i))
        send, recv = self.plan.programs[source].ops[s], self.plan.programs[dest].ops[d]
        self._write(dest, recv.writes, self._read(source, s, send.reads[0]))
        return (rank, i), (peer, j)

    def _read(self, rank: int, i: int, chunk: Chunk) -> list[Value]:
        held = self.values[rank]
        for block in chunk.blocks:
            if block not in held:
                op = self.plan.programs[rank].ops[i]
                missing = Chunk(block[0], block[1], block[1] + 1)
                raise _error(rank, i, op, missing, f"{missing} is read before it is written")
        return [held[block] for block in chunk.blocks]

    def _operand(self, rank: int, i: int, op: Compute, chunk: Chunk) -> list[Value]:
        """The operand of a kernel. A result of half type has been rounded: it may only be moved."""
        values = self._read(rank, i, chunk)
        if self.plan.problem.half:
            program = self.plan.programs[rank]
            source, into = program.buffer(chunk.buffer).dtype, program.buffer(op.writes[0].buffer).dtype
            moves = (op.kernel in MOVES and source == into) or op.kernel in ENCODE
            if source in HALF and not moves and any(is_result(exact(value)[0]) for value in values):
                raise _error(rank, i, op, chunk, f"{chunk} has been rounded to {source}; this op would round it again")
        return values

    def _write(self, rank: int, chunks: Sequence[Chunk], values: Sequence[Value]) -> None:
        blocks = [block for chunk in chunks for block in chunk.blocks]
        self.values[rank].update(zip(blocks, values, strict=True))

    def _collective(self, calls: list[Partner]) -> None:
        """Carry out a collective that all ranks have started."""
        ops = [self.plan.programs[rank].ops[i] for rank, i in calls]
        read = [[self._read(rank, i, chunk) for chunk in op.reads] for (rank, i), op in zip(calls, ops, strict=True)]
        name, size = ops[0].name, len(ops)  # type: ignore[union-attr]
        for rank, op in enumerate(ops):
            if name == "all_gather":
                values = [v for chunks in read for v in chunks[0]]
            elif name == "all_to_all":
                values = [v for chunks in read for v in chunks[rank]]
            elif name == "broadcast":
                values = next(chunks[0] for chunks in read if chunks) if op.writes else []
            else:
                terms = [chunks[0] for chunks in read]
                if name == "reduce_scatter":
                    length = len(terms[0]) // size
                    terms = [t[rank * length : (rank + 1) * length] for t in terms]
                values = [total(*column) for column in zip(*terms, strict=True)]
            self._write(rank, op.writes, values)

    def _check_ended(self) -> None:
        """Raise PlanError for an op that was not done: rather one that started than one that did not."""
        for rank, program in enumerate(self.plan.programs):
            for i, op in enumerate(program.ops):
                if i in self.started[rank] and i not in self.done[rank]:
                    why = f"rank {rank} never completes op {i}, {op}: {self._why(rank, i)}"
                    raise PlanError(why, rank, i, str(_first(op)))
        for rank, program in enumerate(self.plan.programs):
            for i, op in enumerate(program.ops):
                if i not in self.started[rank]:
                    why = f"rank {rank} never starts op {i}, {op}: its dependencies form a cycle"
                    raise PlanError(why, rank, i, str(_first(op)))

    def _why(self, rank: int, i: int) -> str:
        """Why an op that has started is never done: what its partner waits for."""
        if (rank, i) not in self.partners:
            there = {r for calls in self.at_collective.values() if (rank, i) in calls for r, _ in calls}
            missing = min(set(range(self.plan.size)) - there)
            return f"rank {missing} never reaches this collective."
        peer, j = self.partners[rank, i]
        needs, behind, _ = self.limits[peer]
        other = self.plan.programs[peer].ops[j]
        verb = "sends it" if isinstance(other, Send) else "receives it"
        for k in (*needs[j], behind[j]):
            if k >= 0 and k not in self.done[peer]:
                at = self.partners.get((peer, k))
                waits = f", which waits for rank {at[0]}" if at else ""
                return f"rank {peer} {verb} only after its op {k}{waits}."
        return f"rank {peer} never reaches its op {j}, {other}."


def _check_outputs(plan: Plan, program: Program, held: dict[tuple[str, int], Value]) -> None:
    """Check that every output block holds exactly the terms that the operation defines."""
    for (name, block), wanted in after(plan.problem, program.rank, plan.parts).items():
        got = held.get((name, block))
        times = 0
        if got is not None and plan.problem.wire:
            got, times = exact(got)
        if got == wanted and times <= plan.roundings:
            continue
        chunk = Chunk(name, block, block + 1)
        writers = [i for i, op in enumerate(program.ops) if any((name, block) in c.blocks for c in op.writes)]
        if times > plan.roundings:
            why = f"at the end a term of {chunk} was rounded {times} times, but at most {plan.roundings} are allowed"
            raise _error(program.rank, writers[-1], program.ops[writers[-1]], chunk, why)
        if got is None or not writers:  # what is over x holds a term before
            last = len(program.ops) - 1 if program.ops else None
            at = f"rank {program.rank}, after its last op, {last}" if program.ops else f"rank {program.rank} has no ops"
            raise PlanError(f"{at}: {chunk} is never written", program.rank, last, str(chunk))
        if plan.problem.order:
            why = f"at the end {chunk} is {_sum_of(got)}, but the order {plan.problem.order!r} is {_sum_of(wanted)}"
            raise _error(program.rank, writers[-1], program.ops[writers[-1]], chunk, why)
        missing, extra = _difference(wanted, got), _difference(got, wanted)
        words = [f"lacks {_spell(t)}" for t in missing[:2]] + [f"contains {_spell(t)} too often" for t in extra[:2]]
        why = _first_mistake(missing, extra) or "; ".join(words)
        raise _error(program.rank, writers[-1], program.ops[writers[-1]], chunk, f"at the end {chunk} {why}")


def _check_replicated(plan: Plan, values: Sequence[dict[tuple[str, int], Value]]) -> None:
    """Check that the results that all ranks get alike have the same bits: all have decoded one message."""
    name = plan.problem.replicated
    for program, held in zip(plan.programs, values, strict=True):
        for block in after(plan.problem, program.rank, plan.parts) if name else ():
            got = held[block]
            if block[0] != name or (got == values[0][block] and is_rounded(got)):
                continue
            chunk = Chunk(block[0], block[1], block[1] + 1)
            writer = max(i for i, op in enumerate(program.ops) if any(block in c.blocks for c in op.writes))
            why = f"at the end {chunk} is not the message that the other ranks have decoded"
            raise _error(program.rank, writer, program.ops[writer], chunk, why)


def _difference(a: Value, b: Value) -> list[Term]:
    """The terms of a that b lacks."""
    return [*(Counter(a) - Counter(b)).elements()]


def _first_mistake(missing: Sequence[Term], extra: Sequence[Term]) -> str:
    """Where the difference begins, if it is an opaque kernel that has read something else. Else empty."""
    for wanted in missing:
        for got in extra:
            if not (is_opaque(wanted) and is_opaque(got)) or wanted[:2] + wanted[3:] != got[:2] + got[3:]:
                continue
            for right, wrong in zip(wanted[2].values, got[2].values, strict=False):
                if right != wrong:
                    lacks, holds = _difference(right, wrong), _difference(wrong, right)
                    read, instead = (" + ".join(map(_spell, terms)) or "nothing" for terms in (wrong, right))
                    here = (
                        f"depends on a {_spell(wanted).partition(' of ')[2]} that has read {read} instead of {instead}"
                    )
                    return _first_mistake(lacks, holds) or here
    return ""


def _sum_of(value: Value) -> str:
    """The text of a sum: '(x[5] of rank 0 + x[5] of rank 1)'."""
    return " + ".join(map(_spell, value)) or "nothing"


def _spell(term: object) -> str:
    """The text of a term: 'x[5] of rank 2' for ('x', 2, 5)."""
    if isinstance(term, tuple) and len(term) == 2 and term[0] in ORDERED_PAIRS.values():
        a, b = map(_sum_of, term[1])
        return f"({a} {term[0]} {b})"
    if isinstance(term, tuple) and is_opaque(term):
        return f"output {term[3]} of {term[0]}<{', '.join(map(str, term[1]))}>"
    if isinstance(term, tuple) and len(term) == 3 and isinstance(term[1], int):
        return f"{term[0]}[{term[2]}] of rank {term[1]}"
    if isinstance(term, tuple) and len(term) == 2:
        return f"{term[0]}({', '.join(' + '.join(map(_spell, value)) for value in term[1])})"
    if isinstance(term, tuple) and len(term) == 3:
        return f"{term[0]}({_spell(term[1])}, {_spell(term[2])})"
    return str(term)
