"""The software device by itself: what its checker finds, what it lets pass, and its memory."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fompi
from fompi.backends.cuda import staging
from fompi.backends.cuda.software import SoftwareDevice, seen
from fompi.base.errors import DeviceError, RaceError


@pytest.fixture
def device():
    made = SoftwareDevice(delay=0)
    yield made
    gc.collect()
    assert not made.reports


def copy(stream, to, source):
    stream.device.copy(to, source)(stream)


def mark(stream):
    return stream.record(stream.device.event())


def double(device, x):
    """A kernel of a user, in place."""

    def kernel(reads, writes):
        writes[0][...] = 2 * reads[0]

    return device.call(kernel, "double", [x], [x])


# ------------------------------------------------------------------------------------------------------------- arrays


def test_arrays_go_up_and_come_down(device):
    for dtype in ("float32", "int64", "float16", "complex64", "bool"):
        for shape in ((), (0,), (3,), (2, 0, 4), (5, 3, 2)):
            x = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
            y = device.array(x)
            assert (y.shape, y.dtype, y.nbytes, y.ndim, y.size) == (x.shape, x.dtype, x.nbytes, x.ndim, x.size)
            np.testing.assert_array_equal(y.get(), x, strict=True)


def test_slices_and_views_share_memory(device):
    x = np.arange(24.0).reshape(4, 6)
    y = device.array(x)
    np.testing.assert_array_equal(y[1:3].get(), x[1:3])
    np.testing.assert_array_equal(y[..., 0].get(), x[..., 0])
    np.testing.assert_array_equal(y[2].get(), x[2])
    np.testing.assert_array_equal(y[3, 5].get(), x[3, 5])
    np.testing.assert_array_equal(y.rows_first(1).get(), x.T)
    np.testing.assert_array_equal(y.rows_first(1).rows_at(1).get(), x)
    np.testing.assert_array_equal(y.reshape(-1).view(np.uint8)[8:16].view(np.float64).get(), [1.0])
    assert y[1:].overlaps(y[:2]) and not y[:2].overlaps(y[2:]) and y[:2].ptr + 96 == y[2:].ptr
    assert len(y) == 4 and y.device is device and not y.overlaps(x)
    np.testing.assert_array_equal(y[:, 1:].reshape(-1).get(), x[:, 1:].reshape(-1))


def test_the_host_cannot_read_it(device):
    y = device.array(np.ones(4))
    with pytest.raises(TypeError, match="get\\(\\)"):
        np.asarray(y)
    with pytest.raises(TypeError, match="array of the host"):
        np.ones(4) + y
    for read in (
        lambda: float(y[0]),
        lambda: bool(y[0] > 0),
        lambda: [0][y[0]],
        lambda: y[y > 0],
        lambda: np.nonzero(y),
    ):
        with pytest.raises(TypeError, match=r"the host|get\(\)"):
            read()


def computed(a, b):
    """One expression of each kind of NumPy: views, products, reductions, sorting, places, results in place."""
    z = a @ b
    e = np.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1)[:, None]
    best = np.argsort(-p, axis=1, kind="stable")[:, :2]
    y = np.zeros((5, 3), np.float32, like=None if isinstance(a, np.ndarray) else a)
    np.put_along_axis(y, best, np.take_along_axis(p, best, 1), 1)
    y[1:3] += p[1:3]
    y *= np.float32(2)
    left, right = np.split(np.concatenate([y, p], 1), 2, -1)
    out = np.empty_like(left)
    np.multiply(left, right, out=out)
    out[best[:, 0] % 5] = 0
    np.add.at(out, best[:, 1], np.ones_like(out))
    np.copyto(out, np.float32(7), where=p < 0.1)
    total, *rows = a
    return [
        np.where(out > 0, out, np.float32(3)),
        (out * out).sum(),
        z.T.reshape(-1),
        a.astype(np.int32),
        total,
        rows[0],
    ]


def test_functions_of_numpy(device):
    """They are kernels of the current stream, with the bits of the host. Streams that nothing orders are a race."""
    random = np.random.default_rng(0)
    a, b = random.standard_normal((5, 4)).astype("f4"), random.standard_normal((4, 3)).astype("f4")
    x, w = device.array(a), device.array(b)
    wanted = [np.asarray(each).tobytes() for each in computed(a, b)]
    assert [each.get().tobytes() for each in computed(x, w)] == wanted
    with device.using(device.stream("mine")):
        assert [each.get().tobytes() for each in computed(x, w)] == wanted
        y = x + 1
    with pytest.raises(fompi.RaceError, match="add on stream mine"):
        y * 2
    with pytest.raises(ValueError, match="broadcast"):  # at the call, and not later in the stream
        x + w


def test_a_host_access_by_address_ends_the_process():
    code = (
        "import ctypes, numpy, fompi\n"
        "y = fompi.Device('software').array(numpy.ones(4))\n"
        "print(ctypes.c_double.from_address(y.ptr).value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -11 and not done.stdout


def test_new_memory_is_nan(device):
    assert np.isnan(seen(device.empty((3, 2), "float32"))).all()


def test_memory_is_given_back(device):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        device.array(np.ones(1000)).get()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_device_that_is_dropped_ends_its_threads():
    def streams():
        return [t for t in threading.enumerate() if t.name.startswith("fompi stream")]

    made = [SoftwareDevice() for _ in range(20)]
    for device in made:
        device.array(np.ones(3)).get()
    assert len(streams()) >= 20
    del made, device
    gc.collect()
    end = time.monotonic() + 10
    while len(streams()) > 10 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(streams()) <= 10


def test_out_of_memory(device):
    small = SoftwareDevice(delay=0, capacity=1000)
    kept = small.array(np.ones(100))
    with pytest.raises(DeviceError, match="out of memory: 240 bytes were asked for, 200 of 1000 are free"):
        small.empty((30,), "float64")
    small.empty((25,), "float64")
    del kept
    small.empty((125,), "float64")
    with pytest.raises(DeviceError, match="out of memory"):
        device.empty((1 << 60,), "float64")


def test_an_unknown_device():
    with pytest.raises(DeviceError, match="'tpu'"):
        fompi.Device("tpu")


# ------------------------------------------------------------------------------------------------------------ planted


def test_no_race_if_events_order_the_streams(device):
    a, b = device.stream("a"), device.stream("b")
    x, y = device.array(np.ones(8)), device.empty((8,), "float64")
    double(device, x)(a)
    b.wait(mark(a))
    copy(b, y, x)
    a.wait(mark(b))
    double(device, x)(a)
    mark(a).wait()
    assert (x.get() == 4).all() and (y.get() == 2).all()


def test_a_missing_wait(device):
    a, b = device.stream("a"), device.stream("b")
    x, y = device.array(np.ones(8)), device.empty((8,), "float64")
    double(device, x)(a)
    with pytest.raises(RaceError, match=r"copy on stream b reads .* double on stream a writes 0 to 64.*nothing orders"):
        copy(b, y, x)
    mark(a).wait()


def test_a_wrong_event(device):
    a, b = device.stream("a"), device.stream("b")
    x, y = device.array(np.ones(8)), device.empty((8,), "float64")
    early = mark(a)
    double(device, x)(a)
    b.wait(early)
    with pytest.raises(RaceError):
        copy(b, y, x)
    mark(a).wait()


def test_different_bytes_do_not_conflict(device):
    a, b = device.stream("a"), device.stream("b")
    x = device.array(np.ones(8))
    double(device, x[:4])(a)
    double(device, x[4:])(b)
    mark(a).wait()
    mark(b).wait()
    assert (x.get() == 2).all()


def test_a_message_that_leaves_early(device):
    a = device.stream("a")
    x, p = device.array(np.ones(8)), device.pinned((8,), "float64")
    copy(a, p, x)
    with pytest.raises(RaceError, match=r"the message to rank 1 reads .* copy on stream a writes"):
        device.message("to rank 1", p, False)
    mark(a).wait()
    device.message("to rank 1", p, False)()


def test_a_buffer_that_is_written_while_a_message_leaves(device):
    a = device.stream("a")
    x, p = device.array(np.ones(8)), device.pinned((8,), "float64")
    device.touch("fill", p, True)
    end = device.message("to rank 1", p, False)
    with pytest.raises(RaceError, match=r"copy on stream a writes .* the message to rank 1 reads"):
        copy(a, p, x)
    end()
    copy(a, p, x)
    mark(a).wait()


def test_the_host_reads_what_a_stream_still_writes(device):
    a = device.stream("a")
    x, p = device.array(np.ones(8)), device.pinned((8,), "float64")
    copy(a, p, x)
    with pytest.raises(RaceError, match="the sum on the host"):
        device.touch("the sum on the host", p, False)
    mark(a).wait()
    device.touch("the sum on the host", p, False)


def test_freed_while_in_use(device):
    a = device.stream("a")
    x = device.array(np.ones(8))
    double(device, x)(a)
    with pytest.raises(DeviceError, match=r"is freed, but .* double on stream a"):
        x.memory.free()
    mark(a).wait()
    x.memory.free()
    with pytest.raises(DeviceError, match="which was freed"):
        double(device, x)(a)
    with pytest.raises(DeviceError, match="freed twice"):
        x.memory.free()


def test_dropped_while_in_use():
    """A finalizer cannot raise: the checker notes it."""
    device = SoftwareDevice(delay=0)
    a = device.stream("a")
    x, p = device.array(np.ones(8)), device.pinned((8,), "float64")
    enqueue = device.copy(p, x)
    enqueue(a)
    done = mark(a)
    del x, p, enqueue
    while not done.reached.is_set():
        time.sleep(1e-3)
    time.sleep(0.05)  # the thread of the stream drops its references
    gc.collect()
    device.pinned((1,), "float64")  # settles page-locked memory
    assert len(device.reports) == 2 and all("copy on stream a" in str(report) for report in device.reports)


def test_memory_that_nothing_has_written(device):
    with pytest.raises(DeviceError, match="which nothing has written"):
        copy(device.stream("a"), device.pinned((8,), "float64"), device.empty((8,), "float64"))


def test_events_that_were_never_recorded(device):
    with pytest.raises(DeviceError, match="no stream has recorded"):
        device.event().done()
    with pytest.raises(DeviceError, match="no stream has recorded"):
        device.stream("a").wait(device.event())


def test_pageable_memory(device):
    with pytest.raises(DeviceError, match="pinned"):
        device.copy(np.ones(8), device.array(np.ones(8)))


def test_another_device(device):
    with pytest.raises(DeviceError, match="another device"):
        double(device, SoftwareDevice().array(np.ones(8)))


def test_a_kernel_that_fails():
    """The error is found at the next call, as on a GPU, and the device refuses everything from then on."""

    def kernel(reads, writes):
        raise ZeroDivisionError("boom")

    device = SoftwareDevice(delay=0)
    a, x = device.stream("a"), device.array(np.ones(8))
    device.call(kernel, "bad", [x], [x])(a)
    event = mark(a)
    with pytest.raises(DeviceError, match="ZeroDivisionError: boom"):
        event.wait()
    with pytest.raises(DeviceError, match="ZeroDivisionError: boom"):
        x.get()


@pytest.mark.parametrize("check", [True, False])
def test_without_the_checker_a_race_is_silent(check):
    """The same program raises with it. Without it the copy overtakes the kernel, and nobody says so."""
    device = SoftwareDevice(seed=3, delay=1e-2, check=check)
    a, b = device.stream("a"), device.stream("b")
    x, y = device.array(np.ones(8)), device.empty((8,), "float64")
    double(device, x)(a)
    if check:
        with pytest.raises(RaceError):
            copy(b, y, x)
        return
    copy(b, y, x)
    mark(a).wait()
    mark(b).wait()
    assert not device.reports and (x.get() == 2).all()
    assert {*y.get()} in ({1.0}, {2.0})


def test_the_current_stream(device):
    a = device.stream("a")
    x = device.array(np.ones(8))
    assert device.entry() is None
    with device.using(a):
        double(device, x)(a)
        assert (x.get() == 2).all()
    assert device.entry() is None


# ----------------------------------------------------------------------------------------------- against a brute force


class Graph:
    """Which act happens before which, by reachability. Acts are nodes; an edge is an order that the program made."""

    def __init__(self):
        self.before = []

    def node(self, *earlier):
        known = set().union(*(self.before[e] | {e} for e in earlier if e is not None)) if earlier else set()
        self.before.append(known)
        return len(self.before) - 1


@pytest.mark.parametrize("seed", range(60))
def test_the_checker_finds_a_race_exactly_if_there_is_one(seed):
    """Random programs on three streams, compared with a graph. It raises at the first access that is not ordered."""
    chance, device, graph = random.Random(seed), SoftwareDevice(delay=0), Graph()
    streams = [device.stream(str(i)) for i in range(3)]
    memory = [device.array(np.zeros(8)) for _ in range(2)]
    host = graph.node()
    last = [host] * 3  # the last act of each stream
    accesses = [[] for _ in memory]
    events = []

    def nothing(reads, writes):
        pass

    raced = False
    for _ in range(60):
        act = chance.choice(["launch"] * 4 + ["record", "record", "wait", "wait", "done"])
        s = chance.randrange(3)
        if act == "launch":
            which, start = chance.randrange(2), chance.randrange(8)
            stop, writes = chance.randrange(start + 1, 9), chance.random() < 0.5
            node = graph.node(last[s], host)
            conflicts = [
                other
                for other, a, b, wrote in accesses[which]
                if a < stop and start < b and (wrote or writes) and other not in graph.before[node]
            ]
            x = memory[which][start:stop]
            enqueue = device.call(nothing, f"launch {node}", [] if writes else [x], [x] if writes else [])
            if conflicts:
                with pytest.raises(RaceError):
                    enqueue(streams[s])
                raced = True
                break
            enqueue(streams[s])
            last[s] = node
            accesses[which].append((node, start, stop, writes))
        elif act == "record":
            last[s] = graph.node(last[s])
            events.append((mark(streams[s]), last[s]))
        elif act == "wait" and events:
            event, node = chance.choice(events)
            streams[s].wait(event)
            last[s] = graph.node(last[s], node)
        elif act == "done" and events:
            event, node = chance.choice(events)
            event.wait()
            host = graph.node(host, node)
    for stream in streams:
        mark(stream).wait()
    assert raced or len(graph.before) > 20


# ---------------------------------------------------------------------------------------------------------- processes

CHILD = """
import sys
import numpy as np
import fompi
device = fompi.Device("software", delay=0)
stream = device.stream("peers")
x = device.open(sys.argv[1].encode(), 32)
own = device.empty((32,), np.uint8)
device.copy(own, x)(stream)
event = stream.record(device.event())
event.wait()
print(own.view(np.float64).get().tolist())
device.copy(x, device.array(np.full(4, 7.0)).view(np.uint8))(stream)
stream.record(device.event()).wait()
"""


def test_another_process_opens_the_memory(device):
    x = device.array(np.arange(8.0))
    child = [sys.executable, "-c", CHILD, device.export(x[2:6]).decode()]
    done = subprocess.run(child, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[2.0, 3.0, 4.0, 5.0]\n", done.stderr
    assert x.get().tolist() == [0, 1, 7, 7, 7, 7, 6, 7]


def test_the_exporter_has_died(device):
    code = (
        "import numpy, fompi\ndevice = fompi.Device('software')\nx = device.array(numpy.ones(4))\n"
        "print(device.export(x).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    with pytest.raises(DeviceError, match="cannot be opened"):
        device.open(done.stdout.strip().encode(), 32)


def test_many_handles_stay_open(device, monkeypatch):
    """The one unused for longest is closed. A handle of new memory with the same descriptor is another handle."""
    monkeypatch.setattr(staging, "MOST_OPENED", 3)
    for number in range(10):
        x = device.array(np.full(4, float(number)))
        opened = device.open(device.export(x), 32)
        assert seen(opened).view(np.float64).tolist() == [number] * 4
        assert device.open(device.export(x), 32).ptr == opened.ptr
    assert len(device._opened) == 3
