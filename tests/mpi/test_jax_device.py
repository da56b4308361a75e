"""Calls of compiled JAX programs on a GPU: XLA hands its stream and addresses of the device to the handler.

There is no GPU here. A frame is made as XLA makes it, and the device is the CUDA device over a fake runtime.
"""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

import fompi
from fompi.base.call_options import CallOptions
from fompi.jax import ffi
from fompi.jax.sites import End, Start, TracedCall, site_of
from fompi.mpi.paths import IPC, STAGED
from fompi.tensors import dlpack

jax = pytest.importorskip("jax")

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only

STREAM = 0x77
VERSION = 0, 3


@pytest.fixture(params=[STAGED, IPC])
def device(request, fakecuda, monkeypatch, world, comm):
    monkeypatch.setenv("FOMPI_PATH", request.param)
    made = fakecuda.device()
    monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda: made)
    made.runtime.lives["stream"].add(STREAM)
    yield made
    world.engine.progress_while_waiting()
    gc.collect()
    comm.Barrier()
    made.runtime.lives["stream"].remove(STREAM)
    made.close()
    assert made.runtime.memory == {}


class Frame:
    """What XLA gives to the handler for a call of a site: words, in which addresses of other words are."""

    def __init__(self, site, given, results, refuses=""):
        self.kept, self.words = [], []
        self.get = ffi._ErrorCreate(self._stream)
        self.create = ffi._ErrorCreate(self._error)
        api = ffi._Api()
        api.stream_get, api.error_create = self.get, self.create
        self.kept.append(api)
        words = [0] * 21
        words[ffi._API], words[ffi._STAGE] = ctypes.addressof(api), ffi.EXECUTE
        words[ffi._ARGUMENTS], words[ffi._RESULTS] = self._buffers([0, *given]), self._buffers([0, *results])
        words[ffi._ATTRIBUTES] = self._at([self._at([0, self._at([site.number])])])
        self.refuses, self.error, self.address = refuses, "", self._at(words)

    def _at(self, words):
        made = (ctypes.c_uint64 * len(words))(*words)
        self.kept.append(made)
        return ctypes.addressof(made)

    def _buffers(self, addresses):
        return self._at([self._at([0, 0, 0, address]) for address in addresses])

    def _stream(self, address):
        ffi._StreamGet.from_address(address).stream = STREAM

    def _error(self, address):
        self.error = ffi._Error.from_address(address).message.decode()
        return 1

    def run(self):
        ffi._handle(VERSION, self.address, is_on_device=True)
        return self.error


def shaped(*arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def site_for(operation, *arrays, **options):
    comm = options.pop("comm")
    arguments, _, how = operation.read(tuple(shaped(*arrays)), {**options})
    return site_of(TracedCall(operation, arguments, comm, how or CallOptions()))


CALLS = [
    (fompi.all_gather_matmul, ((4, 6), (6, 5)), {}),
    (fompi.matmul_reduce_scatter, ((6, 4), (4, 5)), {}),
    (fompi.all_reduce, ((7,),), {}),
    (fompi.all_to_all, ((4, 3),), {}),
]


@pytest.mark.parametrize(("operation", "shapes", "options"), CALLS, ids=lambda value: getattr(value, "name", None))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calls_follow_the_stream_of_xla(world, device, fakecuda, operation, shapes, options, dtype):
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    arrays = [np.random.default_rng([world.rank, *s]).integers(-4, 5, s).astype(kind) for s in shapes]
    wanted = operation(*arrays, comm=world, **options)
    site = site_for(operation, *arrays, comm=world, **options)
    given = [fakecuda.as_cupy(device, a) for a in arrays]
    results = [fakecuda.as_cupy(device, np.zeros(f.shape, dlpack.STORAGE[f.dtype])) for f in site.results]
    begun = len(device.runtime.log)
    addresses = [x.data.ptr for x in given], [y.data.ptr for y in results]
    for _ in range(2):
        assert not Frame(site, *addresses).run()
    assert fakecuda.of_cupy(results[0]).tobytes() == wanted.tobytes()
    recorded = [event for event, stream in device.runtime.calls("eventRecord", begun) if stream == STREAM]
    waited = [event for stream, event in device.runtime.calls("streamWaitEvent", begun) if stream != STREAM]
    assert len(recorded) == 2 and {*recorded} <= {*waited}, "fompi follows the stream of XLA"
    del given, results, site


def test_start_and_end(world, device, fakecuda):
    """Other kernels of the program are between them."""
    x = np.full((3, 2), world.rank + 1.0, "f4")
    site = site_for(fompi.all_reduce, x, comm=world)
    start, end = Start(site), End(site)
    given, result = fakecuda.as_cupy(device, x), fakecuda.as_cupy(device, np.zeros((3, 2), "f4"))
    number = fakecuda.as_cupy(device, np.zeros((), "i4"))
    for _ in range(2):
        assert not Frame(start, [given.data.ptr], [number.data.ptr]).run()
        assert not Frame(end, [number.data.ptr], [result.data.ptr]).run()
    assert (fakecuda.of_cupy(result) == world.size * (world.size + 1) / 2).all()
    del given, result, number, site, start, end


def test_what_is_not_for_gpus_says_so(world, device):
    class Other(ffi.Target):
        given = results = ()
        number = 1 << 40

    site = Other()
    ffi.SITES[site.number] = site
    assert "Other is not for arrays of a GPU" in Frame(site, [], []).run()
