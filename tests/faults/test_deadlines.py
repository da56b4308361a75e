"""Nothing hangs: after FOMPI_TIMEOUT seconds the error names who waits for whom, back to the rank at the root."""

from __future__ import annotations

TIMEOUT = 2.0


def run(launch, ranks, code, **options):
    """The job ends soon after its deadline; `event()` marks when the wait began."""
    ended = launch(ranks, code, timeout=TIMEOUT, **options)
    assert not ended.finished.timed_out and not ended.finished.left_behind, ended.output
    assert ended.finished.returncode != 0 and ended.tracebacks == 1, ended.output
    assert TIMEOUT - 0.5 < ended.seconds < TIMEOUT + 6, ended.output
    return ended.output


def test_a_rank_that_computes(launch):
    output = run(
        launch,
        3,
        """
fompi.all_reduce(np.ones(3), comm=world)
event()
if rank == 1:
    time.sleep(30)
fompi.all_reduce(np.ones(3), comm=world)
""",
    )
    assert "WaitTimeout: after 2 s (FOMPI_TIMEOUT): rank " in output
    assert "waits for rank 1 to come to call 2, all_reduce(" in output
    assert "rank 1 at the root does not answer: it computes outside fompi, is stopped or dead, or cannot be" in output


def test_a_rank_that_is_stopped(launch):
    """In the middle of a bound operation, by a signal."""
    output = run(
        launch,
        3,
        """
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9))
step()
event()
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
step()
""",
    )
    assert "rank 2 at the root does not answer" in output
    assert "waits for rank 2 to send in all_reduce by ring (bound 1, call 2), op " in output


def test_a_collective_of_the_library(launch):
    """Nobody knows who is missing in it: all are asked."""
    output = run(
        launch,
        3,
        """
spec = fompi.Spec((9,), "float64", fompi.Partial())
plan = fompi.plan(fompi.all_reduce, spec, ranks=size, schedule="unfused")
step = fompi.bind(plan, comm=world, x=np.ones(9))
step()
event()
if rank == 1:
    time.sleep(30)
step()
""",
    )
    assert "waits for all ranks to come to all_reduce by unfused (bound 1, call 2), op " in output
    assert "rank 1" in output.partition("FOMPI_TIMEOUT")[2] and "does not answer" in output


def test_a_part_that_is_never_ready(launch):
    """The root is in fompi, and drives, but its program never says that x is ready."""
    output = run(
        launch,
        2,
        """
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9))
event()
if rank == 1:
    step.start("x")
    while True:
        step.progress()
step()
""",
    )
    assert "rank 0 waits for rank 1 to send in all_reduce by ring (bound 1, call 1), op " in output
    assert "rank 1 at the root does not wait in fompi; its last call was all_reduce by ring (bound 1, call 1)" in output


def test_a_chain(launch):
    """0 waits for 1 in one operation, 1 for 2 in another, 2 computes."""
    output = run(
        launch,
        3,
        """
def broadcast_from(root):
    spec = fompi.Spec((9,), "float64", fompi.Replicate())
    plan = fompi.plan(fompi.broadcast, spec, ranks=size, schedule="direct", root=root)
    return fompi.bind(plan, comm=world, x=np.ones(9))

first, second = broadcast_from(1), broadcast_from(2)
event()
if rank == 0:
    first()
if rank == 1:
    time.sleep(0.7)
    second()
time.sleep(30)
""",
    )
    assert "(FOMPI_TIMEOUT): rank 0 waits for rank 1 to send in broadcast by direct (bound 1, call 1), op " in output
    assert "; rank 1 waits for rank 2 to send in broadcast by direct (bound 2, call 1), op " in output
    assert "; rank 2 at the root does not answer" in output


def test_a_chain_over_communicators(launch):
    """Each link in another communicator; rank 0 shares none with rank 2 in which it waits."""
    output = run(
        launch,
        3,
        """
pairs = {}
for a, b in ((0, 1), (1, 2)):
    pair = world.split(0 if rank in (a, b) else 1 + rank, rank, f"pair {a}{b}")
    pairs[a, b] = pair
event()
if rank == 0:
    fompi.all_reduce(np.ones(3), comm=pairs[0, 1])
if rank == 1:
    time.sleep(0.5)
    fompi.all_reduce(np.ones(3), comm=pairs[1, 2])
time.sleep(30)
""",
    )
    assert "rank 0 waits for rank 1 to come to call 1, all_reduce(" in output
    assert "; rank 1 waits for rank 1 to come to call 1, all_reduce(float64[:])" in output
    assert "(on pair 12, where that is world rank 2)" in output


def test_a_circle(launch):
    """Two ranks wait for each other on two communicators."""
    output = run(
        launch,
        2,
        """
other = world.split(0, rank, "other")
event()
fompi.all_reduce(np.ones(3), comm=(world, other)[rank])
""",
    )
    assert "rank 0 waits for rank 1 to come to call 2, all_reduce(" in output
    assert "a circle" in output


def test_a_communicator_to_which_not_all_come(launch):
    output = run(
        launch,
        3,
        """
from mpi4py import MPI
event()
if rank == 1:
    time.sleep(30)
fompi.Communicator(MPI.COMM_WORLD)
""",
    )
    assert "of 3 waited 2 s (FOMPI_TIMEOUT) for all ranks to come to the creation of a communicator" in output


def test_a_rank_that_never_makes_its_first_communicator(launch):
    output = run(
        launch,
        3,
        """
from mpi4py import MPI
event()
if MPI.COMM_WORLD.rank == 1:
    time.sleep(30)
fompi.Communicator()
""",
        world=False,
    )
    assert "WaitTimeout: rank " in output


def test_a_mesh_to_which_not_all_come(launch):
    output = run(launch, 3, "event()\nif rank == 1:\n    time.sleep(30)\nfompi.Mesh(world.link.comm, a=size)")
    assert "FOMPI_TIMEOUT" in output


def test_a_split_to_which_not_all_come(launch):
    output = run(launch, 3, "event()\nif rank == 1:\n    time.sleep(30)\nworld.split(0)")
    assert "waits for rank 1 to come to call 1, a split; rank 1 at the root does not answer" in output


def test_a_missing_call(launch):
    """One rank skips an operation; the others are one call ahead, and then one rank waits in a call more."""
    output = run(
        launch,
        2,
        """
if rank == 1:
    fompi.all_reduce(np.ones(3), comm=world)
event()
fompi.all_reduce(np.ones(3), comm=world)
time.sleep(30)
""",
    )
    assert "rank 1 waits for rank 0 to come to call 2, all_reduce(" in output
    assert "rank 0 at the root does not answer" in output


def test_the_others_hear_of_it(launch):
    """Who gives up ends the call for all. The late rank gets an error when it comes; a new communicator works."""
    ended = launch(
        3,
        """
if rank == 1:
    time.sleep(3.5)
try:
    fompi.all_reduce(np.ones(3), comm=world)
    raise AssertionError("no error")
except (fompi.WaitTimeout, fompi.PeerError, fompi.StateError) as error:
    say("SAID", rank, type(error).__name__, error)
try:
    fompi.all_reduce(np.ones(3), comm=world)
    raise AssertionError("no error")
except fompi.StateError as error:
    assert "cannot be used after a call that was given up" in str(error)
world.engine.timeout = 20
with fompi.Communicator(name="next") as other:
    for schedule in ("auto", "ring", "unfused"):
        assert (fompi.all_reduce(np.ones(3), comm=other, schedule=schedule) == size).all()
""",
        timeout=TIMEOUT,
    )
    ended.assert_clean()
    said = ended.lines("SAID")
    assert len(said) == 3 and sum("WaitTimeout" in line for line in said) >= 1
    assert "gave up: after 2 s (FOMPI_TIMEOUT)" in said[1]


def test_calls_in_another_order(launch):
    """Unbound calls that do not match are told from each other, not waited for."""
    ended = launch(
        3,
        """
x, w = np.ones((3, 3)), np.eye(3)
calls = [lambda: fompi.all_reduce(x, comm=world), lambda: fompi.all_gather_matmul(x, w, comm=world)]
event()
for call in reversed(calls) if rank == 1 else calls:
    call()
""",
    )
    ended.assert_failed("MismatchError: the ranks disagree in call 1 of world", "rank 1 calls all_gather_matmul(")


def test_a_bad_deadline(launch):
    for text in ("soon", "0", "-1"):
        ended = launch(1, "", timeout=text)
        assert ended.finished.returncode != 0
        assert f"LaunchError: FOMPI_TIMEOUT={text}: give a number of seconds above 0" in ended.output
