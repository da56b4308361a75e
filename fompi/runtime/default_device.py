"""FOMPI_DEVICE: operations and strategies on tensors of the host run on a device.

Inputs are copied to it, results are copied back.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from fompi.backends import cuda
from fompi.backends.cuda import Device
from fompi.base.errors import warn
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.mpi import environment, launcher, self_test, transport
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor


@cache
def default_device() -> Any:
    """The device of FOMPI_DEVICE. None: the host."""
    kind = environment.value("FOMPI_DEVICE")
    if kind == "auto":
        return None
    return Device(kind, seed=transport.world()[0]) if kind == "software" else Device(kind)


def upload(x: Any, name: str) -> Tensor:
    """`x` if it is on a device, else a copy of it on the device of FOMPI_DEVICE. Raises what `dlpack.borrow` raises."""
    tensor = dlpack.borrow(x, name)
    if tensor.device is not None:
        return tensor
    return replace(tensor, array=default_device().array(tensor.array), host=tensor.array)


def _local_rank() -> int:
    """The number of this process on its host. Without a word of the launcher: its rank."""
    known = launcher.detect().local_rank
    return transport.world()[0] if known is None else known


def _is_gpu_aware() -> bool:
    """True if the MPI library takes memory of GPUs: FOMPI_GPU_AWARE says so, or it claims so and a child did it."""
    choice = environment.value("FOMPI_GPU_AWARE")
    claim = transport.gpu_awareness(choice)
    if not claim.aware or choice == "1":
        return claim.aware
    reason = self_test.failure_once("cuda")
    if reason:
        claimed = f"the MPI library claims to take memory of GPUs ({claim.source})"
        warn(f"{claimed}, but {reason}: messages go through the host")
    return not reason


cuda.local_rank, cuda.is_gpu_aware = _local_rank, _is_gpu_aware


def device_for(kind: str, comm: Communicator, what: str) -> Any:
    """The device of this rank, for the command `what`. Collective: an error of one rank is raised on all."""
    device, refusal = None, None
    try:
        device = Device(kind, seed=comm.rank, delay=0.0) if kind == "software" else Device(kind)
    except Exception as error:
        refusal = error
    agree(comm, f"{what} --device {kind}", refusal)
    return device
