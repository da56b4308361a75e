"""`certify=True`: a result with the largest error that the roundings of its messages can have caused.

    y, error = fompi.all_reduce(x, comm=tp, certify=True)          # each element of y is off by at most error

    step = fompi.all_reduce.bind(x, comm=tp, certify=True)         # `tp` carries a wire (`Communicator.using`)
    y = step()                                                     # and then step.error

Each rank knows the scales of the blocks that it has rounded. It tells the others half a unit of each, and the proof
says which of them are in its result (`fompi.plans.certified`). Errors of sums in float32, and of a result of a half
type, are in the bound too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fompi.backends.half import widen
from fompi.backends.wires import half_unit
from fompi.base.layout import HALF
from fompi.base.wires import WIRES
from fompi.ops import operations
from fompi.plans.certified import roundings_of, shares_of
from fompi.runtime.executor import Executor
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray

SUM_ERROR = 2.0**-24
"""A sum of two float32 numbers is off by at most this share of it."""


class Certificate:
    """The largest error of the results of an executor on this rank, call by call. Making one is collective."""

    def __init__(self, executor: Executor):
        plan, comm = executor.plan, executor.comm
        self._executor, self._wire = executor, plan.problem.wire
        rounded = roundings_of(plan)
        self._places = [*rounded]
        self._own = [block for (rank, _), block in rounded.items() if rank == comm.rank]
        self._shares = shares_of(plan)[comm.rank] if self._places else []
        self._told = np.zeros((len(self._own), 2))
        self._gather = operations.all_gather.bind(self._told, comm=comm, schedule="direct") if self._places else None

    def error(self, y: Any) -> float:
        """The largest error of any element of `y`, the result of the last call. Infinite if it is not finite."""
        array = dlpack.borrow(y, "y")
        largest = float(np.abs(widen(_on_host(array.array), array.dtype)).max(initial=0.0))
        if not np.isfinite(largest):
            largest = np.inf
        most = self._of_messages(largest)
        if array.dtype in HALF:  # the result was rounded
            most += WIRES[array.dtype].of_itself * largest + WIRES[array.dtype].least
        return most

    def _of_messages(self, largest: float) -> float:
        """What messages and sums of float32 have added, in a result of this size."""
        if self._gather is None:
            return 0.0
        for i, block in enumerate(self._own):
            m, size = self._executor.encoded_block(*block)
            self._told[i] = half_unit(self._wire, _on_host(m), size)
        told = dict(zip(self._places, np.asarray(self._gather()), strict=True))
        most = 0.0
        for shares in self._shares:
            units = sum(share * told[at][0] for at, share in shares.items())
            terms = sum(told[at][1] for at in shares)
            most = max(most, units + len(shares) * SUM_ERROR * (largest + 2 * terms))
        return float(most) if np.isfinite(most) else np.inf

    def close(self) -> None:
        if self._gather is not None:
            self._gather.close()


def _on_host(array: Any) -> Any:
    return array.get() if isinstance(array, DeviceArray) else array
