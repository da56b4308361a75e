"""Where the tensors of `fompi bench [SUITE] --device cuda` are.

All tensors are on the device. A time lasts from the call to the end of the last kernel of the slowest rank.

`--device software` runs the same on the software device, whose checker raises races at the end. Its times say nothing
of any GPU.
"""

from __future__ import annotations

from functools import partial
from time import sleep
from typing import Any

import numpy as np

from fompi.backends.cuda import backend_of
from fompi.base.errors import WaitTimeout
from fompi.bench.measure import BenchHosts, Call, HostPlace
from fompi.engine.communicator import Communicator
from fompi.runtime.default_device import device_for

NOT_A_GPU = "software device: no times of a GPU"


class DevicePlace(HostPlace):
    """The device of this rank. `kind` is "cuda" or "software"."""

    def __init__(self, kind: str, comm: Communicator):
        self.device, self.patience = device_for(kind, comm, "bench"), comm.engine.timeout
        self.backend = backend_of(self.device)
        self.is_software = kind == "software"
        self.marks = (NOT_A_GPU,) if self.is_software else ()

    def array(self, a: np.ndarray) -> Any:
        return self.device.array(a)

    def read(self, y: Any) -> np.ndarray:
        result: np.ndarray = y.get()
        return result

    def finished(self, call: Call) -> Call:
        return partial(self._finish, call)

    def _finish(self, call: Call) -> Any:
        """The result of the call, when all that it has enqueued in the caller's stream is done."""
        result, waits = call(), 0
        token = self.backend.entry()
        while token is not None and not token.done():
            sleep(1e-5)
            waits += 1
            if waits * 1e-5 > self.patience:
                raise WaitTimeout(f"the kernels on {self.device!r} are not done after {self.patience:g} s")
        return result

    def setup(self, comm: Communicator, cluster: BenchHosts) -> str:
        return f"{self._card()}; {comm.paths(self.device).title}; {cluster}"

    def _card(self) -> str:
        """The card, and the versions of its driver and of CuPy's CUDA, in words."""
        if self.is_software:
            return NOT_A_GPU
        runtime = self.device.runtime
        name = runtime.getDeviceProperties(self.device.number)["name"].decode()
        return f"{name}, driver for CUDA {runtime.driverGetVersion()}, CuPy for {runtime.runtimeGetVersion()}"

    def check(self) -> None:
        if self.is_software:
            self.device.check()
