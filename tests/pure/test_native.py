"""Calls in C on an MPI that is a Python class: all ranks in one process, in any order, with errors anywhere."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import deque
from dataclasses import replace
from random import Random
from threading import Thread
from time import perf_counter, sleep

import catalogue
import numpy as np
import pytest
from twin import poisoned, twin

from fompi.backends import in_c
from fompi.backends.half import narrow, storage
from fompi.backends.numpy import Numpy
from fompi.engine.in_flight import FINISHED, GOES_ON, HAS_KERNELS
from fompi.engine.native import FUNCTIONS, PACE, _address
from fompi.runtime.compiled import Compiled
from fompi.runtime.lower import BLOCKS, OP, starts_of, table
from fompi.schedules import registry

native = pytest.importorskip("fompi.native._native", reason="fompi was installed without a C compiler")

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "uint8", "complex64")
INT, POINTER, HANDLE, INTS = ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.POINTER(ctypes.c_int)
SEND = ctypes.CFUNCTYPE(INT, POINTER, INT, HANDLE, INT, INT, HANDLE, POINTER)
TEST = ctypes.CFUNCTYPE(INT, POINTER, INTS, POINTER)
TESTSOME = ctypes.CFUNCTYPE(INT, INT, POINTER, INTS, INTS, POINTER)


@pytest.fixture(autouse=True)
def kernels_of_numpy(monkeypatch):
    """The twin and kernels of Python use none of C: the bits of C are compared with those of NumPy."""
    monkeypatch.setattr(in_c, "run", None)


class FakeMPI:
    """Messages between ranks that are numbers of communicators. They arrive late by chance; call `fails_at` fails."""

    def __init__(self, seed, request_nbytes=4, fails_at=None):
        self.draw, self.fails_at, self.calls = Random(seed), fails_at, 0
        self.request = {4: ctypes.c_int32, 8: ctypes.c_int64}[request_nbytes]
        self.messages, self.requests, self.last, self.silent_until = {}, {}, 0, 0.0
        functions = (SEND(self.isend), SEND(self.issend), SEND(self.irecv), TEST(self.test), TESTSOME(self.testsome))
        self.functions = functions  # they must stay
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in functions]
        self.library = native.Library(*addresses, 7, request_nbytes, PACE)

    def failed(self):
        self.calls += 1
        return self.calls - 1 == self.fails_at

    def posted(self, where, request):
        self.last += 1
        self.requests[self.last] = request
        self.request.from_address(where).value = self.last
        return 0

    def isend(self, data, count, kind, dest, tag, rank, where, is_synchronous=False):
        assert kind == 7
        if self.failed():
            return 13
        message = [ctypes.string_at(data, count), False]
        self.messages.setdefault((rank, dest, tag), deque()).append(message)
        return self.posted(where, lambda: message[1] if is_synchronous else self.draw.random() < 0.7)

    def issend(self, *arguments):
        return self.isend(*arguments, is_synchronous=True)

    def irecv(self, data, count, kind, source, tag, rank, where):
        if self.failed():
            return 14

        def received():
            queue = self.messages.get((source, rank, tag))
            if not queue or self.draw.random() < 0.3:
                return False
            message = queue.popleft()
            assert len(message[0]) == count
            ctypes.memmove(data, message[0], count)
            message[1] = True
            return True

        return self.posted(where, received)

    def is_done(self, where):
        number = self.request.from_address(where)
        done = perf_counter() >= self.silent_until and self.requests[number.value]()
        if done:
            del self.requests[number.value]
            number.value = 0
        return done

    def test(self, where, flag, status):
        if self.failed():
            return 15
        flag[0] = self.is_done(where)
        return 0

    def testsome(self, count, where, n, indices, statuses):
        if self.failed():
            return 16
        done = [i for i in range(count) if self.is_done(where + i * ctypes.sizeof(self.request))]
        self.draw.shuffle(done)
        for k, i in enumerate(done):
            indices[k] = i
        n[0] = len(done) or -32766
        return 0


class Rank:
    """One rank of a plan on fresh memory. Its call in C was made for the rows of `before`, and has those of `sizes`."""

    def __init__(self, plan, rank, sizes, inputs, mpi, before=None):
        self.compiled = Compiled(plan, rank)
        sized = self.compiled.sized(plan.extents(rank, sizes if before is None else before))
        self.table = table(self.compiled, sized, 1 << 30)
        sized = self.compiled.sized(plan.extents(rank, sizes))
        self.arrays = {}
        for buffer in self.compiled.program.buffers:
            array = poisoned(sized.shapes[buffer.name], buffer.dtype)
            if buffer.role == "input":
                array[...] = np.asarray(inputs[buffer.name]).reshape(array.shape)
            self.arrays[buffer.name] = np.ascontiguousarray(array)
        if self.table is not None:
            self.call = made(mpi, self.table, rank)
            if before is not None:
                self.call.resizable(self.table.blocks.view(np.uint8), 4096, 1 << 30)
                assert self.call.resize(starts_of(sized), False, False)
            self.call.place(np.array([self.arrays[name].ctypes.data for name in self.table.buffers], np.uint64))
            self.actions = self.compiled.resolve(self.arrays, sized.starts, Numpy())

    def run_kernels(self, draw):
        """Run some of the kernels that are Python's. Returns the state of the call."""
        state = HAS_KERNELS
        while state == HAS_KERNELS:
            op = self.call.take(bool(draw.random() < 0.3))
            if op < 0:
                break
            with np.errstate(all="ignore"):
                self.actions[op]()
            state = self.call.ran(op, perf_counter())
        return state

    @property
    def outputs(self):
        return {b.name: self.arrays[b.name] for b in self.compiled.outputs}


def made(mpi, t, rank=0, is_small=False):
    ops = t.ops.view(np.uint8)
    return native.Call(
        mpi.library, ops, *t.on_start, *t.on_done, t.blockers, t.first, t.nbytes, rank, is_small, 5, False, True
    )


def ranks_of(problem, schedule, slices, seed, **options):
    """The ranks of a plan, and what the twin computes. No ranks: C does not know an op of the plan."""
    plan = registry.write(problem, schedule, slices)
    sizes = catalogue.sizes(problem, ("even", "uneven", "few")[seed % 3], seed=seed)
    inputs, mpi = catalogue.inputs(problem, sizes, seed), FakeMPI(seed, **options)
    before = catalogue.sizes(problem, ("few", "even", "uneven")[seed % 3], seed=seed + 1)
    ranks = [Rank(plan, rank, sizes, inputs[rank], mpi, before) for rank in range(problem.size)]
    if any(rank.table is None for rank in ranks):
        return [], None, mpi
    with np.errstate(all="ignore"):
        return ranks, twin(plan, inputs, Numpy(), sizes=sizes, seed=seed), mpi


def interleaved(ranks, draw):
    """Drive all ranks in random turns until each is finished or has failed. Returns their last states."""
    states = [rank.call.run(1 << 8, 0.0, 1.0) for rank in ranks]
    for _ in range(100_000):
        alive = [i for i, state in enumerate(states) if state in (GOES_ON, HAS_KERNELS)]
        if not alive:
            break
        i = draw.choice(alive)
        states[i] = ranks[i].run_kernels(draw) if states[i] == HAS_KERNELS else ranks[i].call.drive(0.0, 1.0)
    return states


def assert_bits(ranks, wanted):
    for rank, expected in zip(ranks, wanted, strict=True):
        for name, array in rank.outputs.items():
            assert array.tobytes() == np.ascontiguousarray(expected[name]).tobytes(), (name, rank.compiled.title)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((3, dtype) for dtype in DTYPES), (2, "float64"), (5, "bfloat16")],
)
def test_every_plan_has_the_bits_of_the_twin(size, dtype):
    """The kernels of the other dtypes do not depend on the number of ranks. They take a third of the schedules."""
    lowered, every = 0, 1 if dtype in ("float64", "bfloat16") else 3
    for number, (name, problem) in enumerate(catalogue.problems(size, dtype).items()):
        for schedule in registry.available(problem)[number % every :: every]:
            seed = size + number
            ranks, wanted, mpi = ranks_of(problem, schedule, 1 + seed % 2, seed, request_nbytes=(4, 8)[seed % 2])
            if not ranks:
                continue
            lowered += 1
            assert interleaved(ranks, Random(seed)) == [FINISHED] * size, (name, schedule)
            assert_bits(ranks, wanted)
            assert not mpi.requests and not any(mpi.messages.values())
            begun, ended = np.frombuffer(ranks[0].call.times()).reshape(2, -1)
            assert (begun > 0).all() and (ended >= begun).all() and ranks[0].call.moved_at == ended.max()
    assert lowered > 10


def test_a_call_runs_again_and_again():
    """With other bases, too."""
    ranks, wanted, _ = ranks_of(catalogue.problems(3)["all_reduce"], "ring", 2, 4)
    moved = [{name: array.copy() for name, array in rank.arrays.items()} for rank in ranks]
    for turn in range(3):
        if turn == 1:
            for rank, arrays in zip(ranks, moved, strict=True):
                rank.arrays = arrays
                rank.call.place(np.array([arrays[name].ctypes.data for name in rank.table.buffers], np.uint64))
        assert interleaved(ranks, Random(turn)) == [FINISHED] * 3
        assert_bits(ranks, wanted)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_an_error_of_mpi_anywhere(name):
    """The rank that gets it fails. What it exports names each op once: done, in flight, ready or blocked."""
    failures = 0
    for fails_at in range(0, 60):
        ranks, _, mpi = ranks_of(catalogue.problems(3)[name], "direct", 1, fails_at, fails_at=fails_at)
        for _ in range(40):  # the others may wait for ever
            interleaved_some(ranks, mpi.draw)
        for rank in ranks:
            call = rank.call
            failures += call.error != 0
            assert call.error in (0, 13, 14, 15, 16)
            if not call.unfinished:
                continue
            code, unfinished = call.error, call.unfinished
            blockers, times, requests = call.export()
            begun, ended = np.frombuffer(times).reshape(2, -1)
            flying = [op for _, op in requests]
            assert len(set(flying)) == len(flying) and not call.unfinished
            assert (ended == 0).sum() == unfinished and not ended[flying].any() and begun[flying].all()
            ready = [i for i, n in enumerate(np.frombuffer(blockers, np.int32)) if not n and not begun[i]]
            assert code or not [i for i in ready if rank.table.ops[i]["kind"] < 2]
    assert failures > 10


def interleaved_some(ranks, draw):
    for rank in ranks:
        if rank.call.unfinished and not rank.call.error:
            rank.call.drive(0.0, 1.0)
        elif not rank.call.started:
            rank.call.run(0, 0.0, 1.0)


def test_without_progress_python_goes_on():
    ranks, _, _ = ranks_of(catalogue.problems(2)["all_reduce"], "ring", 1, 1)
    assert ranks[0].call.run(0, 5.0, 0.01) == 2 and ranks[0].call.unfinished
    with pytest.raises(RuntimeError, match="not finished"):
        ranks[0].call.run(0, 1.0, 1.0)


def test_wrong_tables_are_refused():
    """A spoiled table is an error, or keeps every op inside its buffers and every counter right."""
    draw, refused = Random(7), 0
    ranks, _, mpi = ranks_of(catalogue.problems(3)["reduce_scatter"], "ring", 2, 1)
    right = ranks[1].table
    for _ in range(600):
        fields = right._asdict()
        which = draw.choice(["ops", "on_start", "on_done", "blockers", "first", "nbytes"])
        parts = fields[which]
        at = draw.randrange(2) if isinstance(parts, tuple) else None
        array = (parts if at is None else parts[at]).copy()
        place = array.view(np.uint8)
        if not len(place):
            continue
        place[draw.randrange(len(place))] ^= 1 << draw.randrange(8)
        fields[which] = array if at is None else tuple(array if k == at else part for k, part in enumerate(parts))
        try:
            made(mpi, right._replace(**fields))
        except ValueError:
            refused += 1
    assert refused > 250


def test_wrong_rows_are_refused():
    """Spoiled blocks and rows are an error, or do not fit, or keep every op inside its buffers."""
    draw, refused = Random(7), 0
    ranks, _, mpi = ranks_of(catalogue.problems(3)["reduce_scatter"], "ring", 2, 1)
    compiled, right = ranks[1].compiled, ranks[1].table
    sizes = catalogue.sizes(compiled.plan.problem, "even")
    rows = np.array(starts_of(compiled.sized(compiled.plan.extents(1, sizes))))
    for _ in range(300):
        call, blocks, starts = made(mpi, right), right.blocks.view(np.uint8).copy(), rows.copy()
        place = draw.choice([blocks, starts.view(np.uint8)])
        place[draw.randrange(len(place))] ^= 1 << draw.randrange(8)
        try:
            call.resizable(blocks, 4096, 1 << 30)
            fits = call.resize(starts, False, False)
        except ValueError:
            refused += 1
            continue
        if not fits:
            refused += 1
            with pytest.raises(ValueError, match="do not fit"):
                call.run(0, 0.0, 1.0)
    assert refused > 100
    with pytest.raises(ValueError, match="one start"):
        ranks[1].call.resize(rows[1:], False, False)
    with pytest.raises(RuntimeError, match="does not wait"):
        ranks[1].call.sized(rows, False, False, (), 0.0, 1.0)


@pytest.mark.parametrize("wrong", [(0, 1, 1, 1, 1, 7, 4), (1, 1, 1, 1, 1, 7, 3000), (1, 1, 1, 1, 1, 7, 0)])
def test_a_library_without_functions_is_refused(wrong):
    with pytest.raises(ValueError, match="no address"):
        native.Library(*wrong, PACE)


def test_the_table_has_the_layout_of_c():
    assert (OP.itemsize, BLOCKS.itemsize) == (native.OP_NBYTES, native.BLOCKS_NBYTES)


@pytest.mark.parametrize(
    ("name", "schedule", "dtype", "most"),
    [
        ("all_reduce", "unfused", "float64", 1 << 30),  # a collective of the library
        ("all_gather_matmul", "unfused", "float64", 1 << 30),
        ("all_gather", "ring", "float64", 8),  # messages of more bytes
    ],
)
def test_what_c_does_not_know(name, schedule, dtype, most):
    plan = registry.write(catalogue.problems(2, dtype)[name], schedule, 1)
    compiled = Compiled(plan, 0)
    sized = compiled.sized(plan.extents(0, catalogue.sizes(plan.problem, "even")))
    assert table(compiled, sized, most) is None


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int8", "int64", "complex128"])
def test_numbers_at_the_edges(dtype):
    """Zeros with signs, infinities, subnormal and wrapping numbers: the bits of NumPy."""
    draw = np.random.default_rng(1)
    for size, name in ((2, "all_reduce"), (3, "all_reduce")):
        for op in ("sum", "prod", "mean", "max", "min"):
            if (op == "mean" and "int" in dtype) or (op != "sum" and op != "mean" and "complex" in dtype):
                continue
            problem = catalogue.problems(size, dtype)[name]
            problem = replace(problem, op=op)
            plan = registry.write(problem, "ring", 1)
            sizes = catalogue.sizes(problem, "uneven")
            inputs = [
                {key: any_bits(draw, array) for key, array in of.items()} for of in catalogue.inputs(problem, sizes, 0)
            ]
            mpi = FakeMPI(3)
            ranks = [Rank(plan, rank, sizes, inputs[rank], mpi) for rank in range(size)]
            assert all(rank.table is not None for rank in ranks)
            with np.errstate(all="ignore"):
                wanted = twin(plan, inputs, Numpy(), sizes=sizes, seed=1)
            interleaved(ranks, Random(1))
            for rank, expected in zip(ranks, wanted, strict=True):
                for key, array in rank.outputs.items():
                    assert same(array, expected[key], dtype), (dtype, op)


def any_bits(draw, array):
    """Numbers of any bits, a third of them zeros of both signs."""
    numbers = draw.integers(0, 256, array.nbytes, np.uint8).reshape(-1, array.itemsize)
    zeros = draw.random(len(numbers)) < 0.3
    numbers[zeros] = 0
    numbers[zeros, -1] = draw.choice([0, 0x80], zeros.sum())
    return numbers.reshape(-1).view(array.dtype).reshape(array.shape)


def same(a, b, dtype):
    """The same bits, but for those of a NaN."""
    if storage(dtype).kind not in "fc":
        return a.tobytes() == b.tobytes()
    numbers = (np.float32 if dtype == "complex64" else np.float64) if "complex" in dtype else a.dtype
    a, b = (np.ascontiguousarray(x).view(numbers) for x in (a, b))
    return np.array_equal(np.isnan(a), np.isnan(b)) and a[~np.isnan(a)].tobytes() == b[~np.isnan(b)].tobytes()


def test_kernels_of_python_are_taken_and_come_back():
    """Sums first, each once; what is taken when Python goes on has begun, and is not C's any more."""
    ranks, _, _ = ranks_of(catalogue.problems(2)["all_gather_matmul"], "ring", 2, 1)
    call = ranks[0].call
    assert call.has_kernels > 1 and call.run(0, 0.0, 1.0) == HAS_KERNELS == call.state
    assert call.take(True) == -1
    with pytest.raises(IndexError, match="no such kernel"):
        call.ran(0, 1.0)
    op = call.take(False)
    ranks[0].actions[op]()
    call.ran(op, 3.5)
    with pytest.raises(IndexError, match="no such kernel"):
        call.ran(op, 3.5)
    assert call.has_ended(op) and np.frombuffer(call.times())[op] == 3.5
    ranks[1].call.run(0, 0.0, 1.0)
    second = -1
    for _ in range(1000):
        ranks[1].call.drive(0.0, 1.0)
        ranks[0].call.drive(0.0, 1.0)
        second = call.take(False)
        if second >= 0:
            break
    blockers, times, _ = call.export()
    begun, ended = np.frombuffer(times).reshape(2, -1)
    assert begun[second] and not ended[second] and not np.frombuffer(blockers, np.int32)[second]
    assert call.state == FINISHED and call.take(False) == -1


def test_ops_wait_until_they_are_released():
    ranks, wanted, _ = ranks_of(catalogue.problems(2)["all_gather"], "ring", 2, 1)
    held = [np.flatnonzero(rank.table.blockers == 0).astype(np.int32) for rank in ranks]
    for rank, ops in zip(ranks, held, strict=True):
        assert rank.call.run(1 << 8, 0.0, 1.0, np.concatenate([ops, ops])) == GOES_ON
    for _ in range(2):
        for rank, ops in zip(ranks, held, strict=True):
            assert not any(map(rank.call.has_ended, ops))
            rank.call.release(ops)
    with pytest.raises(IndexError):
        ranks[0].call.release(held[0])
    for _ in range(1000):
        if not [rank.call.drive(0.0, 1.0) for rank in ranks if rank.call.unfinished]:
            break
    assert_bits(ranks, wanted)
    with pytest.raises(IndexError):
        ranks[0].call.run(0, 0.0, 1.0, np.array([99], np.int32))


def test_a_thread_goes_on_with_calls_in_flight():
    """It polls calls of which C did one round, sleeps without any, and can be stopped and started again."""
    ranks, wanted, mpi = ranks_of(catalogue.problems(3)["all_reduce"], "ring", 2, 3)
    for _ in range(2):
        assert mpi.library.help(1e-4, 1e-3) and mpi.library.has_thread
        for turn in range(3):
            for rank in ranks:
                for array in rank.outputs.values():
                    array.view(np.uint8)[...] = 0xAB
            assert [rank.call.run(1 << 8, 0.0, 1.0) for rank in ranks] == [GOES_ON] * 3
            until = perf_counter() + 10
            while any(rank.call.state == GOES_ON for rank in ranks) and perf_counter() < until:
                sleep(1e-3)
            assert [rank.call.state for rank in ranks] == [FINISHED] * 3
            assert_bits(ranks, wanted)
            assert mpi.library.poll() == 2 and mpi.library.poll() == 0
            sleep(0.07 * turn)  # then it sleeps
        mpi.library.stop()
        mpi.library.stop()
        assert not mpi.library.has_thread


def test_the_thread_ends_a_call_while_a_wait_for_it_rests():
    """The call is over then, and not in flight: it can run again."""
    ranks, wanted, mpi = ranks_of(catalogue.problems(2)["all_reduce"], "ring", 1, 3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # the MPI of these tests needs the GIL
    try:
        assert mpi.library.help(2e-5, 1e-4)
        for turn in range(20):
            mpi.silent_until = perf_counter() + 0.0145 + 2.5e-5 * turn
            for rank in reversed(ranks):  # at once: if the call were in flight, the thread would soon find it there
                assert rank.call.run(1 << 8, 0.0, 1.0) == GOES_ON
            ranks[1].call.drive(0.015, 1.0)
            until = perf_counter() + 10
            while any(rank.call.state == GOES_ON for rank in ranks) and perf_counter() < until:
                sleep(1e-4)
        assert_bits(ranks, wanted)
    finally:
        mpi.library.stop()
        sys.setswitchinterval(interval)


def test_the_thread_wakes_python():
    """When a call has ended, if Python wants to know, and when a kernel of Python can run; `wake` does, too."""
    ranks, _, mpi = ranks_of(catalogue.problems(2)["all_gather_matmul"], "ring", 2, 1)
    library = mpi.library
    begun = perf_counter()
    library.rest(0.02)
    assert perf_counter() - begun > 0.019
    for _ in range(2):
        begun = perf_counter()
        waker = Thread(target=lambda: (sleep(0.02), library.wake()))
        waker.start()
        library.rest(10.0)
        waker.join()
    assert perf_counter() - begun < 5
    library.wake()
    library.rest(10.0)
    library.help(1e-4, 1e-4)
    draw, states = Random(1), [rank.call.run(1 << 8, 0.0, 1.0) for rank in ranks]
    until = perf_counter() + 20
    while any(states) and perf_counter() < until:
        states = [rank.run_kernels(draw) if rank.call.state == HAS_KERNELS else rank.call.state for rank in ranks]
        library.rest(0.5)
        library.poll()
    assert states == [FINISHED] * 2 and perf_counter() < until
    library.stop()


def test_the_thread_tells_of_the_end_of_watched_calls():
    ranks, _, mpi = ranks_of(catalogue.problems(2)["all_gather"], "ring", 2, 1)
    for is_watched in (1, 0):
        mpi.library.is_watched = is_watched
        assert GOES_ON in [rank.call.run(1 << 8, 0.0, 1.0) for rank in ranks]
        mpi.library.help(1e-3, 1e-3)
        begun = perf_counter()
        mpi.library.rest(10.0 if is_watched else 0.2)
        while any(rank.call.state for rank in ranks) and perf_counter() - begun < 5:
            sleep(1e-3)
        assert (perf_counter() - begun < 5) and mpi.library.poll() == 2
        assert is_watched or perf_counter() - begun > 0.19
    mpi.library.stop()


@pytest.mark.parametrize("name", ["libmpi_cray.so.12", "libmpi_gnu_123.so", "libmpi_abi.so.0", "libothers.so"])
def test_the_functions_of_mpi_are_those_of_mpi4py(tmp_path, name):
    """Whatever the file of the MPI library is called, and whatever another library has."""
    flags = ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
    (tmp_path / "mpi.c").write_text(
        "".join(f"int {p}{name}(void) {{ return 7; }}" for name in FUNCTIONS for p in ("", "P"))
    )
    (tmp_path / "extension.c").write_text("int of_mpi4py;")
    for command in (["-o", name, f"-Wl,-soname,{name}", "mpi.c"], ["-o", "extension.so", "extension.c", name]):
        subprocess.run([*flags, *command], cwd=tmp_path, check=True)
    extension = ctypes.CDLL(str(tmp_path / "extension.so"))
    found, own = [_address(f, extension) for f in FUNCTIONS], ctypes.CDLL(str(tmp_path / name))
    assert found == [ctypes.cast(own[f], ctypes.c_void_p).value for f in FUNCTIONS]
    assert _address("MPI_Isend", ctypes.CDLL(native.__file__)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_of_half_types_need_no_mpi(dtype, monkeypatch):
    """Calls that Python carries out use the kernels of C, too, whether or not functions of MPI were found."""
    a, b = (narrow(np.random.default_rng(seed).standard_normal(1000).astype(np.float32), dtype) for seed in (1, 2))
    results, made = [], []

    def kernel(*arguments):
        made.append(arguments)
        native.kernel(*arguments)

    for run in (kernel, None):
        monkeypatch.setattr(in_c, "run", run)
        c, halves = np.empty((2, 1000), storage(dtype)), Numpy()
        halves.bind("add", [a, b], [c[0]], [dtype, dtype], [dtype])()
        halves.bind("max", [a, b], [c[1]], [dtype, dtype], [dtype])()
        results.append(c.tobytes())
    assert results[0] == results[1] and len(made) == 4
    code = "import sys; from fompi.backends import in_c; print(in_c.run is not None, 'mpi4py' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert said.stdout == "True False\n"


def test_a_jax_program_hears_of_a_call_without_a_result():
    """As without memory, or after an interrupt: an error of XLA, never success. `run` returns None or an error."""
    said, words = [], lambda *numbers: (ctypes.c_uint64 * len(numbers))(*numbers)

    @ctypes.CFUNCTYPE(POINTER, ctypes.POINTER(ctypes.c_uint64))
    def create(error):
        said.append((error[0], ctypes.string_at(error[2]), error[3] & 0xFFFFFFFF))
        return 4711

    def run(site, given, results, api):
        if site == 1:
            raise MemoryError
        return {2: None, 3: 12, 4: "what is no address"}[site]

    handler = ctypes.CFUNCTYPE(POINTER, POINTER)(native.xla_handler(run, 0, 3))
    api = words(0, 0, 0, 0, 0, 0, ctypes.cast(create, POINTER).value)
    for site, wanted, raised in ((1, 4711, MemoryError), (2, None, None), (3, 12, None), (4, 4711, TypeError)):
        number = words(site)
        pair = words(0, ctypes.addressof(number))
        attributes = words(ctypes.addressof(pair))
        token = words(0)
        frame = [0] * 21
        frame[2], frame[20] = ctypes.addressof(api), ctypes.addressof(attributes)
        for which in (9, 14):
            frame[which - 2], frame[which] = 1, ctypes.addressof(token)
        held, reports = words(*frame), []
        hook, sys.unraisablehook = sys.unraisablehook, lambda report, kept=reports: kept.append(report.exc_type)
        try:
            assert handler(ctypes.addressof(held)) == wanted
        finally:
            sys.unraisablehook = hook
        assert reports == [raised] * (raised is not None)
    assert [each[0] for each in said] == [32, 32] and all(
        b"has no result" in each[1] and each[2] == 13 for each in said
    )
