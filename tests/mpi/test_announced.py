"""Products that one kernel of a device computes and announces (FOMPI_COUNTERS=1), with the checker of races on."""

from __future__ import annotations

import threading

import calls
import catalogue
import numpy as np
import pytest

import fompi
from fompi.backends.cuda import software
from fompi.backends.cuda.failures import OutOfMemory
from fompi.backends.cuda.software import SoftwareDevice
from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.mpi.paths import DIRECT, IPC, STAGED
from fompi.planner.explain import explain
from fompi.plans.plan import Send
from fompi.schedules import registry

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])

NAMES = ["matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all", "matmul_all_reduce bias"]
PATHS = [STAGED, DIRECT, IPC]
ROWS = 8


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    monkeypatch.setenv("FOMPI_COUNTERS", "1")


def small(random, shape, dtype):
    """Whole numbers: every order of a sum gives the same bits, also in half types."""
    return catalogue.rounded(random.integers(-3, 4, shape).astype(float), dtype)


def bound(device, world, name, schedule="direct", dtype="float32", comm=None):
    """A plan that is bound to new arrays on the device. `write(call)` writes them, and returns the result to expect."""
    problem, size = catalogue.problems(world.size, dtype)[name], world.size
    sizes = Sizes(pairs=((ROWS,) * size,) * size) if problem.moves == "all_to_all" else Sizes((ROWS,) * size)
    plan = registry.write(problem, schedule, (1, 2), sizes)
    given = catalogue.inputs(problem, sizes)[world.rank]
    tensors = {key: device.array(calls.as_user(x, dtype)) for key, x in given.items()}

    def write(call):
        inputs = catalogue.inputs(problem, sizes, call, small)
        for key, x in inputs[world.rank].items():
            device.put(tensors[key], calls.as_user(x, dtype))
        exact = calls.expected(problem, catalogue.widened(inputs, dtype), sizes, world.rank)["y"]
        return catalogue.rounded(exact, dtype)

    return fompi.bind(plan, comm=comm or world, **tensors), write


@pytest.mark.parametrize("name", NAMES)
def test_values_over_several_calls(world, device, name, monkeypatch):
    """New whole numbers in the same arrays at every call: the bits are those of the host."""
    for number, schedule in enumerate(registry.available(catalogue.problems(world.size)[name])):
        monkeypatch.setenv("FOMPI_PATH", PATHS[number % 3])
        step, write = bound(device, world, name, schedule)
        with step:
            assert step.announced == len(step.compiled.announced)
            assert step.announced or schedule != "direct" or world.size == 1
            for call in range(3):
                wanted = write(call)
                assert step().get().tobytes() == wanted.tobytes(), (schedule, call)


@pytest.mark.parametrize("path", PATHS)
def test_half_types(world, device, path, monkeypatch):
    """The products read the weights as they are."""
    monkeypatch.setenv("FOMPI_PATH", path)
    for dtype in ("bfloat16", "float16"):
        step, write = bound(device, world, "matmul_reduce_scatter", dtype=dtype)
        with step:
            assert step.announced or world.size == 1
            for call in range(2):
                wanted = write(call)
                assert calls.as_stored(step().get()).tobytes() == wanted.tobytes()


def test_the_backward_of_a_product_of_gathered_rows(world, device):
    """reduce_scatter(dy @ w.T): the weight is strided."""
    size = world.size
    specs = (
        fompi.Spec((ROWS * size, 6 * size), "float32", fompi.Shard(1)),
        fompi.Spec((6 * size, 5), "float32", fompi.Shard(0)),
    )
    plan = fompi.plan(fompi.matmul_reduce_scatter, *specs, ranks=size, schedule="ring", slices=2)
    dy = np.arange(ROWS * size * 6, dtype="f4").reshape(ROWS * size, 6) % 7
    w = np.arange(30, dtype="f4").reshape(5, 6) % 5
    with fompi.bind(plan, comm=world, x=device.array(dy), w=device.array(w).rows_first(1)) as step:
        wanted = size * (dy @ w.T)[ROWS * world.rank : ROWS * (world.rank + 1)]
        for _ in range(2):
            assert (step().get() == wanted).all()


@pytest.mark.parametrize("seed", range(3))
def test_values_without_the_checker(world, seed):
    """With delays between launches, and between the products of a kernel."""
    device = SoftwareDevice(seed=100 * seed + world.rank, delay=1e-3, check=False)
    step, write = bound(device, world, "matmul_reduce_scatter", ("direct", "ring", "bidirectional")[seed])
    with step:
        for call in range(4):
            wanted = write(call)
            assert step().get().tobytes() == wanted.tobytes()


def hold(monkeypatch, product, work):
    """Run `work()` in each kernel that announces, before it computes this product."""
    listed = SoftwareDevice.tiles

    def tiles(self, product_of):
        own = [*listed(self, product_of)]
        if product_of is made.products[product]:
            tile, places = own[0]
            own[0] = (lambda: (work(), tile())), places
        return own

    class made(software.SoftwareAnnouncer):
        def __init__(self, device, products):
            made.products = products
            super().__init__(device, products)

    monkeypatch.setattr(SoftwareDevice, "tiles", tiles)
    monkeypatch.setattr(software, "SoftwareAnnouncer", made)


@pytest.mark.parametrize("path", PATHS)
def test_messages_leave_while_the_kernel_runs(world, device, path, monkeypatch):
    """The second product of each rank begins when the message with the first one has arrived."""
    if world.size == 1:
        pytest.skip("one rank sends nothing")
    monkeypatch.setenv("FOMPI_PATH", path)
    gate = threading.Event()
    hold(monkeypatch, 1, lambda: gate.wait(20))
    step, write = bound(device, world, "matmul_reduce_scatter")
    with step:
        first = next(i for i, op in enumerate(step.compiled.ops) if isinstance(op, Send))
        for call in range(2):
            wanted = write(call)
            gate.clear()
            step.start()
            while not step._run.ended[first]:
                assert not step.progress()
            assert not gate.is_set() and len(step._run.tokens) >= step.announced - 1
            gate.set()
            assert step.wait().get().tobytes() == wanted.tobytes()
            ends = [event.end for event in sorted(step.trace.events) if event.op in step.compiled.announced]
            assert min(ends) > 0


def test_calls_that_announce_nothing(world, device):
    """Parts that become ready one by one, fewer rows, and kernels of the user: each product is a kernel of its own."""
    step, write = bound(device, world, "matmul_reduce_scatter")
    with step:
        for call in range(2):
            wanted = write(call)
            step.start("x")
            for part in reversed(range(step.compiled.buffers["x"].count)):
                step.ready("x", part)
            assert step.wait().get().tobytes() == wanted.tobytes()
            assert step.start().wait().get().tobytes() == wanted.tobytes()
            step([ROWS - 1] * world.size)
            assert step.announced == 0
            wanted = write(call + 1)
            assert step().get().tobytes() == wanted.tobytes()
            assert step.announced or world.size == 1


def test_calls_without_bind_announce_nothing(world, device, monkeypatch):
    """Their tensors may have other addresses each time: nobody asks the device for a kernel with a table of them."""
    asked = []
    monkeypatch.setattr(SoftwareDevice, "announced", lambda *args: asked.append(args))
    x, w = np.arange(ROWS * world.size * 3, dtype="f4").reshape(-1, 3) % 7, np.ones((3, 4), "f4")
    for _ in range(2):
        got = fompi.matmul_reduce_scatter(device.array(x), device.array(w), comm=world, schedule="direct", slices=2)
        assert (got.get() == world.size * (x @ w)[ROWS * world.rank : ROWS * (world.rank + 1)]).all()
    assert not asked


@pytest.mark.parametrize("error", [OutOfMemory("full", 0), UserWarning("as an error")])
def test_a_kernel_that_one_rank_cannot_make(world, device, error, monkeypatch):
    """The ranks have agreed on the plan by then. That rank has a kernel for each product."""

    def refuse(*args):
        raise error

    fails = world.rank == world.size - 1
    if fails:
        monkeypatch.setattr(SoftwareDevice, "announced", refuse)
    step, write = bound(device, world, "matmul_reduce_scatter")
    with step:
        assert bool(step.announced) == (world.size > 1 and not fails)
        wanted = write(0)
        assert step().get().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("value", ["0", "auto"])
def test_it_is_off_without_being_asked_for(world, device, value, monkeypatch):
    monkeypatch.setenv("FOMPI_COUNTERS", value)
    step, write = bound(device, world, "matmul_reduce_scatter")
    with step:
        wanted = write(0)
        assert step.announced == 0 and step().get().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("product", [0, 1])
def test_a_kernel_that_fails_in_the_middle(world, product, monkeypatch):
    """All ranks get the error, also those whose messages with earlier products have left. Nothing hangs."""

    def fail():
        if world.rank == world.size - 1:
            raise ZeroDivisionError("boom")

    if world.size == 1:
        pytest.skip("one rank announces nothing")
    hold(monkeypatch, product, fail)
    device, own = SoftwareDevice(delay=0), fompi.Communicator(name="own")
    step, write = bound(device, world, "matmul_reduce_scatter", comm=own)
    write(0)
    with pytest.raises((fompi.DeviceError, fompi.PeerError), match="ZeroDivisionError: boom"):
        step().get()
    if world.rank == world.size - 1:
        with pytest.raises(fompi.DeviceError, match=r"boom\. It was launched by op \d+, matmul\("):
            device.check()
    assert fompi.all_reduce(np.ones(3), comm=own).tolist() == [world.size] * 3


@pytest.mark.parametrize(("share", "is_tried"), [(0.0, True), (0.3, False), (1.0, True)])
def test_the_planner_says_whether_products_are_announced(world, device, monkeypatch, share, is_tried):
    """A machine with the cost of the one kernel decides. One without it leaves the question to `bind`."""
    monkeypatch.setenv("FOMPI_COUNTERS", "")
    tried = []
    monkeypatch.setattr(SoftwareDevice, "announced", lambda *_: tried.append(1))
    machine = Machine("dear calls", 0.0, 1e3, 2e3, 1e9, 0.1, lanes=2, launch=0.01, poll=0.01, announced=share)
    form = catalogue.problems(world.size, "float32")["matmul_reduce_scatter"]
    found = explain(form, Sizes((64,) * world.size), machine)
    assert found.winner.candidate.announced == (share == 1.0)
    x, w = (device.array(np.ones(shape, "f4")) for shape in ((64 * world.size, 3), (3, 4)))
    step = fompi.bind(found, comm=world, x=x, w=w)
    assert (step().get() == 3.0 * world.size).all() and bool(tried) == is_tried
    step.close()
