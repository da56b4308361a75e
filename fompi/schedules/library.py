"""The collectives of the MPI library. `unfused` is a kernel and one collective; `sliced` is the same in slices.

Slice j is the j-th part of every shard, so all rows keep their places. While slice j is sent, the kernel works on
slice j + 1 if the operation computes first, else on slice j - 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from fompi.plans.plan import Chunk, Collective, Compute, Op, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.work import Gather, Scatter


def window(problem: Problem) -> int | None:
    """How many collectives may be in flight: one if the kernels follow the collectives, else any number (None).

    Collectives that are in flight together end together: none is done before this rank has sent its data, and this data
    is sent behind the data of the others. So with more than one in flight, the kernels would start late.
    """
    return 1 if (problem.weights or problem.gradients) and not problem.multiplies_first else None


def sliced(problem: Problem, work: Workspace) -> Iterator[Op]:
    """`sliced`, and `unfused` with one part."""
    if problem.moves in ("reduce_scatter", "all_reduce"):
        yield from _reduce(Scatter(problem, work))
    elif problem.moves == "broadcast":
        yield from _broadcast(Gather(problem, work))
    elif problem.multiplies_first:
        yield from _all_to_all(Scatter(problem, work))
    else:
        yield from _gather(Gather(problem, work))


def _gather(local: Gather) -> Iterator[Op]:
    yield from local.begin()
    ranks = range(local.size)
    for part in range(local.parts):
        dests = ranks if local.problem.moves == "all_to_all" else [local.rank]
        outgoing = tuple(local.outgoing(dest, part) for dest in dests)
        yield Collective(local.problem.moves, outgoing, tuple(local.place(source, part) for source in ranks))
    for part in range(local.parts):
        yield from local.use_slice(part)
    yield from local.finish()


def _all_to_all(local: Scatter) -> Iterator[Op]:
    yield from local.begin()
    partial, ranks = local.partial(local.problem.dtype), range(local.size)
    for part in range(local.parts):
        x, y = ([local.outgoing(buffer, dest, part) for dest in ranks] for buffer in (local.x, partial))
        yield from local.products(x, y)
        yield Collective("all_to_all", tuple(y), tuple(local.arriving(source, part) for source in ranks))


def _reduce(local: Scatter) -> Iterator[Op]:
    """The reduce-scatter of MPI reads one run of rows. So the terms are stored part by part, not owner by owner."""
    yield from local.begin()
    problem, size = local.problem, local.size
    for part in range(local.parts):
        run = slice(part * size, (part + 1) * size)
        if problem.moves == "all_reduce":  # any run of rows may be a slice
            blocks = range(run.start, run.stop)
            target = local.work["y"][run]
            slices = local.partial(problem.dtype) if problem.multiplies_first else local.x
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
    outgoing: tuple[Chunk, ...] = ()
    yield from local.begin() if local.rank == root else ()
    for part in range(local.parts):
        run = slice(part * local.size, (part + 1) * local.size)
        if local.rank == root:
            outgoing = (local.x[run],)
        yield Collective("broadcast", outgoing, () if outgoing else (y[run],))
    if outgoing:
        yield Compute("copy", (local.x[:],), (y[:],))
