"""Kernels and messages on the memory of a device."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

from fompi.base.errors import DeviceError
from fompi.tensors import dlpack

_devices: dict[tuple[str, int], Any] = {}
_devices_lock = Lock()
_chosen: dict[str, int] = {}

local_rank: Callable[[], int] = lambda: 0  # noqa: E731
"""The number of this process on its host. `fompi.runtime.default_device` knows the launcher, and replaces it."""

is_gpu_aware: Callable[[], bool] = lambda: False  # noqa: E731
"""True if the MPI library takes memory of GPUs. `fompi.runtime.default_device` replaces it."""


def Device(kind: str = "software", **options: Any) -> Any:
    """The device `kind`: "software", "cuda", or "cuda:1" for a GPU by number.

        device = fompi.Device("software", seed=0)
        x = device.array(np.ones((8, 4)))   # a DeviceArray: a copy on the device
        fompi.all_gather(x).get()           # the result is a DeviceArray, too; get() copies it to the host

    "software" is a new device without hardware, with a checker for races. "cuda" is the GPU of this rank: by its number
    on the host, so that several ranks may share one. A process has one device for a GPU. `options` are those of
    `fompi.backends.cuda.software.SoftwareDevice` and `fompi.backends.cuda.cupy.CudaDevice`.

    Raises DeviceError for a kind that is not there, and LaunchError if there is no CuPy, driver or GPU.
    """
    name, colon, number = kind.partition(":")
    if name == "cuda" and (not colon or number.isdecimal()):
        return device_of("cuda", int(number) if colon else None, **options)
    if kind != "software":
        raise DeviceError(f"there is no device {kind!r}: give 'software', 'cuda' or 'cuda:NUMBER'")
    from fompi.backends.cuda.software import SoftwareDevice

    return SoftwareDevice(**options)


def device_of(kind: str, number: int | None = None, **options: Any) -> Any:
    """The device of this process for the GPU `number`. None: the GPU of this rank, by its number on the host.

    The first GPU that is asked for becomes that of the rank.
    """
    from fompi.backends.cuda.cupy import CudaDevice
    from fompi.backends.cuda.driver import visible_devices

    with _devices_lock:
        if number is None and kind not in _chosen:
            number = local_rank() % visible_devices()
        number = _chosen.setdefault(kind, number) if number is None else number  # type: ignore[arg-type]
        device = _devices.get((kind, number))
        if device is None:
            device = _devices[kind, number] = CudaDevice(number, known_to_mpi=is_gpu_aware(), **options)
        elif options:
            raise DeviceError(f"{device!r} exists: its options can be given only when it is asked for first")
        _chosen.setdefault(kind, number)
    return device


dlpack.DEVICES["cuda"] = lambda: device_of("cuda")


def backend_of(device: Any) -> Any:
    """The Backend on this device. It has one, so that all calls share its streams."""
    if device.backend is None:
        from fompi.backends.cuda.backend import OnDevice

        device.backend = OnDevice(device)
    return device.backend
