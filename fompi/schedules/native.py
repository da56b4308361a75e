"""The MPI library's own collectives: `unfused` is a kernel and one collective, `sliced` the same in s slices.

Slice j is the j-th part of every shard, so the rows keep their standard places: while slice j is on its way, the
kernel works on slice j + 1 (compute first) or j - 1 (communicate first).
"""

from __future__ import annotations

from collections.abc import Iterator

from fompi.plans.plan import Chunk, Collective, Compute, Op, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.work import Gather, Scatter


def window(problem: Problem) -> int | None:
    """How many may be under way at once: of those that no kernel holds back, one.

    All that are under way end together: none is complete before what this rank sends has left, behind all the rest.
    """
    return 1 if (problem.weights or problem.gradients) and not problem.multiplies_first else None


def sliced(problem: Problem, work: Workspace) -> Iterator[Op]:
    if problem.moves in ("reduce_scatter", "all_reduce"):
        yield from _reduce(Scatter(problem, work))
    elif problem.moves == "broadcast":
        yield from _broadcast(Gather(problem, work))
    elif problem.multiplies_first:
        yield from _deal(Scatter(problem, work))
    else:
        yield from _gather(Gather(problem, work))


def _gather(local: Gather) -> Iterator[Op]:
    yield from local.begin()
    ranks = range(local.size)
    for part in range(local.parts):
        every = ranks if local.problem.moves == "all_to_all" else [local.rank]
        outgoing = tuple(local.outgoing(dest, part) for dest in every)
        yield Collective(local.problem.moves, outgoing, tuple(local.land(source, part) for source in ranks))
    for part in range(local.parts):
        yield from local.use_slice(part)
    yield from local.finish()


def _deal(local: Scatter) -> Iterator[Op]:
    yield from local.begin()
    partial, y, ranks = local.partial(local.problem.dtype), local.work["y"], range(local.size)
    for part in range(local.parts):
        blocks = [rank * local.parts + part for rank in ranks]
        yield from local.products([local.x[b] for b in blocks], [partial[b] for b in blocks])
        yield Collective("all_to_all", tuple(partial[b] for b in blocks), tuple(y[b] for b in blocks))


def _reduce(local: Scatter) -> Iterator[Op]:
    """A reduce-scatter takes its input in one run: slices are made part by part, not owner by owner."""
    yield from local.begin()
    problem, size = local.problem, local.size
    for part in range(local.parts):
        run = slice(part * size, (part + 1) * size)
        if problem.moves == "all_reduce":  # any runs of rows will do
            blocks = range(run.start, run.stop)
            target, slices = (
                local.work["y"][run],
                local.partial(problem.dtype) if problem.multiplies_first else local.x,
            )
        else:
            blocks = range(part, size * local.parts, local.parts)
            target, slices = local.target(part), local.x
            if problem.multiplies_first or local.parts > 1:
                slices = local.work.scratch("slices", "slices", problem.sent_row, problem.dtype)
        x, here = [local.x[b] for b in blocks], [slices[b] for b in range(run.start, run.stop)]
        if problem.multiplies_first:
            yield from local.products(x, here)
        elif slices is not local.x:
            yield Compute("copy", tuple(x), tuple(here))
        yield Collective(problem.moves, (slices[run],), (target,))


def _broadcast(local: Gather) -> Iterator[Op]:
    root, y = local.problem.root, local.full
    mine: tuple[Chunk, ...] = ()
    yield from local.begin() if local.rank == root else ()
    for part in range(local.parts):
        run = slice(part * local.size, (part + 1) * local.size)
        if local.rank == root:
            mine = (local.x[run],)
        yield Collective("broadcast", mine, () if mine else (y[run],))
    if mine:
        yield Compute("copy", (local.x[:],), (y[:],))
