"""Ends and faults while the helper thread is working. The rules are the same as without it.

On both MPIs: a second thread in the library, also while it is finalised, and a fork.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fompi import Machine

IN_FLIGHT = """
helper = world.engine.helper
assert helper is not None

def begin(elements=50_000, kernels=None):
    plan = fompi.plan(
        fompi.all_reduce, fompi.Spec((elements,), "float64", fompi.Partial()), ranks=size, schedule="ring"
    )
    step = fompi.bind(plan, comm=world, x=np.ones(elements), kernels=kernels)
    step.start()
    return step

def is_finished(pending):
    "True if the operation is finished. Makes no progress."
    try:
        pending.result
    except fompi.StateError:
        return False
    return True
"""


# ---------------------------------------------------------------------------------------------------------------- ends

ENDS = {
    "working": "step = begin()",
    "working, then closed": "step = begin()\nstep.close()\nworld.close()",
    "working for a rank that is late": "if rank == 1:\n    time.sleep(1)\nstep = begin()",
    "asleep": "fompi.all_reduce.start(np.ones(9), comm=world).wait()\ntime.sleep(0.3)",
    "woken many times": """
for _ in range(5):
    fompi.all_reduce.start(np.ones(9), comm=world).wait()
    time.sleep(0.06)
""",
    "in a kernel": """
def add(reads, writes):
    time.sleep(0.3)
    np.add(*reads, out=writes[0])

step = begin(kernels={"add": add})
time.sleep(0.05)
""",
    "asleep when the program finalises MPI": """
from mpi4py import MPI
fompi.all_reduce.start(np.ones(9), comm=world).wait()
world.close()
MPI.Finalize()
time.sleep(0.3)
""",
    "awake when the program finalises MPI": """
from mpi4py import MPI
pending = fompi.all_reduce.start(np.ones(50_000), comm=world)
while not is_finished(pending):
    time.sleep(1e-3)
MPI.Finalize()
time.sleep(0.3)
""",
    "working for another thread": """
thread = threading.Thread(target=lambda: fompi.all_reduce.start(np.ones(50_000), comm=world).wait())
thread.start()
""",
}


OF_FOMPI = {"working, then closed", "working for a rank that is late", "asleep", "woken many times", "in a kernel"}
"""The library sees the same as when the helper works, or nothing."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.one_mpi] * (what in OF_FOMPI)) for what in ENDS]
)
def test_a_normal_end_while_the_helper_is(launch, what):
    """The job prints nothing, has status 0, leaves no process, and ends soon."""
    ended = launch(3, IN_FLIGHT + ENDS[what])
    ended.assert_clean()


def test_an_exit_status_while_the_helper_works(launch):
    ended = launch(2, IN_FLIGHT + "step = begin()\nsys.exit(3)")
    assert ended.finished.returncode == 3 and ended.tracebacks == 0, ended.output
    assert not ended.finished.timed_out and not ended.finished.left_behind


@pytest.mark.one_mpi
def test_an_exception_while_the_helper_works(launch):
    """One rank fails. The others compute outside fompi with an operation in flight."""
    code = """
if rank == 1:
    time.sleep(0.3)
    event()
    raise RuntimeError("the original error")
pending = fompi.all_reduce.start(np.ones(50_000), comm=world)
time.sleep(30)
"""
    ended = launch(3, IN_FLIGHT + code)
    ended.assert_failed("RuntimeError: the original error")


@pytest.mark.one_mpi
def test_a_rank_that_leaves_while_only_the_helper_of_another_rank_works(launch):
    """The helper raises no error, because the program does not wait yet. The program's wait raises it."""
    code = """
if rank == 0:
    pending = fompi.all_reduce.start(np.ones(9), comm=world)
    time.sleep(1)
    event()
    pending.wait()
"""
    ended = launch(2, IN_FLIGHT + code)
    ended.assert_failed("PeerError: rank 0 waits for rank 1 to start call 1", "but rank 1 has ended")


@pytest.mark.one_mpi
def test_a_rank_whose_helper_works_answers(launch):
    """It computes outside fompi with an operation in flight. It answers with the name of its last call."""
    code = """
other = world.split(0 if rank < 2 else 1, name="pair")
pending = fompi.all_reduce.start(np.ones(9), comm=other)
if rank == 1:
    held = fompi.all_gather.start(np.ones(9), comm=world)  # in flight until the other ranks start it
    time.sleep(30)
pending.wait()
event()
fompi.bind(
    fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=2), comm=other, x=np.ones(9)
) if rank == 0 else time.sleep(30)
"""
    ended = launch(3, IN_FLIGHT + code, timeout=2.0)
    assert ended.finished.returncode != 0 and ended.tracebacks == 1 and not ended.finished.timed_out, ended.output
    assert "rank 0 waits for rank 1 to start call 2, bind(" in ended.output
    assert "root cause: rank 1 does not wait in fompi; its last call was all_gather (call 2 of world)" in ended.output


def test_a_forked_child(launch):
    """It has no helper and does not use MPI. The parent's helper goes on.

    The child leaves by os._exit, as children of multiprocessing do. On a normal exit mpi4py would finalise MPI in it.
    """
    code = """
import multiprocessing, warnings
warnings.simplefilter("ignore")  # Python warns about a fork in a process with threads

def work():
    emit("CHILD", threading.active_count(), (np.ones(9) * 2).sum())

step = begin()
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
other = os.fork()
if other == 0:
    work()
    os._exit(0)
child.join()
assert child.exitcode == 0 and os.waitpid(other, 0)[1] == 0
assert (step.wait() == size).all()
assert (fompi.all_reduce(np.ones(9), comm=world) == size).all()
emit("PARENT", rank)
"""
    ended = launch(2, IN_FLIGHT + code)
    ended.assert_clean()
    assert ended.lines("CHILD") == ["1 18.0"] * 4 and ended.lines("PARENT") == ["0", "1"]


# --------------------------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.one_mpi) for mode in ("auto", "poll")), "helper", "library"]
)
def test_every_mode_works(launch, mode):
    code = """
for schedule in ("ring", "direct", "unfused"):
    pending = fompi.all_reduce.start(np.ones(50_000), comm=world, schedule=schedule)
    time.sleep(0.01)
    assert (pending.wait() == size).all()
    assert (fompi.all_reduce(np.ones((600, 600)), comm=world, schedule=schedule) == size).all()
emit("MODE", world.engine.progress_mode, *(t.name for t in threading.enumerate() if t.name != "MainThread"))
"""
    ended = launch(2, code, env={"FOMPI_PROGRESS": mode})
    ended.assert_clean()
    wanted = {"poll": "poll", "library": "library fompi progress"}.get(mode, "helper fompi progress")
    assert ended.lines("MODE") == [wanted] * 2


@pytest.mark.one_mpi
def test_a_machine_that_moves_messages_by_itself_needs_little_help(launch, tmp_path):
    """FOMPI_PROGRESS=auto uses what `calibrate` has measured of the library."""
    path = tmp_path / "machine.json"
    replace(Machine.load("laptop"), unaided_share=0.97).save(path)
    code = """
y = fompi.all_reduce(np.ones(9), comm=world)
emit("MODE", world.engine.progress_mode, world.engine.helper.pause, y[0])
"""
    ended = launch(2, code, env={"FOMPI_MACHINE": str(path)})
    ended.assert_clean()
    assert ended.lines("MODE") == ["library 4 ms 2.0"] * 2


def test_mpi_for_one_thread_has_no_helper(launch):
    """The program may be inside MPI at any time, so a second thread must not call it."""
    code = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
world = fompi.Communicator()
assert (fompi.all_reduce.start(np.ones(9), comm=world).wait() == 2).all()
emit("MODE", world.engine.progress_mode, threading.active_count())
"""
    ended = launch(2, code, world=False, env={"FOMPI_PROGRESS": "helper"})
    ended.assert_clean()
    assert ended.lines("MODE") == ["poll 1"] * 2


@pytest.mark.one_mpi
def test_an_unknown_mode(launch):
    ended = launch(1, "", env={"FOMPI_PROGRESS": "nonsense"})
    assert ended.finished.returncode != 0
    assert "LaunchError: FOMPI_PROGRESS=nonsense: give one of auto, helper, library, poll" in ended.output


# ----------------------------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("mode", ["helper", pytest.param("poll", marks=pytest.mark.one_mpi)])
def test_a_collective_of_the_library_on_a_rank_that_computes(launch, mode):
    """That rank has agreed to the call, but its program makes no progress. A helper makes progress for it."""
    code = """
pending = fompi.all_reduce.start(np.ones(3), comm=world, schedule="unfused")
event()
if rank == 1:
    time.sleep(30 if os.environ["FOMPI_PROGRESS"] == "poll" else 3)
assert (pending.wait() == size).all()
"""
    ended = launch(3, code, timeout=2.0, env={"FOMPI_PROGRESS": mode})
    if mode == "helper":
        ended.assert_clean()
        return
    assert ended.finished.returncode != 0 and ended.tracebacks == 1 and not ended.finished.timed_out, ended.output
    assert "WaitTimeout: no progress for 2 s (FOMPI_TIMEOUT): rank " in ended.output
    assert "root cause: rank 1 does not answer: it computes outside fompi" in ended.output


@pytest.mark.one_mpi
def test_all_ranks_that_do_not_answer_are_named(launch):
    code = """
fompi.all_reduce(np.ones(3), comm=world)
event()
if rank > 0:
    time.sleep(30)
fompi.all_reduce(np.ones(3), comm=world)
"""
    ended = launch(4, code, timeout=1.0)
    assert ended.finished.returncode != 0 and ended.tracebacks == 1, ended.output
    assert "root cause: rank 1 does not answer (nor does rank 2, 3): it computes" in ended.output


@pytest.mark.one_mpi
def test_a_kernel_that_takes_longer_than_the_deadline(launch):
    """While the kernel of a call runs on one thread, a wait for that call on another thread has no deadline."""
    code = """
def add(reads, writes):
    time.sleep(2.5)
    np.add(*reads, out=writes[0])

step = begin(60, {"add": add})
time.sleep(0.5)
assert (step.wait() == size).all()
"""
    ended = launch(2, IN_FLIGHT + code, timeout=1.0)
    ended.assert_clean()


@pytest.mark.one_mpi
def test_a_communicator_after_an_abandoned_call(launch):
    """Every call on it raises a StateError at once. The error quotes the reason."""
    code = """
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9))
if rank == 1:
    time.sleep(2.5)
try:
    step()
except (fompi.WaitTimeout, fompi.PeerError):
    pass
else:
    raise AssertionError("no error")
calls = {
    "step": step,
    "start": step.start,
    "an operation": lambda: fompi.all_reduce(np.ones(3), comm=world),
    "a start": lambda: fompi.all_reduce.start(np.ones(3), comm=world),
    "bind": lambda: fompi.bind(plan, comm=world, x=np.ones(9)),
    "split": lambda: world.split(0),
    "a mesh": lambda: fompi.Mesh(world, a=size),
    "gathering": lambda: fompi.gather_traces([], world),
}
world.engine.timeout = 1000.0  # a call that waits now is killed with the job
for name, call in calls.items():
    try:
        call()
    except fompi.StateError as error:
        assert "cannot be used any more: a call on it was abandoned" in str(error), error
        assert "FOMPI_TIMEOUT" in str(error) and isinstance(error.__cause__, (fompi.WaitTimeout, fompi.PeerError))
    else:
        raise AssertionError(f"{name} raised no error")
"""
    ended = launch(2, code, timeout=1.0)
    ended.assert_clean()
