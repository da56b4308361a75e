"""Hierarchical: for groups of consecutive ranks, with fast links inside a group and slow links between groups.

Each piece crosses the slow links once for each group, not once for each rank. Sums are computed inside a group before
they leave it. A piece from another group is passed on inside the group. Pieces for other groups are sent first, pieces
for the same group last.

An all-gather of 4 ranks in groups of 2. The table lists the shards that each link carries, in order:

    0 <-> 2   0, 2        1 <-> 3   1, 3
    0 <-> 1   0, 1; then 2, 3 as they arrive
    2 <-> 3   2, 3; then 0, 1 as they arrive

Where a sum must be a tree over the ranks, the mates send their terms to the one of them that adds. Groups of 2**i ranks
are nodes of that tree.

Source: the two-level algorithms of MPI libraries, for example Karonis et al., IPDPS 2000. Here they have compute
between the messages.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from fompi.plans.plan import Buffer, Chunk, Op, Recv, Send, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.work import Gather, InOrder, Scatter, skewed


def hierarchical(problem: Problem, work: Workspace, ranks: int) -> Iterator[Op]:
    """The schedule with groups of `ranks` ranks."""
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
    """The neighbours of one rank: `mate` is in the same group, `counterpart` has the same place in another group."""

    def __init__(self, work: Workspace, ranks: int):
        self.rank, self.size, self.ranks = work.rank, work.size, ranks
        self.others = range(1, work.size // ranks)
        self.mates = range(1, ranks)

    def mate(self, distance: int, of: int | None = None) -> int:
        """The rank `distance` places after the rank `of` (None: this rank), in the same group."""
        rank = self.rank if of is None else of
        return rank - rank % self.ranks + (rank + distance) % self.ranks

    def counterpart(self, distance: int, of: int | None = None) -> int:
        """The rank in the same place as the rank `of` (None: this rank), `distance` groups after it."""
        return ((self.rank if of is None else of) + distance * self.ranks) % self.size


def _all_gather(local: Gather, groups: _Groups) -> Iterator[Op]:
    """The rank's block goes to its counterparts and mates. Then each block from another group goes to the mates."""
    rank, parts = local.rank, range(local.parts)
    for d in groups.others:
        for part in parts:
            yield Recv(groups.counterpart(-d), local.place(groups.counterpart(-d), part))
            yield Send(groups.counterpart(d), local.outgoing(rank, part))
    for e in groups.mates:
        for part in parts:
            yield Recv(groups.mate(-e), local.place(groups.mate(-e), part))
            yield Send(groups.mate(e), local.outgoing(rank, part))
    yield from local.use_own()
    for e in groups.mates:
        for part in parts:
            yield from local.use(groups.mate(-e), part)
    for d in groups.others:
        for part in parts:
            source = groups.counterpart(-d)
            for e in groups.mates:
                yield Send(groups.mate(e), local.place(source, part))
            for e in groups.mates:
                yield Recv(groups.mate(-e), local.place(groups.counterpart(-d, groups.mate(-e)), part))
            yield from local.use(source, part)
            for e in groups.mates:
                yield from local.use(groups.counterpart(-d, groups.mate(-e)), part)


class _GroupSums:
    """The buffers for sums: `inbox` for sums that go round the group, `groups` for the sums of other groups."""

    def __init__(self, local: Scatter, axis: str):
        row, dtype = local.problem.sent_row, local.problem.accumulator
        self.local, self.dtype, self.axis = local, dtype, axis
        self.inbox: Buffer = local.work.scratch("inbox", axis, row, dtype)
        self.groups: Buffer = local.work.scratch("group_sums", "copies", row, dtype)

    def group_sum(self, groups: _Groups, d: int, part: int) -> Generator[Op | None, None, Chunk]:
        """The sum of this group for the counterpart d groups away. The sum goes round the group and ends here."""
        if self.local.problem.order:
            return (yield from self.tree_of_group(groups, d, part))
        for step in range(groups.ranks):
            owner = groups.counterpart(d, groups.mate(-1 - step))
            arriving = self.inbox[self.local.block(owner, part)]
            if step:
                yield Recv(groups.mate(-1), arriving)
            term = yield from self.local.term(owner, part, self.dtype)
            if step:
                yield self.local.combine(arriving, term, arriving)
            if step < groups.ranks - 1:
                yield Send(groups.mate(1), arriving if step else term)
                yield None
        return arriving

    def tree_of_group(self, groups: _Groups, d: int, part: int) -> Generator[Op | None, None, Chunk]:
        """`group_sum` as a tree over the ranks: each mate sends its term to the one that adds them."""
        local, mates, me = self.local, groups.ranks, groups.rank % groups.ranks
        for e in groups.mates:
            term = yield from local.term(groups.counterpart(d, groups.mate(e)), part, self.dtype)
            yield Send(groups.mate(e), term)
        block = local.block(groups.counterpart(d), part)
        own = yield from local.term(groups.counterpart(d), part, self.dtype)
        yield None
        terms: list[Chunk | None] = [None] * mates
        for e in groups.mates:
            buffer = local.work.scratch(f"inbox{e}", self.axis, local.problem.sent_row, self.dtype)
            terms[(me - e) % mates] = buffer[block]
            yield Recv(groups.mate(-e), buffer[block])
        tree = InOrder(local, terms, wide=True)
        yield from tree.add()
        yield from tree.finish([own], self.inbox[block], is_last=False)
        return self.inbox[block]

    def from_group(self, d: int, part: int) -> Chunk:
        """The sum of the group `d` groups before this one."""
        return self.groups[d * self.local.parts + part]

    def finish(self, groups: _Groups, own: Chunk, part: int) -> Iterator[Op]:
        """Add the sums of all groups and write the result."""
        if self.local.problem.order:
            count, mine = 1 + len(groups.others), groups.rank // groups.ranks
            distances = [(mine - group) % count for group in range(count)]
            tree = InOrder(self.local, [self.from_group(d, part) if d else None for d in distances], wide=True)
            yield from tree.add()
            yield from tree.finish([own], self.local.target(part))
            return
        first = self.from_group(1, part)
        for d in groups.others[1:]:
            yield self.local.combine(first, self.from_group(d, part), first)
        yield self.local.combine(first, own, self.local.target(part), is_last=True)


def _reduce_scatter(local: Scatter, groups: _Groups) -> Iterator[Op]:
    """The group sums each piece. The sums for other groups are sent to counterparts. The rank's own sum is last."""
    parts, sums = range(local.parts), _GroupSums(local, "rows")
    for d in groups.others:
        for part in parts:
            yield Recv(groups.counterpart(-d), sums.from_group(d, part))

    def piece(d: int, part: int) -> Iterator[Op | None]:
        total = yield from sums.group_sum(groups, d, part)
        if d:
            yield Send(groups.counterpart(d), total)
        else:
            yield from sums.finish(groups, total, part)

    yield from skewed(piece(d, part) for d in (*groups.others, 0) for part in parts)


def _all_reduce(local: Scatter, groups: _Groups, part: int) -> Iterator[Op | None]:
    """One slice: its owners sum it as above. Then it is gathered while the next slices are computed and summed.

    A message that is sent in one step is received in the next step. So both ends handle slices in the same order.
    """
    rank, y, sums = local.rank, local.work["y"], _GroupSums(local, "slices")
    for d in (*groups.others, 0):
        total = yield from sums.group_sum(groups, d, part)
        if d:
            yield Send(groups.counterpart(d), total)
            yield None
            yield Recv(groups.counterpart(-d), sums.from_group(d, part))
    yield None
    yield from sums.finish(groups, total, part)
    for d in groups.others:
        yield Send(groups.counterpart(d), y[local.block(rank, part)])
    for e in groups.mates:
        yield Send(groups.mate(e), y[local.block(rank, part)])
    yield None
    for d in groups.others:
        yield Recv(groups.counterpart(-d), y[local.block(groups.counterpart(-d), part)])
    for e in groups.mates:
        yield Recv(groups.mate(-e), y[local.block(groups.mate(-e), part)])
    for d in groups.others:
        for e in groups.mates:
            yield Send(groups.mate(e), y[local.block(groups.counterpart(-d), part)])
    yield None
    for d in groups.others:
        for e in groups.mates:
            yield Recv(groups.mate(-e), y[local.block(groups.counterpart(-d, groups.mate(-e)), part)])
