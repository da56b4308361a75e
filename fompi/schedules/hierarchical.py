"""Hierarchical: ranks in groups of neighbours with fast links inside and slow ones between.

Each piece crosses the slow links once for each group, not once for each rank: sums are made inside a group before they
leave it, and what comes from another group is passed on inside. Pieces for other groups go first, our own group's last.

4 ranks in groups of 2, all-gather: what each message carries, between groups first

    0 <-> 2   0, 2        1 <-> 3   1, 3
    0 <-> 1   0, 1; then 2, 3, as they come
    2 <-> 3   2, 3; then 0, 1

(The two-level algorithms of MPI libraries, for example Karonis et al., IPDPS 2000; here with the compute in between.)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from fompi.plans.plan import Buffer, Chunk, Compute, Op, Recv, Send, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.work import Gather, Scatter, skewed


def hierarchical(problem: Problem, work: Workspace, ranks: int) -> Iterator[Op]:
    """In groups of `ranks`."""
    if problem.moves == "all_gather":
        gather = Gather(problem, work)
        yield from gather.begin()
        yield from _all_gather(gather, _Groups(work, ranks))
        yield from gather.finish()
        return
    scatter = Scatter(problem, work)
    yield from scatter.begin()
    if problem.moves == "all_reduce":
        yield from skewed(_all_reduce(scatter, _Groups(work, ranks), part) for part in range(scatter.parts))
    else:
        yield from _reduce_scatter(scatter, _Groups(work, ranks))


class _Groups:
    """Who is where, seen from one rank: mates in our group, and who has our place in another group."""

    def __init__(self, work: Workspace, ranks: int):
        self.rank, self.size, self.ranks = work.rank, work.size, ranks
        self.others = range(1, work.size // ranks)
        self.mates = range(1, ranks)

    def mate(self, distance: int, of: int | None = None) -> int:
        rank = self.rank if of is None else of
        return rank - rank % self.ranks + (rank + distance) % self.ranks

    def namesake(self, distance: int, of: int | None = None) -> int:
        return ((self.rank if of is None else of) + distance * self.ranks) % self.size


def _all_gather(local: Gather, groups: _Groups) -> Iterator[Op]:
    rank, parts = local.rank, range(local.parts)
    for d in groups.others:
        for part in parts:
            yield Recv(groups.namesake(-d), local.land(groups.namesake(-d), part))
            yield Send(groups.namesake(d), local.outgoing(rank, part))
    for e in groups.mates:
        for part in parts:
            yield Recv(groups.mate(-e), local.land(groups.mate(-e), part))
            yield Send(groups.mate(e), local.outgoing(rank, part))
    yield from local.use_own()
    for e in groups.mates:
        for part in parts:
            yield from local.use(groups.mate(-e), part)
    for d in groups.others:
        for part in parts:
            source = groups.namesake(-d)
            for e in groups.mates:
                yield Send(groups.mate(e), local.land(source, part))
            for e in groups.mates:
                yield Recv(groups.mate(-e), local.land(groups.namesake(-d, groups.mate(-e)), part))
            yield from local.use(source, part)
            for e in groups.mates:
                yield from local.use(groups.namesake(-d, groups.mate(-e)), part)


class _Sums:
    """Where sums arrive: from the mate before us, on the way round our group; from other groups, of our blocks."""

    def __init__(self, local: Scatter, axis: str):
        row, dtype = local.problem.sent_row, local.problem.accumulator
        self.local, self.dtype = local, dtype
        self.inbox: Buffer = local.work.scratch("inbox", axis, row, dtype)
        self.groups: Buffer = local.work.scratch("group_sums", "copies", row, dtype)

    def group_sum(self, groups: _Groups, d: int, part: int) -> Generator[Op | None, None, Chunk]:
        """The terms of our group for the rank in our place, d groups on: summed on their way round, last by us."""
        for step in range(groups.ranks):
            owner = groups.namesake(d, groups.mate(-1 - step))
            arriving = self.inbox[self.local.block(owner, part)]
            if step:
                yield Recv(groups.mate(-1), arriving)
            term = yield from self.local.term(owner, part, self.dtype)
            if step:
                yield Compute("add", (arriving, term), (arriving,))
            if step < groups.ranks - 1:
                yield Send(groups.mate(1), arriving if step else term)
                yield None
        return arriving

    def from_group(self, d: int, part: int) -> Chunk:
        return self.groups[d * self.local.parts + part]

    def add_groups(self, groups: _Groups, part: int) -> Iterator[Op]:
        """The sums of all other groups, in the place of the first."""
        for d in groups.others[1:]:
            first = self.from_group(1, part)
            yield Compute("add", (first, self.from_group(d, part)), (first,))

    def finish(self, own: Chunk, part: int) -> Op:
        return Compute("add", (self.from_group(1, part), own), (self.local.target(part),))


def _reduce_scatter(local: Scatter, groups: _Groups) -> Iterator[Op]:
    parts, sums = range(local.parts), _Sums(local, "rows")
    for d in groups.others:
        for part in parts:
            yield Recv(groups.namesake(-d), sums.from_group(d, part))

    def piece(d: int, part: int) -> Iterator[Op | None]:
        whole = yield from sums.group_sum(groups, d, part)
        if d:
            yield Send(groups.namesake(d), whole)
        else:
            yield from sums.add_groups(groups, part)
            yield sums.finish(whole, part)

    yield from skewed(piece(d, part) for d in (*groups.others, 0) for part in parts)


def _all_reduce(local: Scatter, groups: _Groups, part: int) -> Iterator[Op | None]:
    """One slice: summed by its owners as above, then gathered while the next ones are made and summed.

    What is sent in one step is received in the next one, so that slices keep to one order at both ends.
    """
    rank, y, sums = local.rank, local.work["y"], _Sums(local, "slices")
    for d in (*groups.others, 0):
        whole = yield from sums.group_sum(groups, d, part)
        if d:
            yield Send(groups.namesake(d), whole)
            yield None
            yield Recv(groups.namesake(-d), sums.from_group(d, part))
    yield None
    yield from sums.add_groups(groups, part)
    yield sums.finish(whole, part)
    for d in groups.others:
        yield Send(groups.namesake(d), y[local.block(rank, part)])
    for e in groups.mates:
        yield Send(groups.mate(e), y[local.block(rank, part)])
    yield None
    for d in groups.others:
        yield Recv(groups.namesake(-d), y[local.block(groups.namesake(-d), part)])
    for e in groups.mates:
        yield Recv(groups.mate(-e), y[local.block(groups.mate(-e), part)])
    for d in groups.others:
        for e in groups.mates:
            yield Send(groups.mate(e), y[local.block(groups.namesake(-d), part)])
    yield None
    for d in groups.others:
        for e in groups.mates:
            yield Recv(groups.mate(-e), y[local.block(groups.namesake(-d, groups.mate(-e)), part)])
