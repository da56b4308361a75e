"""Ends and faults while the helper thread is at work: the same rules as without it."""

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
    "Without moving it."
    try:
        pending.result
    except fompi.StateError:
        return False
    return True
"""


# ---------------------------------------------------------------------------------------------------------------- ends

ENDS = {
    "at work": "step = begin()",
    "at work, then closed": "step = begin()\nstep.close()\nworld.close()",
    "at work for a rank that comes late": "if rank == 1:\n    time.sleep(1)\nstep = begin()",
    "asleep": "fompi.all_reduce.start(np.ones(9), comm=world).wait()\ntime.sleep(0.3)",
    "woken again and again": """
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
    "when the program finalises MPI": """
from mpi4py import MPI
fompi.all_reduce.start(np.ones(9), comm=world).wait()
world.close()
MPI.Finalize()
time.sleep(0.3)
""",
    "when the program finalises MPI in the middle": """
from mpi4py import MPI
pending = fompi.all_reduce.start(np.ones(50_000), comm=world)
while not is_finished(pending):
    time.sleep(1e-3)
MPI.Finalize()
time.sleep(0.3)
""",
    "in another thread's operation": """
thread = threading.Thread(target=lambda: fompi.all_reduce.start(np.ones(50_000), comm=world).wait())
thread.start()
""",
}


@pytest.mark.parametrize("what", ENDS)
def test_a_normal_end_while_the_helper_is(launch, what):
    """No word, no status, nothing left, and soon."""
    ended = launch(3, IN_FLIGHT + ENDS[what])
    ended.assert_clean()
    assert ended.finished.seconds < 15


def test_an_exit_status_while_the_helper_works(launch):
    ended = launch(2, IN_FLIGHT + "step = begin()\nsys.exit(3)")
    assert ended.finished.returncode == 3 and ended.tracebacks == 0, ended.output
    assert not ended.finished.timed_out and not ended.finished.left_behind


def test_an_exception_while_the_helper_works(launch):
    """On one rank; the others compute outside fompi with an operation in flight."""
    ended = launch(
        3,
        IN_FLIGHT
        + """
if rank == 1:
    time.sleep(0.3)
    event()
    raise RuntimeError("the first words")
pending = fompi.all_reduce.start(np.ones(50_000), comm=world)
time.sleep(30)
""",
    )
    ended.assert_failed("RuntimeError: the first words")


def test_a_rank_that_leaves_while_others_wait_behind_their_back(launch):
    """The helper cannot know how long its program wants to wait: the error comes with the wait."""
    ended = launch(
        2,
        IN_FLIGHT
        + """
if rank == 0:
    pending = fompi.all_reduce.start(np.ones(9), comm=world)
    time.sleep(1)
    event()
    pending.wait()
""",
    )
    ended.assert_failed("PeerError: rank 0 waits for rank 1 to come to call 1", "but rank 1 has ended")


def test_a_rank_whose_helper_is_at_work_answers(launch):
    """It computes outside fompi, but something is in flight there: it says what it did last."""
    ended = launch(
        3,
        IN_FLIGHT
        + """
other = world.split(0 if rank < 2 else 1, name="pair")
mine = fompi.all_reduce.start(np.ones(9), comm=other)
if rank == 1:
    held = fompi.all_gather.start(np.ones(9), comm=world)  # in flight as long as the others do not come to it
    time.sleep(30)
mine.wait()
event()
fompi.bind(
    fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=2), comm=other, x=np.ones(9)
) if rank == 0 else time.sleep(30)
""",
        timeout=2.0,
    )
    assert ended.finished.returncode != 0 and ended.tracebacks == 1 and not ended.finished.timed_out, ended.output
    assert "rank 0 waits for rank 1 to come to call 2, bind(" in ended.output
    assert "rank 1 at the root does not wait in fompi; its last call was all_gather (call 2 of world)" in ended.output


def test_a_child_by_fork(launch):
    """It has no helper and no part in MPI; the parent's helper goes on. (mpi4py finalises MPI in a child that exits as
    programs do, so children leave by os._exit, as those of multiprocessing.)"""
    ended = launch(
        2,
        IN_FLIGHT
        + """
import multiprocessing, warnings
warnings.simplefilter("ignore")  # Python's own about forks in a process with threads

def work():
    say("CHILD", threading.active_count(), (np.ones(9) * 2).sum())

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
say("PARENT", rank)
""",
    )
    ended.assert_clean()
    assert ended.lines("CHILD") == ["1 18.0"] * 4 and ended.lines("PARENT") == ["0", "1"]


# --------------------------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("mode", ["auto", "helper", "native", "poll"])
def test_every_mode_works(launch, mode):
    ended = launch(
        2,
        """
for schedule in ("ring", "direct", "unfused"):
    pending = fompi.all_reduce.start(np.ones(50_000), comm=world, schedule=schedule)
    time.sleep(0.01)
    assert (pending.wait() == size).all()
    assert (fompi.all_reduce(np.ones((600, 600)), comm=world, schedule=schedule) == size).all()
say("MODE", world.engine.progress_mode, *(t.name for t in threading.enumerate() if t.name != "MainThread"))
""",
        env={"FOMPI_PROGRESS": mode},
    )
    ended.assert_clean()
    wanted = {"poll": "poll", "native": "native fompi progress"}.get(mode, "helper fompi progress")
    assert ended.lines("MODE") == [wanted] * 2


def test_a_machine_that_moves_messages_by_itself_needs_little_help(launch, tmp_path):
    """FOMPI_PROGRESS=auto, by what `calibrate` has measured of the library."""
    path = tmp_path / "machine.json"
    replace(Machine.load("laptop"), native_share=0.97).save(path)
    code = """
y = fompi.all_reduce(np.ones(9), comm=world)
say("MODE", world.engine.progress_mode, world.engine.helper.pause, y[0])
"""
    ended = launch(2, code, env={"FOMPI_MACHINE": str(path)})
    ended.assert_clean()
    assert ended.lines("MODE") == ["native 4 ms 2.0"] * 2


def test_an_mpi_for_one_thread_has_no_helper(launch):
    """Somebody may be inside MPI at any time."""
    ended = launch(
        2,
        """
import mpi4py
mpi4py.rc.thread_level = "serialized"
world = fompi.Communicator()
assert (fompi.all_reduce.start(np.ones(9), comm=world).wait() == 2).all()
say("MODE", world.engine.progress_mode, threading.active_count())
""",
        world=False,
        env={"FOMPI_PROGRESS": "helper"},
    )
    ended.assert_clean()
    assert ended.lines("MODE") == ["poll 1"] * 2


def test_no_mode(launch):
    ended = launch(1, "", env={"FOMPI_PROGRESS": "nonsense"})
    assert ended.finished.returncode != 0
    assert "LaunchError: FOMPI_PROGRESS=nonsense: give one of auto, helper, native, poll" in ended.output


# ----------------------------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("mode", ["helper", "poll"])
def test_a_library_s_collective_to_which_one_rank_does_not_come(launch, mode):
    """It has agreed, but nobody drives it there: with a helper it comes all the same."""
    ended = launch(
        3,
        """
pending = fompi.all_reduce.start(np.ones(3), comm=world, schedule="unfused")
event()
if rank == 1:
    time.sleep(30 if os.environ["FOMPI_PROGRESS"] == "poll" else 3)
assert (pending.wait() == size).all()
""",
        timeout=2.0,
        env={"FOMPI_PROGRESS": mode},
    )
    if mode == "helper":
        ended.assert_clean()
        return
    assert ended.finished.returncode != 0 and ended.tracebacks == 1 and not ended.finished.timed_out, ended.output
    assert "WaitTimeout: after 2 s (FOMPI_TIMEOUT): rank " in ended.output
    assert "rank 1 at the root does not answer: it computes outside fompi" in ended.output


def test_all_who_do_not_answer_are_named(launch):
    ended = launch(
        4,
        """
fompi.all_reduce(np.ones(3), comm=world)
event()
if rank > 0:
    time.sleep(30)
fompi.all_reduce(np.ones(3), comm=world)
""",
        timeout=1.0,
    )
    assert ended.finished.returncode != 0 and ended.tracebacks == 1, ended.output
    assert "rank 1 at the root does not answer (nor does rank 2, 3): it computes" in ended.output


def test_a_kernel_that_takes_longer_than_the_deadline(launch):
    """The wait on one thread for a call whose kernel runs on another is no wait for other ranks."""
    ended = launch(
        2,
        IN_FLIGHT
        + """
def add(reads, writes):
    time.sleep(2.5)
    np.add(*reads, out=writes[0])

step = begin(60, {"add": add})
time.sleep(0.5)
assert (step.wait() == size).all()
""",
        timeout=1.0,
    )
    ended.assert_clean()


def test_a_communicator_after_a_call_that_was_given_up(launch):
    """Whatever is called on it says so at once, and quotes why."""
    ended = launch(
        2,
        """
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
    "clocks": lambda: fompi.read_clocks(world),
}
begun = time.perf_counter()
for name, call in calls.items():
    try:
        call()
    except fompi.StateError as error:
        assert "cannot be used after a call that was given up" in str(error), error
        assert "FOMPI_TIMEOUT" in str(error) and isinstance(error.__cause__, (fompi.WaitTimeout, fompi.PeerError))
    else:
        raise AssertionError(f"{name} goes on")
assert time.perf_counter() - begun < 0.5
""",
        timeout=1.0,
    )
    ended.assert_clean()
