"""Predictions: `simulate(plan, machine)` returns the Trace of a plan, `predict(plan, machine)` its time in seconds.

If each rank does the same as the rank `step` further on (`symmetry`), only the first `step` ranks are simulated. They
represent all ranks. A message to a rank outside of them goes to the rank that represents it.
"""

from __future__ import annotations

from math import lcm

from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.model.walk import Walk, check_sizes
from fompi.plans.dependencies import KERNEL_LANES, Constraints, constraints, lane
from fompi.plans.meaning import ROOTED
from fompi.plans.plan import Plan
from fompi.traces.trace import Trace

FEW_RANKS, MOST_RANKS = 16, 64
"""With more than FEW_RANKS ranks, shortcuts of `representatives` are tried, which may round rows up.

With more than MOST_RANKS ranks, a trace shows only the ranks that represent all. Its size would be too large otherwise.
"""

SYMMETRIC = (
    "unfused",
    "sliced",
    "unfused_p2p",
    "sliced_p2p",
    "direct",
    "pairwise",
    "ring",
    "bidirectional",
    "hierarchical",
)
"""Schedules in which all ranks do the same on equal links, relative to their own rank: there is no root."""


def simulate(plan: Plan, machine: Machine | str, sizes: Sizes | None = None) -> Trace:
    """The Trace that is predicted for `plan` on `machine`: a Machine, the name of a preset, or the path of a file.

    `sizes` are the rows of each rank. The default are the sizes that the plan was made for. Raises LayoutError if the
    sizes do not fit the plan, and PlanError if the plan cannot finish.
    """
    machine = Machine.of(machine)
    if plan.size > MOST_RANKS:
        return representatives(plan, machine, sizes)
    events = Walk(plan, sizes or plan.sizes, machine, plan.size).run()
    return Trace("predicted", f"{plan.problem} by {plan.schedule} on {machine.name}", tuple(events))


def representatives(plan: Plan, machine: Machine, sizes: Sizes | None = None, announces: bool = False) -> Trace:
    """The Trace of the ranks that represent all, or of all ranks. It takes as long as `simulate` predicts.

    `announces`: one kernel computes the products that a device can announce.
    With more than FEW_RANKS ranks that differ by one row, all get the greater number of rows, if that makes them alike.
    """
    sizes = sizes or plan.sizes
    known: dict[int, Constraints] = {}
    step = symmetry(plan, sizes, machine, known)
    if step > FEW_RANKS:
        rounded = Sizes((max(sizes.rows, default=0),) * plan.size)
        if sizes.rows and max(sizes.rows) == min(sizes.rows) + 1 and symmetry(plan, rounded, machine) < step:
            return representatives(plan, machine, rounded, announces)
    title = f"{plan.problem} by {plan.schedule} on {machine.name}"
    shown = "" if step == plan.size else f"; ranks 0 to {step - 1} of {plan.size}, the other ranks do the same"
    return Trace("predicted", title + shown, tuple(Walk(plan, sizes, machine, step, known, announces).run()))


def predict(plan: Plan, machine: Machine, sizes: Sizes | None = None) -> float:
    """The seconds that `simulate` predicts."""
    return representatives(plan, machine, sizes).seconds


def symmetry(plan: Plan, sizes: Sizes, machine: Machine, known: dict[int, Constraints] | None = None) -> int:
    """The least `step` such that each rank does the same as the rank `step` further on; else the number of ranks.

    The constraints of the ranks that are compared are stored in `known`. Raises LayoutError if the sizes do not fit.
    """
    check_sizes(plan, sizes)
    size = plan.size
    if plan.schedule.partition("(")[0] not in SYMMETRIC or plan.problem.operation in ROOTED:
        return size
    step = lcm(max((level.ranks for level in machine.levels if level.ranks < size), default=1), plan.group_size)
    counts = sizes.runs or sizes.pairs
    if size % step or step == size or len(set(map(machine.rate, range(size)))) > 1 or plan.problem.is_split:
        return size
    dealt = plan.problem.columns or plan.problem.experts
    if size <= FEW_RANKS and dealt[step:] + dealt[:step] != dealt:
        return size
    if counts:
        equal = all(row[-step:] + row[:-step] == counts[(r + step) % size] for r, row in enumerate(counts))
    else:
        equal = all(n == sizes.rows[(r + step) % size] for r, n in enumerate(sizes.rows))
    if not equal:
        return size
    pairs = {(rank, (rank + step) % size) for rank in (0, step - 1, size - 1)}  # a sample: all ranks cost too much
    known = {} if known is None else known
    return step if all(_same_programs(plan, *pair, known) for pair in pairs) else size


def _same_programs(plan: Plan, rank: int, other: int, known: dict[int, Constraints]) -> bool:
    """True if two ranks do the same at the same time, with peers at the same distance.

    With more than FEW_RANKS ranks, a rank may have one column more than another. This difference is neglected.
    """
    first, second = plan.programs[rank], plan.programs[other]
    shift = other - rank
    for each in {rank, other} - known.keys():
        known[each] = constraints(plan.programs[each].ops, plan.pace)
    return (
        len(first.ops) == len(second.ops)
        and (plan.size > FEW_RANKS or [x.row for x in first.buffers] == [y.row for y in second.buffers])
        and known[rank] == known[other]
        and all(
            type(a) is type(b)
            and (lane(a)[0] in (*KERNEL_LANES, "collective") or (lane(a)[1] + shift) % plan.size == lane(b)[1])
            and getattr(a, "kernel", "") == getattr(b, "kernel", "")
            for a, b in zip(first.ops, second.ops, strict=True)
        )
    )
