"""Ring: every message goes to the next rank. `bidirectional` sends half of the parts in each direction.

The tables show the shard that each rank works on in each step, on 4 ranks. An all-gather begins with its own shard. A
reduce-scatter ends with its own shard, so that no message follows the last kernel.

    all-gather                                  reduce-scatter

    step   r0  r1  r2  r3                       step   r0  r1  r2  r3
      0     0   1   2   3                         0     3   0   1   2
      1     3   0   1   2                         1     2   3   0   1
      2     2   3   0   1                         2     1   2   3   0
      3     1   2   3   0                         3     0   1   2   3

Sources: CommFuse, arXiv 2604.24013; the ring exchanges of TransformerEngine's userbuffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fompi.plans.plan import Chunk, Compute, Op, Recv, Send, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.work import Gather, Scatter, skewed

Directions = list[tuple[int, range]]
"""(+1, the parts that go to the next rank) and (-1, the parts that go to the previous rank)."""


def ring(problem: Problem, work: Workspace) -> Iterator[Op]:
    """All parts go to the next rank."""
    yield from _write(problem, work, [(1, range(work.parts))])


def bidirectional(problem: Problem, work: Workspace) -> Iterator[Op]:
    """Even parts go to the next rank, odd parts to the previous rank."""
    yield from _write(problem, work, [(1, range(0, work.parts, 2)), (-1, range(1, work.parts, 2))])


def _write(problem: Problem, work: Workspace, directions: Directions) -> Iterator[Op]:
    if problem.moves == "broadcast":
        yield from _broadcast(Gather(problem, work), directions)
    elif problem.moves == "all_gather":
        local = Gather(problem, work)
        yield from local.begin()
        yield from _all_gather(local, local.outgoing, directions)
        yield from local.finish()
    else:
        scatter = Scatter(problem, work)
        yield from scatter.begin()
        if problem.size == 1:
            yield from scatter.own_into(scatter.targets)
        elif problem.moves == "all_reduce":
            way = {part: sign for sign, parts in directions for part in parts}
            yield from skewed(_all_reduce(scatter, way[part], part) for part in range(scatter.parts))
        else:
            yield from _reduce_scatter(scatter, directions)


def _all_gather(local: Gather, own: Callable[[int, int], Chunk], directions: Directions) -> Iterator[Op]:
    """In each step a rank passes one shard on, receives the next one, and uses the shard that it has."""
    rank, size = local.rank, local.size
    for step in range(size):
        for sign, parts in directions:  # invariant: this rank has the shard of `owner`
            owner = (rank - sign * step) % size
            for part in parts:
                if step < size - 1:
                    yield Recv((rank - sign) % size, local.place((owner - sign) % size, part))
                    yield Send((rank + sign) % size, local.place(owner, part) if step else own(rank, part))
                if step:
                    yield from local.use(owner, part)
        if step == 0:
            yield from local.use_own()


def _reduce_scatter(local: Scatter, directions: Directions) -> Iterator[Op]:
    """In each step a rank receives a sum, adds its own term and passes the sum on."""
    rank, size, dtype = local.rank, local.size, local.problem.accumulator
    inbox = local.work.scratch("inbox", "rows", local.problem.sent_row, dtype)
    for step in range(size - 1):
        for sign, parts in directions:
            owner = (rank - sign * (1 + step)) % size
            for part in parts:
                arriving = inbox[owner * local.parts + part]
                if step:
                    yield Recv((rank - sign) % size, arriving)
                term = yield from local.term(owner, part, dtype)
                if step:
                    yield local.combine(arriving, term, arriving)
                yield Send((rank + sign) % size, arriving if step else term)
    for sign, parts in directions:
        for part in parts:
            yield Recv((rank - sign) % size, inbox[rank * local.parts + part])
    own = yield from local.own_terms(dtype)
    for part in range(local.parts):
        yield local.combine(inbox[rank * local.parts + part], own[part], local.target(part), is_last=True)


def _all_reduce(local: Scatter, sign: int, part: int) -> Iterator[Op | None]:
    """One part: a reduce-scatter in a ring, then an all-gather of the sums in a ring. Each None ends a step."""
    rank, size, y, dtype = local.rank, local.size, local.work["y"], local.problem.accumulator
    inbox = local.work.scratch("inbox", y.axis, local.problem.sent_row, dtype)
    ahead, behind = (rank + sign) % size, (rank - sign) % size
    for step in range(size):
        owner = (rank - sign * (1 + step)) % size
        arriving = inbox[local.block(owner, part)]
        if step:
            yield Recv(behind, arriving)
        term = yield from local.term(owner, part, dtype)
        if step == size - 1:
            yield local.combine(arriving, term, local.target(part), is_last=True)
        elif step:
            yield local.combine(arriving, term, arriving)
        if step < size - 1:
            yield Send(ahead, arriving if step else term)
            yield None
    for step in range(size - 1):
        yield Send(ahead, y[local.block((rank - sign * step) % size, part)])
        yield None
        yield Recv(behind, y[local.block((rank - sign * (step + 1)) % size, part)])


def _broadcast(local: Gather, directions: Directions) -> Iterator[Op]:
    """A chain of ranks that begins at the root. Two directions make two chains, each to half of the ranks."""
    rank, size, root, y = local.rank, local.size, local.problem.root, local.full
    yield from local.begin() if rank == root else ()
    x = local.x if rank == root else y
    ways = [sign for sign, _ in directions]
    reach = {ways[0]: size - 1} if len(ways) == 1 else {1: size // 2, -1: (size - 1) // 2}
    for block in range(y.count):
        for sign in ways:
            hops = sign * (rank - root) % size
            if 0 < hops <= reach[sign]:
                yield Recv((rank - sign) % size, y[block])
            if hops < reach[sign]:
                yield Send((rank + sign) % size, x[block])
        if rank == root:
            yield Compute("copy", (x[block],), (y[block],))
