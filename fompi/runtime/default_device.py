"""FOMPI_DEVICE: operations on tensors of the host run on a device. Inputs are copied to it, results are copied back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from fompi.backends import cuda
from fompi.backends.cuda import Device
from fompi.mpi import environment, launcher, transport
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor


@cache
def default_device() -> Any:
    """The device of FOMPI_DEVICE. None: the host."""
    kind = environment.value("FOMPI_DEVICE")
    return None if kind == "auto" else Device(kind, seed=transport.world()[0])


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
    return transport.gpu_awareness(environment.value("FOMPI_GPU_AWARE")).aware


cuda.local_rank, cuda.is_gpu_aware = _local_rank, _is_gpu_aware
