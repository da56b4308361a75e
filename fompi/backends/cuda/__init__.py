"""Kernels and messages on the memory of a device.

| file | what it holds |
|---|---|
| `device` | the protocols of a device, its streams and its events |
| `software` | a device without hardware, with a checker for races |
| `backend` | the Backend on any device: a stream for each lane, ordered by events |
"""

from __future__ import annotations

from typing import Any

from fompi.base.errors import DeviceError


def Device(kind: str = "software", **options: Any) -> Any:
    """The device `kind`. `options` are those of its class (`fompi.backends.cuda.software.SoftwareDevice`).

        device = fompi.Device("software", seed=0)
        x = device.array(np.ones((8, 4)))   # a DeviceArray: a copy on the device
        fompi.all_gather(x).get()           # the result is a DeviceArray, too; get() copies it to the host

    "software" is a device without hardware, with a checker for races. Raises DeviceError for a kind that is not there.
    """
    if kind != "software":
        raise DeviceError(f"there is no device {kind!r}: give 'software'")
    from fompi.backends.cuda.software import SoftwareDevice

    return SoftwareDevice(**options)


def backend_of(device: Any) -> Any:
    """The Backend on this device. It has one, so that all calls share its streams."""
    if device.backend is None:
        from fompi.backends.cuda.backend import OnDevice

        device.backend = OnDevice(device)
    return device.backend
