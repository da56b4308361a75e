"""Schedules in the XML of MSCCL for the tests, and a run of them on data, with threads that take turns at random."""

from __future__ import annotations

from collections import defaultdict, deque
from random import Random

import numpy as np


def xml(collective, ranks, chunks, threads, in_place=True, scratch=0):
    """`threads[rank]` are (send, recv, channel, steps). A step is (type, source, dest, count, what it waits for)."""
    lines = [
        f'<algo name="{collective}" proto="Simple" nchannels="1" nchunksperloop="{chunks}" ngpus="{ranks}" '
        f'coll="{collective}" inplace="{int(in_place)}">'
    ]
    for rank in range(ranks):
        lines.append(f'<gpu id="{rank}" i_chunks="{chunks}" o_chunks="{chunks}" s_chunks="{scratch}">')
        for number, (send, recv, channel, steps) in enumerate(threads[rank]):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">')
            for s, (kind, source, dest, count, after) in enumerate(steps):
                on, before = after or (-1, -1)
                lines.append(
                    f'<step s="{s}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1]}" dstbuf="{dest[0]}" '
                    f'dstoff="{dest[1]}" cnt="{count}" depid="{on}" deps="{before}" hasdep="0"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def ring_all_reduce(n, count=1):
    threads = []
    for r in range(n):
        order = [("s", r), *(("rrs", (r - k) % n) for k in range(1, n - 1)), ("rrcs", (r + 1) % n)]
        order += [*(("rcs", (r - k) % n) for k in range(n - 2)), ("r", (r + 2) % n)]
        steps = [(kind, ("i", c * count), ("i", c * count), count, None) for kind, c in order]
        threads.append([((r + 1) % n, (r - 1) % n, 0, steps)])
    return xml("allreduce", n, n * count, threads)


def all_pairs_all_reduce(n):
    """A thread for each peer, and one that adds: it waits for them, and they wait for it."""
    threads = []
    for r in range(n):
        peers = [p for p in range(n) if p != r]
        adds = [("re", ("s", p), ("i", r), 1, (at, 1)) for at, p in enumerate(peers)]
        mine = []
        for p in peers:
            steps = [("s", ("i", p), ("s", r), 1, None), ("r", ("s", p), ("s", p), 1, None)]
            steps += [("s", ("i", r), ("i", r), 1, (len(peers), len(adds) - 1)), ("r", ("i", p), ("i", p), 1, None)]
            mine.append((p, p, 0, steps))
        threads.append([*mine, (-1, -1, 0, adds)])
    return xml("allreduce", n, n, threads, scratch=n)


def ring_all_gather(n, in_place):
    threads = []
    for r in range(n):
        own = "i" if not in_place else "o"
        steps = [("s", (own, r if in_place else 0), ("o", r), 1, None)]
        steps += [("rcs", ("o", (r - k) % n), ("o", (r - k) % n), 1, None) for k in range(1, n - 1)]
        steps.append(("r", ("o", (r + 1) % n), ("o", (r + 1) % n), 1, None))
        copy = [] if in_place else [(-1, -1, 0, [("cpy", ("i", 0), ("o", r), 1, None)])]
        threads.append([((r + 1) % n, (r - 1) % n, 0, steps), *copy])
    return xml("allgather", n, n, threads, in_place)


def ring_reduce_scatter(n):
    threads = []
    for r in range(n):
        steps = [("s", ("i", (r - 1) % n), ("i", 0), 1, None)]
        steps += [("rrs", ("i", (r - k) % n), ("i", 0), 1, None) for k in range(2, n)]
        steps.append(("rrc", ("i", r), ("o", 0), 1, None))
        threads.append([((r + 1) % n, (r - 1) % n, 0, steps)])
    return xml("reduce_scatter", n, n, threads, in_place=False)


def all_to_all(n):
    """Two connections between two ranks: each carries one of two chunks."""
    threads = []
    for r in range(n):
        mine = [
            (
                p,
                p,
                channel,
                [("s", ("i", 2 * p + channel), ("o", 0), 1, None), ("r", ("i", 0), ("o", 2 * p + channel), 1, None)],
            )
            for channel in (0, 1)
            for p in range(n)
            if p != r
        ]
        threads.append([*mine, (-1, -1, 0, [("cpy", ("i", 2 * r), ("o", 2 * r), 2, None)])])
    return xml("alltoall", n, 2 * n, threads, in_place=False)


ALL = {
    "ring": ring_all_reduce,
    "ring of two chunks": lambda n: ring_all_reduce(n, 2),
    "all pairs": all_pairs_all_reduce,
    "gather in place": lambda n: ring_all_gather(n, True),
    "gather": lambda n: ring_all_gather(n, False),
    "reduce scatter": ring_reduce_scatter,
    "all to all": all_to_all,
}


def runs_right(algorithm, seed, slots=8):
    """True if a run on data ends, with the right result. Threads take turns at random, one step at a time."""
    random = Random(seed)
    start = np.random.default_rng(seed).integers(1, 1 << 30, (algorithm.ranks, algorithm.chunks)).astype(np.int64)
    memory = [{place: int(start[term]) for place, term in algorithm.before(r).items()} for r in range(algorithm.ranks)]
    at = {(t.rank, t.number): 0 for t in algorithm.threads}
    queues = defaultdict(deque)
    threads = {(t.rank, t.number): t for t in algorithm.threads}

    def can(key):
        thread = threads[key]
        if at[key] == len(thread.steps):
            return False
        step = thread.steps[at[key]]
        takes = not step.kind.receives or queues[thread.takes]
        return (
            all(at.get((key[0], on), 0) > number for on, number in step.after)
            and takes
            and (not step.kind.sends or len(queues[thread.sends]) < slots)
        )

    while ready := [key for key in threads if can(key)]:
        key = random.choice(ready)
        thread, here = threads[key], memory[key[0]]
        step = thread.steps[at[key]]
        at[key] += 1
        value = queues[thread.takes].popleft() if step.kind.receives else None
        for used, place in ((step.kind.reads, step.source), (step.kind.adds, step.dest)):
            if used:
                read = [here.get(chunk, -1) for chunk in place.chunks]  # -1: memory that nobody has written
                value = read if value is None else [a + b for a, b in zip(value, read, strict=True)]
        if step.kind.writes:
            here.update(zip(step.dest.chunks, value, strict=True))
        if step.kind.sends:
            queues[thread.sends].append(value)
    if any(at[key] < len(thread.steps) for key, thread in threads.items()) or any(queues.values()):
        return False
    return all(
        memory[rank].get(place) == sum(int(start[term]) for term in terms)
        for rank in range(algorithm.ranks)
        for place, terms in algorithm.after(rank).items()
    )
