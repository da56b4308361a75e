"""Processes that UCX connects: what they compute, and what they learn when one of them dies or does not come."""

from __future__ import annotations

import re
import sys
import textwrap

import job
import pytest

pytestmark = pytest.mark.one_mpi

START = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, size = int(sys.argv[1]), 3
children = []
if rank == 0:
    children = [subprocess.Popen([sys.executable, __file__, str(other), *sys.argv[2:]]) for other in (1, 2)]
import numpy as np
import fompi
from fompi.mpi import transport

class Store:  # a folder, with the methods of torch's stores
    folder = Path(sys.argv[2])

    def path(self, key):
        return self.folder / key.replace("/", "_")

    def set(self, key, value):
        self.path(key + ".new").write_text(value)
        self.path(key + ".new").rename(self.path(key))

    def get(self, key):
        return self.path(key).read_bytes()

    def check(self, keys):
        return all(self.path(key).exists() for key in keys)

    def add(self, key, amount):
        self.path(f"{key} {rank}").touch()
        return len([*self.folder.glob(self.path(key).name + " *")])

transport.start_by_store(Store, rank, size, 20.0)
comm = fompi.Communicator()
"""

VALUES = START + textwrap.dedent("""
    generator = np.random.default_rng(0)
    all_x = [generator.standard_normal((5 + r, 8)).astype(np.float32) for r in range(size)]
    w = generator.standard_normal((8, 6)).astype(np.float32)
    whole = np.concatenate(all_x)
    for schedule in (None, "ring", "direct", "unfused", "sliced"):
        options = {} if schedule is None else {"schedule": schedule}
        y = fompi.all_gather_matmul(all_x[rank], w, comm=comm, **options)
        assert np.allclose(y, whole @ w, atol=1e-4), schedule
    for nbytes in (0, 4, 4000, 4000000):
        x = np.arange(nbytes // 4, dtype=np.int32) + rank
        assert (fompi.all_reduce(x, comm=comm) == 3 * np.arange(nbytes // 4) + 3).all(), nbytes
        assert (fompi.broadcast(x, root=1, comm=comm) == np.arange(nbytes // 4) + 1).all(), nbytes
    half = comm.split(rank % 2)
    assert fompi.all_reduce(np.ones(2), comm=half).tolist() == [2 - rank % 2] * 2
    bound = fompi.all_reduce.bind(x := np.full(3, rank + 1.0), comm=comm)
    for _ in range(3):
        assert bound().tolist() == [6.0] * 3
    bound.close()
    comm.barrier()
    comm.close()
    print(f"rank {rank} is right")
""")

KILLED = START + textwrap.dedent("""
    x = np.ones(1 << 16)
    fompi.all_reduce(x, comm=comm)
    moment, begun = float(sys.argv[3]), time.monotonic()
    try:
        while True:
            if rank == 1 and time.monotonic() - begun > moment:
                os.kill(os.getpid(), signal.SIGKILL)
            fompi.all_reduce(x, comm=comm)
    except fompi.PeerError as error:
        print(f"rank {rank} after {time.monotonic() - begun - moment:.1f} s: {error}", flush=True)
""")


def start(tmp_path, program, *words, seconds=50):
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "meeting").mkdir()
    command = [sys.executable, str(tmp_path / "program.py"), "0", str(tmp_path / "meeting"), *map(str, words)]
    variables = {"FOMPI_CARRIER": "ucx", "FOMPI_TIMEOUT": "40", "OMP_NUM_THREADS": "1"}
    return job.run(command, seconds, env=variables, cwd=tmp_path)


def test_values(tmp_path):
    done = start(tmp_path, VALUES)
    assert done.returncode == 0 and not done.left_behind, done.output
    assert all(f"rank {rank} is right" in done.stdout for rank in range(3)), done.output


@pytest.mark.parametrize("moment", [0.0, 0.31])
def test_a_killed_process_is_named_at_once(tmp_path, moment):
    done = start(tmp_path, KILLED, moment)
    assert not done.timed_out and not done.left_behind, done.output
    assert sorted(re.findall(r"rank (\d) after", done.stdout)) == ["0", "2"], done.output  # they may share a line
    assert "rank 1 is lost: " in done.stdout, done.output
    assert done.seconds < 35, done.output  # not the deadline


def test_a_process_that_does_not_come_is_named(tmp_path):
    alone = "import sys\nsys.argv[1:] = ['2', sys.argv[2]]\n" + START.replace("20.0", "3.0")
    done = start(tmp_path, alone)
    assert done.returncode and not done.timed_out, done.output
    assert "WaitTimeout: rank 2 of 3 waited 3 s for rank 0 to start UCX" in done.stderr, done.output


GROUPS = START + textwrap.dedent("""
    world = transport.start_mpi().COMM_WORLD
    one, other = (world.Split(rank != apart, rank) for apart in (2, 1))  # {0, 1}, {0, 2}
    both = [group.Idup() for group in (one, other)]  # made at the same time on rank 0
    first, second = (request.result() or group for group, request in both)
    world.Barrier()
    if rank == 0:
        values = np.zeros((2, 1))
        requests = [group.Irecv(value, 1, 5) for group, value in zip((first, second), values)]
        [request.Wait() for request in requests]
        assert values.tolist() == [[1.0], [2.0]], values
    else:
        time.sleep(0.5 * (rank == 1))
        (first if rank == 1 else second).Isend(np.full(1, float(rank)), 0, 5).Wait()
    for _ in range(3):
        world.Create_group(world.Get_group().Incl([0, 2, 1]), 7).Free()
    print(f"rank {rank} is right")
""")

ENDS = START + textwrap.dedent("""
    world = transport.start_mpi().COMM_WORLD
    if rank == 0:
        group = world.Dup()
        for tag in range(20):
            group.Isend(np.full(1000, float(tag)), 1, tag).Free()
        group.Free()  # nobody waits for these messages: they are sent all the same
    elif rank == 1:
        group, x = world.Dup(), np.zeros(1000)
        time.sleep(11)
        for tag in range(20):
            group.Irecv(x, 0, tag).Wait()
            assert (x == tag).all()
    else:
        world.Dup()
        os.kill(os.getpid(), signal.SIGKILL)  # one that is lost is not awaited
    print(f"rank {rank} is right")
""")


def test_groups_that_are_made_at_the_same_time(tmp_path):
    done = start(tmp_path, GROUPS)
    assert done.returncode == 0 and done.stdout.count("is right") == 3, done.output


def test_a_rank_ends_when_its_messages_have_come(tmp_path):
    done = start(tmp_path, ENDS)
    assert done.returncode == 0 and done.stdout.count("is right") == 2 and not done.timed_out, done.output
    assert done.seconds < 30, done.output  # nobody has waited for the deadline
