"""What holds an op of a program back: what it reads and writes, its lane, and the pace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from fompi.plans.plan import Collective, Compute, Op, Pace, Recv, Send


class Constraints(NamedTuple):
    """When the ops of a program may start: after all of `needs[i]` are done, and `behind[i]` (or -1) and all of
    `follows[i]` have started."""

    needs: list[list[int]]
    behind: list[int]
    follows: Sequence[Sequence[int]] = ()


def dependencies(ops: Sequence[Op]) -> list[list[int]]:
    """For each op the earlier ones that must be done before it starts.

    A read follows the last write of each of its blocks; a write follows the last write and all reads since.
    """
    writer: dict[tuple[str, int], int] = {}
    readers: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    needs = []
    for i, op in enumerate(ops):
        before: set[int] = set()
        for chunk in op.reads:
            for block in chunk.blocks:
                if block in writer:
                    before.add(writer[block])
                readers[block].append(i)
        for chunk in op.writes:
            for block in chunk.blocks:
                if block in writer:
                    before.add(writer[block])
                before.update(readers.pop(block, ()))
                writer[block] = i
        before.discard(i)
        needs.append(sorted(before))
    return needs


class Frontier:
    """Which ops of a program may start, as others start and finish."""

    def __init__(self, constraints: Constraints):
        self.waits_for, self.on_start, self.on_done = release(constraints)

    def begin(self) -> list[int]:
        return [i for i, count in enumerate(self.waits_for) if count == 0]

    def started(self, op: int) -> list[int]:
        return self._released(self.on_start[op])

    def done(self, op: int) -> list[int]:
        return self._released(self.on_done[op])

    def _released(self, ops: Sequence[int]) -> list[int]:
        free = []
        for i in ops:
            self.waits_for[i] -= 1
            if self.waits_for[i] == 0:
                free.append(i)
        return free


def release(constraints: Constraints) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """For each op: how many events it waits for; whom it releases when it starts; whom when it is done."""
    needs, behind, follows = constraints
    waits_for = [len(before) + (ahead >= 0) for before, ahead in zip(needs, behind, strict=True)]
    on_start: list[list[int]] = [[] for _ in needs]
    on_done: list[list[int]] = [[] for _ in needs]
    for i, (before, ahead) in enumerate(zip(needs, behind, strict=True)):
        for earlier in before:
            on_done[earlier].append(i)
        if ahead >= 0:
            on_start[ahead].append(i)
    for i, started in enumerate(follows):
        waits_for[i] += len(started)
        for earlier in started:
            on_start[earlier].append(i)
    return waits_for, on_start, on_done


MERGES = frozenset(("add", "copy", "pack"))
"""Kernels that are bound by memory, and have a lane of their own."""


def lane(op: Op) -> tuple[str, int]:
    """Kernels start as they become ready, and so do sends without a window; the ops of other lanes in program order."""
    if isinstance(op, Send):
        return ("send", op.dest)
    if isinstance(op, Recv):
        return ("recv", op.source)
    if isinstance(op, Collective):
        return ("collective", 0)
    return ("merge" if op.kernel in MERGES else "compute", 0)


def track(op: Op) -> str:
    """Its lane as a trace shows it."""
    name, peer = lane(op)
    return {"send": f"send to {peer}", "recv": f"recv from {peer}"}.get(name, name)


def constraints(ops: Sequence[Op], pace: Pace) -> Constraints:
    """All that holds an op back: what it reads and writes, its lane, and the pace of sends, or of collectives."""
    window = pace.window
    needs, behind = dependencies(ops), [-1] * len(ops)
    lanes: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        one_line = window is not None and isinstance(op, Send) and not pace.by_peer
        lanes[("send", -1) if one_line else lane(op)].append(i)
    for key, members in lanes.items():
        if key[0] in ("compute", "merge") or (key[0] == "send" and window is None):
            continue
        for earlier, later in pairwise(members):
            behind[later] = earlier
        if window is not None and key[0] != "recv":
            for earlier, later in zip(members, members[window:], strict=False):
                needs[later] = sorted({*needs[later], earlier})
    if pace.in_step and window is not None:
        sends, recvs = ([i for i, op in enumerate(ops) if isinstance(op, kind)] for kind in (Send, Recv))
        for send, recv in zip(sends[window:], recvs, strict=False):
            needs[send] = sorted({*needs[send], recv})
    return Constraints(needs, behind)


def enqueued(ops: Sequence[Op], found: Constraints) -> Constraints:
    """The same for kernels that are enqueued on a device: they may be, as soon as those that they need have been."""
    kernels = {i for i, op in enumerate(ops) if isinstance(op, Compute)}
    follows = [[j for j in needs if j in kernels] if i in kernels else [] for i, needs in enumerate(found.needs)]
    needs = [[j for j in needs if j not in follows[i]] for i, needs in enumerate(found.needs)]
    return Constraints(needs, found.behind, follows)


def messages(ops: Sequence[Op]) -> list[int]:
    """The number of each Send (and Recv) among those to (and from) the same peer; -1 for the other ops."""
    seen: defaultdict[tuple[str, int], int] = defaultdict(int)
    numbers = []
    for op in ops:
        if isinstance(op, (Send, Recv)):
            numbers.append(seen[lane(op)])
            seen[lane(op)] += 1
        else:
            numbers.append(-1)
    return numbers
