"""Bound operations on tensors that are given at each call: any of them, of the form of the bound ones."""

from __future__ import annotations

import gc
import threading
import weakref

import calls
import catalogue
import numpy as np
import pytest

import fompi
from fompi import Partial, Shard, Spec
from fompi.backends.cuda.software import SoftwareDevice
from fompi.base.layout import split
from fompi.mpi.paths import IPC, STAGED
from fompi.ops import arguments
from fompi.runtime import binding, default_device
from fompi.schedules import registry


def sum_plan(world, shape=(10,), schedule="direct", dtype="float64"):
    return fompi.plan(fompi.all_reduce, Spec(shape, dtype, Partial()), ranks=world.size, schedule=schedule)


def results_of(step, results):
    """The results by name, as copies."""
    given = results if isinstance(results, tuple) else (results,)
    return {b.name: np.array(y) for b, y in zip(step.compiled.outputs, given, strict=True)}


def same_bits(one, other):
    return one.keys() == other.keys() and all(one[key].tobytes() == other[key].tobytes() for key in one)


@pytest.mark.parametrize("name", calls.NAMES)
def test_bits_of_the_bound_call(world, name):
    """All tensors, some of them and none; outputs too. The next call finds bound memory as it was."""
    problem = catalogue.problems(world.size)[name]
    packed = problem.packed
    schedules = registry.available(problem)
    for number, schedule in enumerate(schedules[len(name) % 2 :: 2] or schedules):
        sizes = calls.row_sizes(problem, "uneven", seed=number)
        plan = registry.write(problem, schedule, (1, (1, 2))[number % 2], sizes)
        mine = [catalogue.inputs(problem, sizes, call)[world.rank] for call in range(2)]
        if packed:
            mine = [{**given, "x": calls.with_gaps(given["x"])} for given in mine]
        bound = {key: calls.with_gaps(x) if packed and key == "x" else x.copy() for key, x in mine[0].items()}

        def write(given, bound=bound):
            for key, x in given.items():
                bound[key][...] = x

        with fompi.bind(plan, comm=world, **bound) as step:
            wanted = []
            for given in mine:
                write(given)
                wanted.append(results_of(step, step()))
            kept = step.wait()
            assert same_bits(results_of(step, step(**mine[0])), wanted[0]), schedule
            assert same_bits(results_of(step, kept), wanted[0])  # results lie where they always lie
            out = {b.name: np.full(b.shape(plan.extents(world.rank)), 9.0) for b in step.compiled.outputs}
            got = step.start(**mine[1], **out).wait()
            assert all(y is x for x, y in zip(out.values(), got if len(out) > 1 else (got,), strict=True))
            assert same_bits(out, wanted[1]) and same_bits(results_of(step, kept), wanted[0])
            write({key: np.full_like(x, 7) for key, x in mine[0].items()})
            first, *others = mine[1]
            write({key: mine[1][key] for key in others})
            assert same_bits(results_of(step, step(**{first: mine[1][first]})), wanted[1])  # only one is given
            held = {key: calls.with_gaps(x) if packed and key == "x" else x.copy() for key, x in mine[0].items()}
            for which in (1, 0, 1):  # new numbers in the same tensors
                for key, x in mine[which].items():
                    held[key][...] = x
                step(**held, **out)
                assert same_bits(out, wanted[which]), schedule


def test_columns_of_one_tensor(world):
    """x of an all-to-all in two dimensions is one tensor, whose columns the plan packs."""
    spec = Spec((4 * world.size, 2 * world.size), "float64", Shard(0))
    plan = fompi.plan(fompi.all_to_all, spec, ranks=world.size, split_dim=1)
    x = np.arange(8.0 * world.size).reshape(4, -1) + 100 * world.rank
    with fompi.bind(plan, comm=world, x=np.zeros_like(x)) as step:
        wanted = fompi.all_to_all(x, split_dim=1, concat_dim=0, comm=world)
        np.testing.assert_array_equal(step(x=x), wanted)
        out = np.zeros(wanted.shape)
        assert step(x=x, out=out) is out
        np.testing.assert_array_equal(out, wanted)
        assert (step() == 0).all()


@pytest.mark.parametrize("schedule", ["unfused", "direct", "exchange"])
def test_memory_lives_until_the_last_transfer(world, schedule):
    """Nobody else holds the tensors of two calls in flight. They are free right after `wait`, and are given anew."""
    plan = sum_plan(world, (1 << 15,), schedule)
    steps = [fompi.bind(plan, comm=world, x=np.zeros(1 << 15)) for _ in range(2)]
    total = sum(range(world.size))
    for call in range(4):
        alive = []
        for i, step in enumerate(steps):
            x = np.full(1 << 15, float(call + i + world.rank))
            alive.append(weakref.ref(x))
            step.start(x=x)
            del x
        gc.collect()
        noise = [np.full(1 << 15, np.nan) for _ in range(4)]
        for i, step in enumerate(steps):
            assert (step.wait() == world.size * (call + i) + total).all()
        assert [ref() for ref in alive] == [None, None]
        del noise
    for step in steps:
        step.close()


def test_frameworks_shapes_and_rows(world):
    """A tensor of another framework, without dimensions, without elements, read-only, or of bfloat16. Fewer rows."""
    torch = pytest.importorskip("torch")
    total = sum(range(world.size))
    for shape in ((), (2, 0), (3, 4)):
        with fompi.bind(sum_plan(world, shape), comm=world, x=np.zeros(shape)) as step:
            x = torch.full(shape, float(world.rank), dtype=torch.float64)
            readonly = np.full(shape, float(world.rank))
            readonly.flags.writeable = False
            for given in (x, readonly):
                np.testing.assert_array_equal(step(x=given), np.full(shape, float(total)), strict=True)
            out = torch.zeros(shape, dtype=torch.float64)
            version = out._version
            assert step(x=x, out=out) is out and out._version > version and (out == total).all()
    x = torch.full((6,), 0.5 + world.rank, dtype=torch.bfloat16)
    with fompi.bind(sum_plan(world, (6,), dtype="bfloat16"), comm=world, x=torch.zeros_like(x)) as step:
        assert torch.equal(step(x=x), torch.full((6,), 0.5 * world.size + total, dtype=torch.bfloat16))
    spec = Spec((4 * world.size, 2), "float64", Shard(0))
    plan = fompi.plan(fompi.all_gather, spec, ranks=world.size)
    with fompi.bind(plan, comm=world, x=np.zeros((4, 2))) as step:
        x, out = np.full((4, 2), 1.0 + world.rank), np.zeros((4 * world.size, 2))
        wanted = np.repeat(np.arange(1.0, world.size + 1), 3)
        got = step([3] * world.size, x=x, out=out)
        assert got.shape == (3 * world.size, 2) and np.shares_memory(got, out)
        np.testing.assert_array_equal(got[:, 1], wanted)
        np.testing.assert_array_equal(step(x=x)[:, 0], np.repeat(np.arange(1.0, world.size + 1), 4))


def test_parts_feeds_and_labels(world):
    """A given x becomes ready in parts, parts of a given result are views of it, and a feed reads it."""
    rows = split(8 * world.size, world.size)[world.rank]
    spec = Spec((8 * world.size, 2), "float64", Shard(0))
    plan = fompi.plan(fompi.all_gather, spec, ranks=world.size, slices=2, schedule="direct")
    whole = np.arange(16.0 * world.size).reshape(-1, 2)
    mine = whole[8 * world.rank : 8 * world.rank + rows]
    with fompi.bind(plan, comm=world, x=np.zeros((rows, 2))) as first:
        x, y = np.full((rows, 2), np.nan), np.zeros_like(whole)
        first.start("x", x=x, out=y, label="now")
        for part in (1, 0):
            x[4 * part : 4 * part + 4] = mine[4 * part : 4 * part + 4]
            first.ready("x", part)
        assert np.shares_memory(first.part("y", 1), y)
        assert first.wait() is y
        np.testing.assert_array_equal(first.part("y", 1), whole[4:8])
        np.testing.assert_array_equal(y, whole)


def test_threads(world):
    """Each thread has executors of its own, and gives tensors to each call."""
    steps = [fompi.bind(sum_plan(world, (200,)), comm=world, x=np.zeros(200)) for _ in range(3)]
    errors, total = [], sum(range(world.size))

    def program(i):
        try:
            for call in range(30):
                x, out = np.full(200, float(10 * i + call + world.rank)), np.zeros(200)
                steps[i](x=x, out=out)
                assert (out == world.size * (10 * i + call) + total).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=program, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for step in steps:
        step.close()


def wrong_tensors():
    """What is refused, by a word of the error: the tensors of a call of a plan on float64[3, 4]."""
    readonly, both = np.zeros((3, 4)), np.zeros((3, 4))
    readonly.flags.writeable = False
    return [
        ("shape", fompi.ShapeError, {"x": np.zeros((4, 3))}),
        ("float32", fompi.DtypeError, {"x": np.zeros((3, 4), np.float32)}),
        ("strides", fompi.TensorError, {"x": np.zeros((4, 3)).T}),
        ("not a tensor", fompi.TensorError, {"x": [1.0]}),
        ("read-only", fompi.TensorError, {"out": readonly}),
        ("shares memory", fompi.TensorError, {"x": both, "out": both}),
        ("no tensor 'z'", fompi.PlanError, {"z": both}),
    ]


@pytest.mark.parametrize("schedule", ["unfused", "direct", "ring"])
def test_a_tensor_of_another_form(world, schedule):
    """It is an error of `start` on this rank, and of the call on all others. The next call works."""
    with fompi.bind(sum_plan(world, (3, 4), schedule), comm=world, x=np.ones((3, 4))) as step:
        for number, (words, kind, given) in enumerate(wrong_tensors()):
            culprit = number % world.size
            if world.rank == culprit:
                with pytest.raises(kind, match=words):
                    step.start(**given)
            else:
                with pytest.raises(fompi.PeerError, match=f"rank {culprit} failed.*{words}"):
                    step()
            assert (step(x=np.full((3, 4), 2.0)) == 2.0 * world.size).all()
        y = step()
        assert (y == world.size).all()
        with pytest.raises(fompi.TensorError, match="x shares memory with y"):
            step(x=y)  # all ranks feed a result back into its own memory


@pytest.mark.parametrize("path", [STAGED, IPC])
@pytest.mark.parametrize("counters", ["0", "1"])
def test_a_device(world, monkeypatch, path, counters):
    """The same on a device. What a kernel with announced products uses is copied, so the bits are the same."""
    monkeypatch.setenv("FOMPI_PATH", path)
    monkeypatch.setenv("FOMPI_COUNTERS", counters)
    device = SoftwareDevice(seed=world.rank, delay=0)
    for name in ("matmul_reduce_scatter", "all_gather_matmul", "all_reduce", "matmul_all_reduce"):
        problem = catalogue.problems(world.size, "float32")[name]
        sizes = calls.row_sizes(problem, "even")
        plan = registry.write(problem, "direct", 2, sizes)
        mine = [catalogue.inputs(problem, sizes, call)[world.rank] for call in range(2)]
        tensors = [{key: device.array(x) for key, x in given.items()} for given in mine]
        with fompi.bind(plan, comm=world, **{key: device.array(x) for key, x in mine[0].items()}) as step:
            assert step.announced or counters == "0" or world.size == 1 or name in ("all_reduce", "all_gather_matmul")
            first = step().get()
            out = device.array(np.zeros_like(first))
            second = step(**tensors[1]).get()
            assert step(**tensors[0]).get().tobytes() == first.tobytes()
            for which in (1, 0, 1):
                assert step(**tensors[which], out=out) is out
                assert out.get().tobytes() == (first, second)[which].tobytes(), name
            if world.rank == 0:
                with pytest.raises(fompi.TensorError, match="x is on the host"):
                    step(x=mine[0]["x"])
            elif world.size > 1:
                with pytest.raises(fompi.PeerError):
                    step()
            assert step().get().tobytes() == first.tobytes()
    device.check()
    assert not device.reports


def test_tensors_of_the_host_on_a_device(world, monkeypatch):
    """FOMPI_DEVICE=software: given tensors are copied to the device and back, as bound ones are."""
    device = SoftwareDevice(seed=world.rank, delay=0)
    for module in (arguments, binding, default_device):
        monkeypatch.setattr(module, "default_device", lambda: device)
    total, bound, y = sum(range(world.size)), np.ones((2, 3)), np.zeros((2, 3))
    for how in ({}, {"out": y}):
        with fompi.bind(sum_plan(world, (2, 3)), comm=world, x=bound, **how) as step:
            for call in range(3):
                x, out = np.full((2, 3), float(call + world.rank)), np.zeros((2, 3))
                assert (step(x=x) == call * world.size + total).all()
                assert step(out=out) is out and (out == world.size).all()
                assert step(x=x, out=out) is out and (out == call * world.size + total).all()
            step.start("x", x=x)
            x[...] = 5.0
            for part in range(step.compiled.buffers["x"].count):
                step.ready("x", part)
            assert (step.wait() == 5.0 * world.size).all()
            assert (step() == world.size).all()
    assert not device.reports
