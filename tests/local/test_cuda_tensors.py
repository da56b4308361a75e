"""Tensors of other libraries on a GPU, over a fake runtime: CuPy is real, torch, JAX and Numba are stand-ins."""

from __future__ import annotations

import gc
import sys
import threading
from importlib import import_module
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from device_calls import random

import fompi
from fompi.backends import cuda
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray
from fompi.tensors.dlpack import LentOnDevice, borrow, lend

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only


class Producer:
    """A tensor of a library that exports DLPack. It notes the stream and the thread of each export."""

    def __init__(self, array, dtype="float32", versioned=True, device=(2, 0)):
        self.lent, self.versioned, self.device, self.exports = LentOnDevice(array, dtype), versioned, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        if not self.versioned and "max_version" in keywords:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.exports.append((keywords["stream"], threading.get_ident()))
        return self.lent.__dlpack__(stream=-1, max_version=keywords.get("max_version"))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_tensors_by_dlpack(device, versioned, dtype):
    array = device.array(np.arange(12, dtype=dlpack.STORAGE[dtype]).reshape(3, 4))
    x = Producer(array, dtype, versioned)
    tensor = borrow(x)
    assert x.exports == [(device._arrivals.ptr, threading.get_ident())]
    assert (tensor.dtype, tensor.array.ptr, tensor.array.shape) == (dtype, array.ptr, (3, 4))
    assert tensor.device is device and device.entry() is not None
    np.testing.assert_array_equal(tensor.array.get(), array.get())
    result = lend(tensor.array, dtype, tensor)
    assert isinstance(result, LentOnDevice) and result.__dlpack_device__() == (2, 0)
    again = borrow(result)
    assert (again.dtype, again.array.ptr) == (dtype, array.ptr)
    kept = array.memory
    ptr = array.ptr
    del array, x, tensor, result
    gc.collect()
    assert again.array.get().size == 12 and kept.ptr == ptr
    count = sys.getrefcount(kept)
    del again
    gc.collect()
    assert sys.getrefcount(kept) < count, "the capsule's deleter has run"


def test_a_consumer_waits_for_what_fompi_has_enqueued(device):
    lent, backend = LentOnDevice(device.array(random(3)), "float32"), cuda.backend_of(device)
    runtime, queues = device.runtime, [*backend.queues.values()]

    def waits(**keywords):
        before = len(runtime.calls("streamWaitEvent"))
        lent.__dlpack__(**keywords)
        return [ptr for ptr, _ in runtime.calls("streamWaitEvent")[before:]]

    assert waits(stream=5) == []  # all is done
    runtime.busy.update({queues[0].stream.ptr, queues[2].stream.ptr})
    assert waits(stream=5) == [5, 5] and waits(stream=None) == [1, 1] and waits(stream=2) == [2, 2]
    assert waits() == [1, 1] and waits(stream=-1) == []
    with pytest.raises(BufferError, match="stream=0"):
        lent.__dlpack__(stream=0)
    with pytest.raises(BufferError, match="only as it is"):
        lent.__dlpack__(dl_device=(1, 0))
    runtime.busy.clear()
    del backend, queues


def test_arrays_of_cupy(device, fakecuda):
    for dtype in ("float32", "int8", "complex64", ml_dtypes.bfloat16):
        x = random(4, 6, dtype=dtype)
        given = fakecuda.as_cupy(device, x)
        tensor = borrow(given[:, ::2])
        assert tensor.framework == "cupy" and tensor.device is device and tensor.dtype == np.dtype(dtype).name
        assert tensor.array.ptr == given.data.ptr and tensor.array.strides == (6 * x.itemsize, 2 * x.itemsize)
        result = lend(tensor.array[1:], tensor.dtype, tensor)
        assert type(result) is type(given) and result.dtype == x.dtype
        assert result.data.ptr == given[1:].data.ptr and result.strides == given[:, ::2].strides
        del given, tensor
        gc.collect()
        device.runtime.span(result.data.ptr, 1)  # kept alive
        del result


class Interface:
    """An object with `__cuda_array_interface__` alone, as the arrays of Numba."""

    def __init__(self, array, **changes):
        self.array, self.changes = array, changes

    @property
    def __cuda_array_interface__(self):
        return {**self.array.interface, "version": 3, **self.changes}


def test_arrays_by_the_cuda_array_interface(device):
    array = device.array(random(4, 6))
    tensor = borrow(Interface(array[1:], stream=None))
    assert tensor.array.ptr == array[1:].ptr and tensor.device is device
    np.testing.assert_array_equal(tensor.array.get(), array[1:].get())
    before = len(device.runtime.calls("eventRecord"))
    borrow(Interface(array, stream=2))
    assert [stream for _, stream in device.runtime.calls("eventRecord")[before:]] == [2]
    assert device.entry() is not None
    with pytest.raises(fompi.TensorError, match="stream 0"):
        borrow(Interface(array, stream=0))
    with pytest.raises(fompi.TensorError, match="mask"):
        borrow(Interface(array, mask=array))
    with pytest.raises(fompi.DtypeError):
        borrow(Interface(array, typestr="<V4"))
    result = lend(tensor.array, "float32", tensor)
    assert result.__cuda_array_interface__["data"][0] == array[1:].ptr


def test_tensors_of_torch_jax_and_numba(device, monkeypatch):
    """Stand-ins with the names of the classes. The real libraries here have no CUDA."""

    assert import_module("torch"), "a tensor of torch is there only if torch is loaded"
    array = device.array(random(4, 6))
    consumed = []

    def from_dlpack(lent):
        assert lent.__dlpack_device__() == (2, 0)
        consumed.append(lent.__dlpack__(stream=5, max_version=(1, 0)))
        return "tensor"

    modules = {
        "torch": SimpleNamespace(from_dlpack=from_dlpack),
        "jax.dlpack": SimpleNamespace(from_dlpack=from_dlpack),
        "numba.cuda": SimpleNamespace(as_cuda_array=lambda x: x.__cuda_array_interface__),
    }
    monkeypatch.setattr(dlpack, "_module", modules.__getitem__)
    options = {"dtype": "torch.float32", "requires_grad": False, "is_cuda": True, "is_deleted": lambda self: False}
    options["data_ptr"] = lambda self: 1 << 12
    for module, name in (("torch", "Tensor"), ("jaxlib._jax", "ArrayImpl")):
        kind = type(name, (Producer,), {"__module__": module, **options})
        x = kind(array)
        if module != "torch":
            x.dtype = np.dtype("float32")
        tensor = borrow(x)
        assert tensor.framework in module
        assert dlpack.device_of(x) is device and tensor.owner is x
        assert x.exports == [(device._arrivals.ptr, threading.get_ident())]
        assert lend(tensor.array, "float32", tensor) == "tensor"
    numba = type("DeviceNDArray", (Interface,), {"__module__": "numba.cuda.cudadrv.devicearray"})
    tensor = borrow(numba(array, stream=None))
    assert tensor.framework == "numba" and dlpack.device_of(numba(array)) is device
    assert lend(tensor.array, "float32", tensor)["data"][0] == array.ptr
    assert len(consumed) == 2
    consumed.clear()
    del x


def test_a_tensor_of_another_gpu_is_refused(device, fakecuda):
    other = fakecuda.device(number=1, devices=2)
    x = fakecuda.as_cupy(other, random(3))
    with pytest.raises(fompi.TensorError, match="x is on cuda:1, but this rank uses cuda:0: make that one the current"):
        fompi.all_gather(x)
    with pytest.raises(fompi.TensorError, match="cuda:1"):
        borrow(Producer(device.array(random(3)), device=(2, 1)))
    device.runtime._setDevice(1)
    far = DeviceArray.of(SimpleNamespace(ptr=device.runtime.malloc(12), device=device), (3,), "f4")
    device.runtime._setDevice(0)
    with pytest.raises(fompi.TensorError, match="cuda:1"):
        borrow(Interface(far))
    device.runtime.free(far.ptr)
    with pytest.raises(fompi.TensorError, match="on rocm:0, but fompi works on host memory and CUDA"):
        borrow(Producer(device.array(random(3)), device=(10, 0)))


# ---------------------------------------------------------------------------------------------------------- operations


def test_operations_give_the_kind_that_they_take(device, fakecuda):
    x, w = random(4, 6), random(6, 5)
    y = fompi.all_gather_matmul(fakecuda.as_cupy(device, x), fakecuda.as_cupy(device, w))
    np.testing.assert_array_equal(fakecuda.of_cupy(y), x @ w)
    out = fakecuda.as_cupy(device, np.zeros((4, 6), "f4"))
    assert fompi.all_reduce(fakecuda.as_cupy(device, x), out=out) is out
    np.testing.assert_array_equal(fakecuda.of_cupy(out), x)
    lent = fompi.all_gather(Producer(device.array(x)))
    np.testing.assert_array_equal(borrow(lent).array.get(), x)
    with pytest.raises(fompi.TensorError, match="on the CUDA device, but w is on the host"):
        fompi.all_gather_matmul(fakecuda.as_cupy(device, x), w)


def test_bound_plans_take_foreign_arrays(device, fakecuda):
    plan = fompi.plan(
        fompi.all_gather_matmul, fompi.Spec((4, 6), "float32", fompi.Shard(0)),
        fompi.Spec((6, 5), "float32", fompi.Shard(1)), ranks=1
    )  # fmt: skip
    x, w = random(4, 6), random(6, 5)
    given = fakecuda.as_cupy(device, x)
    with fompi.bind(plan, x=given, w=fakecuda.as_cupy(device, w)) as step:
        before = len(device.runtime.calls("malloc")), len(device.runtime.calls("eventCreateWithFlags"))
        for _ in range(3):
            y = step()
            np.testing.assert_array_equal(fakecuda.of_cupy(y), x @ w)
            x += 1
            fakecuda.view(borrow(given).array)[...] += 1
        assert len(device.runtime.calls("malloc")) == before[0], "a step allocates nothing"
        assert len(device.runtime.calls("eventCreateWithFlags")) <= before[1] + 1


def test_without_a_gpu_the_public_name_says_so(device):
    with pytest.raises(fompi.LaunchError, match="no CUDA driver on this host"):
        fompi.Device("cuda")
    with pytest.raises(fompi.DeviceError, match="'cuda:NUMBER'"):
        fompi.Device("cuda:x")
    array = device.array(random(3))
    dlpack.DEVICES["cuda"] = lambda: fompi.Device("cuda")
    with pytest.raises(fompi.TensorError, match="x is on cuda:0, but there is no CUDA driver on this host"):
        fompi.all_gather(Producer(array))
