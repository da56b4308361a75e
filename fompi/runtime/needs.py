"""What a call needs of a device's memory, and which other plan would fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fompi.base.doors import DOORS
from fompi.base.layout import Extents, nbytes
from fompi.plans.plan import Plan
from fompi.plans.problems import Problem


def device_nbytes(plan: Plan, extents: Extents, given: Collection[str]) -> int:
    """The bytes of device memory that one rank needs for a plan, besides the buffers that are `given`."""
    buffers = plan.programs[extents.rank].buffers
    new = (b for b in buffers if b.place != "host" and b.name not in given)
    return sum(nbytes(b.shape(extents), b.dtype) for b in new)


def remedy(
    plan: Plan,
    problem: Problem,
    extents: Extents,
    given: Collection[str],
    free: int,
    made_for_device: Callable[[Plan], Plan],
) -> str:
    """How a call can be done with `free` bytes of device memory, in words. `made_for_device` stages a plan.

    Of all plans it names the one that needs least, with the fewest slices.
    """
    need = device_nbytes(plan, extents, given)
    needs = {
        (schedule, slices): device_nbytes(made_for_device(other), extents._replace(shares=other.shares), given)
        for schedule, slices, other in DOORS.other_plans(problem)
    }
    text = f"{plan.schedule} needs {need} bytes on the device for this call, {free} are free for it"
    (schedule, slices), least = min(needs.items(), key=lambda item: item[1], default=((plan.schedule, 1), need))
    if least <= free:
        return f"{text}. schedule={schedule!r}, slices={slices} needs {least} and would fit"
    return f"{text}. No schedule and no number of slices needs less than {least}"
