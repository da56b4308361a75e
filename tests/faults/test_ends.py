"""How a program ends: with an error on one rank or on all ranks, early, or normally.

On both MPIs: what the launcher ends, and what the library has to finish. What fompi itself tells the other ranks is the
same on each.
"""

from __future__ import annotations

import pytest

STEPS = """
def steps(count):
    for _ in range(count):
        fompi.all_gather_matmul(np.ones((4, 3)), np.eye(3), comm=world)
        fompi.all_reduce(np.ones(5), comm=world)

def go_on():
    while True:
        steps(10)
"""


# ------------------------------------------------------------------------------------------------- uncaught exceptions


@pytest.mark.one_mpi
def test_before_the_first_operation(launch):
    code = """
if rank == 1:
    time.sleep(0.3)
    event()
    raise RuntimeError("the original error")
go_on()
"""
    ended = launch(3, STEPS + code)
    ended.assert_failed("RuntimeError: the original error")


def test_between_operations(launch):
    """The last rank fails while the other ranks are already in the next operation."""
    code = """
steps(20)
if rank == size - 1:
    event()
    raise RuntimeError("the original error")
go_on()
"""
    ended = launch(3, STEPS + code)
    ended.assert_failed("RuntimeError: the original error")


@pytest.mark.parametrize("schedule", [pytest.param("ring", marks=pytest.mark.one_mpi), "unfused"])
def test_inside_an_operation(launch, schedule):
    """The other ranks get a PeerError, which they do not catch. It is not printed."""
    code = f"""
from fompi import Partial, Shard, Spec

def matmul(reads, writes):
    if rank == 2 and call == 5:
        event()
        raise RuntimeError("a bad product")
    np.matmul(*reads, out=writes[0])

specs = Spec((8, 2 * size), "float64", Shard(1)), Spec((2 * size, 3), "float64", Shard(0))
plan = fompi.plan(fompi.matmul_all_reduce, *specs, ranks=size, schedule={schedule!r})
step = fompi.bind(plan, comm=world, x=np.ones((8, 2)), w=np.ones((2, 3)), kernels={{"matmul": matmul}})
for call in range(1000):
    step()
"""
    ended = launch(3, code)
    ended.assert_failed("RuntimeError: a bad product", "fompi: on rank 2 in matmul_all_reduce by")
    assert "PeerError" not in ended.output


@pytest.mark.one_mpi
def test_inside_an_operation_that_the_other_ranks_start_late(launch):
    """The error is raised before they start it."""
    code = """
from fompi import Partial, Shard, Spec

def matmul(reads, writes):
    event()
    raise RuntimeError("a bad product")

specs = Spec((8, 2 * size), "float64", Shard(1)), Spec((2 * size, 3), "float64", Shard(0))
plan = fompi.plan(fompi.matmul_all_reduce, *specs, ranks=size, schedule="ring")
with fompi.bind(plan, comm=world, x=np.ones((8, 2)), w=np.ones((2, 3)), kernels={"matmul": matmul}) as step:
    if rank != 2:
        time.sleep(30)
    step()
"""
    ended = launch(3, code)
    ended.assert_failed("RuntimeError: a bad product")


def test_on_all_ranks_at_once(launch):
    """Only one rank, the lowest, prints its traceback."""
    code = """
fompi.all_reduce(np.ones(1), comm=world)
event()
raise RuntimeError(f"raised by {rank}")
"""
    ended = launch(3, code)
    ended.assert_failed("RuntimeError: raised by ")


@pytest.mark.one_mpi
def test_all_ranks_disagree(launch):
    """All ranks get the same error. It is printed once."""
    code = """
event()
fompi.all_reduce(np.ones(rank), comm=world)
"""
    ended = launch(3, code)
    ended.assert_failed("MismatchError: the ranks disagree in call 1 of world: rank 0 calls all_reduce(")


@pytest.mark.one_mpi
def test_on_ranks_whose_numbers_differ(launch):
    """Two communicators number the ranks in opposite orders. Still only one rank prints its traceback."""
    code = """
other = world.split(0, -rank, "reversed")
fompi.all_reduce(np.ones(1), comm=other)
fompi.all_reduce(np.ones(1), comm=world)
event()
raise RuntimeError("the original error")
"""
    ended = launch(3, code)
    ended.assert_failed("RuntimeError: the original error")


BAD_SUM = """
from fompi import Partial, Spec

def add(reads, writes):
    if rank == 2:
        event()
        raise ValueError("the original error")
    np.add(*reads, out=writes[0])

plan = fompi.plan(fompi.all_reduce, Spec((9,), "float64", Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9), kernels={"add": add})
"""


@pytest.mark.one_mpi
def test_an_error_that_wraps_a_peer_error(launch):
    """A program may wrap a PeerError in its own error. Only the original error of the other rank is printed."""
    code = """
try:
    step()
except fompi.PeerError as error:
    raise RuntimeError("training failed") from error
"""
    ended = launch(3, BAD_SUM + code)
    ended.assert_failed("ValueError: the original error")


@pytest.mark.one_mpi
def test_a_peer_error_if_the_failed_rank_catches_its_own(launch):
    """The rank that failed catches its error. Then one of the other ranks prints its traceback."""
    code = """
try:
    step()
except ValueError:
    time.sleep(30)
"""
    ended = launch(3, BAD_SUM + code)
    ended.assert_failed("PeerError: rank 2 failed in all_reduce by ring", "ValueError: the original error")


@pytest.mark.one_mpi
@pytest.mark.parametrize("world", [True, False])
def test_an_error_that_leaves_a_with_block_and_is_caught(launch, world):
    """A notebook or a job server catches it. The other ranks do not wait for their deadline, and nobody at exit."""
    code = """
try:
    with fompi.Communicator(name="own") as own:
        rank = own.rank
        fompi.all_reduce(np.ones(5), comm=own)
        if rank == 1:
            raise RuntimeError("the original error")
        try:
            fompi.all_reduce(np.ones(5), comm=own)
        except fompi.PeerError as error:
            print(f"rank {rank}: {error}", flush=True)
except RuntimeError:
    try:
        fompi.all_reduce(np.ones(5), comm=own)
    except fompi.StateError as error:
        print(f"rank {rank}: {error}", flush=True)
time.sleep(1)
"""
    ended = launch(3, code, world=world)
    ended.assert_clean()
    assert (
        ended.output.count("rank 1 left Communicator('own', rank 1 of 3) by an error: RuntimeError: the original") == 2
    )
    assert "rank 1: the communicator 'own' is closed" in ended.output


@pytest.mark.one_mpi
def test_in_a_thread(launch):
    code = """
def work():
    time.sleep(0.3)
    event()
    raise RuntimeError("the original error")

if rank == 1:
    threading.Thread(target=work, name="worker").start()
go_on()
"""
    ended = launch(3, STEPS + code)
    ended.assert_failed("Exception in thread worker", "RuntimeError: the original error")


def test_in_a_thread_while_all_main_threads_compute(launch):
    """No rank is inside fompi or MPI. The hook of the program keeps what it gets, as pytest's does."""
    code = """
threading.excepthook = [].append
world = fompi.Communicator()

def work():
    event()
    raise RuntimeError("the original error")

fompi.all_reduce(np.ones(1), comm=world)
if world.rank == 1:
    threading.Thread(target=work, name="worker").start()
while True:
    sum(range(1000))
"""
    ended = launch(3, code, world=False)
    ended.assert_failed("RuntimeError: the original error")


def test_while_the_other_ranks_compute(launch):
    code = """
fompi.all_reduce(np.ones(1), comm=world)
if rank == 1:
    event()
    raise RuntimeError("the original error")
time.sleep(30)
"""
    ended = launch(3, code)
    ended.assert_failed("RuntimeError: the original error")


@pytest.mark.one_mpi
def test_an_interrupt_while_waiting(launch):
    """One rank gets SIGINT inside a wait, as on Ctrl-C."""
    code = """
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt():
    event()
    os.kill(os.getpid(), signal.SIGINT)

if rank == 0:
    threading.Timer(0.5, interrupt).start()
    fompi.all_reduce(np.ones(1), comm=world)
else:
    time.sleep(30)
"""
    ended = launch(3, code)
    ended.assert_failed("KeyboardInterrupt")


@pytest.mark.one_mpi
def test_an_interrupt_inside_a_kernel(launch):
    code = """
from fompi import Partial, Spec

def add(reads, writes):
    if rank == 1:
        event()
        raise KeyboardInterrupt
    np.add(*reads, out=writes[0])

plan = fompi.plan(fompi.all_reduce, Spec((9,), "float64", Partial()), ranks=size, schedule="ring")
fompi.bind(plan, comm=world, x=np.ones(9), kernels={"add": add})()
"""
    ended = launch(3, code)
    ended.assert_failed("KeyboardInterrupt")


@pytest.mark.one_mpi
def test_in_a_program_with_its_own_exception_hook(launch):
    """The hook that the program installed before is called."""
    code = """
def hook(kind, error, trace):
    print("HOOKED", error, file=sys.stderr, flush=True)

sys.excepthook = hook
world = fompi.Communicator()
event()
if world.rank == 1:
    raise RuntimeError("the original error")
time.sleep(30)
"""
    ended = launch(2, code, world=False)
    assert ended.finished.returncode != 0 and ended.output.count("HOOKED the original error") == 1
    assert not ended.finished.timed_out


# ----------------------------------------------------------------------------------------------------------- early ends


def test_exit_with_a_status_on_one_rank(launch):
    """The other ranks wait for it, and get an error. The error is printed once."""
    code = """
steps(3)
if rank == 1:
    event()
    sys.exit(3)
go_on()
"""
    ended = launch(3, STEPS + code)
    ended.assert_failed("PeerError: rank ", "but rank 1 has ended; its last call was all_reduce (call 6 of world)")


def test_exit_with_a_status_at_the_end(launch):
    """No rank waits for another. The job has the status of that rank."""
    ended = launch(3, STEPS + "steps(3)\nsys.exit(3 if rank == 1 else 0)")
    assert ended.finished.returncode == 3 and ended.tracebacks == 0, ended.output
    assert not ended.finished.timed_out


@pytest.mark.parametrize(
    "call",
    [
        "fompi.all_reduce(np.ones(3), comm=world)",
        pytest.param("fompi.Mesh(a=size)", marks=pytest.mark.one_mpi),
        pytest.param("step()", marks=pytest.mark.one_mpi),
        "native()",
    ],
)
def test_a_rank_that_ends_before_the_others(launch, call):
    """It makes one call fewer than the other ranks."""
    code = f"""
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9))
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="unfused")
native = fompi.bind(plan, comm=world, x=np.ones(9))
step()
if rank == 0:
    event()
else:
    {call}
"""
    ended = launch(3, code)
    ended.assert_failed("rank 0 has ended; its last call was all_reduce by ring (bound 1, call 1)")


@pytest.mark.one_mpi
def test_exit_of_a_thread(launch):
    """SystemExit in a thread ends the thread, not the job."""
    code = """
thread = threading.Thread(target=sys.exit)
thread.start()
thread.join()
steps(3)
"""
    ended = launch(2, STEPS + code)
    ended.assert_clean()


# ---------------------------------------------------------------------------------------------------------- normal ends

NORMAL = {
    "nothing": "",
    "operations": "steps(5)",
    "closed": "steps(2)\nworld.close()",
    "used in a with block": """
with fompi.Communicator() as other, fompi.Mesh(a=size, b=1) as mesh:
    fompi.all_reduce(np.ones(3), comm=other)
    fompi.all_reduce(np.ones(3), comm=mesh["a"])
""",
    "never closed": """
mesh = fompi.Mesh(a=1, b=size)
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="unfused")
step = fompi.bind(plan, comm=mesh["b"], x=np.ones(9))
step()
""",
    "never waited for": """
pending = [fompi.all_reduce.start(np.ones(50000), comm=world, schedule=s) for s in ("ring", "unfused", "auto")]
""",
    "never waited for, and slow": """
if rank == 0:
    time.sleep(1)
fompi.all_gather_matmul.start(np.ones((50, 30)), np.ones((30, 40)), comm=world, schedule="ring")
if rank == 1:
    time.sleep(1)
""",
    "a started executor": """
plan = fompi.plan(fompi.all_reduce, fompi.Spec((50000,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(50000))
step.start()
""",
    "never ready": """
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9))
step.start("x")
step.ready("x", 0)
""",
    "one rank is slow": "steps(2)\nif rank == 1:\n    time.sleep(1.5)",
    "caught": """
try:
    fompi.all_reduce(np.ones(rank), comm=world)
except fompi.MismatchError:
    steps(2)
""",
    "MPI finalised by the program": "steps(2)\nfrom mpi4py import MPI\nworld.close()\nMPI.Finalize()",
    "large messages": """
x = np.ones((300000, 2))
for schedule in ("ring", "direct", "unfused"):
    fompi.all_reduce(x, comm=world, schedule=schedule)
    fompi.broadcast(x, comm=world, schedule=schedule)
""",
}


OF_FOMPI = {"operations", "closed", "used in a with block", "never closed", "never ready", "one rank is slow", "caught"}
"""These leave nothing in flight that the library would have to finish."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.one_mpi] * (what in OF_FOMPI)) for what in NORMAL]
)
def test_normal_ends(launch, what):
    """The job prints nothing, has status 0, leaves no process, and ends soon."""
    ended = launch(3, STEPS + NORMAL[what])
    ended.assert_clean()


def test_a_call_that_only_one_rank_starts(launch):
    """The other ranks never start that call. The job still ends."""
    ended = launch(2, "if rank == 0:\n    pending = fompi.all_reduce.start(np.ones(3), comm=world)")
    ended.assert_clean()


@pytest.mark.one_mpi
def test_one_rank(launch):
    ended = launch(1, STEPS + "steps(3)\nassert size == 1")
    ended.assert_clean()


def test_the_program_ends_mpi(launch):
    """Calls after MPI.Finalize() are typed errors: MPI itself would end the process."""
    code = """
from mpi4py import MPI

steps(3)
pending = fompi.all_reduce.start(np.ones(5), comm=world)
pending.wait()
plan = fompi.plan("all_reduce", fompi.Spec((5,), "float64", fompi.Partial()), ranks=size)
bound = fompi.bind(plan, comm=world, x=np.ones(5))
MPI.Finalize()
calls = {
    "call": lambda: fompi.all_reduce(np.ones(5), comm=world),
    "default": lambda: fompi.all_reduce(np.ones(5)),
    "start": lambda: fompi.all_reduce.start(np.ones(5), comm=world),
    "communicator": fompi.Communicator,
    "bound": bound,
    "split": lambda: world.split(0, 0, "x"),
}
for name, call in calls.items():
    try:
        call()
    except fompi.StateError as error:
        assert "MPI.Finalize()" in str(error), error
    else:
        raise AssertionError(name)
world.close()
emit("END", rank)
"""
    ended = launch(2, STEPS + code)
    ended.assert_clean()
    assert ended.lines("END") == ["0", "1"]


@pytest.mark.parametrize("where", ["main", pytest.param("thread", marks=pytest.mark.one_mpi), "exit"])
def test_an_error_after_the_end_of_mpi_keeps_its_words(launch, where):
    """Whoever does not catch it still reads it: no hook of fompi calls MPI then."""
    code = """
from mpi4py import MPI
import atexit
x = np.ones(3)
fompi.all_reduce(x, comm=world)
def call():
    fompi.all_reduce(x, comm=world)
if WHERE == "exit":
    atexit.register(call)
MPI.Finalize()
if WHERE == "main":
    call()
if WHERE == "thread":
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
"""
    ended = launch(2, code.replace("WHERE", repr(where)))
    assert "StateError" in ended.output and "MPI.Finalize" in ended.output, ended.output
    assert "Attempting to use an MPI" not in ended.output and not ended.finished.left_behind, ended.output
    assert not ended.finished.timed_out and (where != "main" or ended.finished.returncode != 0)


@pytest.mark.one_mpi
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_traceback_ends_at_the_line_of_the_program(launch, debug):
    """An error of fompi is about the call. The frames of fompi below it are for those who change fompi."""
    code = """
def layer(x):
    return fompi.all_gather_matmul(x, np.ones((5, 2)), comm=world)  # the wrong line
event()
layer(np.ones((2, 3)))
"""
    ended = launch(2, code, env={"FOMPI_DEBUG": debug})
    ended.assert_failed("ShapeError", "the wrong line")
    assert ("fompi/ops/" in ended.output) == (debug == "1"), ended.output
    assert ("more frames, inside of fompi" in ended.output) == (debug == "0")


@pytest.mark.one_mpi
def test_a_traceback_of_a_kernel_of_the_program_is_whole(launch):
    code = """
def matmul(reads, writes):
    raise KeyError("of the kernel")
spec = fompi.Spec((size * 2, 3), "float64", fompi.Shard(0))
plan = fompi.plan(fompi.all_gather_matmul, spec, fompi.Spec((3, 2 * size), "float64", fompi.Shard(1)), ranks=size)
step = fompi.bind(plan, comm=world, x=np.ones((2, 3)), w=np.ones((3, 2)), kernels={"matmul": matmul})
event()
step()
"""
    launch(2, code).assert_failed("of the kernel", "in matmul")


@pytest.mark.one_mpi
@pytest.mark.parametrize("has_comm", [False, True])
def test_a_hook_that_is_set_later_prints_once(launch, has_comm):
    """It calls the one before, as that of torch.distributed does."""
    code = f"""
before = sys.excepthook
def hook(*args):
    emit("HOOK", args[0].__name__)
    before(*args)
sys.excepthook = hook
if {has_comm}:
    world = fompi.Communicator()
event()
fompi.Machine.load("nowhere")
"""
    ended = launch(2, code, world=False)
    assert ended.finished.returncode != 0 and "HOOK LayoutError" in ended.output, ended.output
    assert ended.output.count("ends by an error") == 1, ended.output
    assert ended.output.count("LayoutError: no machine") == 1, ended.output


@pytest.mark.one_mpi
def test_an_error_whose_causes_close_a_circle(launch):
    """`raise a from b` can make one. The rank ended never, and the others waited."""
    ended = launch(
        2,
        """
first, second = ValueError("first"), RuntimeError("second")
first.__cause__, second.__cause__ = second, first
event()
if rank == 1:
    raise first
world.barrier()
""",
    )
    assert not ended.finished.timed_out and not ended.finished.left_behind and ended.finished.returncode, ended.output
    assert "ValueError: first" in ended.output


@pytest.mark.one_mpi
def test_interleave_on_a_part_of_the_ranks_waits_for_no_other_rank(mpirun):
    """The program has made no communicator of all ranks, and the last rank does nothing."""
    code = """
import numpy as np, fompi
from fompi.parallel.pipeline import Pipeline
from mpi4py import MPI
mine = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1)
class Stage:
    def forward(self, x): return x, None
    def backward(self, saved, dy): return dy
if MPI.COMM_WORLD.rank < MPI.COMM_WORLD.size - 1:
    x, how = [np.ones(3, np.float32)] * 6, dict(microbatches=6, activations=(3,), schedule="eager-1f1b")
    with fompi.Communicator(mine) as comm:
        assert fompi.interleave(lambda: fompi.all_reduce(np.ones(1), comm=comm)[0], lambda: 2) == [comm.size, 2]
        with Pipeline([Stage()], comm=comm, loss=lambda y, t: (0.0, y), overlap_f_b=True, **how) as pipe:
            pipe.step(x, x)
print("done")
"""
    finished = mpirun(3, "-c", code, seconds=40)
    assert finished.returncode == 0 and finished.stdout.count("done") == 3, finished.stderr


@pytest.mark.one_mpi
def test_an_interrupt_ends_the_functions_of_interleave_on_all_ranks(mpirun, tmp_path):
    """It comes while function 0 waits until it may run, and function 1 waits for the other rank, which comes later."""
    code = """
import os, signal, threading, time
from pathlib import Path
import numpy as np, fompi
from fompi.parallel.interleave import give_way
comm = fompi.Communicator()
if comm.rank == 0:
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
def second():
    while comm.rank == 1 and not Path("interrupted").exists():
        time.sleep(0.01)
    fompi.all_reduce(np.ones(3), comm=comm)
try:
    fompi.interleave(give_way, second)
    comm.barrier()
except KeyboardInterrupt:
    assert comm.rank == 0
    Path("interrupted").touch()
except fompi.PeerError as error:
    assert comm.rank == 1 and "KeyboardInterrupt" in str(error), error
assert fompi.all_reduce(np.ones(3), comm=comm)[0] == 2
print("done")
"""
    finished = mpirun(2, "-c", code, seconds=40, cwd=tmp_path)
    assert finished.returncode == 0 and finished.stdout.count("done") == 2, finished.stderr
