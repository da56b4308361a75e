"""Operations on the memory of a device: every operation, schedule and path gives the bits that it gives on the host.

The device is the software device with its checker on. A missing wait, a message that leaves early, or memory that is
freed early is an error, whatever the threads happened to do.
"""

from __future__ import annotations

import re
import threading
from itertools import pairwise, product

import calls
import catalogue
import numpy as np
import pytest
from mpi4py import MPI

import fompi
from fompi.backends.cuda import backend_of
from fompi.backends.cuda.software import SoftwareDevice
from fompi.mpi.paths import DIRECT, IPC, STAGED
from fompi.parallel.sequence import Sharding, ring_attention
from fompi.plans.plan import Compute
from fompi.runtime.needs import device_nbytes
from fompi.schedules import registry

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[3])

PATHS = [STAGED, DIRECT, IPC]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    monkeypatch.setenv("FOMPI_PATH", request.param)
    return request.param


def uploaded(device, x):
    """`x` on the device, with gaps where it has some. What is no array stays as it is."""
    if isinstance(x, (list, tuple)):
        return type(x)(uploaded(device, each) for each in x)
    if not isinstance(x, np.ndarray):
        return x
    return device.array(x) if x.flags.c_contiguous or x.base is None else device.array(x.base)[..., 0]


def call_on(device, problem, given, sizes, comm, **options):
    """As `calls.call`, on the device."""
    positional, named = calls.arguments(problem, given, sizes, comm.rank)
    named = {key: value if key == "counts" else uploaded(device, value) for key, value in named.items()}
    result = calls.operation_of(problem)(*uploaded(device, positional), comm=comm, **named, **options)
    if problem.operation == "all_gather_matmul_many":
        result = result[0].get(), [y.get() for y in result[1]]
    else:
        result = tuple(y.get() for y in result) if isinstance(result, tuple) else result.get()
    return calls.by_name(problem, result)


def variants(problem, turn, most):
    """About `most` pairs of schedule and slices. Each `turn` has different ones."""
    every = [("auto", None), *product(registry.available(problem), (1, (1, 2)))]
    step = -(-len(every) // most)
    return every[turn % step :: step]


def compare(world, device, name, schedule, slices, form, seed):
    """One call on the device, and the same on the host."""
    problem = catalogue.problems(world.size, "float32")[name]
    sizes = calls.row_sizes(problem, form, seed=seed)
    mine = catalogue.inputs(problem, sizes, seed)[world.rank]
    wanted = calls.call(problem, mine, sizes, world, schedule=schedule, slices=slices)
    got = call_on(device, problem, mine, sizes, world, schedule=schedule, slices=slices)
    assert got.keys() == wanted.keys()
    for key, array in wanted.items():
        assert got[key].tobytes() == array.tobytes(), (name, schedule, slices, key, seed)


SEEDS = 3


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for i, name in enumerate(calls.NAMES) for k, path in enumerate(PATHS) if (i + k) % 3],
    indirect=["path"],
)
def test_every_schedule(world, path, name, without_verification):
    """With the checker on, and delays by three seeds: each operation sees all of them over each of two paths.

    The schedules take turns.
    """
    devices = [SoftwareDevice(seed=SEEDS * world.rank + seed) for seed in range(SEEDS)]
    cases = variants(catalogue.problems(world.size, "float32")[name], PATHS.index(path), 5 if world.size < 3 else 4)
    assert len(cases) >= SEEDS
    for number, (schedule, slices) in enumerate(cases):
        device = devices[(number + PATHS.index(path)) % SEEDS]
        compare(world, device, name, schedule, slices, ("uneven", "even")[number % 2], number)
    for device in devices:
        device.check()
        assert not device.reports


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
def test_smaller_messages(world, device, path, wire, without_verification):
    """Blocks are encoded on the device. What is staged is their bytes."""
    names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "matmul_reduce_scatter"]
    names += ["all_gather_matmul", "matmul_all_reduce", "all_gather_matmul_weight_gradient"]
    for number, name in enumerate(names):
        problem = catalogue.problems(world.size, "float32")[name]
        sizes = calls.row_sizes(problem, ("uneven", "even")[number % 2], seed=number)
        mine = catalogue.inputs(problem, sizes, number)[world.rank]
        for schedule in ("auto", "ring") if name != "all_to_all" else ("auto",):
            how = {"schedule": schedule, "wire": wire}
            wanted = calls.call(problem, mine, sizes, world, **how)
            got = call_on(device, problem, mine, sizes, world, **how)
            for key, array in wanted.items():
                assert got[key].tobytes() == array.tobytes(), (name, schedule, key)
    x = np.random.default_rng(world.rank).standard_normal(300).astype(np.float32)
    y, error = fompi.all_reduce(device.array(x), comm=world, wire=wire, certify=True)
    z, same = fompi.all_reduce(x, comm=world, wire=wire, certify=True)
    assert y.get().tobytes() == z.tobytes() and error == same


@pytest.mark.parametrize(
    "name", ["all_gather_matmul", "matmul_reduce_scatter", "all_to_all", "all_reduce", "broadcast"]
)
def test_bound_plans(world, device, path, name):
    """Bound to device memory, a plan is staged where its messages need it. The bits are those of the host."""
    problem = catalogue.problems(world.size, "float32")[name]
    for number, schedule in enumerate(registry.available(problem)):
        sizes = calls.row_sizes(problem, "uneven", seed=number)
        plan = registry.write(problem, schedule, (1, (1, 2))[number % 2], sizes)
        mine = catalogue.inputs(problem, sizes, number)[world.rank]
        with fompi.bind(plan, comm=world, **mine) as step:
            wanted = step()
        with fompi.bind(plan, comm=world, **{key: device.array(x) for key, x in mine.items()}) as step:
            for _ in range(3):
                got = step()
            assert got.get().tobytes() == wanted.tobytes(), schedule
            fompi.verify(step.plan)
            moves = any(not isinstance(op, Compute) for op in step.plan.programs[world.rank].ops)
            is_native = schedule in ("unfused", "sliced")
            assert ("_host" in str(step.plan.programs[world.rank].ops)) == (moves and (path == STAGED or is_native))


def test_fewer_rows_and_parts(world, device, path):
    plan = fompi.plan(fompi.all_gather, fompi.Spec((4 * world.size, 3), "float32", fompi.Shard(0)), ranks=world.size)
    x = np.arange(12, dtype="f4").reshape(4, 3) + 100 * world.rank
    with fompi.bind(plan, comm=world, x=device.array(x)) as step:
        step.start("x").ready("x", 0)
        assert step.wait().get().tolist() == [
            [*row + 100 * r] for r in range(world.size) for row in x - 100 * world.rank
        ]
        counts = [1 + rank % 3 for rank in range(world.size)]
        assert step(counts).shape == (sum(counts), 3)


def test_in_place_and_out(world, device, path):
    x = np.random.default_rng(world.rank).standard_normal(50).astype("f4")
    wanted = fompi.all_reduce(x, comm=world)
    own = device.array(x)
    assert fompi.all_reduce(own, comm=world, out=own) is own and own.get().tobytes() == wanted.tobytes()
    out = device.empty((50,), "float32")
    assert fompi.all_reduce(device.array(x), comm=world, out=out) is out and out.get().tobytes() == wanted.tobytes()
    strided = device.array(np.stack([x, x], 1))[:, 1]
    assert fompi.all_reduce(strided, comm=world).get().tobytes() == wanted.tobytes()
    with pytest.raises(fompi.TensorError, match="shares memory"):
        fompi.all_gather(own[:5], comm=world, out=own[: 5 * world.size])


def test_half_types(world, device, path):
    for dtype in ("bfloat16", "float16"):
        for name in ("all_gather", "matmul_reduce_scatter", "all_reduce"):
            problem = catalogue.problems(world.size, dtype)[name]
            sizes = calls.row_sizes(problem, "uneven")
            mine = catalogue.inputs(problem, sizes)[world.rank]
            wanted = calls.call(problem, mine, sizes, world, schedule="direct")
            got = call_on(device, problem, mine, sizes, world, schedule="direct")
            assert {key: a.tobytes() for key, a in got.items()} == {key: a.tobytes() for key, a in wanted.items()}


def test_work_that_was_enqueued_before(world, device, path):
    """A call follows what the current stream of the program still does."""
    mine, size = device.stream("mine"), world.size
    x = device.array(np.zeros((2, 1000), "f4"))
    plan = fompi.plan(fompi.all_gather, fompi.Spec((2 * size, 1000), "float32", fompi.Shard(0)), ranks=size)

    def fill(number):
        def kernel(reads, writes):
            writes[0][...] = number

        device.call(kernel, "fill", [], [x])(mine)

    with device.using(mine), fompi.bind(plan, comm=world, x=x) as step:
        for number in range(3):
            fill(number)
            assert (fompi.all_gather(x, comm=world).get() == number).all()
            fill(number + 10)
            assert (step().get() == number + 10).all()
    fill(5)
    if size > 1:
        with pytest.raises((fompi.RaceError, fompi.PeerError), match="nothing orders them"):
            fompi.all_gather(x, comm=world)
    mine.record(device.event()).wait()


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "all_to_all"])
def test_parts_that_the_program_still_writes(world, device, path, name):
    """`ready` follows what the current stream of the program still does. So does whoever reads the result there."""
    problem, mine = catalogue.problems(world.size, "float32")[name], device.stream("mine")
    sizes = calls.row_sizes(problem, "even")
    given = catalogue.inputs(problem, sizes)[world.rank]

    def copied(source, to):
        device.call(lambda reads, writes: np.copyto(writes[0], reads[0]), "fill", [source], [to])(mine)

    for schedule in sorted({"direct", "ring", "sliced"} & {*registry.available(problem)}):
        plan = registry.write(problem, schedule, 2, sizes)
        starts = next(b for b in plan.programs[world.rank].buffers if b.name == "x").offsets(plan.extents(world.rank))
        blocks = [slice(*ends) for ends in pairwise(starts)]
        with fompi.bind(plan, comm=world, **given) as step:
            wanted = step()
        tensors = {key: device.array(x) for key, x in given.items()}
        x, source = tensors["x"], device.array(given["x"])
        y, z = (device.empty(wanted.shape, wanted.dtype) for _ in range(2))
        with device.using(mine), fompi.bind(plan, comm=world, out=y, **tensors) as step:
            for _ in range(3):
                step.start("x")
                for i in reversed(range(len(blocks))):
                    copied(source[blocks[i]], x[blocks[i]])
                    step.ready("x", i)
                assert step.wait().ptr == y.ptr
                copied(y, z)  # the next call writes y
            assert z.get().tobytes() == wanted.tobytes(), schedule
            step.start("x")
            for i, block in enumerate(blocks):
                copied(source[block], x[block])
                with device.using(device.stream("another")):
                    step.ready("x", i)
            with pytest.raises((fompi.RaceError, fompi.PeerError), match="nothing orders them"):
                step.wait()
            mine.record(device.event()).wait()


def test_kernels_of_the_user(world, device, path):
    seen = []

    def matmul(reads, writes):
        seen.append([a.shape for a in (*reads, *writes)])
        np.matmul(reads[0], reads[1], out=writes[0])
        writes[0] += 1

    x, w = np.ones((2, 3), "f4"), np.ones((3, 4), "f4")
    spec = (
        fompi.Spec((2 * world.size, 3), "float32", fompi.Shard(0)),
        fompi.Spec((3, 4 * world.size), "float32", fompi.Shard(1)),
    )
    plan = fompi.plan(fompi.all_gather_matmul, *spec, ranks=world.size, schedule="direct")
    tensors = {"x": device.array(x), "w": device.array(w)}
    y = device.array(np.full((2 * world.size, 4), 7, "f4"))
    with fompi.bind(plan, comm=world, kernels={"matmul": matmul}, out=y, **tensors) as step:
        assert seen == [[(2, 3), (3, 4), (2, 4)]], "bind has launched it once"
        assert (y.get() == 7).all(), "not on tensors of the program"
        assert (step().get() == 4).all() and len(seen) == 1 + world.size
    given = {**tensors, "y": y}
    needed = sum(t.nbytes for t in given.values()) + device_nbytes(step.plan, step.plan.extents(world.rank), given)
    tight = SoftwareDevice(delay=0, capacity=needed + 40)
    tensors = {name: tight.array(t.get()) for name, t in tensors.items()}
    seen.clear()
    fompi.bind(plan, comm=world, kernels={"matmul": matmul}, out=tight.array(y.get()), **tensors).close()
    assert not seen, "no memory to launch it"


def test_a_kernel_that_bind_cannot_launch(world):
    """All ranks raise its error, which names the kernel."""
    own, last = fompi.Communicator(name="own"), world.rank == world.size - 1

    def add(reads, writes):
        if last:
            raise ZeroDivisionError("boom")
        np.add(*reads, out=writes[0])

    plan = fompi.plan(
        fompi.all_reduce, fompi.Spec((8,), "float32", fompi.Partial()), ranks=world.size, schedule="direct"
    )
    device = SoftwareDevice(delay=0)
    if world.size > 1:
        with pytest.raises((fompi.DeviceError, fompi.MismatchError), match=r"kernel 'add' of kernels= .*boom"):
            fompi.bind(plan, comm=own, x=device.array(np.ones(8, "f4")), kernels={"add": add})
        device.tell()  # nothing: the program has got the error
    assert fompi.all_reduce(np.ones(3), comm=own).tolist() == [world.size] * 3


def after_the_first(fails):
    """A product that fails in a call, if it `fails`: not when bind launches it."""
    launches = []

    def matmul(reads, writes):
        launches.append(1)
        if fails and len(launches) > 1:
            raise ZeroDivisionError("boom")
        np.matmul(reads[0], reads[1], out=writes[0])

    return matmul


def test_a_kernel_that_fails(world, path):
    """All ranks get an error that names the op, and nothing hangs. The device refuses everything afterwards."""
    matmul = after_the_first(world.rank == world.size - 1)

    device, own = SoftwareDevice(delay=0), fompi.Communicator(name="own")
    x, w = (
        fompi.Spec((8, 3 * world.size), "float32", fompi.Shard(1)),
        fompi.Spec((3 * world.size, 4), "float32", fompi.Shard(0)),
    )
    plan = fompi.plan(fompi.matmul_all_reduce, x, w, ranks=world.size, schedule="direct")
    tensors = {"x": device.array(np.ones((8, 3), "f4")), "w": device.array(np.ones((3, 4), "f4"))}
    step = fompi.bind(plan, comm=own, kernels={"matmul": matmul}, **tensors)
    with pytest.raises((fompi.DeviceError, fompi.PeerError), match="ZeroDivisionError: boom"):
        step().get()
    if world.rank == world.size - 1:
        with pytest.raises(fompi.DeviceError, match="boom"):
            device.check()
    assert fompi.all_reduce(np.ones(3), comm=own).tolist() == [world.size] * 3


@pytest.fixture
def gate(device):
    """Kernels of products do not begin before it is set."""
    made, stream = threading.Event(), backend_of(device).queues["compute"].stream
    device.call(lambda reads, writes: made.wait(20), "gate", [], [])(stream)
    yield made
    made.set()


def test_a_call_returns_before_its_kernels_are_done(world, device, path, gate):
    """The result is ordered: behind the kernels for the current stream, a race for any other stream."""
    mine, other = device.stream("mine"), device.stream("other")
    x, w = np.full((2, 3), world.rank + 1, "f4"), np.ones((3, 4), "f4")
    wanted = fompi.all_gather_matmul(x, w, comm=world, schedule="direct")

    def double(reads, writes):
        writes[0][...] = 2 * reads[0]

    with device.using(mine), world.record() as traces:
        y = fompi.all_gather_matmul(device.array(x), device.array(w), comm=world, schedule="direct")
        with pytest.raises(fompi.RaceError, match=r"double on stream other .* matmul on stream compute"):
            device.call(double, "double", [y], [y])(other)
        device.call(double, "double", [y], [y])(mine)
        assert not traces and not gate.is_set()
        gate.set()
        assert y.get().tobytes() == (2 * wanted).tobytes()
    assert [trace.kind for trace in traces] == ["measured"]
    assert min(event.end for event in traces[0].events if event.op >= 0) > 0


def test_a_step_returns_before_its_kernels_are_done(world, device, path, gate):
    size = world.size
    spec = (
        fompi.Spec((2 * size, 3), "float32", fompi.Shard(0)),
        fompi.Spec((3, 4 * size), "float32", fompi.Shard(1)),
    )
    plan = fompi.plan(fompi.all_gather_matmul, *spec, ranks=size, schedule="ring")
    tensors = {"x": device.array(np.ones((2, 3), "f4")), "w": device.array(np.ones((3, 4), "f4"))}
    with fompi.bind(plan, comm=world, **tensors) as step:
        y = step()
        assert step.finished and not gate.is_set()
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        assert step.seconds > 0.03, "the time of a call ends with its kernels"
        assert min(event.end for event in step.trace.events) > 0
        for _ in range(3):  # nobody reads the result in between
            assert step() is y
        assert (y.get() == 3).all()
        timer.join()


def test_a_kernel_that_fails_after_the_call_has_returned(world, path):
    """The error names the operation. It comes when the result is read, at the next call, or at close()."""
    fails, own = world.rank == world.size - 1, fompi.Communicator(name="own")
    spec = (
        fompi.Spec((2 * world.size, 3), "float32", fompi.Shard(0)),
        fompi.Spec((3, 4 * world.size), "float32", fompi.Shard(1)),
    )
    plan = fompi.plan(fompi.all_gather_matmul, *spec, ranks=world.size, schedule="direct")
    named = r"ZeroDivisionError: boom\. It was launched by op \d+, matmul\(.*all_gather_matmul by direct"

    def begun(device):
        gate, product = threading.Event(), after_the_first(fails)

        def matmul(reads, writes):
            gate.wait(20)
            product(reads, writes)

        tensors = {"x": device.array(np.ones((2, 3), "f4")), "w": device.array(np.ones((3, 4), "f4"))}
        gate.set()  # for bind
        step = fompi.bind(plan, comm=own, kernels={"matmul": matmul}, **tensors)
        gate.clear()
        y = step()
        gate.set()
        return step, y, tensors["x"]

    step, y, x = begun(SoftwareDevice(delay=0))
    if fails:
        with pytest.raises(fompi.DeviceError, match=named):
            y.get()
    for again in (step, lambda: fompi.all_gather(x, comm=own)):
        with pytest.raises((fompi.DeviceError, fompi.PeerError, fompi.MismatchError), match=named):
            again()
    step.close()  # the error is known
    step, _, _ = begun(SoftwareDevice(delay=0))
    if fails:
        with pytest.raises(fompi.DeviceError, match=named):
            step.close()
    assert fompi.all_reduce(np.ones(3), comm=own).tolist() == [world.size] * 3


def test_memory_that_is_used_up(world, path):
    """The rank that has no memory gets the error, the others hear of it, and the next call works."""
    device = SoftwareDevice(delay=0, capacity=8_000 if world.rank == 0 else 1 << 30)
    with pytest.raises((fompi.DeviceError, fompi.PeerError), match="out of memory"):
        fompi.all_gather(device.array(np.ones((1, 900))), comm=world)
    y = fompi.all_gather(device.array(np.ones((1, 20))), comm=world)
    assert (y.get() == 1).all()


def test_memory_that_another_plan_would_not_need(world, path):
    """The error says what was asked, what is free, and which schedule and slices would fit, on all ranks."""
    problem = catalogue.problems(world.size, "float32")["matmul_reduce_scatter"]
    sizes = calls.row_sizes(problem, "even")
    mine = catalogue.inputs(problem, sizes)[world.rank]
    needs = {}
    for schedule in registry.available(problem):
        plan = registry.write(problem, schedule, 1, sizes)
        needs[schedule] = device_nbytes(plan, plan.extents(world.rank), mine)
    most, least = max(needs, key=needs.get), min(needs.values())
    assert needs[most] > least or world.size == 1
    given = sum(x.nbytes for x in mine.values())
    for free, answer in (
        (least, r"schedule='\w+', slices=1 needs \d+ and would fit"),
        (8, "No schedule and no number"),
    ):
        if world.size == 1 and free == least:
            continue  # one rank has one schedule
        tight = SoftwareDevice(delay=0, capacity=given + (free if world.rank == 0 else 1 << 20))
        tensors = {name: tight.array(x) for name, x in mine.items()}
        words = rf"out of memory: \d+ bytes were asked for, .*{re.escape(most)} needs \d+ bytes .*, {free} are free"
        words += f" for it. {answer}"
        with pytest.raises((fompi.DeviceError, fompi.MismatchError), match=words):
            fompi.bind(registry.write(problem, most, 1, sizes), comm=world, **tensors)
        with pytest.raises((fompi.DeviceError, fompi.PeerError), match=words):
            fompi.matmul_reduce_scatter(tensors["x"], tensors["w"], comm=world, schedule=most, slices=1)


def test_tensors_of_different_devices(world, device):
    x, w = np.ones((2, 3)), np.ones((3, 4))
    other = SoftwareDevice(delay=0)
    for left, right, where in (
        (device.array(x), w, "on the software device, but w is on the host"),
        (x, device.array(w), "on the host, but w is on the software device"),
        (device.array(x), other.array(w), "another software device"),
    ):
        with pytest.raises(fompi.TensorError, match=where):
            fompi.all_gather_matmul(left, right, comm=world)
    if world.size > 1:
        with pytest.raises(fompi.MismatchError, match="software device"):
            fompi.all_gather(x if world.rank else device.array(x), comm=world)
        with pytest.raises((fompi.TensorError, fompi.PeerError), match="kernels run on"):
            plan = fompi.plan(
                fompi.all_gather, fompi.Spec((2 * world.size, 3), "float64", fompi.Shard(0)), ranks=world.size
            )
            fompi.bind(plan, comm=world, x=x, backend=backend_of(device))


def test_the_trace_and_the_proof(world, device, path):
    spec = (
        fompi.Spec((8 * world.size, 3), "float32", fompi.Shard(0)),
        fompi.Spec((3, 4 * world.size), "float32", fompi.Shard(1)),
    )
    plan = fompi.plan(fompi.all_gather_matmul, *spec, ranks=world.size, schedule="direct")
    tensors = {"x": device.array(np.ones((8, 3), "f4")), "w": device.array(np.ones((3, 4), "f4"))}
    with fompi.bind(plan, comm=world, **tensors) as step:
        step()
        lanes = {event.lane for event in step.trace.events}
        assert ("upload" in lanes) == (path == STAGED and world.size > 1) and "compute" in lanes
        assert step.compute_seconds() > 0
        assert step.messages_seconds() >= 0
        assert step.proof.wall > 0


def test_gradients_of_replicated_parameters(world, device):
    mine = [np.random.default_rng([n, world.rank]).standard_normal((n, 2)).astype("f4") for n in (3, 0, 5)]
    mine.append(np.arange(3.0) + world.rank)
    wanted = fompi.sum_replicated(mine, comm=world)
    own = [device.array(x) for x in mine]
    for got, want in zip(fompi.sum_replicated(own, comm=world), wanted, strict=True):
        assert got.get().tobytes() == want.tobytes() and got.shape == want.shape
    fompi.sum_replicated(own, comm=world, out=own)
    assert all(got.get().tobytes() == want.tobytes() for got, want in zip(own, wanted, strict=True))
    with pytest.raises((fompi.TensorError, fompi.MismatchError), match="device"):
        fompi.sum_replicated([own[0], mine[0]], comm=world)


def test_many_calls_in_flight(world, device, path):
    xs = [device.array(np.full((3, 50), number + world.rank, "f4")) for number in range(12)]
    pending = [fompi.all_reduce.start(x, comm=world) for x in xs]
    total = sum(range(world.size))
    for number, each in enumerate(pending):
        assert (each.wait().get() == number * world.size + total).all()


def use_for_tensors_of_the_host(monkeypatch, device):
    """As FOMPI_DEVICE does it."""
    from fompi.ops import arguments
    from fompi.parallel import arrays
    from fompi.runtime import binding, default_device

    for module in (arguments, arrays, binding, default_device):
        monkeypatch.setattr(module, "default_device", lambda: device)


def test_operations_on_host_tensors_run_on_the_device(world, monkeypatch, path):
    """FOMPI_DEVICE=software: a program with tensors on the host runs on the device, unchanged."""
    torch = pytest.importorskip("torch")
    device = SoftwareDevice(seed=world.rank, delay=0)
    x, w = np.random.default_rng(3).standard_normal((4, 6)), np.random.default_rng(4).standard_normal((6, 5))
    wanted = fompi.all_gather_matmul(x, w, comm=world, schedule="direct")
    total = fompi.all_reduce(x, comm=world, schedule="direct")
    plan = fompi.plan(fompi.all_gather, fompi.Spec((4 * world.size, 6), "float64", fompi.Shard(0)), ranks=world.size)
    use_for_tensors_of_the_host(monkeypatch, device)
    got = fompi.all_gather_matmul(x, w, comm=world, schedule="direct")
    assert type(got) is np.ndarray and got.tobytes() == wanted.tobytes()
    got = fompi.all_gather_matmul(torch.from_numpy(x), torch.from_numpy(w), comm=world, schedule="direct")
    assert got.numpy().tobytes() == wanted.tobytes()
    out = x.copy()
    assert fompi.all_reduce(out, comm=world, out=out, schedule="direct") is out and out.tobytes() == total.tobytes()
    weight = torch.from_numpy(w).requires_grad_()
    fompi.all_gather_matmul(torch.from_numpy(x), weight, comm=world).sum().backward()
    assert weight.grad is not None and torch.isfinite(weight.grad).all()
    given, out = np.zeros((4, 6)), np.zeros((4 * world.size, 6))
    with fompi.bind(plan, comm=world, x=given, out=out) as step:
        for number in range(3):
            given[...] = number
            assert step() is not None and (out == number).all()
        step.start("x")
        given[...] = 7
        step.ready("x", 0)
        assert (step.wait() == 7).all() and (out == 7).all()
    assert device.clocks.of["the host"]["the host"] > 10 and not device.reports


def test_attention_on_tensors_of_torch_runs_on_the_device(world, monkeypatch):
    torch = pytest.importorskip("torch")
    torch.manual_seed(world.rank)
    qkv = [torch.randn(4, 2, 3, requires_grad=True) for _ in range(3)]

    def results():
        y = ring_attention(*qkv, Sharding(4 * world.size, ring=world.size), comm=world)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), qkv)]

    wanted = results()
    use_for_tensors_of_the_host(monkeypatch, SoftwareDevice(seed=world.rank, delay=0))
    for one, other in zip(results(), wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


WITH_GRADIENTS = [name for name in calls.NAMES if "gradient" not in name]


@pytest.mark.parametrize("number", range(len(WITH_GRADIENTS)), ids=WITH_GRADIENTS.__getitem__)
def test_gradients(world, monkeypatch, number):
    """Forward and backward of every operation on tensors of torch give the bits that they give on the host.

    The paths take turns.
    """
    name = WITH_GRADIENTS[number]
    monkeypatch.setenv("FOMPI_PATH", PATHS[number % len(PATHS)])
    torch = pytest.importorskip("torch")
    problem = catalogue.problems(world.size, "float32")[name]
    sizes = calls.row_sizes(problem, "uneven")
    mine = catalogue.inputs(problem, sizes)[world.rank]
    # BLAS may give other last bits at other addresses. Whole numbers are exact in any order.
    mine = {key: np.round(4 * x) if isinstance(x, np.ndarray) else x for key, x in mine.items()}
    positional, named = calls.arguments(problem, mine, sizes, world.rank)
    given = []

    def leaves(x):
        if isinstance(x, (list, tuple)):
            return type(x)(map(leaves, x))
        if not isinstance(x, np.ndarray):
            return x
        given.append(torch.from_numpy(x.copy()).requires_grad_())
        return given[-1]

    def results():
        """The outputs, and the gradients of a weighted sum of them."""
        given.clear()
        options = {key: value if key == "counts" else leaves(value) for key, value in named.items()}
        outputs = calls.operation_of(problem)(*leaves(positional), comm=world, schedule="direct", **options)
        flat = [y for each in ([outputs] if torch.is_tensor(outputs) else outputs) for y in (
            [each] if torch.is_tensor(each) else each)]  # fmt: skip
        sum((y * torch.arange(y.numel()).reshape(y.shape)).sum() for y in flat).backward()
        return [t.detach().numpy().tobytes() for t in (*flat, *(x.grad for x in given if x.grad is not None))]

    wanted = results()
    device = SoftwareDevice(seed=world.rank, delay=0)
    use_for_tensors_of_the_host(monkeypatch, device)
    assert results() == wanted and len(wanted) > 1
    assert device.clocks.of["the host"]["the host"] > 3 and not device.reports


def late(world, seed):
    """A device whose streams are late by chance, and which checks nothing."""
    return SoftwareDevice(seed=seed * world.size + world.rank, delay=2e-3, check=False)


@pytest.mark.skipif(MPI.COMM_WORLD.size not in (2, 3), reason="one rank has no messages, more take longer")
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "all_reduce", "matmul_all_to_all"])
def test_random_delays_without_the_checker(world, path, name, without_verification):
    """What the checker finds in order must also be right in time. Ten seeds take turns with the schedules."""
    cases = variants(catalogue.problems(world.size, "float32")[name], 0, 20)
    for seed in range(10):
        compare(world, late(world, seed), name, *cases[3 * seed % len(cases)], "uneven", seed)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10))
def test_all_random_delays_without_the_checker(world, path, seed, without_verification):
    """The same with every operation."""
    device = late(world, seed)
    for name in calls.NAMES:
        for schedule, slices in variants(catalogue.problems(world.size, "float32")[name], 0, 5):
            compare(world, device, name, schedule, slices, "uneven", seed)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_schedule_with_every_seed(world, path, seed, without_verification):
    """The checker is on. Nothing takes turns."""
    device = SoftwareDevice(seed=seed * world.size + world.rank)
    for name in calls.NAMES:
        for number, (schedule, slices) in enumerate(variants(catalogue.problems(world.size, "float32")[name], 0, 100)):
            compare(world, device, name, schedule, slices, ("uneven", "even")[number % 2], number + seed)
    device.check()
    assert not device.reports
