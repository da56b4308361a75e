"""Direct: each block goes directly to the rank that needs it.

In step d a rank sends to rank + d, or to rank - d for sums. The messages carry the same
bytes as in a ring, but without a chain of dependencies: a slow rank delays only its own messages. Gathers begin with
the rank's own block, sums end with it. Terms are summed in the order of a ring, from the next rank round to the rank
itself, so that both schedules give the same bits. Or they are added in the tree that the problem asks for.

Sources: TransformerEngine; PyTorch's async-TP; the attention of arXiv 2604.24013.

- `pairwise` is `direct` with another pace (`fompi.plans.plan.Pace`): no rank runs ahead, so that only one message at a
  time enters each port. Source: the pairwise exchange of MPICH (Thakur, Rabenseifner, Gropp 2005).
- An all-to-all of columns packs the columns for each rank, and sends them while the next ones are packed.
- A product whose columns are dealt is computed rank by rank; the columns of a rank travel while the next ones are
  computed, its own ones are last. The reverse begins with the rank's own columns, and adds the product of the others as
  they arrive.
- `unfused_p2p` has the compute in one piece before or after the messages.
- `sliced_p2p` has the compute in slices, as in `sliced`: one part of every shard at a time.
- `exchange` is an all-reduce in one step, for small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from fompi.plans.plan import Chunk, Compute, Op, Recv, Send, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.work import Dealt, Gather, InOrder, Scatter, skewed, terms_of


def direct(problem: Problem, work: Workspace, whole: bool = False, by_slices: bool = False) -> Iterator[Op]:
    """The ops of a schedule. `whole`: compute in one piece. `by_slices`: compute one part of every shard at a time."""
    if problem.deals_x:
        yield from _columns(problem, work)
    elif problem.columns:
        dealt = Dealt(problem, work)
        yield from dealt.begin()
        yield from (_deal if problem.multiplies_first else _collect)(dealt, whole)
    elif problem.moves == "broadcast":
        yield from _broadcast(Gather(problem, work))
    elif problem.multiplies_first or problem.moves in ("reduce_scatter", "all_reduce"):
        scatter, *more = terms = terms_of(problem, work, early=whole, by_slices=by_slices)
        for term in terms:
            yield from term.begin()
        if problem.moves == "all_to_all":
            yield from _all_to_all(scatter)
        elif problem.size == 1:
            yield from scatter.own_into(scatter.targets)
        elif problem.moves == "all_reduce":
            yield from skewed(_all_reduce(scatter, more, part) for part in range(scatter.parts))
        else:
            yield from _reduce_scatter(scatter, more)
    else:
        gather = Gather(problem, work, late=whole)
        yield from gather.begin()
        yield from _gather(gather, by_slices)
        yield from gather.finish()


unfused_p2p, sliced_p2p = partial(direct, whole=True), partial(direct, by_slices=True)


def _gather(local: Gather, by_slices: bool) -> Iterator[Op]:
    """All-gather and all-to-all. They differ only in the blocks that a rank sends."""
    rank, size, parts = local.rank, local.size, range(local.parts)

    def blocks(peers: Iterable[int]) -> list[tuple[int, int]]:
        pairs = [(peer, part) for peer in peers for part in parts]
        return sorted(pairs, key=lambda pair: pair[1]) if by_slices else pairs

    arriving = blocks((rank - d) % size for d in range(1, size))
    for source, part in arriving:
        yield Recv(source, local.place(source, part))
    for dest, part in blocks(local.work.dests(1)):
        yield Send(dest, local.outgoing(dest, part))
    if by_slices:
        yield from local.copy_own()
        for part in parts:
            yield from local.use_slice(part)
        return
    yield from local.use_own()
    for source, part in arriving:
        yield from local.use(source, part)


def _all_to_all(local: Scatter) -> Iterator[Op]:
    """matmul, then all-to-all. Each product is sent as soon as it is computed. The rank's own product is last."""
    rank, size, parts, out = local.rank, local.size, range(local.parts), local.problem.dtype
    for d in range(1, size):
        source = (rank - d) % size
        for part in parts:
            yield Recv(source, local.arriving(source, part))
    for dest, part in local.order(local.work.dests(1)):
        term = yield from local.term(dest, part, out)
        yield Send(dest, term)
    yield from local.own_into(local.targets)


def _columns(problem: Problem, work: Workspace) -> Iterator[Op]:
    """All-to-all of columns: those for each other rank are packed and sent, the rank's own ones are packed last."""
    rank, size, parts, y = work.rank, work.size, work.parts, work["y"]
    for d in range(1, size):
        source = (rank - d) % size
        for part in range(parts):
            yield Recv(source, y[source * parts + part])
    own = range(rank * parts, (rank + 1) * parts)
    for dest in work.dests(1):
        x, packed = work[f"x{dest}"], work.scratch(f"packed{dest}", "own", problem.columns_row(dest), problem.dtype)
        for block in own:
            yield Compute("pack", (x[block],), (packed[block],))
            yield Send(dest, packed[block])
    yield Compute("pack", (work[f"x{rank}"][:],), (y[own.start : own.stop],))


def _deal(local: Dealt, whole: bool) -> Iterator[Op]:
    """The product of the columns of each rank, which leave for it. `whole`: no message leaves before all are there."""
    rank, size, parts, own, y = local.rank, local.size, local.parts, local.own, local.work["y"]
    for d in range(1, size):
        source = (rank - d) % size
        for part in range(parts):
            yield Recv(source, y[source * parts + part])
    dests = local.work.dests(1)
    sent = local.pieces("sent", dests)
    if whole and size > 1:
        products = local.pieces("product", [*dests, rank])
        for r, product in products.items():
            yield local.product(r, local.x[own], product[own])
        targets = [sent[dest][own] for dest in dests]
        yield Compute("copy", tuple(product[own] for product in products.values()), (*targets, y[own]))
    for dest in dests:
        for block in range(own.start, own.stop):
            if not whole:
                yield local.product(dest, local.x[block], sent[dest][block])
            yield Send(dest, sent[dest][block])
    if not whole or size == 1:
        yield local.product(rank, local.x[own], y[own])


def _collect(local: Dealt, whole: bool) -> Iterator[Op]:
    """The rows of this rank come back, columns by columns. Their products are summed: y = own @ w + arrived @ w + ...

    `whole`: no product begins before all are there.
    """
    problem, work, rank, size, own = local.problem, local.work, local.rank, local.size, local.own
    y, blocks, sources = work["y"], range(own.start, own.stop), [(rank - d) % size for d in range(1, size)]
    total = y if problem.dtype == problem.accumulator else work.scratch("y_wide", "own", y.row, problem.accumulator)
    arriving = local.pieces("arriving", sources)
    for source in sources:
        for block in blocks:
            yield Recv(source, arriving[source][block])
    for dest in work.dests(1):
        for part in range(local.parts):
            yield Send(dest, local.x[dest * local.parts + part])
    first = local.x[own]
    if whole and size > 1:
        arrived = local.pieces("arrived", [rank, *sources])
        taken = [first, *(arriving[source][own] for source in sources)]
        yield Compute("copy", tuple(taken), tuple(arrived[r][own] for r in (rank, *sources)))
        first, arriving = arrived[rank][own], arrived
    yield local.product(rank, first, total[own])
    for source in sources:
        for block in blocks:
            chunk = total[block]
            yield Compute("matmul_add", (arriving[source][block], chunk, local.weights[source][:]), (chunk,))
    if total is not y:
        yield Compute("copy", (total[own],), (y[own],))


class _Sums:
    """The buffers for terms of other ranks and for their sums.

    A sum replaces the first term, unless the terms have a narrower dtype than the sum.
    """

    def __init__(self, local: Scatter):
        self.local, problem = local, local.problem
        self.inbox = local.work.scratch("inbox", "copies", problem.sent_row, local.sent_dtype)
        self.sums = self.inbox
        if local.sent_dtype != problem.accumulator and not problem.order:
            self.sums = local.work.scratch("sums", "own", problem.sent_row, problem.accumulator)

    def arrived(self, d: int, part: int) -> Chunk:
        """The term from rank + d."""
        return self.inbox[(d - 1) * self.local.parts + part]

    def all_from(self, d: int, part: int) -> list[Chunk]:
        """The terms from rank + d."""
        return [self.arrived(d, part)]

    def add(self, part: int) -> Iterator[Op]:
        """Sum the terms of all other ranks."""
        for d in range(2, self.local.size):
            before = self.arrived(1, part) if d == 2 else self._sum(part)
            yield self.local.combine(before, self.arrived(d, part), self._sum(part))

    def finish(self, part: int, own: Sequence[Chunk]) -> Iterator[Op]:
        """Add this rank's own term and write the result."""
        before = self.arrived(1, part) if self.local.size == 2 else self._sum(part)
        yield self.local.combine(before, own[0], self.local.target(part), is_last=True)

    def _sum(self, part: int) -> Chunk:
        return (
            self.arrived(1, part) if self.sums is self.inbox else self.sums[self.local.rank * self.local.parts + part]
        )


class _SumsInOrder(_Sums):
    """Sum the terms in the order of a tree over the ranks, or over the subtrees that they have."""

    def __init__(self, local: Scatter):
        super().__init__(local)
        self.trees: dict[int, InOrder] = {}

    def all_from(self, d: int, part: int) -> list[Chunk]:
        local = self.local
        more = local.problem.terms[(local.rank + d) % local.size][1:]
        row, at = local.problem.sent_row, (d - 1) * local.parts + part
        others = [local.work.scratch(f"inbox{j}", "copies", row, local.sent_dtype)[at] for j in range(1, 1 + len(more))]
        return [self.arrived(d, part), *others]

    def add(self, part: int) -> Iterator[Op]:
        local, terms = self.local, list[Chunk | None]()
        for r, mine in enumerate(local.problem.terms):
            d = (r - local.rank) % local.size
            terms += self.all_from(d, part) if d else [None] * len(mine)
        row, dtype, at = local.problem.sent_row, local.problem.accumulator, local.rank * local.parts + part

        def spare(k: int) -> Chunk:
            return local.work.scratch(f"sums{k}", "own", row, dtype)[at]

        sizes = [n for mine in local.problem.terms for n in mine]
        self.trees[part] = InOrder(local, terms, local.sent_dtype == dtype, spare, sizes)
        yield from self.trees[part].add()

    def finish(self, part: int, own: Sequence[Chunk]) -> Iterator[Op]:
        yield from self.trees[part].finish(own, self.local.target(part))


def _sums(local: Scatter) -> _Sums:
    return _SumsInOrder(local) if local.problem.order else _Sums(local)


def _reduce_scatter(local: Scatter, more: Sequence[Scatter]) -> Iterator[Op]:
    """The terms of other ranks are summed while this rank computes its own. Then one add remains, and no message.

    In the order of a tree there remain as many as the tree is high. `more`: the rank has more than one term.
    """
    rank, size, parts, sums = local.rank, local.size, range(local.parts), _sums(local)
    for d, part in local.order(range(1, size)):
        for arriving in sums.all_from(d, part):
            yield Recv((rank + d) % size, arriving)
    for owner, part in local.order(local.work.dests(-1)):
        for mine in (local, *more):
            term = yield from mine.term(owner, part, local.sent_dtype)
            yield Send(owner, term)
    for part in parts:
        yield from sums.add(part)
    own = []
    for mine in (local, *more):
        own.append((yield from mine.own_terms(local.sent_dtype)))
    for part in parts:
        yield from sums.finish(part, [terms[part] for terms in own])


def _all_reduce(local: Scatter, more: Sequence[Scatter], part: int) -> Iterator[Op | None]:
    """One slice: the owners sum its rows. Then it is gathered while the next slices are computed and summed."""
    rank, size, y, sums, own = local.rank, local.size, local.work["y"], _sums(local), list[Chunk]()
    for d in range(1, size):
        for arriving in sums.all_from(d, part):
            yield Recv((rank + d) % size, arriving)
    for owner in local.work.dests(-1):
        for mine in (local, *more):
            term = yield from mine.term(owner, part, local.sent_dtype)
            yield Send(owner, term)
    for mine in (local, *more):
        own.append((yield from mine.term(rank, part, local.sent_dtype)))
    yield None
    yield from sums.add(part)
    yield from sums.finish(part, own)
    for d in range(1, size):
        source = (rank + d) % size
        yield Recv(source, y[local.block(source, part)])
    for dest in local.work.dests(-1):
        yield Send(dest, local.target(part))


def _broadcast(local: Gather) -> Iterator[Op]:
    """Scatter, then all-gather (van de Geijn). The root sends each block to its owner, which sends it to the others."""
    rank, size, root, y = local.rank, local.size, local.problem.root, local.full
    own = range(rank * local.parts, (rank + 1) * local.parts)
    if rank == root:
        yield from local.begin()
        for d in range(1, size):
            dest = (rank + d) % size
            for block in range(dest * local.parts, (dest + 1) * local.parts):
                yield Send(dest, local.x[block])
        for d in range(1, size):
            for block in own:
                yield Send((rank + d) % size, local.x[block])
        yield Compute("copy", (local.x[:],), (y[:],))
        return
    for block in own:
        yield Recv(root, y[block])
    for d in range(1, size):
        source = (rank - d) % size
        for block in range(source * local.parts, (source + 1) * local.parts):
            yield Recv(source, y[block])
    for d in range(1, size):
        dest = (rank + d) % size
        if dest != root:
            for block in own:
                yield Send(dest, y[block])


def exchange(problem: Problem, work: Workspace) -> Iterator[Op]:
    """All-reduce in one step. Each rank sends its whole term to all others and sums all terms in the order of ranks."""
    local, *more = terms_of(problem, work, early=True)
    rank, size, y, dtype = work.rank, work.size, work["y"], local.sent_dtype
    own = []
    for mine in (local, *more):
        yield from mine.begin()
        own.append(mine.partial(dtype)[:] if mine.computed else mine.x[:])
    if size == 1:
        yield Compute("copy", (own[0],), (y[:],))
        return

    def inbox(d: int, number: int) -> Chunk:
        return work.scratch(f"inbox{d}_{number}" if number else f"inbox{d}", y.axis, problem.sent_row, dtype)[:]

    inboxes = {}
    for d in range(1, size):
        source = (rank - d) % size
        inboxes[source] = [inbox(d, number) for number in range(len(problem.terms[source]))]
        for chunk in inboxes[source]:
            yield Recv(source, chunk)
    for d in range(1, size):
        for term in own:
            yield Send((rank + d) % size, term)
    if problem.order:
        tree = InOrder(
            local,
            [chunk for r in range(size) for chunk in inboxes.get(r, [None] * len(own))],
            dtype == problem.accumulator,
            lambda k: work.scratch(f"sums{k}", y.axis, problem.sent_row, problem.accumulator)[:],
            [n for mine in problem.terms for n in mine],
        )
        yield from tree.add()
        yield from tree.finish(own, y[:])
        return
    terms = [inboxes.get(r, own)[0] for r in range(size)]
    sums = y if problem.dtype == problem.accumulator else work.scratch("sums", y.axis, y.row, problem.accumulator)
    before = terms[0]
    for r in range(1, size):
        after = y[:] if r == size - 1 else sums[:]
        yield local.combine(before, terms[r], after, is_last=r == size - 1)
        before = after
