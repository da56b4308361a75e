"""How CUDA starts in this process: CuPy, the driver and the number of GPUs, or what is missing and what helps."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from fompi.backends.cuda.library import wheel
from fompi.base.errors import LaunchError, in_words

NO_DEVICE, INSUFFICIENT_DRIVER = 100, 35


def load_cupy() -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise LaunchError(
            f"a CUDA device needs CuPy ({error}): pip install '.[cuda13]', or '.[cuda12]' for an older driver"
        ) from error


def visible_devices() -> int:
    """How many GPUs this process sees. Raises LaunchError as CudaDevice does."""
    return device_count(load_cupy().cuda.runtime)


def device_count(runtime: Any) -> int:
    """The number of GPUs. Raises LaunchError if there is no driver or GPU, or CuPy is for a newer CUDA."""
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:
        raise LaunchError(_refusal(runtime, error)) from error
    if not count:
        raise LaunchError(NO_GPU)
    return count


NO_GPU = "there is no CUDA device: CUDA_VISIBLE_DEVICES or the job's allocation (--gpus) hides it, or the host has none"


def _refusal(runtime: Any, error: Exception) -> str:
    """Why CUDA does not start, and what helps."""
    status = getattr(error, "status", None)
    if status == NO_DEVICE:
        return NO_GPU
    if status != INSUFFICIENT_DRIVER:
        return f"CUDA does not start: {in_words(error)}. Try nvidia-smi on this host"
    built, driver = int(runtime.runtimeGetVersion()), 0
    with suppress(Exception):
        driver = int(runtime.driverGetVersion())
    if not driver:
        return "there is no CUDA driver on this host: run on a host with a GPU (nvidia-smi must work)"
    have, want = (f"{version // 1000}.{version % 1000 // 10}" for version in (driver, built))
    return (
        f"the driver of this host is for CUDA {have}, but CuPy is for CUDA {want}: update the driver, or install the "
        f"CuPy for it: pip uninstall {wheel()} && pip install 'cupy-cuda{driver // 1000}x'"
    )
