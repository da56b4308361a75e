"""What a call needs of a device's memory, and which other plan would fit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fompi.backends.cuda.failures import OutOfMemory
from fompi.base.doors import DOORS
from fompi.base.errors import DeviceError
from fompi.base.layout import Extents, nbytes
from fompi.plans.plan import Plan
from fompi.plans.problems import Problem
from fompi.plans.staged import for_device
from fompi.tensors.device_array import DeviceArray


def device_nbytes(plan: Plan, extents: Extents, given: Collection[str]) -> int:
    """The bytes of device memory that one rank needs for a plan, besides the buffers that are `given`."""
    buffers = plan.programs[extents.rank].buffers
    new = (b for b in buffers if b.place != "host" and b.name not in given)
    return sum(nbytes(b.shape(extents), b.dtype) for b in new)


def out_of_memory(
    error: OutOfMemory,
    plan: Plan,
    problem: Problem,
    extents: Extents,
    given: Collection[str],
    arrays: dict[str, Any],
    is_staged: Any,
) -> DeviceError:
    """The error of a call that has only these `arrays` yet: what it needs, and which plan would fit. Empties `arrays`.

    Of all plans it names the one that needs least, with the fewest slices. `is_staged`: as in `for_device`.
    """
    free = error.free + sum(a.nbytes for name, a in arrays.items() if name not in given and isinstance(a, DeviceArray))
    arrays.clear()  # the traceback of the error keeps them
    need = device_nbytes(plan, extents, given)
    needs = {
        (schedule, slices): device_nbytes(for_device(other, is_staged), extents._replace(shares=other.shares), given)
        for schedule, slices, other in DOORS.other_plans(problem)
    }
    text = f"{error}. {plan.schedule} needs {need} bytes on the device for this call, {free} are free for it"
    (schedule, slices), least = min(needs.items(), key=lambda item: item[1], default=((plan.schedule, 1), need))
    if least <= free:
        return DeviceError(f"{text}. schedule={schedule!r}, slices={slices} needs {least} and would fit")
    return DeviceError(f"{text}. No schedule and no number of slices needs less than {least}")
