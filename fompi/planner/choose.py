"""The schedule of a problem: the best one on a machine (`fompi.explain`), or without a machine by a simple rule.

All ranks of a call must choose the same schedule. So a call chooses by facts that all its ranks know. If they know less
than the model needs, for example if the columns of a weight differ between ranks, the rule chooses. In an all-to-all
the ranks exchange how much they send, to a power of two, and whether it is even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from fompi.base import layout
from fompi.base.doors import DOORS
from fompi.base.errors import PlanError
from fompi.base.layout import Sizes, Slices
from fompi.model.machine import Machine
from fompi.model.simulate import FEW_RANKS
from fompi.planner.candidates import FEW_OPS, direct_window
from fompi.planner.explain import MOST_EVENTS, explain
from fompi.plans.meaning import ROOTED
from fompi.plans.plan import MOST_MESSAGES, PAIRWISE, Plan
from fompi.plans.problems import Problem
from fompi.schedules.registry import (
    DIRECT_FAMILY,
    WHOLE,
    alternatives,
    is_available,
    keeps_order,
    messages_per_peer,
    shares_of,
    write,
)

LEAST_RANKS, TINY_NBYTES, DOUBLING_NBYTES = 4, 4096, 16 << 10
"""An all-reduce is one exchange on fewer ranks, and on one host with fewer than twice as many if it is tiny.

Between hosts, recursive doubling is for up to DOUBLING_NBYTES.
"""

SMALL_NBYTES = 64 << 10
"""An all-reduce of at most this many bytes takes one step (`exchange`): its latency counts more than its bytes."""

LARGE_NBYTES = 8 << 20
"""From this many bytes of a shard on, the product of a block is cut in two. Then messages start earlier."""

SIMULATED = 2
"""How many candidates are simulated while a call waits for the choice, besides those without overlap."""

STREAM_NBYTES, STREAM_SLICES, SUM_SLICES = 1 << 20, 4, 8
"""Over a network, shards of at least STREAM_NBYTES go round a ring in STREAM_SLICES slices.

A product that is summed on all ranks sends each slice twice, so it has SUM_SLICES.
"""

LEAST_SLICE, LEAST_ROWS = 64 << 10, 64
"""Beside a product shorter shards are cut, too, if each slice has so many bytes and rows. Fewer rows take longer."""

EXCHANGE_NBYTES, EXCHANGE_SLICES, MOST_EXCHANGE_SLICES, EXCHANGE_WINDOW = 512 << 10, 8, 64, 2
"""An all-to-all over a network, between more than two ranks.

From EXCHANGE_NBYTES for each peer on, the rows for a peer are cut into EXCHANGE_SLICES slices, or into more slices of
at most 1 MiB. EXCHANGE_WINDOW slices are in flight at a time: one arrives while the next one leaves, and few TCP
streams meet at a port.
"""

EVEN_RATIO = 1.5
"""An all-to-all is even if no rank sends more than this many times as much to one rank as to another.

In `pairwise` all ranks wait for the longest message of each step. So it is only good if the messages are even.
"""


def choose_schedule(
    problem: Problem,
    rows: int | None,
    network: bool = False,
    machine: Machine | None = None,
    crowded: bool = False,
    even: bool = True,
) -> tuple[str, Slices]:
    """Schedule and slices for `rows` rows of all ranks together (None: not all ranks know how many).

    `machine` chooses by its model; None takes the rule. `network`: the ranks are on several hosts. `crowded`: they are
    on one host and leave no core free. `even`: in an all-to-all, each rank sends about as much to every other rank.

    The model chooses once for each power of two of rows. So most new sizes cost nothing.
    """
    if machine is None or not rows or problem.size == 1:
        known = rows or None if problem.moves == "all_to_all" else rows  # 0: the ranks exchanged no hints
        name, slices = _by_rule(problem, known, network, crowded, even)
        return (name, slices) if keeps_order(problem, name) else ("direct", 1 if name in WHOLE else slices)
    return _by_model(problem, 1 << rows.bit_length() - 1, machine, even)


def encode_rows(rows: Sequence[int], rank: int) -> int:
    """The rows of this rank for each rank, as a hint of 7 bits for the handshake of an all-to-all.

    The last bit is 1 if the rows are even. The other bits are the number of bits of their sum.
    """
    return sum(rows).bit_length() << 1 | is_even([*rows[:rank], *rows[rank + 1 :]])


def is_even(rows: Sequence[int]) -> bool:
    """True if these rows of ranks are about as many."""
    return max(rows) <= EVEN_RATIO * min(rows)


def decode_rows(hints: Sequence[int]) -> tuple[int, bool]:
    """From the hints of all ranks: roughly how many rows they have together, and whether all of them are even."""
    return sum(1 << (hint >> 1) >> 1 for hint in hints), all(hint & 1 for hint in hints)


@lru_cache(maxsize=4096)
def _by_model(problem: Problem, rows: int, machine: Machine, even: bool = True) -> tuple[str, Slices]:
    size = problem.size  # all ranks get equal rows, so that a few ranks represent all in the simulation
    if problem.operation in ROOTED or problem.experts:
        sizes = problem.spread((max(1, rows // size),) * size)
    elif problem.moves == "all_to_all":
        sizes = Sizes(pairs=((max(1, rows // size**2),) * size,) * size)
    else:
        sizes = Sizes((max(1, rows // size),) * size)
    if size > FEW_RANKS:  # all wait for the slowest rank anyway, and equal ranks are simulated quickly
        machine = machine.at_slowest(size)
    explanation = explain(problem, sizes, machine, None, SIMULATED, FEW_OPS, for_call=True)
    best_first = (judged.candidate for judged in explanation.judged)
    best = next(candidate for candidate in best_first if even or candidate.schedule != PAIRWISE)
    return best.schedule, best.slices


def clear_choices() -> None:
    """Forget all choices by the model. It is called when a schedule is registered."""
    _by_model.cache_clear()


DOORS.schedule_registered = clear_choices


@lru_cache(maxsize=4096)
def _by_rule(
    problem: Problem, rows: int | None, network: bool, crowded: bool = False, even: bool = True
) -> tuple[str, int]:
    """Schedule and slices without a machine. docs/inside/planner.md has the rule as a table.

    Messages go directly to the rank that needs them. No rank waits for a chain of other ranks, and as many bytes move
    as in a ring. Large messages over a network go round a ring: each host has one stream in and one stream out, so that
    no two streams share a port. TCP is fastest there. Plain sums of half types do not: a ring sends what is summed in
    float32, which takes up to twice as long. Products that are summed are float32 in every schedule. Nor do sums with a
    wire: a ring would round partial sums again.

    If a message is a copy by a core that could compute (`crowded`), nothing can be hidden. Then products stay in one
    piece, and the library does small sums, because it needs fewer messages.
    """
    if problem.size == 1:
        return "direct", 1
    computes, sums = bool(problem.weights or problem.gradients), problem.sums
    nbytes = None if rows is None else layout.nbytes((rows, *problem.sent_row), problem.dtype)
    if crowded and computes:
        small_sum = sums and nbytes is not None and nbytes <= SMALL_NBYTES
        return "unfused" if small_sum and is_available(problem, "unfused") else "unfused_p2p", 1
    if rows is None or nbytes is None:
        return "direct", 1
    if problem.moves == "all_reduce" and nbytes <= SMALL_NBYTES and not problem.wire:
        return _small_all_reduce(problem.size, nbytes, network), 1
    shard = nbytes // problem.size
    if problem.exchanges:
        pair = shard if problem.columns else shard // problem.size
        at_pair = rows // problem.size if problem.columns else rows // problem.size**2
        slices = _exchange_slices(problem.size, pair, at_pair, computes) if network else 1
        return PAIRWISE if even and slices > 1 and not computes else "direct", slices
    if network and _has_slices(STREAM_SLICES, shard, rows // problem.size, computes):
        is_wide = sums and not computes and problem.dtype != problem.accumulator
        stream = "direct" if is_wide or (sums and problem.wire) else "ring"
        is_sum = computes and problem.moves == "all_reduce"
        is_long = is_sum and _has_slices(SUM_SLICES, shard, rows // problem.size, True)
        for slices in (SUM_SLICES if is_long else STREAM_SLICES, STREAM_SLICES, 1):
            if messages_per_peer(problem, stream, slices) <= MOST_MESSAGES:
                return stream, slices
    if computes and problem.moves == "all_reduce" and shard >= STREAM_NBYTES:
        return "direct", STREAM_SLICES  # slice j is gathered while the next slices are computed
    return "direct", 2 if computes and shard >= LARGE_NBYTES else 1


def _small_all_reduce(size: int, nbytes: int, network: bool) -> str:
    """The schedule of an all-reduce of up to SMALL_NBYTES.

    `exchange` has one step, and size - 1 messages of everything. `doubling` has log2(size) of both.
    """
    if size < LEAST_RANKS or (size < 2 * LEAST_RANKS and nbytes <= TINY_NBYTES and not network):
        return "exchange"
    return "doubling" if nbytes <= DOUBLING_NBYTES or not network else "direct"


def _has_slices(slices: int, nbytes: int, rows: int, computes: bool) -> bool:
    """True if a block of so many bytes and rows is cut into so many slices over a network."""
    is_enough = nbytes >= slices * LEAST_SLICE and rows >= slices * LEAST_ROWS
    return nbytes >= STREAM_NBYTES or (computes and is_enough)


def _exchange_slices(size: int, nbytes: int, rows: int, computes: bool) -> int:
    """The slices of an all-to-all over a network. A rank has `nbytes`, and so many rows, for each other rank."""
    if computes:
        return STREAM_SLICES if _has_slices(STREAM_SLICES, nbytes, rows, True) else 1
    if size == 2 or nbytes < EXCHANGE_NBYTES:
        return 1
    return min(max(EXCHANGE_SLICES, 1 << (nbytes // STREAM_NBYTES).bit_length()), MOST_EXCHANGE_SLICES)


def window_of_call(problem: Problem, schedule: str, slices: Slices, network: bool, by_model: bool) -> int | None:
    """The window of a call (None: the window of the schedule). `by_model`: a machine chose the schedule."""
    if by_model:
        return direct_window(problem.size) if schedule in DIRECT_FAMILY else None
    if not network or not problem.exchanges or schedule != "direct" or problem.size == 2:
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

    "auto" takes the best candidate on `machine`, or without a machine the schedule of `choose`. `slices` and `window`
    replace those of the choice. `at(rank)` is the problem of each rank, if the problems differ in columns that are not
    sent.

    Raises PlanError if the problem does not have this schedule.
    """
    if schedule == "auto" and machine is not None:
        cut: Slices
        best = explain(problem, sizes, machine, at, events=MOST_EVENTS).winner.candidate
        name, cut, best_window, rows, _ = best
        window = best_window if window is None else window
        sizes = sizes if rows is None else Sizes(rows)
    elif schedule == "auto":
        name, cut = choose_schedule(problem, None if sizes.pairs else sum(sizes.rows))
    elif is_available(problem, schedule):
        name, cut = schedule, 1
    else:
        raise PlanError(f"no schedule {schedule!r} for {problem.operation}{alternatives(problem, schedule)}")
    return write(problem, name, cut if slices is None else slices, sizes, window, at)
