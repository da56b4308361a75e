"""What a producer of DLPack capsules may do, and when its deleter is called. The producer is written in ctypes."""

from __future__ import annotations

import ctypes
import gc
import threading

import numpy as np
import pytest
import torch

from fompi.base.errors import DtypeError, TensorError
from fompi.tensors import dlpack
from fompi.tensors.dlpack import borrow


class DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, written independently of the code under test."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Producer:
    """Exports the numbers 0 to 11 as float32, and records the calls of its deleter."""

    def __init__(
        self,
        versioned=True,
        shape=(3, 4),
        strides=None,
        device=(1, 0),
        deleter=True,
        version=(1, 0),
        flags=0,
        **fields,
    ):
        self.memory = np.arange(12, dtype="float32")
        self.deleted = []
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(strides))(*strides) if strides is not None else None
        self.device = device
        self.deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.deleted.append)
        self.managed = Versioned(version=version, flags=flags) if versioned else Managed()
        self.managed.deleter = ctypes.cast(self.deleter, ctypes.c_void_p) if deleter else None
        self.managed.tensor = DLTensor(
            **{
                "data": self.memory.ctypes.data,
                "device_type": device[0],
                "device_id": device[1],
                "ndim": len(shape),
                "code": 2,
                "bits": 32,
                "lanes": 1,
                "shape": ctypes.addressof(self.shape) if shape else None,
                "strides": ctypes.addressof(self.strides) if self.strides is not None else None,
                **fields,
            }
        )
        name = b"dltensor_versioned" if versioned else b"dltensor"
        self.capsule = new_capsule(ctypes.addressof(self.managed), name, None)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, max_version=None):
        return self.capsule


both = pytest.mark.parametrize("versioned", [True, False])


@both
def test_the_deleter_is_called_once_after_the_last_view(versioned):
    producer = Producer(versioned)
    borrowed = borrow(producer)
    assert "used_dltensor" in repr(producer.capsule) and ("versioned" in repr(producer.capsule)) == versioned
    assert borrowed.framework == "dlpack" and not borrowed.readonly
    assert borrowed.array.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert borrowed.array.ctypes.data == producer.memory.ctypes.data
    view = borrowed.array[1:].T
    del borrowed
    gc.collect()
    assert producer.deleted == []
    del view
    assert producer.deleted == [ctypes.addressof(producer.managed)]


@both
def test_a_deleter_on_another_thread(versioned):
    producer, held = Producer(versioned), []
    held.append(borrow(producer))
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(producer.deleted) == 1


@both
def test_a_producer_without_deleter(versioned):
    producer = Producer(versioned, deleter=False)
    assert borrow(producer).array.sum() == 66
    assert producer.deleted == []


@both
def test_a_capsule_is_consumed_once(versioned):
    producer = Producer(versioned)
    borrowed = borrow(producer, "w")
    with pytest.raises(TensorError, match=r"w exported .*used_dltensor.*consumed only once; export the tensor again"):
        borrow(producer, "w")
    with pytest.raises(TensorError, match="consumed only once"):
        borrow(producer.capsule)
    assert producer.deleted == []
    del borrowed
    assert len(producer.deleted) == 1


def test_a_capsule_without_its_producer():
    x = torch.arange(4)
    capsule = x.__dlpack__()
    assert borrow(capsule).array.ctypes.data == x.data_ptr()
    with pytest.raises(TensorError, match="consumed only once"):
        borrow(capsule)
    with pytest.raises(TensorError, match="consumed only once"):
        borrow(np.zeros(2).__array_struct__)  # a capsule of another kind


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"byte_offset": 8, "shape": (2,)}, [2, 3]),
        ({"shape": ()}, 0),
        ({"shape": (), "byte_offset": 4}, 1),
        ({"shape": (0, 4), "data": None}, []),
        ({"shape": (3, 0), "data": None}, [[], [], []]),
        ({"shape": (4, 3), "strides": (1, 4)}, np.arange(12).reshape(3, 4).T.tolist()),
        ({"shape": (2, 2), "strides": (0, 2)}, [[0, 2], [0, 2]]),
        ({"shape": (4,), "strides": (-1,), "byte_offset": 12}, [3, 2, 1, 0]),
        ({"shape": (), "strides": ()}, 0),
        ({"shape": (6,), "device": (3, 0)}, [0, 1, 2, 3, 4, 5]),  # page-locked memory is on the host
    ],
)
@both
def test_every_kind_of_tensor(versioned, fields, expected):
    producer = Producer(versioned, **fields)
    array = borrow(producer).array
    assert array.dtype == "float32" and array.tolist() == expected
    del array
    assert len(producer.deleted) == 1


def test_flags():
    assert borrow(Producer(flags=1)).readonly and not borrow(Producer(flags=1)).array.flags.writeable
    assert not borrow(Producer(flags=2)).readonly  # this flag means: the producer has copied


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"version": (2, 0)}, TensorError, "x was exported in the format of DLPack 2"),
        ({"device_type": 2, "device_id": 3}, TensorError, "x is on cuda:3"),
        ({"lanes": 4}, DtypeError, "2:32x4"),
        ({"bits": 4}, DtypeError, "2:4x1"),
        ({"code": 3}, DtypeError, "3:32x1"),
    ],
)
def test_a_refused_capsule_is_not_consumed(fields, error, message, monkeypatch):
    monkeypatch.setattr(dlpack, "DEVICES", {})
    producer = Producer(**fields)
    with pytest.raises(error, match=message):
        borrow(producer)
    assert producer.deleted == [] and '"dltensor_versioned"' in repr(producer.capsule)
