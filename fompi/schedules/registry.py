"""How an operation is carried out: each schedule is a generator of the ops of one rank.

`slices` is a number of equal ones, or their sizes in proportion: (1, 2, 4), small first.

| schedule        | messages                                             | parts per shard |
|-----------------|------------------------------------------------------|-----------------|
| `unfused`       | kernel, then the native collective                   | 1               |
| `sliced`        | `slices` asynchronous native collectives             | slices          |
| `unfused_p2p`   | kernel, then messages straight to each rank          | slices          |
| `sliced_p2p`    | the same, a slice of every shard at a time           | slices          |
| `direct`        | straight to each rank, between pieces of the kernel  | slices          |
| `pairwise`      | `direct`, all ranks in step (all-to-all)             | slices          |
| `ring`          | to the next rank, between the pieces of the kernel   | slices          |
| `bidirectional` | half of the parts each way round                     | 2 * slices      |
| `exchange`      | all-reduce in one step (small tensors)               | slices          |
| `hierarchical(g)` | between groups of g ranks each piece goes once     | slices          |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from operator import index
from types import CodeType
from typing import Any

from fompi.base.errors import PlanError
from fompi.base.layout import Sizes, Slices
from fompi.plans.plan import IN_STEP, Op, Plan, Program, Programs, Workspace, group_of
from fompi.plans.problems import MEANING, Problem
from fompi.schedules import native
from fompi.schedules.direct import direct, exchange, sliced_p2p, unfused_p2p
from fompi.schedules.hierarchical import hierarchical
from fompi.schedules.ring import bidirectional, ring

Schedule = Callable[[Problem, Workspace], Iterator[Op]]

SCHEDULES: dict[str, Schedule] = {
    "unfused": native.sliced,
    "sliced": native.sliced,
    "unfused_p2p": unfused_p2p,
    "sliced_p2p": sliced_p2p,
    "direct": direct,
    IN_STEP: direct,
    "ring": ring,
    "bidirectional": bidirectional,
    "exchange": exchange,
}


STRAIGHT = ("direct", "unfused_p2p", "sliced_p2p")
"""Those in which every rank sends to every other one, in any order."""

STEP_WINDOW = 2
"""Sends under way of ranks in step, if shards are cut: the next slice is there before the last byte of this one."""

GROUPS_WINDOW = 2
"""Sends to a peer of a plan with groups: a piece that has gone all the way round leaves before others have begun."""

GROUPED = ("all_gather", "reduce_scatter", "all_reduce")
"""What `hierarchical` moves."""

IN_RING_ORDER = (*STRAIGHT, "ring")
"""Those that sum an element in the order of the ranks, from the one behind its owner round to the owner."""

REGISTERED: dict[str, tuple[str, ...]] = {}
"""The schedules of users, and what each can move."""

FORGET: list[Callable[[], None]] = []
"""To be called when one is registered: what was chosen without it."""


def schedule(name: str, *moves: str) -> Callable[[Schedule], Schedule]:
    """Register a schedule of your own: from now on `schedule="NAME"` takes it where these are moved.

        @fompi.schedule("own first", "all_gather")
        def own_first(problem, work):  # of one rank: work.rank, work.size, work.parts
            x, y = work["x"], work["y"]
            yield Compute("copy", (x[:],), (y[work.rank * work.parts : (work.rank + 1) * work.parts],))
            ...

    `moves` are among all_gather, reduce_scatter, all_reduce, all_to_all, broadcast. The generator yields `Send`,
    `Recv`, `Compute` and `Collective` on chunks of the buffers in `work` (`fompi.plans.plan.Workspace`): those of the
    problem, and what `work.scratch(...)` makes. All ranks of a job must register it. A plan by such a schedule is
    proven whenever it is made, on any number of ranks: PlanError names rank, op and chunk. Registered again, a name of
    yours stands for the new one. Raises PlanError for a name of ours or one that cannot be told from a number of ranks,
    and for what nothing moves.
    """
    known = {meaning.moves for meaning in MEANING.values()}
    if name == "auto" or (name in SCHEDULES and name not in REGISTERED):
        raise PlanError(f"a schedule cannot be registered as {name!r}: that is one of ours")
    if not name or "(" in name:
        raise PlanError(f"a schedule cannot be registered as {name!r}: the name is empty, or has a parenthesis")
    if not moves or not known >= set(moves):
        raise PlanError(
            f"schedule {name!r} moves {', '.join(moves) or 'nothing'}; name some of {', '.join(sorted(known))}"
        )

    def register(made: Schedule) -> Schedule:
        SCHEDULES[name], REGISTERED[name] = made, moves
        for forget in FORGET:
            forget()
        return made

    return register


def fingerprint() -> str:
    """What tells the schedules of users from others of the same names: nothing where there are none.

    The same in every process. What a function calls, or closes over, does not count.
    """
    words = [(name, moves, _written(getattr(SCHEDULES[name], "__code__", None))) for name, moves in REGISTERED.items()]
    return f", with {blake2b(repr(words).encode(), digest_size=8).hexdigest()}" if words else ""


def _written(constant: object) -> object:
    """A function as it was written, wherever that was, or one of its constants."""
    if isinstance(constant, CodeType):
        return constant.co_code, constant.co_names, [_written(one) for one in constant.co_consts]
    if isinstance(constant, frozenset):
        return sorted(map(repr, constant))
    return [_written(one) for one in constant] if isinstance(constant, tuple) else repr(constant)


def available(problem: Problem) -> list[str]:
    """The schedules that this problem can be carried out by: ours, then those of users."""
    return _available(problem.moves, problem.size, problem.half)


def _available(moves: str, size: int, half: bool) -> list[str]:
    names = [name for name in SCHEDULES if name not in REGISTERED]
    if moves == "all_to_all":  # each rank's block is wanted by one rank only: a ring would carry it past others
        names = ["unfused", "sliced", "unfused_p2p", "sliced_p2p", "direct", IN_STEP]
    else:
        names.remove(IN_STEP)
    if moves != "all_reduce" and "exchange" in names:
        names.remove("exchange")
    if half and moves in ("reduce_scatter", "all_reduce"):
        names = [name for name in names if name not in ("unfused", "sliced")]
    ranks = next((g for g in range(size // 2, 1, -1) if size % g == 0), 0)
    groups = [f"hierarchical({ranks})"] if ranks and moves in GROUPED else []
    return [*names, *groups, *(name for name, known in REGISTERED.items() if moves in known)]


def is_available(problem: Problem, schedule: str) -> bool:
    """Groups may have any number of ranks that divides theirs."""
    return can_move(schedule, problem.moves, problem.size, problem.half)


def can_move(schedule: str, moves: str, size: int, half: bool = False) -> bool:
    """Whether there is such a schedule for what `moves`, in a half type or not."""
    if not isinstance(schedule, str):
        raise PlanError(f"schedule={schedule!r}: take the name of one, 'auto' among them")
    ranks = group_of(schedule)
    grouped = moves in GROUPED and 1 < ranks < size and size % ranks == 0
    return (grouped and schedule == f"hierarchical({ranks})") or schedule in _available(moves, size, half)


def hint(problem: Problem, schedule: str) -> str:
    """Why there is no such schedule for this problem, where that can be told, and what there is."""
    why = ""
    if schedule in ("unfused", "sliced") and problem.half:
        why = f": the library does not sum {problem.dtype} in float32"
    elif group_of(schedule) > 1 and problem.size % group_of(schedule):
        why = f": {problem.size} ranks are no groups of {group_of(schedule)}"
    return f"{why}; take auto, {', '.join(available(problem))}"


def _writer(schedule: str) -> Schedule:
    ranks = group_of(schedule)
    return SCHEDULES[schedule] if ranks == 1 else partial(hierarchical, ranks=ranks)


MOST_SLICES = 4096


def as_slices(slices: Any) -> Slices:
    """`slices` as a number or a tuple of numbers. Raises PlanError for what is neither, or cuts nothing."""
    found: Slices = 0
    with suppress(TypeError):
        found = tuple(map(index, slices)) if isinstance(slices, Iterable) else index(slices)
    sizes = (found,) if isinstance(found, int) else found
    if not sizes or min(sizes) < 1:
        raise PlanError(f"slices={slices!r}: give a number >= 1, or the sizes of the slices in proportion: (1, 2, 4)")
    if (found if isinstance(found, int) else len(found)) > MOST_SLICES:
        raise PlanError(f"slices={slices!r}: a shard is cut into {MOST_SLICES} slices at most")
    return found


def shares_of(schedule: str, slices: Slices) -> tuple[int, ...]:
    """The sizes of the parts of a shard in proportion. Raises PlanError for slices that are none."""
    slices = as_slices(slices)
    shares = (1,) * slices if isinstance(slices, int) else tuple(slices)
    if schedule == "unfused":
        return (1,)
    return tuple(share for share in shares for _ in range(2)) if schedule == "bidirectional" else shares


def to_one_peer(problem: Problem, schedule: str, slices: Slices) -> int:
    """How many messages a rank may send to another one, by a schedule of ours."""
    rounds = 2 if problem.moves == "all_reduce" else 1
    hops = {"ring": problem.size - 1, "bidirectional": problem.size - 1}.get(schedule, 1)
    if group_of(schedule) > 1:
        hops = problem.size // group_of(schedule)
    return rounds * hops * len(shares_of(schedule, slices))


def write(
    problem: Problem,
    schedule: str,
    slices: Slices = 1,
    sizes: Sizes | None = None,
    window: int | None = None,
    at: Callable[[int], Problem] | None = None,
    order: tuple[tuple[int, ...], ...] = (),
) -> Plan:
    """The Plan of `problem` by `schedule`, its shards cut into `slices`. Raises PlanError for what cannot be.

    `at(rank)` is the problem of each rank where they differ in columns that do not travel (None: they do not differ).
    `order[rank]`: the other ranks, in the order in which `rank` sends to them (`STRAIGHT` only).
    """
    if not is_available(problem, schedule):
        raise PlanError(f"{problem.operation} has no schedule {schedule!r}{hint(problem, schedule)}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise PlanError(f"window={window!r}: at least one message must be under way, or None for no bound")
    shares, size = shares_of(schedule, slices), problem.size
    if order and schedule not in STRAIGHT:
        raise PlanError(f"an order of peers is for {', '.join(STRAIGHT)}, not for {schedule}")
    for rank, dests in enumerate(order):
        if len(order) != size or sorted((*dests, rank)) != list(range(size)):
            raise PlanError(f"order[{rank}]={dests} must be all other ranks of {size}, each once", rank)

    def program(rank: int) -> Program:
        mine = problem if at is None else at(rank)
        work = mine.workspace(rank, len(shares), order[rank] if order else ())
        return work.program(_writer(schedule)(mine, work))

    nothing = Sizes(pairs=((0,) * size,) * size) if problem.moves == "all_to_all" else Sizes(rows=(0,) * size)
    if window is None:
        window = window_of(problem, schedule, len(shares))
    return Plan(problem, schedule, shares, sizes or nothing, Programs(size, program), window, order)


def window_of(problem: Problem, schedule: str, parts: int) -> int | None:
    """Sends in flight, or collectives, where nobody says how many."""
    if schedule == IN_STEP:
        return STEP_WINDOW if parts > 1 else 1
    if schedule == "sliced":
        return native.window(problem)
    return GROUPS_WINDOW if group_of(schedule) > 1 else None
