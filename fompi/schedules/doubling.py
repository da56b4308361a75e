"""Recursive doubling: an all-reduce of small tensors in log2(size) steps, each with one message of everything.

In step k a rank and the one whose number differs in bit k send each other the sum of their 2**k terms. Both add them in
the same order, the lower half first, so all ranks get the same bits. If the number of ranks is no power of two, each
rank beyond the largest one gives its term to a rank below, and gets the result from it.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005), section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

from fompi.plans.plan import Chunk, Compute, Op, Recv, Send, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.work import Scatter


def doubling(problem: Problem, work: Workspace) -> Iterator[Op]:
    """All-reduce by recursive doubling."""
    local = Scatter(problem, work, early=True)
    yield from local.begin()
    rank, size, y = work.rank, work.size, work["y"]
    own = local.partial(local.sent_dtype)[:] if local.computed else local.x[:]
    whole = whole_of(size)
    if size == 1:
        yield Compute("copy", (own,), (y[:],))
        return
    if rank >= whole:
        yield Send(rank - whole, own)
        yield Recv(rank - whole, y[:])
        return

    def memory(name: str, dtype: str) -> Chunk:
        return work.scratch(name, y.axis, problem.sent_row, dtype)[:]

    def is_term(source: int, step: int) -> bool:
        """True if `source` has only its own term when this step begins."""
        return step == 0 and source + whole >= size

    peers = [rank ^ 1 << step for step in range(whole.bit_length() - 1)]
    inboxes = [
        memory(f"inbox{k}", local.sent_dtype if is_term(p, k) else problem.accumulator) for k, p in enumerate(peers)
    ]
    before = own
    if rank + whole < size:
        term, before = memory("term", local.sent_dtype), memory("sum", problem.accumulator)
        yield Recv(rank + whole, term)
        yield local.combine(own, term, before)
    for step, (peer, inbox) in enumerate(zip(peers, inboxes, strict=True)):
        is_last = step == len(peers) - 1
        yield Recv(peer, inbox)
        yield Send(peer, before)
        after = y[:] if is_last else memory(f"sum{step}", problem.accumulator)
        low, high = (before, inbox) if rank < peer else (inbox, before)
        yield local.combine(low, high, after, is_last)
        before = after
    if rank + whole < size:
        yield Send(rank + whole, y[:])


def whole_of(size: int) -> int:
    """The largest power of two that is no more than `size`."""
    return 1 << size.bit_length() - 1


def steps_of(size: int) -> int:
    """How many messages a rank sends one after the other: what the slowest rank does."""
    whole = whole_of(size)
    return whole.bit_length() - 1 + 2 * (size > whole)
