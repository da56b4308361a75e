"""kernels.cu compiled by NVRTC, without a GPU. Needs the wheel nvidia-cuda-nvrtc (some 60 MB).

No function may spill registers or use memory of its own: such a kernel is slower than the memory.
"""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from fompi.backends.cuda import kernels

FUNCTION = (
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


@pytest.fixture(scope="module")
def nvrtc():
    """The library of the wheel, of CUDA 12 or 13."""
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    assert found, "there is no NVRTC: pip install nvidia-cuda-nvrtc"
    return ctypes.CDLL(str(sorted(found)[-1]))


def compiled(nvrtc, architecture):
    """The log of the compiler, and the machine code."""
    program, log_size, size = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    text = kernels.source().encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None) == 0
    options = [b"--std=c++17", f"--gpu-architecture=sm_{architecture}".encode(), b"--ptxas-options=-v"]
    result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(log_size))
    log = ctypes.create_string_buffer(log_size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == 0, log.value.decode()
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    code = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, code) == 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), code.raw


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_it_compiles_and_no_function_spills(nvrtc, architecture):
    log, code = compiled(nvrtc, architecture)
    assert "error" not in log and "warning" not in log, log
    assert code[:4] == b"\x7fELF"
    used = {name: [*map(int, numbers)] for name, *numbers in re.findall(FUNCTION, log, re.DOTALL)}
    missing = {name for name in used if f"{name}".encode() not in code}
    assert len(used) > 100 and not missing
    assert not {name: numbers for name, numbers in used.items() if any(numbers)}
