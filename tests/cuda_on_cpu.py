"""kernels.cu compiled for the CPU, and arrays between pages that no one may touch."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

import numpy as np

from fompi.backends.cuda import kernels
from fompi.tensors.device_array import DeviceArray

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
SOURCE = Path(kernels.__file__).with_name("kernels.cu")
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC", "-x", "c++")


class Compiled:
    """The functions of kernels.cu. `run(launch)` carries out a Launch."""

    def __init__(self, folder, *options):
        path = folder / "kernels.so"
        done = subprocess.run(
            ["g++", *OPTIONS, *options, "-include", str(HEADER), str(SOURCE), "-o", str(path)],
            capture_output=True, text=True, timeout=50,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.library = ctypes.CDLL(str(path))

    def run(self, launch):
        assert len(launch.grid) == len(launch.block) == 1
        values = [np.asarray(np.uint64(a) if type(a) is int else a) for a in launch.args]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        assert getattr(self.library, f"run_{launch.function}")(launch.grid[0], launch.block[0], pointers) == 0


def guarded(array, at_end=True):
    """A copy of `array` between two pages whose use ends the process. It touches the second one, or the first.

    The copy is the `base` of all its views.
    """
    page, nbytes = mmap.PAGESIZE, array.nbytes
    if not nbytes:
        return np.empty(array.shape, array.dtype)
    pages = -(-nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    for edge in (0, (pages + 1) * page):
        at = ctypes.addressof(ctypes.c_uint8.from_buffer(memory, edge))
        assert _protect(ctypes.c_void_p(at), ctypes.c_size_t(page), NO_ACCESS) == 0
    begin = page + (pages * page - nbytes if at_end else 0)
    made = np.ndarray(array.shape, array.dtype, (ctypes.c_uint8 * nbytes).from_buffer(memory, begin))
    made[...] = array
    return made


NO_ACCESS = 0  # PROT_NONE
_protect = ctypes.CDLL(None).mprotect


def on_device(array):
    return DeviceArray(None, array)  # the CPU is the device
