"""Objects that are not tensors, are not on the host, or have an unsupported dtype: the error says what to do."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fompi.base.errors import DtypeError, FompiError, TensorError
from fompi.tensors import dlpack
from fompi.tensors.dlpack import borrow, is_tracer, requires_grad


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ((2, 0), "cuda:0"),
        ((2, 1), "cuda:1"),
        ((10, 0), "rocm:0"),
        ((8, 0), "metal:0"),
        ((99, 2), "DLPack device 99:2"),
    ],
)
def test_tensors_on_a_device(device, name, monkeypatch):
    monkeypatch.setattr(dlpack, "DEVICES", {})

    class OnDevice:
        def __dlpack_device__(self):
            return device

        def __dlpack__(self, **keywords):
            raise AssertionError("must not be called")

    with pytest.raises(TensorError, match=f"w is on {name}, but fompi works on host memory"):
        borrow(OnDevice(), "w")


def test_a_cupy_array_is_recognised_by_the_name_of_its_class(monkeypatch):
    monkeypatch.setattr(dlpack, "DEVICES", {})
    data = SimpleNamespace(device_id=0)
    cupy = type("ndarray", (), {"__module__": "cupy", "dtype": np.dtype("f4"), "data": data})
    with pytest.raises(TensorError, match="cuda:0"):
        borrow(cupy())


@pytest.mark.parametrize(
    ("x", "remedy"),
    [
        ([1.0, 2.0], r"np\.asarray\(w\)"),
        ((1, 2), r"np\.asarray\(w\)"),
        (3.0, r"np\.asarray\(w\)"),
        (np.float32(3), r"np\.asarray\(w\)"),
        (np.ma.array([1.0], mask=[True]), r"w\.filled\(\)"),
        (None, "pass a tensor"),
        ("text", "pass a tensor"),
        (b"bytes", "pass a tensor"),
        (object(), "pass a tensor"),
    ],
)
def test_objects_that_are_not_tensors(x, remedy):
    with pytest.raises(TensorError, match=rf"w has type \w+, which is not a tensor: .*{remedy}"):
        borrow(x, "w")
    assert not is_tracer(x) and not requires_grad(x)


UNKNOWN = [">f4", ">i8", object, "U3", "S2", "M8[s]", "m8[s]", [("a", "f4")], "V2", np.longdouble, np.clongdouble]
UNKNOWN += [ml_dtypes.int4, ml_dtypes.float4_e2m1fn]


@pytest.mark.parametrize("dtype", UNKNOWN)
def test_unsupported_dtypes_of_numpy(dtype):
    with pytest.raises(DtypeError, match=r"w has dtype .*; fompi supports, in native byte order: int8, .* bfloat16"):
        borrow(np.zeros(3, dtype), "w")


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, dtype=torch.complex32),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: jnp.zeros(3, jnp.int4),
    ],
)
def test_unsupported_dtypes_of_frameworks(make):
    with pytest.raises(DtypeError, match="w has dtype"):
        borrow(make(), "w")


def dual(x):
    with torch.autograd.forward_ad.dual_level():
        return borrow(torch.autograd.forward_ad.make_dual(x, x))


NOT_PLAIN = {
    "requires grad": lambda x: borrow(x.requires_grad_()),
    "requires grad, ": lambda x: borrow(torch.nn.Parameter(x)),
    "requires grad, but": lambda x: torch.func.grad(lambda v: borrow(v).array.sum())(x),
    "has a forward-mode tangent": dual,
    "is on meta, but fompi works on host memory": lambda x: borrow(x.to("meta")),
    r"has the layout torch.sparse_coo, .*: pass x.to_dense\(\)": lambda x: borrow(x.to_sparse()),
    r"is a nested tensor, .*: pass x.to_padded_tensor\(0\)": lambda x: borrow(torch.nested.as_nested_tensor([x, x])),
    "has no plain memory that can be borrowed: .*negative bit": lambda x: borrow(torch._neg_view(x)),
    "has no plain memory that can be borrowed: .*storage": lambda x: torch.vmap(lambda v: borrow(v).array)(x),
    "has a forward-mode tangent, ": lambda x: torch.func.jvp(lambda v: borrow(v).array, (x,), (x,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("message", NOT_PLAIN)
def test_torch_tensors_without_plain_memory(message, dtype):
    with pytest.raises(TensorError, match=f"x {message}"):
        NOT_PLAIN[message](torch.ones(3, dtype=dtype))


def test_conjugate_and_fake_tensors_of_torch():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(TensorError, match=r"resolve_conj"):
        borrow(torch.ones(3, dtype=torch.complex64).conj())
    with FakeTensorMode(), pytest.raises(TensorError, match="no plain memory"):
        borrow(torch.ones(3))


def test_requires_grad():
    assert requires_grad(torch.ones(3, requires_grad=True)) and not requires_grad(torch.ones(3))
    assert requires_grad(torch.nn.Parameter(torch.ones(3)))
    assert not requires_grad(np.ones(3)) and not requires_grad(jnp.ones(3))


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.make_jaxpr, jax.checkpoint])
def test_tracers(transform):
    results = []
    message = (
        r"w is a JAX tracer: `fompi.<operation>` cannot run under jax.jit or inside jax.grad. "
        r"Use fompi.jax.<operation>. The strategies of fompi.parallel work in jax.grad, outside of jit"
    )

    def f(v):
        results.append(is_tracer(v))
        with pytest.raises(TensorError, match=message):
            borrow(v, "w")
        return v.sum()

    transform(f)(jnp.ones(3))
    assert results and all(results) and not is_tracer(jnp.ones(3))


def test_jax_arrays_without_memory():
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(TensorError, match="deleted or donated"):
        borrow(x)
    with pytest.raises(TensorError):
        borrow(jax.random.key(0))


def test_an_error_of_the_producer_becomes_a_tensor_error():
    class Broken:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **keywords):
            raise BufferError("no export")

    with pytest.raises(TensorError, match="w cannot be exported by its framework: no export") as caught:
        borrow(Broken(), "w")
    assert isinstance(caught.value, FompiError) and isinstance(caught.value.__cause__, BufferError)


def test_a_producer_older_than_dlpack_1():
    class Old:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, stream=None):
            return np.arange(3).__dlpack__()

    assert borrow(Old()).array.tolist() == [0, 1, 2]
