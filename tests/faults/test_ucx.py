"""Processes that UCX connects: what they compute, and what they learn when one of them dies or does not come."""

from __future__ import annotations

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
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {rank} is right" for rank in range(3)], done.output


@pytest.mark.parametrize("moment", [0.0, 0.31])
def test_a_killed_process_is_named_at_once(tmp_path, moment):
    done = start(tmp_path, KILLED, moment)
    assert not done.timed_out and not done.left_behind, done.output
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line[:6] for line in lines] == ["rank 0", "rank 2"], done.output
    assert "rank 1 is lost: " in done.stdout, done.output
    assert done.seconds < 35, done.output  # not the deadline


def test_a_process_that_does_not_come_is_named(tmp_path):
    alone = "import sys\nsys.argv[1:] = ['2', sys.argv[2]]\n" + START.replace("20.0", "3.0")
    done = start(tmp_path, alone)
    assert done.returncode and not done.timed_out, done.output
    assert "WaitTimeout: rank 0 of 3 has not come within 3 s" in done.stderr, done.output
