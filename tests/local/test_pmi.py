"""PMI-1 over a store: how processes of torchrun start MPI. Here the store is a dictionary, and ranks are threads."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter

import pytest
from stores import Store

from fompi.base.errors import LaunchError, WaitTimeout
from fompi.mpi import launcher, pmi

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "n1", "MASTER_PORT": "7"}


def met(store, nodes=("a", "a"), libraries=None, seconds=10.0, ranks=None):
    """What `meet` returns or raises on each rank. A rank of `ranks` may come as (rank, number of ranks)."""
    size = len(nodes)
    libraries = libraries or ["MPICH 5.0.2"] * 9

    def meet(came):
        rank, of = came if isinstance(came, tuple) else (came, size)
        try:
            return pmi.meet(store, rank, of, nodes[rank % size], libraries[rank], seconds)
        except Exception as error:
            return error

    ranks = [*range(size)] if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(meet, ranks))


def test_ranks_meet_again_on_the_same_store():
    """A launcher that restarts its processes may keep the store. The keys of the first job do not disturb the next."""
    store, names = Store(), set()
    for _ in range(3):
        jobs = met(store, ("a", "a", "b"))
        assert [job.rank for job in jobs] == [0, 1, 2] and {job.nodes for job in jobs} == {("a", "a", "b")}
        (name,) = {job.name for job in jobs}
        names.add(name)
    assert len(names) == 3


@pytest.mark.parametrize(("here", "missing"), [([0, 2], "ranks 1, 3"), ([1], "rank 0")])
def test_a_rank_that_does_not_come(here, missing):
    """All ranks that have come name the same ones."""
    errors = met(Store(), "aaaa", seconds=0.2, ranks=here)
    assert all(isinstance(error, WaitTimeout) for error in errors)
    for rank, error in zip(here, errors, strict=True):
        assert f"rank {rank} of 4 waited 0.2 s for {missing} to start MPI" in str(error)


def test_rank_0_does_not_come_again():
    """The tickets of the first job are still in the store, that of rank 0 too."""
    store = Store()
    met(store)
    (error,) = met(store, seconds=0.1, ranks=[1])
    assert "rank 1 of 2 waited 0.1 s for rank 0 to start MPI" in str(error)


@pytest.mark.parametrize(
    ("came", "words"),
    [
        ([(0, 2), (1, 3)], "rank 0 is one of 2 ranks, but rank 1 one of 3"),
        ([(0, 2), (2, 3)], "rank 0 is one of 2 ranks, but rank 2 one of 3"),
        ([(0, 3), (1, 3), (1, 3)], "another process was rank 1"),
        ([(0, 2), (0, 2)], "two processes are rank 0"),
    ],
)
def test_ranks_that_do_not_fit(came, words):
    """All that have come learn at once why MPI does not start, long before the deadline."""
    begun = perf_counter()
    errors = met(Store(), seconds=20.0, ranks=came)
    assert perf_counter() - begun < 15 and {type(error) for error in errors} == {LaunchError}
    assert all(words in str(error) for error in errors), errors


def test_what_an_earlier_job_objected_to_is_over():
    store = Store()
    met(store, seconds=20.0, ranks=[(0, 2), (1, 3)])
    assert [job.size for job in met(store, ("a", "a", "b"))] == [3, 3, 3]


def test_ranks_with_different_libraries():
    errors = met(Store(), "aaa", ["MPICH 5.0.2", "MPICH 5.0.2", "MPICH 4.3.0"])
    assert {type(error) for error in errors} == {LaunchError}
    assert {str(error) for error in errors} == {
        "rank 0 has loaded MPICH 5.0.2, but rank 2 MPICH 4.3.0: give all hosts the same MPI"
    }


@pytest.mark.parametrize(
    ("nodes", "mapping"),
    [
        ("aabb", "(0,2,2)"),
        ("aaab", "(0,1,3),(1,1,1)"),
        ("abcdd", "(0,3,1),(3,1,2)"),
        ("abab", "(0,2,1),(0,2,1)"),
        ("a", "(0,1,1)"),
    ],
)
def test_the_mapping_of_ranks_to_nodes(nodes, mapping):
    assert pmi.process_mapping(nodes) == f"(vector,{mapping})"


@pytest.fixture
def opened():
    """opened(environ) -> the socket of its PMI_FD, which is closed after the test."""
    with ExitStack() as stack:
        yield lambda environ: stack.enter_context(socket.socket(fileno=int(environ["PMI_FD"])))


@pytest.fixture
def bridged(opened):
    """bridged(seconds, size) -> for each rank of a job a function that asks a line and returns the answer."""
    with ExitStack() as stack:

        def connected(job, seconds, size):
            torchrun = {**TORCHRUN, "RANK": str(job.rank)}
            environ = {**torchrun, "PMIX_RANK": "3"}
            pmi.connect(job, environ, seconds)
            set_here = {name: environ[name] for name in environ.keys() - torchrun.keys() - {"PMI_FD"}}
            assert set_here == {
                "PMI_RANK": str(job.rank),
                "PMI_SIZE": str(size),
                launcher.CONNECTED: f"n1 7 {job.rank}",
            }
            lines = stack.enter_context(opened(environ).makefile("rw"))

            def ask(line):
                print(line, file=lines, flush=True)
                return lines.readline().rstrip("\n")

            return ask

        yield lambda seconds=10.0, size=2: [connected(job, seconds, size) for job in met(Store(), "a" * size)]


def test_what_mpi_asks(bridged):
    first, second = bridged()
    assert (
        first("cmd=init pmi_version=1 pmi_subversion=1") == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
    )
    assert first("cmd=get_maxes") == "cmd=maxes kvsname_max=256 keylen_max=256 vallen_max=1024 rc=0"
    name = first("cmd=get_my_kvsname")
    assert name == second("cmd=get_my_kvsname") and name.startswith("cmd=my_kvsname kvsname=")
    assert first("cmd=get_universe_size") == "cmd=universe_size size=2 rc=0"
    assert first("cmd=get_appnum") == "cmd=appnum appnum=0 rc=0"
    assert first("cmd=get kvsname=fompi key=PMI_process_mapping").endswith("value=(vector,(0,1,2))")
    assert second("cmd=get kvsname=fompi key=card") == "cmd=get_result rc=-1 msg=unknown_key"
    assert first("cmd=put kvsname=fompi key=card value=tcp=1#2").startswith("cmd=put_result rc=0")
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert {*pool.map(lambda ask: ask("cmd=barrier_in"), (first, second))} == {"cmd=barrier_out rc=0"}
    assert second("cmd=get kvsname=fompi key=card") == "cmd=get_result rc=0 msg=success value=tcp=1#2"
    assert second("cmd=finalize") == "cmd=finalize_ack rc=0"


def test_no_two_jobs_have_one_name(bridged):
    """MPICH names shared memory after it: a job would write into that of another one, or of one that was killed."""
    names = [bridged()[0]("cmd=get_my_kvsname") for _ in range(3)]
    assert len({*names}) == 3 and all(len(name) < 256 for name in names)


def test_what_it_does_not_know(bridged):
    """It refuses, and goes on: MPI_Comm_spawn and MPI_Publish_name raise an error."""
    ask, _ = bridged()
    assert ask("cmd=publish_name service=x port=y") == "cmd=publish_name_result rc=-1 msg=not_supported"
    assert ask("mcmd=spawn\nnprocs=1\nendcmd") == "cmd=spawn_result rc=-1 msg=not_supported"
    assert ask("garbage\n\ncmd=abort exitcode=3\n=\ncmd=get_appnum") == "cmd=appnum appnum=0 rc=0"


def test_a_barrier_has_a_deadline(bridged, capfd):
    """The connection closes, so that MPI ends the process. One sentence says why."""
    ask, _ = bridged(seconds=0.2, size=3)[:2]
    assert ask("cmd=barrier_in") == ""
    assert "fompi: rank 0 of 3: MPI_Init waited 0.2 s for all ranks: 1 of 3 have come" in capfd.readouterr().err


def test_the_answer_that_comes_before_the_question(opened):
    """MPICH says "finalize" when no thread of Python runs any more."""
    (job,) = met(Store(), "a")
    environ = {}
    bridge = pmi.connect(job, environ, 10.0)
    bridge.finalised()
    there = opened(environ)
    assert there.recv(100) == b"cmd=finalize_ack rc=0\n"
    there.sendall(b"cmd=finalize\n")
    assert there.recv(100) == b"cmd=finalize_ack rc=0\n"  # read by nobody in a job


def test_a_connection_that_is_closed_needs_no_answer():
    """Without this the thread that ends MPI would raise, and the exit would wait for it."""
    (job,) = met(Store(), "a")
    environ = {}
    bridge = pmi.connect(job, environ, 10.0)
    os.close(int(environ["PMI_FD"]))
    while bridge._connection.fileno() != -1:
        time.sleep(1e-3)
    bridge.finalised()


def test_who_needs_it():
    def is_bridged(library="MPICH", **variables):
        environ = {**TORCHRUN, **variables}
        return launcher.is_bridged(launcher.detect(environ), library, environ)

    assert is_bridged() and is_bridged("Intel MPI") and is_bridged(PMI_FD="7", PMI_RANK="0", PMI_SIZE="1")
    assert not is_bridged(MASTER_ADDR="") and not is_bridged("Open MPI") and not is_bridged(WORLD_SIZE="1")
    assert is_bridged(PMI_RANK="1", PMI_SIZE="4")  # srun --mpi=pmi2, with a torchrun of one process on each node
    environ = dict(TORCHRUN)
    pmi.connect(pmi.PmiJob(Store(), "x", 1, ("a",) * 4), environ, 10.0)
    assert not is_bridged(**environ)  # a child of a rank
    os.close(int(environ["PMI_FD"]))
    assert launcher.torchrun_refusal(environ, "MPICH") is None
    assert "-u PMI_SIZE FOMPI_SINGLETONS=1` to make it a job of one rank" in launcher.refusal(environ, "MPICH")
    assert is_bridged(**environ | {"MASTER_PORT": "8"})  # another torchrun, which such a child has started
    assert pmi.node_of({"GROUP_RANK": "3"}) == "3" and pmi.node_of({}) == os.uname().nodename
