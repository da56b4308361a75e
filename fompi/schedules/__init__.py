"""How an operation is carried out: each schedule is a generator of the ops of one rank.

`slices` is a number of equal ones, or their sizes in proportion: (1, 2, 4), small first.

| schedule        | messages                                             | parts per shard |
|-----------------|------------------------------------------------------|-----------------|
| `unfused`       | kernel, then the native collective                   | 1               |
| `sliced`        | `slices` asynchronous native collectives             | slices          |
| `unfused_p2p`   | kernel, then pairwise messages                       | slices          |
| `sliced_p2p`    | the same, a slice of every shard at a time           | slices          |
| `direct`        | pairwise, between the pieces of the kernel           | slices          |
| `ring`          | to the next rank, between the pieces of the kernel   | slices          |
| `bidirectional` | half of the parts each way round                     | 2 * slices      |
| `exchange`      | all-reduce in one step (small tensors)               | slices          |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index

from fompi.errors import PlanError
from fompi.layout import Sizes, Slices
from fompi.plan import Op, Plan, Program, Programs, Workspace
from fompi.problems import Problem
from fompi.schedules.direct import direct, exchange, sliced_p2p, unfused_p2p
from fompi.schedules.native import sliced
from fompi.schedules.ring import bidirectional, ring

Schedule = Callable[[Problem, Workspace], Iterator[Op]]

SCHEDULES: dict[str, Schedule] = {
    "unfused": sliced,
    "sliced": sliced,
    "unfused_p2p": unfused_p2p,
    "sliced_p2p": sliced_p2p,
    "direct": direct,
    "ring": ring,
    "bidirectional": bidirectional,
    "exchange": exchange,
}


def available(problem: Problem) -> list[str]:
    """The schedules that this problem can be carried out by."""
    names = list(SCHEDULES)
    if problem.moves == "all_to_all":  # each rank's block is wanted by one rank only: a ring would carry it past others
        names = ["unfused", "sliced", "unfused_p2p", "sliced_p2p", "direct"]
    if problem.moves != "all_reduce" and "exchange" in names:
        names.remove("exchange")
    if problem.half and problem.moves in ("reduce_scatter", "all_reduce"):
        names = [name for name in names if name not in ("unfused", "sliced")]
    return names


def shares_of(schedule: str, slices: Slices) -> tuple[int, ...]:
    """The sizes of the parts of a shard in proportion. Raises PlanError for slices that are none."""
    try:
        shares = (1,) * index(slices) if not isinstance(slices, Sequence) else tuple(map(index, slices))
    except TypeError:
        shares = ()
    if not shares or min(shares) < 1:
        raise PlanError(f"slices={slices!r}: give a number >= 1, or the sizes of the slices in proportion: (1, 2, 4)")
    if schedule == "unfused":
        return (1,)
    return tuple(share for share in shares for _ in range(2)) if schedule == "bidirectional" else shares


def write(
    problem: Problem,
    schedule: str,
    slices: Slices = 1,
    sizes: Sizes | None = None,
    window: int | None = None,
    at: Callable[[int], Problem] | None = None,
) -> Plan:
    """The Plan of `problem` by `schedule`, its shards cut into `slices`. Raises PlanError for what cannot be.

    `at(rank)` is the problem of each rank where they differ in columns that do not travel (None: they do not differ).
    """
    if schedule not in available(problem):
        raise PlanError(
            f"{problem.operation} has no schedule {schedule!r}; take one of {', '.join(available(problem))}"
        )
    if window is not None and window < 1:
        raise PlanError(f"window={window}: at least one send must be in flight, or None for no bound")
    shares = shares_of(schedule, slices)

    def program(rank: int) -> Program:
        mine = problem if at is None else at(rank)
        work = mine.workspace(rank, len(shares))
        return work.program(SCHEDULES[schedule](mine, work))

    size = problem.size
    nothing = Sizes(pairs=((0,) * size,) * size) if problem.moves == "all_to_all" else Sizes(rows=(0,) * size)
    return Plan(problem, schedule, shares, sizes or nothing, Programs(size, program), window)
