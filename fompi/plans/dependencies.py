"""When an op of a program may start. This follows from what the ops read and write, their lanes, and the pace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from fompi.base.wires import WIRES
from fompi.plans.plan import Collective, Compute, Op, Pace, Program, Recv, Send


class Constraints(NamedTuple):
    """When the ops of a program may start.

    Op i may start when all ops in `needs[i]` are done, and op `behind[i]` (-1: none) and all ops in `follows[i]` have
    started.
    """

    needs: list[list[int]]
    behind: list[int]
    follows: Sequence[Sequence[int]] = ()


def dependencies(ops: Sequence[Op]) -> list[list[int]]:
    """For each op, the earlier ops that must be done before it starts.

    A read waits for the last write of each of its blocks. A write waits for the last write and for all reads since.
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
    """Tracks which ops of a program may start while other ops start and finish."""

    def __init__(self, constraints: Constraints):
        self.waits_for, self.on_start, self.on_done = release(constraints)

    def begin(self) -> list[int]:
        """The ops that may start at once."""
        return [i for i, count in enumerate(self.waits_for) if count == 0]

    def started(self, op: int) -> list[int]:
        """The ops that may start now that `op` has started."""
        return self._released(self.on_start[op])

    def done(self, op: int) -> list[int]:
        """The ops that may start now that `op` is done."""
        return self._released(self.on_done[op])

    def _released(self, ops: Sequence[int]) -> list[int]:
        ready = []
        for i in ops:
            self.waits_for[i] -= 1
            if self.waits_for[i] == 0:
                ready.append(i)
        return ready


def release(constraints: Constraints) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """For each op: how many events it waits for, which ops its start releases, and which ops its end releases."""
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


_OF_WIRES = (f"{kernel}_{wire}" for wire in WIRES for kernel in ("encode", "decode", "decode_add"))

MERGES = frozenset(("add", "max", "min", "prod", "copy", "pack", *_OF_WIRES))
"""Kernels that are limited by memory bandwidth. They have a lane of their own, apart from the products."""


KERNEL_LANES = ("compute", "merge", "download", "upload")
"""The lanes of kernels: products, sums and copies, and the two directions of copies from and to a device."""


def lane(op: Op) -> tuple[str, int]:
    """The lane of an op, as (kind, peer).

    Kernels start as soon as they are ready, unless the pace is `in_order`, and so do sends without a window. In all
    other lanes the ops start in program order.
    """
    if isinstance(op, Send):
        return ("send", op.dest)
    if isinstance(op, Recv):
        return ("recv", op.source)
    if isinstance(op, Collective):
        return ("collective", 0)
    return (lane_of(op.kernel), 0)


def lane_of(kernel: str) -> str:
    """The name of the lane of a kernel."""
    if kernel in KERNEL_LANES:
        return kernel
    return "merge" if kernel in MERGES or divisor(kernel) is not None else "compute"


def divisor(kernel: str) -> int | None:
    """The number by which the kernel divides a sum: 4 for `mean4`. None for all other kernels."""
    number = kernel[4:]
    return int(number) if kernel.startswith("mean") and number.isdecimal() and number[0] != "0" else None


def track(op: Op) -> str:
    """The name of the lane of an op in a trace."""
    name, peer = lane(op)
    return {"send": f"send to {peer}", "recv": f"recv from {peer}"}.get(name, name)


def constraints(ops: Sequence[Op], pace: Pace) -> Constraints:
    """The constraints of a program: from reads and writes, from lanes, and from the pace of sends or collectives."""
    window = pace.window
    needs, behind = dependencies(ops), [-1] * len(ops)
    lanes: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        shares_window = window is not None and isinstance(op, Send) and not pace.by_peer
        lanes[("send", -1) if shares_window else lane(op)].append(i)
    for key, members in lanes.items():
        if key[0] in KERNEL_LANES or (key[0] == "send" and window is None):
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
    if pace.in_order:
        for earlier, later in pairwise(lanes["compute", 0]):
            needs[later] = sorted({*needs[later], earlier})
    return Constraints(needs, behind)


def device_constraints(ops: Sequence[Op], found: Constraints) -> Constraints:
    """The constraints for a device, which runs its queue by itself.

    A kernel may be enqueued as soon as the kernels that it needs have been enqueued. It still waits for messages.
    """
    kernels = {i for i, op in enumerate(ops) if isinstance(op, Compute)}
    follows = [[j for j in needs if j in kernels] if i in kernels else [] for i, needs in enumerate(found.needs)]
    needs = [[j for j in needs if j not in follows[i]] for i, needs in enumerate(found.needs)]
    return Constraints(needs, found.behind, follows)


WHOLES = {"matmul": 1, "matmul_bias": 2}
"""The products that one kernel may announce, and their operands without rows. The weight is the first of these."""


def announced(program: Program, needs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The products at the head of the compute lane that one kernel may compute, and announce one after the other.

    `needs` are those of `constraints`. These products wait for no message, nor for one another, have the same weight
    and the same dtypes, and some op of another lane takes the result of one of them before the last one is done.
    Empty: there are no two.
    """
    ops, early, found = program.ops, set[int](), list[int]()
    later = set[int]()  # these products, and what waits for them
    for i, op in enumerate(ops):
        if isinstance(op, Compute) and early.issuperset(needs[i]):
            early.add(i)  # it waits for kernels only
    for i, op in enumerate(ops):
        is_later = not later.isdisjoint(needs[i])
        if lane(op) == ("compute", 0):
            is_next = i in early and _factors(program, op) == _factors(program, ops[found[0] if found else i])
            if not is_next or _factors(program, op) is None or is_later:
                break
            found.append(i)
        if is_later or i in found[-1:]:
            later.add(i)
    takers = (before for i, op in enumerate(ops) if lane(op) != ("compute", 0) for before in needs[i])
    return tuple(found) if not set(found[:-1]).isdisjoint(takers) else ()


def _factors(program: Program, op: Op) -> tuple[object, ...] | None:
    """What all products of one kernel have in common: the weight, and the dtypes of rows. None for another op."""
    if not isinstance(op, Compute) or op.kernel not in WHOLES:
        return None
    count = len(op.reads) - WHOLES[op.kernel]
    dtypes = [{program.buffer(chunk.buffer).dtype for chunk in side} for side in (op.reads[:count], op.writes)]
    return op.reads[count], *map(sorted, dtypes)


def message_numbers(ops: Sequence[Op]) -> list[int]:
    """The number of each op among the sends to the same peer, or among the receives from the same peer; else -1."""
    seen: defaultdict[tuple[str, int], int] = defaultdict(int)
    numbers = []
    for op in ops:
        if isinstance(op, (Send, Recv)):
            numbers.append(seen[lane(op)])
            seen[lane(op)] += 1
        else:
            numbers.append(-1)
    return numbers
