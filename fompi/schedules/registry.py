"""The table of schedules. Each schedule is a generator that yields the ops of one rank.

| schedule          | messages                                              | parts per shard |
|-------------------|-------------------------------------------------------|-----------------|
| `unfused`         | the kernel, then one collective of the MPI library    | 1               |
| `sliced`          | one asynchronous collective of it for each slice      | slices          |
| `unfused_p2p`     | the kernel, then messages directly to each rank       | slices          |
| `sliced_p2p`      | the same, for one slice of all shards at a time       | slices          |
| `direct`          | directly to each rank, between pieces of the kernel   | slices          |
| `pairwise`        | as `direct`, all ranks in step (all-to-all only)      | slices          |
| `ring`            | to the next rank, between pieces of the kernel        | slices          |
| `bidirectional`   | as `ring`, half of the parts in each direction        | 2 * slices      |
| `exchange`        | all-reduce in one step, for small tensors             | slices          |
| `doubling`        | all-reduce in log2(ranks) steps, for small tensors    | slices          |
| `hierarchical(g)` | each piece once between groups of g ranks             | slices          |

`slices` is the number of equal slices, or the relative sizes of the slices: (1, 2, 4) begins with the smallest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from operator import index
from types import CodeType
from typing import Any

from fompi.base.differences import detail
from fompi.base.doors import DOORS
from fompi.base.errors import PlanError, meant
from fompi.base.layout import NATIVE_SUMS, Sizes, Slices, integer
from fompi.plans.encoded import encoded
from fompi.plans.meaning import MEANING
from fompi.plans.plan import PAIRWISE, Collective, Compute, Op, Plan, Program, Programs, Workspace, group_size
from fompi.plans.problems import Problem
from fompi.schedules import library
from fompi.schedules.direct import direct, exchange, sliced_p2p, unfused_p2p
from fompi.schedules.doubling import doubling
from fompi.schedules.hierarchical import hierarchical
from fompi.schedules.ring import bidirectional, ring

Schedule = Callable[[Problem, Workspace], Iterator[Op]]

SCHEDULES: dict[str, Schedule] = {
    "unfused": library.sliced,
    "sliced": library.sliced,
    "unfused_p2p": unfused_p2p,
    "sliced_p2p": sliced_p2p,
    "direct": direct,
    PAIRWISE: direct,
    "ring": ring,
    "bidirectional": bidirectional,
    "exchange": exchange,
    "doubling": doubling,
}
"""All schedules by name: the built-in ones, then those that users register. `_generator` adds `hierarchical(g)`."""

REGISTERED: dict[str, tuple[str, ...]] = {}
"""The schedules of users, and what each of them moves."""


def schedule(name: str, *moves: str) -> Callable[[Schedule], Schedule]:
    """Register a schedule of your own. From then on `schedule="NAME"` selects it for the collectives in `moves`.

        @fompi.schedule("own first", "all_gather")
        def own_first(problem, work):  # for one rank: work.rank, work.size, work.parts
            x, y = work["x"], work["y"]
            yield Compute("copy", (x[:],), (y[work.rank * work.parts : (work.rank + 1) * work.parts],))
            ...

    `moves` are some of all_gather, reduce_scatter, all_reduce, all_to_all, broadcast. The generator yields `Send`,
    `Recv`, `Compute` and `Collective` on chunks of the buffers in `work` (`fompi.plans.plan.Workspace`). These are the
    buffers of the problem and those that `work.scratch(...)` makes.

    All ranks of a job must register the schedule. Each plan of such a schedule is verified when it is made, on any
    number of ranks; PlanError names rank, op and chunk. A second registration of a name replaces the first. Raises
    PlanError if the name is built in, empty or contains a parenthesis, and if `moves` is empty or has an unknown name.
    """
    known = {meaning.moves for meaning in MEANING.values()}
    if name == "auto" or (name in SCHEDULES and name not in REGISTERED):
        raise PlanError(f"cannot register a schedule as {name!r}: this name is built in")
    if not name or "(" in name:
        raise PlanError(f"cannot register a schedule as {name!r}: the name is empty or contains a parenthesis")
    if not moves or not known >= set(moves):
        listed = ", ".join(sorted(known))
        raise PlanError(f"schedule {name!r} moves {', '.join(moves) or 'nothing'}; choose one or more of {listed}")

    def register(generator: Schedule) -> Schedule:
        SCHEDULES[name], REGISTERED[name] = generator, moves
        DOORS.schedule_registered()
        return generator

    return register


def write(
    problem: Problem,
    schedule: str,
    slices: Slices = 1,
    sizes: Sizes | None = None,
    window: int | None = None,
    at: Callable[[int], Problem] | None = None,
) -> Plan:
    """The Plan of `problem` by `schedule`, with shards cut into `slices`. Raises PlanError if there is no such plan.

    `at(rank)` is the problem of each rank, if the problems differ in columns that are not sent (None: they do not).
    """
    if not is_available(problem, schedule):
        raise PlanError(f"{problem.operation} has no schedule {schedule!r}{alternatives(problem, schedule)}")
    if window is not None and (integer(window) or 0) < 1:
        raise PlanError(f"window={window!r} must be an integer >= 1, or None for no limit")
    shares, size = shares_of(schedule, slices), problem.size

    def program(rank: int) -> Program:
        local_problem = problem if at is None else at(rank)
        work = local_problem.workspace(rank, len(shares) * problem.runs)
        made = _of_user_packed if local_problem.packed and schedule in REGISTERED else _generator(schedule)
        return _without_empty(problem, work.program(made(local_problem, work)))

    def _of_user_packed(local_problem: Problem, work: Workspace) -> Iterator[Op]:
        """A schedule of the user for a strided x: what it gets as x is packed."""
        strided = work["x"]
        x = work.scratch("x_packed", strided.axis, strided.row, strided.dtype)
        for block in range(x.first, x.first + x.count):
            yield Compute("pack", (strided[block],), (x[block],))
        work.use_instead("x", x)
        yield from _generator(schedule)(replace(local_problem, packed=False), work)

    empty = problem.spread((0,) * size)
    if window is None:
        window = default_window(problem, schedule, len(shares))
    plan = Plan(problem, schedule, shares, sizes or empty, Programs(size, program), window)
    return encoded(plan, roundings(problem, schedule)) if problem.wire else plan


def _without_empty(problem: Problem, program: Program) -> Program:
    """The program without the ops all of whose blocks have no rows, except for those that a collective needs."""
    if problem.experts:  # a rank without experts takes no messages, and multiplies nothing
        ops = (op for op in program.ops if all(chunk.start < chunk.stop for chunk in (*op.reads, *op.writes)))
        return replace(program, ops=tuple(ops))
    if problem.operation not in ("gather", "scatter", "reduce"):
        return program

    collectives = [op for op in program.ops if isinstance(op, Collective)]
    needed = {block for op in collectives for chunk in op.reads for block in chunk.blocks}

    def has_rows(block: tuple[str, int]) -> bool:
        symbol = program.buffer(block[0]).symbol(program.rank, program.size, program.parts, block[1])
        return block in needed or not problem.is_empty(symbol)

    def is_kept(op: Op) -> bool:
        return any(has_rows(block) for chunk in (*op.reads, *op.writes) for block in chunk.blocks)

    return replace(program, ops=tuple(op for op in program.ops if isinstance(op, Collective) or is_kept(op)))


def _generator(schedule: str) -> Schedule:
    ranks = group_size(schedule)
    return SCHEDULES[schedule] if ranks == 1 else partial(hierarchical, ranks=ranks)


# ------------------------------------------------------------------------------------------- which schedules fit


DIRECT_FAMILY = ("direct", "unfused_p2p", "sliced_p2p")
"""The schedules in which every rank sends to every other rank, in any order."""

IN_RING_ORDER = (*DIRECT_FAMILY, "ring")
"""The schedules that sum an element in the order of the ranks. The rank after the owner is first, the owner is last."""

WHOLE = ("exchange", "doubling")
"""The schedules of an all-reduce that send the whole tensor, in one piece."""

COLUMNS = ("unfused_p2p", "direct", PAIRWISE)
"""The schedules of an all-to-all that splits columns: each rank sends other bytes to every other rank."""

HIERARCHICAL_MOVES = ("all_gather", "reduce_scatter", "all_reduce")
"""The collectives that `hierarchical` can carry out."""


WITHOUT_WIRE = ("unfused", "sliced", *WHOLE)
"""The schedules whose messages cannot carry fewer bits: those of the MPI library, and those where each rank sums all
terms by itself, so that the results could differ between ranks.
"""


IN_ORDER = (*DIRECT_FAMILY, *WHOLE)
"""The schedules whose sums can be a tree over the ranks; `doubling` between 2**i ranks. So can groups of 2**i ranks."""


def keeps_order(problem: Problem, schedule: str) -> bool:
    """True if the problem asks for no order, or the schedule has it. Those of users may have it: they are verified."""
    if not problem.order or schedule in REGISTERED:
        return True
    if not problem.sums:
        return True
    ranks = group_size(schedule) if group_size(schedule) > 1 else problem.size if schedule == "doubling" else 1
    if ranks > 1 and {*problem.terms} != {problem.terms[0][:1]}:  # ranks have other parts of the tree
        return False
    return (schedule in IN_ORDER or ranks == group_size(schedule) > 1) and ranks & (ranks - 1) == 0


def carries_wire(problem: Problem, schedule: str) -> bool:
    """True if messages of the schedule can carry the wire of the problem. float16 may hold a mean, and not a sum."""
    if not problem.wire or schedule in REGISTERED:
        return True
    needs_one = problem.wire == "float16" and problem.op == "mean"
    sums_first = needs_one and roundings(problem, schedule) > 1 + (problem.moves == "all_reduce")
    return schedule not in WITHOUT_WIRE and not sums_first


def roundings(problem: Problem, schedule: str) -> int:
    """How often a term of a result is rounded at most, where messages have a wire."""
    size, is_all_reduce = problem.size, problem.moves == "all_reduce"
    if not problem.sums:
        return 1
    if group_size(schedule) > 1:
        return group_size(schedule) + is_all_reduce  # one for each step inside of a group, one between groups
    once = 1 if schedule in (*DIRECT_FAMILY, PAIRWISE) else size - 1
    return once + is_all_reduce


def available(problem: Problem) -> list[str]:
    """The schedules for this problem: the built-in ones, then those of users. Of groups only the largest."""
    ranks = next((g for g in range(problem.size // 2, 1, -1) if problem.size % g == 0), 0)
    built_in = [name for name in SCHEDULES if name not in REGISTERED]
    names = [*built_in, *[f"hierarchical({ranks})"] * (ranks > 0), *REGISTERED]
    return [name for name in names if is_available(problem, name)]


def _takes(problem: Problem, schedule: str) -> bool:
    """True unless rows go to experts, and the schedule does not know runs of rows."""
    if not problem.experts:
        return True
    is_joint = schedule in ("unfused", "sliced", PAIRWISE)  # every rank takes part in every step
    return schedule not in REGISTERED and (not is_joint or min(problem.experts) > 0)


def is_available(problem: Problem, schedule: str) -> bool:
    """True if this problem has the schedule. Groups may have any size that divides the number of ranks."""
    if not carries_wire(problem, schedule) or not keeps_order(problem, schedule):
        return False
    if problem.columns:
        return schedule in COLUMNS
    if not _takes(problem, schedule):
        return False
    return can_move(schedule, problem.moves, problem.size, problem.dtype, problem.op)


def can_move(schedule: str, moves: str, size: int, dtype: str = "float32", op: str = "sum") -> bool:
    """True if the schedule moves tensors of `dtype` by the collective `moves` on `size` ranks, reduced by `op`."""
    if not isinstance(schedule, str):
        raise PlanError(f"schedule={schedule!r} must be a name, for example 'auto' or 'ring'")
    if schedule in REGISTERED:
        return moves in REGISTERED[schedule]
    if schedule not in SCHEDULES:
        ranks = group_size(schedule)
        is_group = schedule == f"hierarchical({ranks})" and 1 < ranks < size and size % ranks == 0
        return is_group and moves in HIERARCHICAL_MOVES
    if moves == "all_to_all":  # only one rank needs each block; a ring would carry it through others
        return schedule in ("unfused", "sliced", "unfused_p2p", "sliced_p2p", "direct", PAIRWISE)
    if schedule in ("unfused", "sliced") and moves in ("reduce_scatter", "all_reduce"):
        return dtype in NATIVE_SUMS and op == "sum"
    return schedule != PAIRWISE and (schedule not in WHOLE or moves == "all_reduce")


def can_carry_out(schedule: str, operation: str, size: int, dtype: str = "float32", op: str = "sum") -> bool:
    """True if the schedule carries out `operation` on `size` ranks, whatever the shapes."""
    meaning = MEANING[operation]
    return schedule in COLUMNS if meaning.deals else can_move(schedule, meaning.moves, size, dtype, op)


def alternatives(problem: Problem, schedule: str) -> str:
    """The end of an error message: why the problem does not have this schedule, if known, and which ones it has."""
    why, listed = "", ["auto", *available(problem)]
    name = re.split(r"\W", schedule)[0]
    if schedule not in SCHEDULES and name != "hierarchical":
        is_cut = name != schedule and (name in SCHEDULES or "slice" in schedule)
        why = ": slices are given beside it, --slices 4 or slices=4" if is_cut else meant(schedule, listed)
    elif name == "hierarchical" and not 1 < group_size(schedule) < problem.size:
        why = f": it is hierarchical(RANKS), with more than 1 and fewer than all {problem.size} ranks in a group"
    elif not _takes(problem, schedule):
        why = ": it does not know experts" if schedule in REGISTERED else ": a rank without experts takes no part"
    elif not carries_wire(problem, schedule):
        of = "" if schedule in WITHOUT_WIRE else ": a sum of some ranks may be infinite there, though the mean is not"
        why = f": its messages cannot carry the wire {problem.wire}{of}"
    elif not keeps_order(problem, schedule):
        why = f": its sums do not have the order {problem.order!r}"
    elif schedule in ("unfused", "sliced") and problem.op != "sum":
        why = f": the MPI library only sums, because its {problem.op} may differ from NumPy's"
    elif schedule in ("unfused", "sliced") and problem.dtype not in NATIVE_SUMS:
        rule = "in float32" if problem.half else "as NumPy does: some saturate"
        why = f": MPI libraries do not sum {problem.dtype} {rule}"
    elif group_size(schedule) > 1 and problem.size % group_size(schedule):
        why = f": {problem.size} ranks cannot be divided into groups of {group_size(schedule)}"
    return f"{why}; choose {', '.join(listed)}"


def fingerprint() -> str:
    """A text that identifies the code of the schedules of users. It is empty if there are none.

    It is the same in every process. It does not cover functions that a schedule calls, nor variables of its closure.
    """
    words = ""
    for name, moves in REGISTERED.items():
        code = repr((moves, _code(getattr(SCHEDULES[name], "__code__", None)))).encode()
        words += detail(f"the schedule {name!r}", "", int.from_bytes(blake2b(code, digest_size=8).digest()))
    return words


def _code(constant: object) -> object:
    """A function without its place in a file, or a constant of a function, in a form with a stable repr."""
    if isinstance(constant, CodeType):
        return constant.co_code, constant.co_names, [_code(part) for part in constant.co_consts]
    if isinstance(constant, frozenset):
        return sorted(map(repr, constant))
    return [_code(part) for part in constant] if isinstance(constant, tuple) else repr(constant)


# ------------------------------------------------------------------------------------------- slices and windows


MOST_SLICES = 4096
"""The most slices of a shard. More slices would exceed the number of messages that a plan may send to one peer."""

PAIRWISE_WINDOW = 2
"""The window of `pairwise` if shards are cut: the next slice starts before the end of this slice arrives."""

HIERARCHICAL_WINDOW = 2
"""The window of `hierarchical`, for each peer. A finished sum leaves the group before the next pieces fill the link."""


def as_slices(slices: Any) -> Slices:
    """`slices` as an integer or a tuple of integers. Raises PlanError if it is neither, or not positive."""
    result: Slices = 0
    try:
        result = index(slices)
    except TypeError:
        with suppress(TypeError):
            result = tuple(map(index, slices))
    sizes = (result,) if isinstance(result, int) else result
    if not sizes or min(sizes) < 1:
        raise PlanError(f"slices={slices!r} must be an integer >= 1, or the relative sizes of the slices: (1, 2, 4)")
    if (result if isinstance(result, int) else len(result)) > MOST_SLICES:
        raise PlanError(f"slices={slices!r}: a shard can be cut into at most {MOST_SLICES} slices")
    return result


def shares_of(schedule: str, slices: Slices) -> tuple[int, ...]:
    """The relative sizes of the parts of a shard. Raises PlanError if `slices` is not valid."""
    slices = as_slices(slices)
    shares = (1,) * slices if isinstance(slices, int) else tuple(slices)
    if schedule == "unfused":
        return (1,)
    return tuple(share for share in shares for _ in range(2)) if schedule == "bidirectional" else shares


def messages_per_peer(problem: Problem, schedule: str, slices: Slices) -> int:
    """An upper bound of the number of messages from one rank to another, for a built-in schedule."""
    rounds = 2 if problem.moves == "all_reduce" else 1
    hops = {"ring": problem.size - 1, "bidirectional": problem.size - 1}.get(schedule, 1)
    if group_size(schedule) > 1:
        hops = problem.size // group_size(schedule)
    return rounds * hops * len(shares_of(schedule, slices))


def default_window(problem: Problem, schedule: str, parts: int) -> int | None:
    """The window of a plan if the caller gives none."""
    if schedule == PAIRWISE:
        return PAIRWISE_WINDOW if parts > 1 else 1
    if schedule == "sliced":
        return library.window(problem)
    return HIERARCHICAL_WINDOW if group_size(schedule) > 1 else None
