"""Borrowing and lending: the same bits at the same address, kept alive exactly as long as they are used."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fompi.base.errors import DtypeError, TensorError
from fompi.tensors.arena import Arena
from fompi.tensors.dlpack import STORAGE, Lent, borrow, lend

TORCH = [dtype for dtype in STORAGE if hasattr(torch, dtype)]
JAX = [dtype for dtype in STORAGE if hasattr(jnp, dtype)]
EVERY = [("numpy", dtype) for dtype in STORAGE]
EVERY += [("torch", dtype) for dtype in TORCH]
EVERY += [("jax", dtype) for dtype in JAX]
pytestmark = pytest.mark.usefixtures("x64")


def numpy_dtype(dtype):
    return np.dtype(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype)


def make(framework, dtype, shape=(3, 4)):
    """A tensor of the numbers 0, 1, 0, 1, 0, ... Every dtype has them, except e8m0fnu, which has no zero."""
    array = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(numpy_dtype(dtype))
    if framework == "torch":
        return torch.from_numpy(array.view(STORAGE[dtype])).clone().view(getattr(torch, dtype))
    return jnp.asarray(array) if framework == "jax" else array


def address(tensor):
    if isinstance(tensor, torch.Tensor):
        return tensor.data_ptr()
    if isinstance(tensor, jax.Array):
        return tensor.unsafe_buffer_pointer()
    return tensor.__array_interface__["data"][0]


# ── every framework, every dtype ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("framework", "dtype"), EVERY)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 4), (5, 0), (1, 7, 1)])
def test_round_trip(framework, dtype, shape):
    x = make(framework, dtype, shape)
    borrowed = borrow(x)
    assert (borrowed.dtype, borrowed.framework) == (dtype, framework)
    assert type(borrowed.array) is np.ndarray and borrowed.array.dtype == STORAGE[dtype]
    assert borrowed.array.shape == shape
    assert borrowed.readonly == (framework == "jax") == (not borrowed.array.flags.writeable)
    assert address(borrowed.array) == address(x) or borrowed.array.size == 0

    array = Arena(2**20).take(shape, STORAGE[dtype])
    array[...] = borrowed.array
    y = lend(array, dtype, borrowed)
    assert type(y) is type(x) and y.dtype == x.dtype and tuple(y.shape) == shape
    assert address(y) == address(array) or array.size == 0
    again = borrow(y)
    assert (again.array == borrowed.array).all() and again.dtype == dtype


@pytest.mark.parametrize(("framework", "dtype"), [case for case in EVERY if case[0] == "torch"])
def test_any_consumer_can_take_a_lent_tensor(framework, dtype):
    array = Arena(2**20).take((3, 4), STORAGE[dtype])
    array[...] = borrow(make("numpy", dtype)).array
    lent = lend(array, dtype, "dlpack")
    assert lent.__dlpack_device__() == (1, 0)
    consumers = [torch.from_dlpack] + [jax.dlpack.from_dlpack] * (dtype in JAX)
    consumers += [np.from_dlpack] * (STORAGE[dtype] == numpy_dtype(dtype))
    for consume in consumers:
        tensor = consume(lent)
        assert address(tensor) == address(array) and str(tensor.dtype).removeprefix("torch.") == dtype
        assert (borrow(tensor).array == array).all()
    assert (borrow(lent).array == array).all() and borrow(lent).framework == "dlpack"
    assert borrow(lent).dtype == dtype and str(lent) == f"Lent({dtype}[3, 4])"


def test_writing_through_a_borrow():
    for x in (np.zeros(4, "float32"), torch.zeros(4), Lent(np.zeros(4), "float64")):
        borrow(x).array[1] = 5
        assert borrow(x).array.tolist() == [0, 5, 0, 0]


def test_dtypes_for_which_numpy_has_several_names():
    for dtype, name in (
        (np.longlong, "int64"),
        (np.intc, "int32"),
        ("=f8", "float64"),
        (np.double, "float64"),
    ):
        assert borrow(np.zeros(2, dtype)).dtype == name
    assert borrow(np.zeros(2, np.dtype("float32", metadata={"unit": "m"}))).dtype == "float32"


STRIDED = {
    "transposed": lambda x: x.T,
    "rows": lambda x: x[::2],
    "columns": lambda x: x[:, 1:3],
    "offset": lambda x: x[1:, 1:],
    "broadcast": lambda x: (torch if isinstance(x, torch.Tensor) else np).broadcast_to(x, (2, 3, 4)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex128"])
@pytest.mark.parametrize("view", STRIDED)
def test_strides_are_kept(view, dtype):
    base = np.arange(12).reshape(3, 4)
    expected = STRIDED[view](base.astype(numpy_dtype(dtype)))
    x = STRIDED[view](torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)))
    for tensor in (x, torch.utils.dlpack.to_dlpack(x), expected):
        array = borrow(tensor).array
        assert array.strides == expected.strides and array.shape == expected.shape
        assert (array == expected.view(STORAGE[dtype])).all()
    assert address(borrow(x).array) == x.data_ptr()


def test_negative_strides_of_numpy():
    x = np.arange(6.0).reshape(2, 3)[::-1, ::-1]
    array = borrow(x).array
    assert array.strides == x.strides and address(array) == address(x)
    for framework in ("torch", "jax"):
        assert lend(x, "float64", framework).tolist() == x.tolist()
    half = make("numpy", "bfloat16")
    assert borrow(half[::-1]).array.tolist() == borrow(half).array.tolist()[::-1]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_of_ndarray_are_plain_arrays():
    x = np.asmatrix(np.eye(2))
    borrowed = borrow(x)
    assert type(borrowed.array) is np.ndarray and address(borrowed.array) == address(x)


def test_read_only():
    x = np.zeros(3)
    x.flags.writeable = False
    assert borrow(x).readonly and borrow(np.broadcast_to(np.zeros(1), (3,))).readonly
    lent = borrow(Lent(x, "float64"))  # the flag of a versioned capsule
    assert lent.readonly and not lent.array.flags.writeable
    y = lend(x, "float64", "torch")  # torch has no read-only tensors, so this is a copy
    y[0] = 1
    assert x[0] == 0 and lend(x, "float64", "jax").tolist() == [0, 0, 0]


def test_lending_to_jax_copies_arrays_that_are_not_aligned():
    arena = Arena(2**20)
    x = arena.take((17,), "float32")
    x[:] = range(17)
    y = lend(x[1:], "float32", "jax")
    assert address(y) != address(x[1:])
    x[:] = 0
    assert y.tolist() == list(range(1, 17))


def test_lending_a_dtype_that_jax_would_narrow():
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(DtypeError, match="jax_enable_x64"):
        lend(np.zeros(8), "float64", "jax")


def test_lend_checks_its_arguments():
    with pytest.raises(DtypeError, match="bfloat16 needs an array of dtype uint16, not float32"):
        lend(np.zeros(3, "float32"), "bfloat16", "torch")
    with pytest.raises(TensorError, match="cupy"):
        lend(np.zeros(3), "float64", "cupy")


def test_versions_devices_and_copies_of_a_lent_tensor():
    array = np.zeros(3)
    lent = Lent(array, "float64")
    assert '"dltensor"' in repr(lent.__dlpack__()) and '"dltensor"' in repr(lent.__dlpack__(max_version=(0, 8)))
    versioned = hasattr(np, "vecdot") and np.lib.NumpyVersion(np.__version__) >= "2.1.0"
    assert ("dltensor_versioned" in repr(lent.__dlpack__(max_version=(1, 0)))) == versioned
    assert lent.__dlpack__(stream=1, dl_device=(1, 0), copy=False)
    assert address(borrow(lent.__dlpack__(copy=True)).array) != address(array)
    with pytest.raises(BufferError, match=r"on device \(1, 0\), not \(2, 0\)"):
        lent.__dlpack__(dl_device=(2, 0))


# ── lifetime ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_borrowed_array_keeps_the_memory(framework, dtype):
    x = make(framework, dtype, (1000,))
    expected = borrow(x).array.copy()
    view = borrow(x).array[::2]
    del x
    gc.collect()
    noise = [make(framework, dtype, (1000,)) + 1 for _ in range(20)]
    assert (view == expected[::2]).all() and noise


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_borrow_ends(framework):
    x = make(framework, "float32")
    alive = weakref.ref(x)
    borrowed = borrow(x)
    del x
    assert alive() is not None
    del borrowed
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "dlpack"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_lent_tensor_keeps_its_block_until_it_dies(framework, dtype):
    arena = Arena(2**20)
    tensor = lend(arena.take((100,), STORAGE[dtype]), dtype, framework)
    if framework == "dlpack":
        tensor = torch.from_dlpack(tensor)
    gc.collect()
    assert arena.lent_nbytes > 0
    view = tensor[10:]
    del tensor
    gc.collect()
    if framework != "jax":  # in JAX a slice is a copy
        assert arena.lent_nbytes > 0
    del view
    gc.collect()
    assert arena.lent_nbytes == 0


def test_a_lent_jax_array_feeds_jit_and_survives_its_arena():
    memory = Arena(0).take((64,), "float32")
    memory[...] = 1
    x = lend(memory, "float32", "jax")
    del memory
    y = jax.jit(lambda v: v * 0 + 2)(x)
    del x
    assert y.tolist() == [2] * 64


def test_donation_does_not_change_a_borrowed_array():
    x = jnp.arange(1000.0)
    array = borrow(x).array
    jax.jit(lambda v: v + 1, donate_argnums=0)(x).block_until_ready()
    assert (array == np.arange(1000)).all()


def resident_nbytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "dlpack"])
def test_memory_stays_flat(framework):
    arena, tensor = (
        Arena(2**20),
        make("torch" if framework == "dlpack" else framework, "bfloat16", (16, 1024)),
    )

    def round_trips(count):
        x = tensor
        for _ in range(count):
            borrowed = borrow(x.__dlpack__() if framework == "dlpack" else x)
            array = arena.take(borrowed.array.shape, borrowed.array.dtype)
            array[...] = borrowed.array
            x = lend(array, borrowed.dtype, borrowed)

    round_trips(1000)
    before = resident_nbytes()
    round_trips(5000)  # 5000 x 32 KiB
    gc.collect()
    assert resident_nbytes() - before < 4 * 2**20
    assert arena.lent_nbytes + arena.free_nbytes <= 2**20


def test_threads_borrow_lend_and_drop():
    arena, failures, lent = Arena(2**20), [], []

    def work(number):
        try:
            for step in range(300):
                x = torch.full((100,), float(number * 300 + step), dtype=torch.bfloat16)
                borrowed = borrow(x if step % 2 else x.__dlpack__())
                array = arena.take(borrowed.array.shape, borrowed.array.dtype)
                array[:] = borrowed.array
                lent.append(lend(array, "bfloat16", "torch"))
                lent.append(lend(array, "bfloat16", "dlpack").__dlpack__())
                assert (array == borrowed.array).all()
                if step % 10 == 0:
                    del lent[:7]  # tensors of any thread
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    lent.clear()
    gc.collect()
    assert arena.lent_nbytes == 0


# ── in a new process ────────────────────────────────────────────────────────────────────────────────────────


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_importing_fompi_imports_no_framework():
    done = run(
        "import sys, fompi.tensors.dlpack, fompi.tensors.arena, numpy\n"
        "fompi.tensors.dlpack.borrow(numpy.ones(3))\n"
        "print({'torch', 'jax', 'jaxlib', 'cupy', 'ml_dtypes', 'mpi4py'} & set(sys.modules))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


def test_tensors_alive_at_exit():
    done = run(
        "import torch, jax.numpy as jnp\n"
        "from fompi.tensors.arena import Arena\n"
        "from fompi.tensors.dlpack import Lent, borrow, lend\n"
        "arena = Arena(0)\n"
        "take = lambda: arena.take((1000,), 'uint16')\n"
        "held = [borrow(x) for x in (jnp.ones(9), torch.ones(9), torch.ones(9).__dlpack__())]\n"
        "held += [lend(take(), 'bfloat16', to) for to in ('torch', 'jax', 'dlpack')]\n"
        "held += [torch.from_dlpack(held[-1]), held[-1].__dlpack__(), held]\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_array_of_jax_on_several_devices():
    done = run(
        "import jax, jax.numpy as jnp\n"
        "from fompi.tensors.dlpack import borrow, TensorError\n"
        "mesh = jax.sharding.Mesh(jax.devices(), 'a')\n"
        "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('a'))\n"
        "try: borrow(jax.device_put(jnp.ones(8), sharding))\n"
        "except TensorError as error: print(error)",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert "unsharded" in done.stdout, done.stderr
