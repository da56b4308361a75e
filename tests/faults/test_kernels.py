"""A kernel that raises on one rank: that rank gets the error, the others a PeerError, and the next calls work.

On both MPIs: an error while collectives of the library are in flight, which is one of the schedules below.
"""

from __future__ import annotations

import pytest

IN_PYTHON = {"FOMPI_ENGINE": "python"}
"""For scripts whose sums raise: those of C do not."""

SCRIPT = """
from fompi.bench.measure import plan
x, w = np.ones((6, 2)), np.ones((2, 3))
failing = False

def matmul(reads, writes):
    if failing and CULPRIT:
        raise ValueError("a bad weight")
    *xs, w = reads
    for x, y in zip(xs, writes, strict=True):
        np.matmul(x, w, out=y)

def run(schedule, slices, calls):
    global failing
    caught = {}
    made = plan("OPERATION", x, w, size, schedule=schedule, slices=slices)
    with fompi.bind(made, comm=world, x=x, w=w, kernels={"matmul": matmul}) as step:
        for call in range(calls):
            failing = call % 2 == 1
            try:
                y = step()
            except (ValueError, fompi.PeerError) as error:
                assert failing
                kind = type(error).__name__
                caught[kind] = " ".join([kind, str(error), *getattr(error, "__notes__", ())])
            else:
                assert not failing, f"rank {rank} got no error in call {call}, {schedule}"
                assert (y == EACH).all()
    for text in caught.values():
        emit("CAUGHT", schedule, rank, text)
    for next_schedule in ("auto", "unfused"):
        assert (fompi.all_reduce(np.ones(3), comm=world, schedule=next_schedule) == size).all()
    assert not world.channel.active and not world.channel.failures

for schedule, slices in SCHEDULES:
    run(schedule, slices, CALLS)
"""
SCHEDULES = {"direct": 2, "ring": 1, "bidirectional": 1, "unfused_p2p": 1, "sliced_p2p": 2, "unfused": 1, "sliced": 2}
ALL = tuple(SCHEDULES.items())


def script(operation="matmul_all_reduce", schedules=ALL, culprit="rank == size - 1", calls=20, each="2 * size"):
    text = SCRIPT.replace("OPERATION", operation).replace("SCHEDULES", repr(schedules)).replace("EACH", each)
    return text.replace("CULPRIT", culprit).replace("CALLS", str(calls))


@pytest.mark.one_mpi
def test_caught_with_schedules_that_pace_their_sends(launch):
    """A send that waits for a message is not delayed by the error."""
    ended = launch(4, script("matmul_all_to_all", (("pairwise", 2), ("direct", 2)), each="2"))
    ended.assert_clean()
    for schedule in ("pairwise", "direct"):
        assert sum(line.startswith(schedule + " ") for line in ended.lines("CAUGHT")) == 4


@pytest.mark.parametrize(
    "operation", ["matmul_all_reduce", pytest.param("matmul_reduce_scatter", marks=pytest.mark.one_mpi)]
)
def test_caught_on_all_ranks(launch, operation):
    """Many times. Without the kernel worthless data is sent, so that the call ends. It never becomes a result."""
    ended = launch(4, script(operation))
    ended.assert_clean()
    caught = ended.lines("CAUGHT")
    for schedule in SCHEDULES:
        lines = [line.removeprefix(schedule + " ") for line in caught if line.startswith(schedule + " ")]
        assert len(lines) == 4
        for rank in range(3):
            assert lines[rank].startswith(f"{rank} PeerError rank 3 failed in {operation} by {schedule}")
            assert " (bound " in lines[rank]
            assert ", op " in lines[rank] and "matmul(x[" in lines[rank]
            assert lines[rank].endswith("ValueError: a bad weight")
        assert lines[3].startswith("3 ValueError a bad weight fompi: on rank 3 in ")


@pytest.mark.one_mpi
def test_two_ranks_fail_at_once(launch):
    """Each raises its own error, unless the other rank's error arrives first. The third rank gets one of the two."""
    ended = launch(3, script(schedules=(("ring", 1), ("direct", 1)), culprit="rank >= 1"))
    ended.assert_clean()
    caught = {tuple(line.split()[1:3]) for line in ended.lines("CAUGHT")}
    assert ("0", "PeerError") in caught and ("0", "ValueError") not in caught
    assert caught & {("1", "ValueError"), ("2", "ValueError")}


@pytest.mark.one_mpi
def test_the_other_ranks_start_the_call_late(launch):
    """They start when its call has ended, so it does not wait for them. Its next call does, and works."""
    code = """
from pathlib import Path
from fompi import Shard, Spec
failing = False

def matmul(reads, writes):
    if failing:
        raise ValueError("a bad product")
    np.matmul(*reads, out=writes[0])

specs = Spec((6, 2 * size), "float64", Shard(1)), Spec((2 * size, 3), "float64", Shard(0))
for schedule in ("ring", "unfused"):
    plan = fompi.plan(fompi.matmul_all_reduce, *specs, ranks=size, schedule=schedule)
    step = fompi.bind(plan, comm=world, x=np.ones((6, 2)), w=np.ones((2, 3)), kernels={"matmul": matmul})
    failing = rank == 1
    while rank != 1 and not Path(schedule).exists():
        time.sleep(0.01)
    try:
        step()
    except (ValueError if rank == 1 else fompi.PeerError) as error:
        assert "a bad product" in str(error)
    else:
        raise AssertionError("no error")
    if rank == 1:
        Path(schedule).touch()
    failing = False
    for _ in range(3):
        assert (step() == 2 * size).all()
    step.close()
assert (fompi.all_reduce(np.ones(3), comm=world) == size).all()
"""
    ended = launch(3, code)
    ended.assert_clean()


@pytest.mark.one_mpi
def test_an_unbound_operation(launch):
    """After the error the next call works."""
    code = """
from fompi.ops import pending
bind, failing = pending.Pending._backend.bind, False

def bad(kernel, *operands):
    if failing and rank == 1 and kernel == "add":
        return lambda: 1 / 0
    return bind(kernel, *operands)

pending.Pending._backend.bind = bad
for number in range(30):
    failing = number % 3 == 1
    try:
        assert (fompi.all_reduce(np.ones(300), comm=world, schedule=("ring", "direct")[number % 2]) == size).all()
        assert not failing
    except ZeroDivisionError:
        assert failing and rank == 1
    except fompi.PeerError as error:
        assert failing and error.origin == 1 and "ZeroDivisionError: division by zero" in str(error)
        assert f"(call {number + 1} of world), op " in str(error)
"""
    ended = launch(3, code, env=IN_PYTHON)
    ended.assert_clean()


@pytest.mark.one_mpi
def test_one_of_several_in_flight(launch):
    """Only the call that failed ends with an error."""
    code = """
from fompi import Partial, Spec

def bad(reads, writes):
    if rank == 2:
        raise ValueError("a bad sum")
    np.add(*reads, out=writes[0])

plan = fompi.plan(fompi.all_reduce, Spec((9,), "float64", Partial()), ranks=size, schedule="ring")
x = np.ones(9)
good, failing = fompi.bind(plan, comm=world, x=x), fompi.bind(plan, comm=world, x=x, kernels={"add": bad})
for call in range(20):
    order = [good, failing] if (call + rank) % 2 else [failing, good]
    pending = fompi.all_reduce.start(x, comm=world)
    for step in order:
        step.start()
    assert (pending.wait() == size).all()
    assert (good.wait() == size).all()
    try:
        failing.wait()
    except (ValueError if rank == 2 else fompi.PeerError) as error:
        assert "a bad sum" in str(error)
    else:
        raise AssertionError("no error")
"""
    ended = launch(3, code)
    ended.assert_clean()


@pytest.mark.one_mpi
def test_arrived_raises_too(launch):
    """A program that only calls `arrived` must not loop for ever."""
    code = """
from fompi import Partial, Spec

def bad(reads, writes):
    raise ValueError("a bad sum")

plan = fompi.plan(fompi.all_reduce, Spec((8,), "float64", Partial()), ranks=size, schedule="direct")
step = fompi.bind(plan, comm=world, x=np.ones(8), kernels={"add": bad} if rank else None)
step.start()
try:
    while not step.arrived("y", 1):
        pass
except (fompi.PeerError if rank == 0 else ValueError):
    emit("CAUGHT", rank)
"""
    ended = launch(2, code)
    ended.assert_clean()
    assert ended.lines("CAUGHT") == ["0", "1"]


SMALL = """
from fompi.ops import pending
bind, failing = pending.Pending._backend.bind, False

def add(*arguments):
    kernel = bind(*arguments)
    def guarded():
        if failing and rank == size - 1:
            raise ValueError("a bad sum")
        kernel()
    return guarded

pending.Pending._backend.bind = add
for i in range(40):
    failing = i % 2 == 1
    for schedule in ("direct", "ring"):  # every rank needs the sums of the others
        try:
            y = fompi.all_reduce(np.ones(size), comm=world, schedule=schedule)
        except (ValueError, fompi.PeerError) as error:
            assert failing and isinstance(error, ValueError) == (rank == size - 1), error
            emit("CAUGHT", rank, str(error))
        else:
            assert not failing and (y == size).all()
assert not world.channel.active and not world.channel.failures
"""


@pytest.mark.one_mpi
def test_a_small_sum(launch):
    """It runs in the thread that releases it, and is not handed out as a kernel. Its error is reported the same way."""
    ended = launch(3, SMALL, env=IN_PYTHON)
    ended.assert_clean()
    caught = ended.lines("CAUGHT")
    assert len(caught) == 3 * 2 * 20
    assert all("ValueError: a bad sum" in line and "op " in line for line in caught if not line.startswith("2"))
