"""How a compiled JAX program calls fompi: a handler of XLA's foreign function interface, in ctypes and in C (xla.c).

A call in a program has a number as its attribute `site`. The handler looks the site up and calls it with the arrays of
the call. The structures are those of `xla/ffi/api/c_api.h`, which lies in jaxlib. XLA refuses a handler of another
version than its own. So the version is read from that header, and one that was not tried is refused here.

JAX may drop a program that still runs: its last call has returned before. So the sites of a program live as long as
what XLA runs. XLA calls the handler when it makes that (`_keep`), and marks what it has freed (`release`).
"""

from __future__ import annotations

import ctypes as c
import functools
import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import jaxlib
import numpy as np

from fompi.base.errors import StateError, in_words
from fompi.plans.problems import Form
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray
from fompi.tensors.dlpack import STORAGE

TARGET = "fompi"
"""The name of the handler in compiled programs."""

KNOWN = {(0, 1): "jaxlib 0.5.0, 0.6.2", (0, 3): "jaxlib 0.10.2"}
"""The versions of the interface that these structures fit, and where they were tried."""

SITES: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""What a call runs, by its number: a `Target`. It lives as long as a program or a trace that has it."""

INSTANTIATE = 0
EXECUTE = 3
METADATA = 1
INTERNAL = 13

_FRAME = struct.Struct("21Q")
"""A call frame as words of 8 bytes: each field has one. The next lines say where some of them are."""

_EXTENSION, _API, _CONTEXT, _STAGE, _ARGUMENTS, _RESULTS, _ATTRIBUTES = 1, 2, 3, 4, 9, 14, 20

_DATA = 24
"""Where in a buffer the address of its data is."""

_P = c.c_void_p


def _struct(
    *fields: tuple[str, Any], begins: Sequence[tuple[str, Any]] = (("size", c.c_size_t), ("extension", _P))
) -> Any:
    """A struct of the interface with these fields, behind those with which it `begins`."""
    return type("Struct", (c.Structure,), {"_fields_": (*begins, *fields)})


_Version = _struct(("major", c.c_int32), ("minor", c.c_int32))
_Metadata = _struct(("size", c.c_size_t), ("version", _Version), ("traits", c.c_uint32), begins=())
_Extension = _struct(
    ("size", c.c_size_t), ("type", c.c_int32), ("next", _P), ("metadata", c.POINTER(_Metadata)), begins=()
)
_ErrorCreate = c.CFUNCTYPE(_P, _P)
_Api = _struct(
    *(("version", _Version), ("internal", _P), ("error_create", _ErrorCreate)),
    *(("others", _P * 3), ("stream_get", _ErrorCreate), ("type_register", _ErrorCreate)),
    *(("context_get", _P), ("state_set", _ErrorCreate)),
)
_TypeInfo = _struct(("deleter", _P))
_TypeRegister = _struct(("name", c.c_char_p), ("length", c.c_size_t), ("type_id", _P), ("type_info", _P))
"""The last field is there from the version 0.3 on."""

_StateSet = _struct(("context", _P), ("words", _P * 3))
"""The words behind the context are (type, state, deleter) in the version 0.1, (stage, type, state) in 0.3."""

_StreamGet = _struct(("context", _P), ("stream", _P))
_Error = _struct(("message", c.c_char_p), ("code", c.c_int32))
_Handler = c.CFUNCTYPE(_P, c.c_size_t)


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
    stages = {"instantiate": jax.ffi.pycapsule(address), "execute": jax.ffi.pycapsule(_native(version) or address)}
    jax.ffi.register_ffi_target(TARGET, stages, platform="cpu", api_version=1)
    on_device = _Handler(functools.partial(_handle, version, is_on_device=True))
    _KEPT.append(on_device)
    capsule = jax.ffi.pycapsule(c.cast(on_device, _P).value)
    jax.ffi.register_ffi_target(TARGET, {"instantiate": capsule, "execute": capsule}, platform="CUDA", api_version=1)


def _native(version: tuple[int, int]) -> int | None:
    """The address of the handler in C, which reads a frame some microseconds faster. None: there is no C."""
    try:
        from fompi.native._native import xla_handler
    except ImportError:
        return None
    return xla_handler(_execute, *version)


def _execute(number: int, given: Sequence[int], results: Sequence[int], api: int) -> Any:
    """Run a site on memory at these addresses. Returns None, or an error of XLA."""
    try:
        SITES[number].run(given, results)
    except BaseException as error:  # nothing above this frame could take an exception
        return _error(_Api.from_address(api), error)
    return None


def _error(api: Any, error: BaseException) -> Any:
    args = _Error(c.sizeof(_Error), None, in_words(error).encode(), INTERNAL)
    return api.error_create(c.addressof(args))


_KEPT: list[Any] = []


def _handle(version: tuple[int, int], address: int, is_on_device: bool = False) -> Any:
    """Answer XLA's question for the version, or run a site. Returns None, or an error of XLA.

    On a GPU the addresses are those of its memory, and the call is in the order of XLA's stream. The fields are read as
    words, which takes a few microseconds less than as structures.
    """
    frame = _FRAME.unpack(c.string_at(address, _FRAME.size))
    if frame[_EXTENSION]:
        extension = _Extension.from_address(frame[_EXTENSION])
        if extension.type == METADATA:
            extension.metadata.contents.version.major, extension.metadata.contents.version.minor = version
            return None
    stage = frame[_STAGE] & 0xFFFFFFFF
    try:
        site = SITES[_word(_word(_word(frame[_ATTRIBUTES]) + 8))]
        if stage == EXECUTE:
            given = _addresses(frame[_ARGUMENTS], len(site.given))
            results = _addresses(frame[_RESULTS], len(site.results))
            if not is_on_device:
                site.run(given, results)
                return None
            api, stream = _Api.from_address(frame[_API]), _StreamGet(c.sizeof(_StreamGet), None, frame[_CONTEXT], None)
            error = api.stream_get(c.addressof(stream))
            if error:
                return error
            site.run_on_device(int(stream.stream or 0), given, results)
        elif stage == INSTANTIATE:
            return _keep(version, _Api.from_address(frame[_API]), frame[_CONTEXT], site)
    except BaseException as error:  # nothing above this frame could take an exception
        return _error(_Api.from_address(frame[_API]), error)
    return None


_ALIVE: dict[int, tuple[Any, Any]] = {}
"""The sites that XLA may run, and a word of memory for each: 0 until XLA has freed the call. By the word's address."""


def _keep(version: tuple[int, int], api: Any, context: int, site: Any) -> Any:
    """Keep a site until XLA frees the call: give it a state, which it deletes. Returns None, or an error of XLA.

    Its deleter is C's `time`, which writes a number other than 0 to the state. It runs nothing of Python: XLA may free
    a call on a thread of its own, or while Python ends.
    """
    deleted, new = c.c_int64(0), version >= (0, 3)
    address, deleter, kind = c.addressof(deleted), c.cast(c.CDLL(None).time, _P).value, c.addressof(_TYPE)
    _ALIVE[address] = deleted, site
    if not _TYPE.value:
        name, info = b"fompi.site", _TypeInfo(c.sizeof(_TypeInfo), None, deleter)
        size = c.sizeof(_TypeRegister) if new else _TypeRegister.type_info.offset
        register = _TypeRegister(size, None, name, len(name), kind, c.addressof(info))
        _KEPT.append(info)
        error = api.type_register(c.addressof(register))
        if error:
            return error
    words = (_P * 3)(*((INSTANTIATE, kind, address) if new else (kind, address, deleter)))
    state = _StateSet(c.sizeof(_StateSet), None, context, words)
    return api.state_set(c.addressof(state))


_TYPE = c.c_int64(0)
"""The number of the type of the states. XLA chooses it."""


def release() -> None:
    """Forget the sites of programs that have ended, and that JAX has dropped."""
    for address, (deleted, _) in list(_ALIVE.items()):
        if deleted.value:
            _ALIVE.pop(address, None)


def _word(address: int) -> int:
    """The word of 8 bytes at this address."""
    return c.c_size_t.from_address(address).value


def _addresses(buffers: int, count: int) -> list[int]:
    """The addresses of `count` buffers of XLA. They are valid during the call. The first buffer is the token."""
    return [_word(_word(buffers + 8 * i) + _DATA) for i in range(1, count + 1)]


def array_at(address: int, form: Form) -> Any:
    """The memory at this address as an array of this form."""
    shape, dtype, memory = _memory(form)
    return np.ndarray(shape, dtype, memory.from_address(address) if memory is not None else None)


class Target:
    """What a call in a compiled program runs. `given` and `results` are the forms of what it takes and returns."""

    given: list[Form]
    results: list[Form]

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        """Run it on arrays, and write its results to arrays."""
        raise NotImplementedError

    def run(self, given: Sequence[int], results: Sequence[int]) -> None:
        """Run it on memory at these addresses."""
        self(list(map(array_at, given, self.given)), list(map(array_at, results, self.results)))

    def run_on_device(self, stream: int, given: Sequence[int], results: Sequence[int]) -> None:
        """Enqueue it on memory of a GPU, behind what XLA's stream has to do, which waits for the results."""
        raise StateError(f"{type(self).__name__} is not for arrays of a GPU: call it outside of jax.jit")


def array_on(device: Any, address: int, form: Form) -> Any:
    """The memory of a device at this address as an array of this form. XLA owns it."""
    array = DeviceArray.foreign(device, array_at(address, form), None)
    return dlpack.lend(array, form.dtype, "device")


@functools.lru_cache(maxsize=4096)
def _memory(form: Form) -> tuple[tuple[int, ...], np.dtype[Any], Any]:
    """The shape, the dtype of NumPy, and the ctypes array. None: it has no bytes.

    bfloat16 and floats of 8 bits are held in unsigned integers.
    """
    dtype = STORAGE[form.dtype]
    nbytes = math.prod(form.shape) * dtype.itemsize
    return form.shape, dtype, c.c_char * nbytes if nbytes else None
