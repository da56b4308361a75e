"""Products that one kernel of the CUDA device announces, over the fake runtime: what it takes, and what it is worth."""

from __future__ import annotations

import gc
import json
import weakref

import numpy as np
import pytest
from device_mutants import plant

import fompi
from fompi.backends.cuda import backend_of
from fompi.backends.cuda.counters import announced
from fompi.backends.cuda.counters.announced import CudaAnnouncer, layout
from fompi.backends.cuda.device import ProductCall
from fompi.backends.half import narrow, storage, widen

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only

ROWS, DEPTH, COLUMNS = (5, 300, 1), 24, 200


def products(device, of_w="float32", of_x="float32", of_y="float32", of_bias="", transposed=False):
    """Three products of whole numbers with one weight, and what each must be. The last one has two runs of rows."""
    random = np.random.default_rng(0)

    def up(*shape, dtype):
        values = narrow(random.integers(-3, 4, shape).astype("f4"), dtype)
        return device.array(values), widen(values, dtype)

    w, w_values = up(*((COLUMNS, DEPTH) if transposed else (DEPTH, COLUMNS)), dtype=of_w)
    if transposed:
        w, w_values = w.rows_first(1), w_values.T
    bias, bias_values = up(COLUMNS, dtype=of_bias or "float32")
    made, wanted = [], []
    for number, count in enumerate(ROWS):
        has_bias = bool(of_bias) and number == 1
        xs = [up(count, DEPTH, dtype=of_x) for _ in range(1 + (number == 2))]
        ys = [device.empty((count, COLUMNS), storage(of_y)) for _ in xs]
        reads, dtypes = [x for x, _ in xs] + [w], [of_x] * len(xs) + [of_w]
        if has_bias:
            reads, dtypes = [*reads, bias], [*dtypes, of_bias]
        made.append(ProductCall("matmul_bias" if has_bias else "matmul", reads, ys, dtypes, [of_y] * len(ys)))
        wanted.append([narrow(x @ w_values + has_bias * bias_values, of_y) for _, x in xs])
    return made, wanted


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32", "float32", ""),
        ("float32", "bfloat16", "float32", "float32"),
        ("float16", "float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "float32", ""),
    ],
)
def test_the_kernel_gets_its_tables(device, dtypes, transposed):
    """Its arguments have the types that it was compiled for. Three calls use the same counters and flags."""
    listed, wanted = products(device, *dtypes, transposed=transposed)
    launch, driver = backend_of(device).bind_announced(listed), device.library.driver
    assert driver.forms[0][:4] == dtypes and driver.forms[0].transposed == transposed
    before = len(device.runtime.calls("malloc")), len(device.runtime.calls("eventCreateWithFlags"))
    for call in range(1, 4):
        for product in listed:
            for y in product.writes:
                device.put(y, 99)
        tokens = launch([])
        assert [token.done() for token in tokens] == [True] * 3
        assert driver.launches[-1] == (call, 3)
        for product, results in zip(listed, wanted, strict=True):
            for y, result in zip(product.writes, results, strict=True):
                assert y.get().tobytes() == result.tobytes()
    assert len(device.runtime.calls("malloc")) == before[0], "a launch allocates nothing"
    assert len(device.library._cublas.calls) == 0


def test_tokens_follow_the_flags_and_the_end(device):
    listed, _ = products(device)
    backend = backend_of(device)
    launch = backend.bind_announced(listed)
    copied = backend.bind("copy", [listed[0].writes[0]], [device.empty((5, COLUMNS), "f4")], ["float32"], ["float32"])
    after = copied([])
    waits = len(device.runtime.calls("streamWaitEvent"))
    device.query = lambda event: 600  # no stream has done anything
    first, second, last = launch([after])
    assert len(device.runtime.calls("streamWaitEvent")) == waits + 1, "the kernel waits for the other stream"
    assert first.done() and second.done() and not last.done()
    assert {token.queue for token in (first, second, last)} == {backend.queues["compute"]}
    device.query = lambda event: 0
    assert last.done() and first.due <= second.due <= last.due


def test_its_memory_goes_back_without_the_garbage_collector(device):
    gc.collect()
    gc.disable()
    try:
        listed, _ = products(device)
        launch = backend_of(device).bind_announced(listed)
        launch([])
        memory = weakref.ref(listed[0].writes[0].memory)
        del launch, listed
        assert memory() is None
    finally:
        gc.enable()


def test_a_flag_that_is_never_raised_is_an_error(device):
    listed, _ = products(device)
    launch = backend_of(device).bind_announced(listed)
    device.library.driver.leaves_out = 1
    first, second, _ = launch([])
    assert first.done()
    with pytest.raises(fompi.DeviceError, match="has ended, and did not raise the flag of one"):
        second.done()


def test_a_kernel_that_fails_is_an_error_of_all_its_products(device):
    listed, _ = products(device)
    launch = backend_of(device).bind_announced(listed)
    launch([])
    device.library.driver.fails = 700
    with pytest.raises(fompi.DeviceError, match="cudaErrorIllegalAddress"):
        for token in launch([]):  # the record of the event fails, or the poll
            token.done()
    with pytest.raises(fompi.DeviceError, match="cudaErrorIllegalAddress"):
        launch([])


def test_what_it_does_not_take(device):
    """Then each product is a call of cuBLAS."""
    listed, _ = products(device)
    first, *others = listed
    other, _ = products(device)

    def changed(**fields):
        return [first._replace(**fields), *others]

    gaps = device.empty((5, 2 * COLUMNS), "f4")[:, ::2]
    refused = {
        "another weight": [first, *other[1:]],
        "float64": changed(read_dtypes=["float64", "float64"], write_dtypes=["float64"]),
        "different dtypes": changed(write_dtypes=["float16"]),
        "a half weight and a float32 x": changed(read_dtypes=["float32", "float16"]),
        "gaps": changed(writes=[gaps]),
        "columns first": changed(reads=[device.empty((DEPTH, 5), "f4").rows_first(1), first.reads[1]]),
        "other strides": changed(writes=[device.empty((5, 2 * COLUMNS), "f4")[:, :COLUMNS]]),
        "no rows": changed(reads=[first.reads[0][:0], first.reads[1]], writes=[first.writes[0][:0]]),
    }
    assert layout(listed, tf32=False) is not None
    for words, those in refused.items():
        assert layout(those, tf32=False) is None, words
    assert backend_of(device).bind_announced(refused["gaps"]) is None
    device.library.has_triton = False
    assert device.announced(listed, True, None) is None
    assert "pip install" in device.needs_for_announced()


def test_alignment(device):
    """Sizes and addresses decide whether the kernel loads 16 bytes at a time, and without masks."""
    x, w, y = (device.empty(shape, "u2") for shape in ((64, 128), (128, 256), (64, 256)))

    def form(x, w, y):
        found = layout([ProductCall("matmul", [x, w], [y], ["bfloat16"] * 2, ["bfloat16"])], False)
        return found.form.even, found.form.aligned

    assert form(x, w, y) == (True, True)
    assert form(x[:, :96], w[:96], y) == (False, True)
    assert form(x[:, 1:65], w[:64], y) == (True, False)
    assert form(x, w[:, :200], device.empty((64, 200), "u2")) == (False, False)
    assert form(x[:1], w, y[:1]) == (True, True)


def test_it_is_taken_where_it_was_measured_to_be_faster(device, tmp_path, monkeypatch):
    listed, _ = products(device)
    assert device.announced(listed, False, tmp_path) is None and not [*tmp_path.iterdir()], "too small to be measured"
    monkeypatch.setattr(announced, "LEAST_FLOPS", 0)
    monkeypatch.setattr(announced.metadata, "version", lambda name: "3.4")
    timed = []

    def seconds(way, device, stream, of=(3.0, 5.0)):
        way()
        timed.append(way)
        return of[(len(timed) - 1) % 2]

    monkeypatch.setattr(announced, "_seconds", seconds)
    assert device.announced(listed, False, tmp_path) is not None
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["seconds"] == [3.0, 5.0] and len(timed) == 2 * (1 + announced.ROUNDS)
    assert device.announced(listed, False, tmp_path) is not None and len(timed) == 2 * (1 + announced.ROUNDS)
    file.write_text("{")
    monkeypatch.setattr(announced, "_seconds", lambda *a: seconds(*a, of=(5.0, 3.0)))
    assert device.announced(listed, False, tmp_path) is None and "5.0" in file.read_text(), "a damaged file"
    assert device.announced(listed, False, tmp_path) is None and device.announced(listed, True, None) is not None
    assert device.announced(listed, False, None) is None, "without a folder it is measured each time"
    assert len(timed) == 6 * (1 + announced.ROUNDS)


def test_a_kernel_that_does_not_compile_is_a_warning(device, monkeypatch):
    listed, _ = products(device)

    def refuse(form, capability, stages):
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(device.library, "_compiled", refuse)
    with pytest.warns(UserWarning, match="not announced, because the kernel fails: RuntimeError: ptxas failed"):
        assert backend_of(device).bind_announced(listed) is None


ANNOUNCED, LAUNCHED = "fompi.backends.cuda.counters.announced", "fompi.backends.cuda.counters.signal:launched"

PLANTED = {
    "results go where x says": (f"{ANNOUNCED}:in_place", "run.y + first * y_row", "run.y + first * x_row"),
    "tiles read the first rows": (f"{ANNOUNCED}:in_place", "run.x + first * x_row", "run.x"),
    "tiles reach over the last row": (f"{ANNOUNCED}:in_place", "np.minimum(high, run.rows - first)", "high"),
    "all tiles are of one group": (f"{ANNOUNCED}:in_place", "column, group", "column, 0"),
    "a run of a group is left out": (f"{ANNOUNCED}:in_place", "for run in runs:", "for run in runs[:1]:"),
    "the last tile is left out": (LAUNCHED, "for n in range(across)", "for n in range(across - 1)"),
    "bands are rows": (LAUNCHED, "for m in rows", "for m in rows[:1]"),
    "the count of a group is short": (
        f"{ANNOUNCED}:CudaAnnouncer.__init__", ".astype(np.int32)", ".astype(np.int32) - 1"
    ),
    "counters begin at one": (f"{ANNOUNCED}:CudaAnnouncer.__init__", "np.zeros_like(need)", "np.ones_like(need)"),
    "the kernel gets no epoch": (f"{ANNOUNCED}:CudaAnnouncer.enqueue", "self._epoch[...] = epoch", "pass"),
    "every product has a bias": (f"{ANNOUNCED}:_runs", "bias[0].ptr if bias else 0", "weight.ptr"),
    "a weight is read by columns": (f"{ANNOUNCED}:layout", "=w.is_transposed", "=not w.is_transposed"),
    "rows of x are as long as the weight": (f"{ANNOUNCED}:layout", "max(x_rows, default=w.rows)", "w.columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["none", *PLANTED])
def test_planted_bugs_are_found(device, name):
    """A kernel of three products, two calls: bits, flags and counters. The bug is in the code that makes its tables."""

    def found():
        listed, wanted = products(device, "float32", "bfloat16", "float32", "float32")
        made = CudaAnnouncer(device, listed, announced.layout(listed, tf32=False))
        for _ in range(2):
            epoch = made.enqueue(device.stream("own"))
            if not all(made.is_raised(group, epoch) for group in range(3)) or made.tables[2].get().any():
                return True
            results = [y.get() for product in listed for y in product.writes]
            if any((a != b).any() for a, b in zip(results, (y for ys in wanted for y in ys), strict=True)):
                return True
        return False

    undo = plant(*PLANTED[name]) if name != "none" else lambda: None
    try:
        is_found = found()
    except (AssertionError, fompi.DeviceError, ValueError):  # the fake CUDA refuses the table
        is_found = True
    finally:
        undo()
    assert is_found == (name != "none")
