"""Which schedule: by a model of the machine if there is one (`fompi.explain`), else by a simple rule.

An operation that is called must choose by what all its ranks know. So it takes the rule where they know less than the
model asks: columns of a weight that differ between ranks. How much an all-to-all moves they tell each other, to a power
of two, and whether it is about as much for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from fompi.base import layout
from fompi.base.errors import PlanError
from fompi.base.layout import Sizes, Slices
from fompi.model.machine import Machine
from fompi.model.simulate import FEW_RANKS
from fompi.planner.candidates import FEW_OPS, window_together
from fompi.planner.explain import MOST_EVENTS, explain
from fompi.plans.plan import IN_STEP, MOST_MESSAGES, Plan
from fompi.plans.problems import Problem
from fompi.schedules.registry import FORGET, STRAIGHT, hint, is_available, shares_of, to_one_peer, write

SMALL_NBYTES = 64 << 10
"""Up to this the latency of a sum counts, its bytes do not: an all-reduce goes in one step."""

LARGE_NBYTES = 8 << 20
"""From this size of a shard on a block of compute is cut in two, so that messages begin earlier."""

WALKED = 2
"""Of the candidates so many are walked through where a call waits for the choice."""

STREAM_NBYTES, STREAM_SLICES = 1 << 20, 4
"""Over a network: shards of this size go round a ring, in so many slices."""

EXCHANGE_NBYTES, EXCHANGE_SLICES, MOST_EXCHANGE_SLICES, EXCHANGE_WINDOW = 512 << 10, 8, 64, 2
"""Over a network: from the first on, what a rank has for each of several others goes in so many slices, or in more (of
at most 1 MiB), so many under way at a time: one arrives while the next leaves, and few streams meet at a port."""

EVEN_SHARE = 1.5
"""Ranks keep in step as long as nobody has more than so many times as much for one rank as for another: all wait for
the longest message of a turn."""


def choose(
    problem: Problem,
    rows: int | None,
    network: bool = False,
    machine: Machine | None = None,
    crowded: bool = False,
    even: bool = True,
) -> tuple[str, Slices]:
    """Schedule and slices for `rows` in all (None: not known to all ranks), by the model of a machine or by the rule.

    `network`: the ranks have several hosts. `crowded`: they have one, and no core of it to spare.
    `even`: each has about as much for any other (an all-to-all).

    By the model calls of about the same size (to a power of two) are done alike, so that new sizes cost nothing.
    """
    if machine is None or not rows or problem.size == 1:
        known = rows or None if problem.moves == "all_to_all" else rows  # 0: no rank knows how many
        return _by_rule(problem, known, network, crowded, even)
    return _by_model(problem, 1 << rows.bit_length() - 1, machine, even)


def encode_rows(rows: Sequence[int], rank: int) -> int:
    """What `rank` says of its rows for each rank, in 7 bits: how many bits their sum has, and whether they are even."""
    others = [*rows[:rank], *rows[rank + 1 :]]
    return sum(rows).bit_length() << 1 | (max(others) <= EVEN_SHARE * min(others))


def decode_rows(hints: Sequence[int]) -> tuple[int, bool]:
    """The rows that all ranks have, about, and whether all are even, from what each tells."""
    return sum(1 << (one >> 1) >> 1 for one in hints), all(one & 1 for one in hints)


@lru_cache(maxsize=4096)
def _by_model(problem: Problem, rows: int, machine: Machine, even: bool = True) -> tuple[str, Slices]:
    size = problem.size  # rows alike everywhere, so that some ranks stand for all
    if problem.moves == "all_to_all":
        sizes = Sizes(pairs=((max(1, rows // size**2),) * size,) * size)
    else:
        sizes = Sizes((max(1, rows // size),) * size)
    if size > FEW_RANKS:  # all wait for the slowest anyway, and now some stand for all
        machine = machine.at_slowest(size)
    found = explain(problem, sizes, machine, None, WALKED, FEW_OPS, hurried=True)
    best = next(c for c in (one.candidate for one in found.judged) if even or c.schedule != IN_STEP)
    return best.schedule, best.slices


def forget() -> None:
    """Choose anew from now on."""
    _by_model.cache_clear()


FORGET.append(forget)


@lru_cache(maxsize=4096)
def _by_rule(
    problem: Problem, rows: int | None, network: bool, crowded: bool = False, even: bool = True
) -> tuple[str, int]:
    """Schedule and slices without a machine.

    Messages go straight to who wants them: no chain of ranks to wait for, and the same bytes as a ring. Large ones
    over a network of hosts do not: one stream into each host and one out of it leave no port shared, and TCP at its
    best (docs/benchmarks.md).
    Where a message is a copy by a core that could compute, there is nothing to hide: products stay in one piece, and
    the library sums what is small in fewer messages.
    """
    if problem.size == 1:
        return "direct", 1
    computes, sums = bool(problem.weights or problem.gradients), problem.moves in ("reduce_scatter", "all_reduce")
    nbytes = None if rows is None else layout.nbytes((rows, *problem.sent_row), problem.dtype)
    if crowded and computes:
        few = sums and nbytes is not None and nbytes <= SMALL_NBYTES
        return "unfused" if few and is_available(problem, "unfused") else "unfused_p2p", 1
    if nbytes is None:
        return "direct", 1
    if problem.moves == "all_reduce" and nbytes <= SMALL_NBYTES:
        return "exchange", 1
    shard = nbytes // problem.size
    if problem.moves == "all_to_all":
        slices = _exchange_slices(problem.size, shard // problem.size, computes) if network else 1
        return IN_STEP if even and slices > 1 and not computes else "direct", slices
    if network and shard >= STREAM_NBYTES:
        for slices in (STREAM_SLICES, 1):
            if to_one_peer(problem, "ring", slices) <= MOST_MESSAGES:
                return "ring", slices
    if computes and problem.moves == "all_reduce" and shard >= STREAM_NBYTES:
        return "direct", STREAM_SLICES  # slice j is gathered while the next are made
    return "direct", 2 if computes and shard >= LARGE_NBYTES else 1


def _exchange_slices(size: int, nbytes: int, computes: bool) -> int:
    """Of the `nbytes` that one rank has for another: where several meet at a port, no more of it than need be."""
    if computes:
        return STREAM_SLICES if nbytes >= STREAM_NBYTES else 1
    if size == 2 or nbytes < EXCHANGE_NBYTES:
        return 1
    return min(max(EXCHANGE_SLICES, 1 << (nbytes // STREAM_NBYTES).bit_length()), MOST_EXCHANGE_SLICES)


def window_of_call(problem: Problem, schedule: str, slices: Slices, network: bool, by_model: bool) -> int | None:
    """Sends in flight of a call over a network, or by the model of a machine."""
    if by_model:
        return window_together(problem.size) if schedule in STRAIGHT else None
    if not network or problem.moves != "all_to_all" or schedule != "direct" or problem.size == 2:
        return None
    return EXCHANGE_WINDOW if len(shares_of(schedule, slices)) > 1 else None


def plan_for(
    problem: Problem,
    sizes: Sizes,
    schedule: str = "auto",
    slices: Slices | None = None,
    window: int | None = None,
    at: Callable[[int], Problem] | None = None,
    machine: Machine | None = None,
) -> Plan:
    """The Plan of `problem` for these sizes, by `schedule`.

    "auto": the one that is best on `machine`, or without one that which `choose` takes.
    """
    if schedule == "auto" and machine is not None:
        cut: Slices
        name, cut, paced, rows, order = explain(problem, sizes, machine, at, events=MOST_EVENTS).winner.candidate
        window = paced if window is None else window
        sizes = sizes if rows is None else Sizes(rows)
    elif schedule == "auto":
        (name, cut), order = choose(problem, None if sizes.pairs else sum(sizes.rows)), ()
    elif is_available(problem, schedule):
        name, cut, order = schedule, 1, ()
    else:
        raise PlanError(f"no schedule {schedule!r} for {problem.operation}{hint(problem, schedule)}")
    return write(problem, name, cut if slices is None else slices, sizes, window, at, order)
