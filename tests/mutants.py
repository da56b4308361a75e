"""Mutations of plans: small changes, like those that a mistake in a schedule or an executor would make."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from plan_texts import with_program

from fompi.plans.kernels import KERNELS
from fompi.plans.plan import Chunk, Collective, Compute, Op, Plan, Program, Recv, Send
from fompi.plans.verify import COLLECTIVES


def mutant(plan: Plan, random) -> tuple[str, Plan]:
    """The name of a random mutation, and the mutated plan."""
    while True:
        name = random.choice(list(MUTATIONS))
        try:
            mutated = MUTATIONS[name](plan, random)
        except LookupError:  # the plan has nothing of this kind
            continue
        if mutated != plan:
            return name, mutated


# ------------------------------------------------------------------------------------------------ tools


def with_ops(plan: Plan, rank: int, ops: list[Op]) -> Plan:
    return with_program(plan, replace(plan.programs[rank], ops=tuple(ops)))


def somewhere(plan: Plan, random, kinds: tuple[type, ...] = (Send, Recv, Compute, Collective)):
    """(rank, its ops as a list, the number of a random op of these kinds). Raises LookupError if there is none."""
    places = [(p.rank, i) for p in plan.programs for i, op in enumerate(p.ops) if isinstance(op, kinds)]
    rank, i = random.choice(places)
    return rank, list(plan.programs[rank].ops), i


def chunks(op: Op) -> list[Chunk]:
    return [*op.reads, *op.writes]


def with_chunk(op: Op, number: int, chunk: Chunk) -> Op:
    """The op with another chunk at this place of `chunks(op)`."""
    if isinstance(op, (Send, Recv)):
        return replace(op, chunk=chunk)
    operands = chunks(op)
    operands[number] = chunk
    return replace(op, reads=tuple(operands[: len(op.reads)]), writes=tuple(operands[len(op.reads) :]))


def change_chunk(change, plan: Plan, random) -> Plan:
    """Replace one chunk of one op by `change(random, program, chunk)`."""
    rank, ops, i = somewhere(plan, random)
    number, chunk = random.choice(list(enumerate(chunks(ops[i]))))
    ops[i] = with_chunk(ops[i], number, change(random, plan.programs[rank], chunk))
    return with_ops(plan, rank, ops)


# ------------------------------------------------------------------------------------------------ order of ops


def drop(plan, random):
    """Remove an op."""
    rank, ops, i = somewhere(plan, random)
    del ops[i]
    return with_ops(plan, rank, ops)


def double(plan, random):
    """Repeat an op at once."""
    rank, ops, i = somewhere(plan, random)
    ops.insert(i, ops[i])
    return with_ops(plan, rank, ops)


def double_later(plan, random):
    """Repeat an op later."""
    rank, ops, i = somewhere(plan, random)
    ops.insert(random.randrange(i, len(ops)) + 1, ops[i])
    return with_ops(plan, rank, ops)


def swap(plan, random):
    """Two ops of one rank change places."""
    rank, ops, i = somewhere(plan, random)
    j = random.randrange(len(ops))
    ops[i], ops[j] = ops[j], ops[i]
    return with_ops(plan, rank, ops)


def swap_neighbours(plan, random):
    """Two neighbouring ops of one rank change places."""
    rank, ops, i = somewhere(plan, random)
    j = (i + 1) % len(ops)
    ops[i], ops[j] = ops[j], ops[i]
    return with_ops(plan, rank, ops)


def move(plan, random):
    """Move an op to another place."""
    rank, ops, i = somewhere(plan, random)
    op = ops.pop(i)
    ops.insert(random.randrange(len(ops) + 1), op)
    return with_ops(plan, rank, ops)


def exchange_programs(plan, random):
    """Two ranks exchange their ops."""
    a, b = random.randrange(plan.size), random.randrange(plan.size)
    return with_ops(with_ops(plan, a, plan.programs[b].ops), b, plan.programs[a].ops)


def everywhere(change, plan, random):
    """The same change at the same places on all ranks. Messages and collectives still match."""
    numbers = range(min(len(p.ops) for p in plan.programs))
    i, j = random.choice(numbers), random.choice(numbers)
    for program in plan.programs:
        ops = list(program.ops)
        change(ops, i, j)
        plan = with_ops(plan, program.rank, ops)
    return plan


def _drop_at(ops, i, j):
    del ops[i]


def _swap_at(ops, i, j):
    ops[i], ops[j] = ops[j], ops[i]


def _double_at(ops, i, j):
    ops.insert(max(i, j), ops[i])


# ------------------------------------------------------------------------------------------------ messages


def divert(plan, random):
    """A message goes to, or comes from, another rank."""
    rank, ops, i = somewhere(plan, random, (Send, Recv))
    peer = random.randrange(-1, plan.size + 1)
    ops[i] = replace(ops[i], dest=peer) if isinstance(ops[i], Send) else replace(ops[i], source=peer)
    return with_ops(plan, rank, ops)


def turn_round(plan, random):
    """A send becomes a receive, or a receive becomes a send."""
    rank, ops, i = somewhere(plan, random, (Send, Recv))
    op = ops[i]
    ops[i] = Recv(op.dest, op.chunk) if isinstance(op, Send) else Send(op.source, op.chunk)
    return with_ops(plan, rank, ops)


def both_ends(change, plan, random):
    """The same change to the send and to the receive of one message."""
    source, ops, i = somewhere(plan, random, (Send,))
    dest = ops[i].dest
    number = [j for j, op in enumerate(ops) if isinstance(op, Send) and op.dest == dest].index(i)
    dest_ops = list(plan.programs[dest].ops)
    arrivals = [j for j, op in enumerate(dest_ops) if isinstance(op, Recv) and op.source == source]
    change(ops, i, random)
    change(dest_ops, arrivals[number], random)
    return with_ops(with_ops(plan, source, ops), dest, dest_ops)


def _drop_one(ops, i, random):
    del ops[i]


def _double_one(ops, i, random):
    ops.insert(i, ops[i])


def _move_one(ops, i, random):
    op = ops.pop(i)
    ops.insert(random.randrange(len(ops) + 1), op)


def exchange_chunks(plan, random):
    """Two ops of one kind on one rank exchange a chunk."""
    rank, ops, i = somewhere(plan, random)
    j = random.choice([j for j, op in enumerate(ops) if type(op) is type(ops[i]) and j != i])
    n = random.choice(range(min(len(chunks(ops[i])), len(chunks(ops[j])))))
    a, b = chunks(ops[i])[n], chunks(ops[j])[n]
    ops[i], ops[j] = with_chunk(ops[i], n, b), with_chunk(ops[j], n, a)
    return with_ops(plan, rank, ops)


# ------------------------------------------------------------------------------------------------ chunks, kernels


def _shifted(random, program: Program, chunk: Chunk):
    """The blocks one or two places before or after."""
    by = random.choice((-2, -1, 1, 2))
    return chunk._replace(start=chunk.start + by, stop=chunk.stop + by)


def _resized(random, program: Program, chunk: Chunk):
    """One block more or less."""
    return chunk._replace(stop=chunk.stop + random.choice((-1, 1)))


def _moved(random, program: Program, chunk: Chunk):
    """Any block of the same buffer."""
    buffer, count = program.buffer(chunk.buffer), chunk.stop - chunk.start
    start = buffer.first + random.choice(range(buffer.count - count + 1))
    return chunk._replace(start=start, stop=start + count)


def _elsewhere(random, program: Program, chunk: Chunk):
    """The same block numbers in another buffer, or any block of it."""
    buffer = random.choice(program.buffers)
    if random.random() < 0.5:
        return chunk._replace(buffer=buffer.name)
    start = buffer.first + random.randrange(buffer.count)
    return Chunk(buffer.name, start, start + 1)


def exchange_operands(plan, random):
    """Two operands of one op change places."""
    rank, ops, i = somewhere(plan, random, (Compute, Collective))
    operands = chunks(ops[i])
    a, b = random.choice(range(len(operands))), random.choice(range(len(operands)))
    ops[i] = with_chunk(with_chunk(ops[i], a, operands[b]), b, operands[a])
    return with_ops(plan, rank, ops)


def change_operands(plan, random):
    """Add or remove one operand."""
    rank, ops, i = somewhere(plan, random, (Compute, Collective))
    side = random.choice(("reads", "writes"))
    operands = list(getattr(ops[i], side))
    if operands and random.random() < 0.5:
        del operands[random.randrange(len(operands))]
    else:
        operands.insert(random.randint(0, len(operands)), random.choice(chunks(ops[i])))
    ops[i] = replace(ops[i], **{side: tuple(operands)})
    return with_ops(plan, rank, ops)


def other_kernel(plan, random):
    """Another kernel, or another collective."""
    rank, ops, i = somewhere(plan, random, (Compute, Collective))
    if isinstance(ops[i], Compute):
        ops[i] = replace(ops[i], kernel=random.choice((*KERNELS, "nothing")))
    else:
        ops[i] = replace(ops[i], name=random.choice((*COLLECTIVES, "nothing")))
    return with_ops(plan, rank, ops)


def other_memory(plan, random):
    """A scratch buffer has another dtype or another shape, the same on all ranks."""
    name = random.choice([b.name for p in plan.programs for b in p.buffers if b.role == "scratch"])
    dtype, row = random.choice(("float32", "bfloat16", "int64")), random.choice(((), (1,), (3,), (4,)))
    change = random.choice(({"dtype": dtype}, {"dtype": plan.problem.dtype}, {"row": row}))
    for program in plan.programs:
        buffers = tuple(replace(b, **change) if b.name == name else b for b in program.buffers)
        plan = with_program(plan, replace(program, buffers=buffers))
    return plan


def window(plan, random):
    """Another window."""
    return replace(plan, window=random.choice((1, 2, 3)))


MUTATIONS = {
    "drop": drop,
    "double": double,
    "double later": double_later,
    "swap": swap,
    "swap neighbours": swap_neighbours,
    "move": move,
    "exchange programs": exchange_programs,
    "drop everywhere": partial(everywhere, _drop_at),
    "swap everywhere": partial(everywhere, _swap_at),
    "double everywhere": partial(everywhere, _double_at),
    "divert": divert,
    "turn round": turn_round,
    "drop both ends": partial(both_ends, _drop_one),
    "double both ends": partial(both_ends, _double_one),
    "move both ends": partial(both_ends, _move_one),
    "exchange chunks": exchange_chunks,
    "shift": partial(change_chunk, _shifted),
    "resize": partial(change_chunk, _resized),
    "another block": partial(change_chunk, _moved),
    "another buffer": partial(change_chunk, _elsewhere),
    "exchange operands": exchange_operands,
    "change operands": change_operands,
    "other kernel": other_kernel,
    "other memory": other_memory,
    "window": window,
}
