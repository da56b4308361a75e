"""How a compiled JAX program calls fompi: a handler of XLA's foreign function interface, written in ctypes.

A call in a program has a number as its attribute `site`. The handler looks the site up and calls it with the arrays of
the call. The structures are those of `xla/ffi/api/c_api.h`, which lies in jaxlib. XLA refuses a handler of another
version than its own. So the version is read from that header, and one that was not tried is refused here.
"""

from __future__ import annotations

import ctypes as c
import functools
import re
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import jaxlib
import numpy as np

from fompi.base.errors import StateError, in_words

TARGET = "fompi"
"""The name of the handler in compiled programs."""

KNOWN = {(0, 1): "jaxlib 0.5.0, 0.6.2", (0, 3): "jaxlib 0.10.2"}
"""The versions of the interface that these structures fit, and where they were tried."""

SITES: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""site(inputs, outputs) by its number. A site lives as long as a program or a trace that has it."""

EXECUTE = 3
METADATA = 1
TOKEN = 17
INTERNAL = 13

DTYPES = {
    1: "?", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "u1", 7: "u2", 8: "u4", 9: "u8", 10: "f2", 11: "f4", 12: "f8",
    15: "c8", 16: "u2", 18: "c16", 19: "u1", 20: "u1", 23: "u1", 24: "u1", 25: "u1", 28: "u1", 29: "u1",
}  # fmt: skip
"""XLA's dtypes as those of NumPy. bfloat16 and floats of 8 bits are held in unsigned integers."""

_P = c.c_void_p
_HEAD: Any = [("size", c.c_size_t), ("extension", _P)]


class _Buffer(c.Structure):
    _fields_ = (*_HEAD, ("dtype", c.c_int32), ("data", _P), ("rank", c.c_int64), ("dims", c.POINTER(c.c_int64)))


class _Scalar(c.Structure):
    _fields_ = (("dtype", c.c_int32), ("value", c.POINTER(c.c_int64)))


class _Buffers(c.Structure):
    _fields_ = (*_HEAD, ("count", c.c_int64), ("types", _P), ("items", c.POINTER(c.POINTER(_Buffer))))


class _Attributes(c.Structure):
    _fields_ = (*_HEAD, ("count", c.c_int64), ("types", _P), ("names", _P), ("items", c.POINTER(c.POINTER(_Scalar))))


class _Frame(c.Structure):
    _fields_ = (
        *_HEAD,
        ("api", _P),
        ("context", _P),
        ("stage", c.c_int32),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
        ("future", _P),
    )


class _Version(c.Structure):
    _fields_ = (*_HEAD, ("major", c.c_int32), ("minor", c.c_int32))


class _Metadata(c.Structure):
    _fields_ = (("size", c.c_size_t), ("version", _Version), ("traits", c.c_uint32))


class _Extension(c.Structure):
    _fields_ = (("size", c.c_size_t), ("type", c.c_int32), ("next", _P), ("metadata", c.POINTER(_Metadata)))


_ErrorCreate = c.CFUNCTYPE(_P, _P)


class _Api(c.Structure):
    _fields_ = (*_HEAD, ("version", _Version), ("internal", _P), ("error_create", _ErrorCreate))


class _Error(c.Structure):
    _fields_ = (*_HEAD, ("message", c.c_char_p), ("code", c.c_int32))


_Handler = c.CFUNCTYPE(_P, c.POINTER(_Frame))


def header_version(text: str) -> tuple[int, int]:
    """Major and minor version of the interface, from the text of the header."""
    found = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in found:
        return -1, -1
    return int(found[0][1]), int(found[1][1])  # type: ignore[index]


def check_version(version: tuple[int, int]) -> None:
    """Raise StateError for a version of the interface that was not tried."""
    if version not in KNOWN:
        known = ", ".join(f"{major}.{minor} ({where})" for (major, minor), where in KNOWN.items())
        raise StateError(
            f"fompi under jax.jit: jaxlib {jaxlib.__version__} has the FFI version {version[0]}.{version[1]}, which "
            f"fompi does not know. It knows {known}. Install one of these, or call fompi.jax outside of jax.jit"
        )


@functools.cache
def register() -> None:
    """Register the handler in XLA, once per process. Raises StateError for a jaxlib that is not known to work."""
    version = header_version((Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text())
    check_version(version)
    handler = _Handler(functools.partial(_handle, version))
    _KEPT.append(handler)
    address = c.cast(handler, _P).value
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(address), platform="cpu", api_version=1)


_KEPT: list[Any] = []


def _handle(version: tuple[int, int], pointer: Any) -> Any:
    """Answer XLA's question for the version, or run a site. Returns None, or an error of XLA."""
    frame = pointer.contents
    if frame.extension:
        extension = c.cast(frame.extension, c.POINTER(_Extension)).contents
        if extension.type == METADATA:
            extension.metadata.contents.version.major, extension.metadata.contents.version.minor = version
            return None
    if frame.stage != EXECUTE:
        return None
    try:
        site = SITES[frame.attributes.items[0].contents.value[0]]
        site(_arrays(frame.arguments), _arrays(frame.results))
    except BaseException as error:  # nothing above this frame could take an exception
        message = in_words(error).encode()
        args = _Error(c.sizeof(_Error), None, message, INTERNAL)
        return c.cast(frame.api, c.POINTER(_Api)).contents.error_create(c.addressof(args))
    return None


def _arrays(buffers: Any) -> list[Any]:
    """The memory of XLA as arrays, without tokens. They are valid during the call."""
    items = (buffers.items[i].contents for i in range(buffers.count))
    return [_array(buffer) for buffer in items if buffer.dtype != TOKEN]


def _array(buffer: Any) -> Any:
    shape = tuple(buffer.dims[: buffer.rank])
    kind, dtype = _memory(shape, buffer.dtype)
    if kind is None:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, kind.from_address(buffer.data))


@functools.lru_cache(maxsize=4096)
def _memory(shape: tuple[int, ...], number: int) -> tuple[Any, np.dtype[Any]]:
    """The ctypes array for this shape and dtype of XLA, and the dtype of NumPy. None: it has no bytes."""
    dtype = np.dtype(DTYPES[number])
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return (c.c_char * nbytes if nbytes else None), dtype
