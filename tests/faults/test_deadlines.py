"""No wait lasts for ever: after FOMPI_TIMEOUT seconds an error says which rank waits for which, to the root cause.

On both MPIs: a process that is stopped, waits inside the library, and those before MPI is up. All else is asked and
answered by fompi.
"""

from __future__ import annotations

import pytest

TIMEOUT, SOON = 2.0, 20.0


def run(launch, ranks, code, **options):
    """Run a job that must end soon after its deadline. `event()` marks when the wait began. Returns its output."""
    ended = launch(ranks, code, timeout=TIMEOUT, **options)
    assert not ended.finished.timed_out and not ended.finished.left_behind, ended.output
    assert ended.finished.returncode != 0 and ended.tracebacks == 1, ended.output
    assert TIMEOUT - 0.5 < ended.seconds < TIMEOUT + SOON, ended.output
    return ended.output


@pytest.mark.one_mpi
def test_a_rank_that_computes(launch):
    code = """
fompi.all_reduce(np.ones(3), comm=world)
event()
if rank == 1:
    time.sleep(30)
fompi.all_reduce(np.ones(3), comm=world)
"""
    output = run(launch, 3, code)
    assert "WaitTimeout: no progress for 2 s (FOMPI_TIMEOUT): rank " in output
    assert "waits for rank 1 to start call 2, all_reduce(" in output
    assert "root cause: rank 1 does not answer: it computes outside fompi, is stopped or dead, or cannot be" in output


def test_a_rank_that_is_stopped(launch):
    """A signal stops it in the middle of a bound operation."""
    code = """
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9))
step()
event()
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
step()
"""
    output = run(launch, 3, code)
    assert "root cause: rank 2 does not answer" in output
    assert "waits for rank 2 to send in all_reduce by ring (bound 1, call 2), op " in output


def test_a_collective_of_the_library(launch):
    """The MPI library does not say which rank is missing, so all ranks are asked."""
    code = """
spec = fompi.Spec((9,), "float64", fompi.Partial())
plan = fompi.plan(fompi.all_reduce, spec, ranks=size, schedule="unfused")
step = fompi.bind(plan, comm=world, x=np.ones(9))
step()
event()
if rank == 1:
    time.sleep(30)
step()
"""
    output = run(launch, 3, code)
    assert "waits for all ranks to start all_reduce by unfused (bound 1, call 2), op " in output
    assert "rank 1" in output.partition("FOMPI_TIMEOUT")[2] and "does not answer" in output


@pytest.mark.one_mpi
def test_a_part_that_is_never_ready(launch):
    """Rank 1 makes progress in fompi, but its program never says that x is ready."""
    code = """
plan = fompi.plan(fompi.all_reduce, fompi.Spec((9,), "float64", fompi.Partial()), ranks=size, schedule="ring")
step = fompi.bind(plan, comm=world, x=np.ones(9))
event()
if rank == 1:
    step.start("x")
    while True:
        step.progress()
step()
"""
    output = run(launch, 2, code)
    assert "rank 0 waits for rank 1 to send in all_reduce by ring (bound 1, call 1), op " in output
    assert "root cause: rank 1 does not wait in fompi; its last call was all_reduce by ring (bound 1, call 1)" in output


@pytest.mark.one_mpi
def test_a_chain(launch):
    """Rank 0 waits for rank 1, rank 1 waits for rank 2 in another operation, and rank 2 computes."""
    code = """
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
"""
    output = run(launch, 3, code)
    assert "(FOMPI_TIMEOUT): rank 0 waits for rank 1 to send in broadcast by direct (bound 1, call 1), op " in output
    assert "; rank 1 waits for rank 2 to send in broadcast by direct (bound 2, call 1), op " in output
    assert "; root cause: rank 2 does not answer" in output


@pytest.mark.one_mpi
def test_a_chain_over_communicators(launch):
    """Each wait is on another communicator. Rank 2 is not in the communicator on which rank 0 waits."""
    code = """
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
"""
    output = run(launch, 3, code)
    assert "rank 0 waits for rank 1 to start call 1, all_reduce(" in output
    assert "; rank 1 waits for rank 1 to start call 1, all_reduce(float64[:])" in output
    assert "(on pair 12, where that is world rank 2); world rank 2 is not in pair 01" in output


@pytest.mark.one_mpi
def test_a_circle(launch):
    """Two ranks wait for each other on two communicators."""
    code = """
other = world.split(0, rank, "other")
event()
fompi.all_reduce(np.ones(3), comm=(world, other)[rank])
"""
    output = run(launch, 2, code)
    assert "rank 0 waits for rank 1 to start call 2, all_reduce(" in output
    assert "these ranks wait for each other in a circle" in output


@pytest.mark.one_mpi
def test_a_circle_of_ranks_that_give_up_one_after_the_other(launch):
    """A rank that has just given up still says for whom it waited."""
    code = """
other = world.split(0, rank, "other")
event()
other.channel.timeout = 0.5
try:
    fompi.all_reduce(np.ones(3), comm=(world, other)[rank])
except fompi.WaitTimeout:
    if rank == 0:
        raise
    for _ in range(150):
        world.engine.receive_control()
        time.sleep(0.02)
"""
    output = run(launch, 2, code)
    assert "rank 0 waits for rank 1 to start call 2, all_reduce(" in output
    assert "these ranks wait for each other in a circle" in output


@pytest.mark.one_mpi
def test_a_communicator_that_not_all_ranks_create(launch):
    code = """
from mpi4py import MPI
event()
if rank == 1:
    time.sleep(30)
fompi.Communicator(MPI.COMM_WORLD)
"""
    output = run(launch, 3, code)
    assert "waits for rank 1 to start Communicator, the first call; root cause: rank 1 does not answer" in output


@pytest.mark.one_mpi
def test_a_rank_that_never_creates_its_first_communicator(launch):
    code = """
from mpi4py import MPI
event()
if MPI.COMM_WORLD.rank == 1:
    time.sleep(30)
fompi.Communicator()
"""
    output = run(launch, 3, code, world=False)
    assert "waits for rank 1 to start Communicator, the first call; root cause: rank 1 does not answer" in output


@pytest.mark.one_mpi
def test_a_mesh_that_not_all_ranks_create(launch):
    output = run(launch, 3, "event()\nif rank == 1:\n    time.sleep(30)\nfompi.Mesh(world.link.comm, a=size)")
    assert "FOMPI_TIMEOUT" in output


@pytest.mark.one_mpi
def test_a_split_that_not_all_ranks_call(launch):
    output = run(launch, 3, "event()\nif rank == 1:\n    time.sleep(30)\nworld.split(0)")
    assert "waits for rank 1 to start call 1, a split; root cause: rank 1 does not answer" in output


@pytest.mark.one_mpi
def test_a_missing_call(launch):
    """Rank 0 skips one call. Rank 1 is one call ahead, so it waits in a call that rank 0 never starts."""
    code = """
if rank == 1:
    fompi.all_reduce(np.ones(3), comm=world)
event()
fompi.all_reduce(np.ones(3), comm=world)
time.sleep(30)
"""
    output = run(launch, 2, code)
    assert "rank 1 waits for rank 0 to start call 2, all_reduce(" in output
    assert "root cause: rank 0 does not answer" in output


@pytest.mark.one_mpi
def test_an_abandoned_call_ends_on_all_ranks(launch):
    """The late rank gets an error when it starts the call. A new communicator works."""
    code = """
if rank == 1:
    time.sleep(3.5)
try:
    fompi.all_reduce(np.ones(3), comm=world)
    raise AssertionError("no error")
except (fompi.WaitTimeout, fompi.PeerError, fompi.StateError) as error:
    emit("CAUGHT", rank, type(error).__name__, error)
try:
    fompi.all_reduce(np.ones(3), comm=world)
    raise AssertionError("no error")
except fompi.StateError as error:
    assert "cannot be used any more: a call on it was abandoned" in str(error)
world.engine.timeout = 20
with fompi.Communicator(name="next") as other:
    for schedule in ("auto", "ring", "unfused"):
        assert (fompi.all_reduce(np.ones(3), comm=other, schedule=schedule) == size).all()
"""
    ended = launch(3, code, timeout=TIMEOUT)
    ended.assert_clean()
    caught = ended.lines("CAUGHT")
    assert len(caught) == 3 and sum("WaitTimeout" in line for line in caught) >= 1
    assert "abandoned the call: no progress for 2 s (FOMPI_TIMEOUT)" in caught[1]


@pytest.mark.one_mpi
def test_calls_in_another_order(launch):
    """Unbound calls that do not match raise an error. The ranks do not wait for each other."""
    code = """
x, w = np.ones((3, 3)), np.eye(3)
calls = [lambda: fompi.all_reduce(x, comm=world), lambda: fompi.all_gather_matmul(x, w, comm=world)]
event()
for call in reversed(calls) if rank == 1 else calls:
    call()
"""
    ended = launch(3, code)
    ended.assert_failed("MismatchError: the ranks disagree in call 1 of world", "rank 1 calls all_gather_matmul(")


@pytest.mark.one_mpi
def test_a_timeout_that_is_not_a_positive_number(launch):
    for text in ("soon", "0", "-1"):
        ended = launch(1, "", timeout=text)
        assert ended.finished.returncode != 0
        assert f"LaunchError: FOMPI_TIMEOUT={text}: give a number of seconds above 0" in ended.output


@pytest.mark.parametrize(("name", "wait"), [("Allreduce", ""), ("Iallreduce", ".Wait()")])
def test_a_rank_does_not_call_a_collective_of_the_library(launch, name, wait):
    """Small collectives of `fompi.mpi.Comm` are MPI's own, which wait for ever. The job ends instead."""
    ended = launch(
        3,
        f"""
from fompi import mpi
comm = mpi.Comm()
for _ in range(3):
    comm.{name}(np.ones(3), np.zeros(3)){wait}
if rank != 1:
    event()
    comm.{name}(np.ones(3), np.zeros(3)){wait}
time.sleep(30)
""",
        timeout=2,
    )
    assert not ended.finished.timed_out and not ended.finished.left_behind and ended.finished.returncode, ended.output
    assert f"WaitTimeout: it has waited 2 s (FOMPI_TIMEOUT) in {name} of the MPI library" in ended.output
    assert ended.seconds < 2 + SOON


@pytest.mark.parametrize("how", ["", ".Wait()", "test", "finalize", "Ibarrier", "Barrier"])
def test_a_rank_leaves_before_a_collective_of_the_library(launch, how):
    """Long before the deadline: a PeerError, or, where the library waits, the end of the job."""
    ended = launch(
        3,
        f"""
from fompi import mpi
comm, how = mpi.Comm(), {how!r}
x, y = np.ones(3), np.zeros(3)
comm.Iallreduce(x, y).Wait()
if rank == 1:
    if how == "finalize":
        from mpi4py import MPI
        MPI.Finalize()
    sys.exit()
try:
    if not how:
        comm.Allreduce(x, y)
    if how == "Barrier":
        comm.Barrier()
    request = comm.Ibarrier() if how == "Ibarrier" else comm.Iallreduce(x, y)
    while how == "test" and not request.Test():
        time.sleep(1e-3)
    request.Wait()
except fompi.PeerError as error:
    emit("CAUGHT", error)
os._exit(1)
""",
    )
    word = how if how in ("Ibarrier", "Barrier") else "Iallreduce" if how else "Allreduce"
    assert not ended.finished.timed_out, ended.output
    assert f"for rank 1 to start {word} of the MPI library, but rank 1 has ended" in ended.output


def test_a_rank_that_leaves_later_has_done_its_part(launch):
    """Rank 1 leaves once its part of a broadcast is done: the others, that come late, still get it."""
    ended = launch(
        3,
        """
from fompi import mpi
comm, x = mpi.Comm(), np.full(3, rank)
time.sleep(rank == 2)
comm.Ibcast(x, 1).Wait()
comm.Bcast(x, 1)
emit("GOT", x)
""",
    )
    ended.assert_clean()
    assert ended.lines("GOT") == ["[1 1 1]"] * 3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("fompi.all_reduce(np.ones(3))", "fompi.all_reduce"),
        pytest.param("fompi.Mesh(tp=3)", "Mesh", marks=pytest.mark.one_mpi),
    ],
)
def test_a_rank_does_not_come_to_the_first_call(launch, call, name):
    """All that have come name the call and the missing rank, though no communicator is there yet."""
    ended = launch(
        3,
        f"""
from fompi.mpi import transport
if transport.world()[0] != 1:
    try:
        {call}
    except fompi.WaitTimeout as error:
        emit("CAUGHT", error)
time.sleep(4)
os._exit(0)
""",
        timeout=1,
        world=False,
    )
    caught = ended.lines("CAUGHT")
    assert len(caught) == 2, ended.output
    assert all(f"waits for rank 1 to start {name}, the first call; root cause: rank 1 does not" in c for c in caught)
