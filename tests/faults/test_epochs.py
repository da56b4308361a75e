"""Epochs whose members die at any moment: who is told, how soon, and what the survivors compute afterwards."""

from __future__ import annotations

import re
import sys
import textwrap

import job
import pytest

pytestmark = pytest.mark.one_mpi

START = """
import os, random, signal, subprocess, sys, threading, time
from pathlib import Path
folder, rank, moment, seed = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if rank == 0:
    children = [subprocess.Popen([sys.executable, __file__, folder, str(other), *sys.argv[3:]]) for other in (1, 2)]
import numpy as np
import fompi
from fompi.members import handle, join

def put(key, text):
    (folder / f"{key}.new").write_text(text)
    (folder / f"{key}.new").rename(folder / key)

def get(key, seconds=20):
    end = time.monotonic() + seconds
    while not (folder / key).exists():
        assert time.monotonic() < end, key
        time.sleep(0.002)
    return (folder / key).read_text()

def kill():
    put("killed", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

def kill_soon(most):  # at some moment in the next so many seconds
    delay = random.Random(seed).uniform(0, most)
    threading.Thread(target=lambda: (time.sleep(delay), kill())).start()

put(f"handle{rank}", handle())
handles = [get(f"handle{other}") for other in range(3)]
"""

DIES = START + textwrap.dedent("""
    x = np.arange(1 << (18 if moment in ("sum", "started") else 6)) + rank

    def sums(comm, times):  # of random sizes, checked
        sizes = random.Random(seed)
        for _ in range(times):
            n = sizes.randrange(len(x))
            total = fompi.all_reduce(x[:n], comm=comm)
            assert (total == comm.size * np.arange(n) + sum(alive)).all()

    alive, told, comm = [0, 1, 2], None, None
    try:
        if rank == 1 and moment == "joining":
            kill_soon(0.02)
        comm = join("first", handles, 20)
        sums(comm, 30)
        if moment == "idle":
            if rank == 1:
                time.sleep(random.Random(seed).uniform(0, 0.3))
                kill()
            get("killed")
        if rank == 1 and moment in ("agreement", "sum"):
            kill_soon(0.3)
        if moment == "started":
            pending = fompi.all_reduce.start(x, comm=comm)
            if rank == 1:
                kill_soon(0.003)
            pending.wait()
        if moment == "reconfigure":
            comm.abort("another epoch")
            if rank == 1:
                kill_soon(0.02)
            comm = join("second", handles, 20)
        sums(comm, 1000000)
    except fompi.PeerError as error:
        told = time.monotonic()
        print(f"rank {rank}: told after {told - float(get('killed')):.3f} s: {error}", flush=True)
    if comm is not None:
        comm.abort("rank 1 is lost")
    alive = [0, 2]
    comm = join("last", [handles[0], handles[2]], 20)
    sums(comm, 30)
    comm.close()
    print(f"rank {rank} went on, {threading.active_count()} threads", flush=True)
    if rank == 0:
        [child.wait(20) for child in children]
""")

MOMENTS = ("idle", "sum", "started", "agreement", "reconfigure", "joining")


def start(tmp_path, program, *words, seconds=60):
    (tmp_path / "program.py").write_text(program)
    folder = tmp_path / "-".join(["meeting", *map(str, words)])
    folder.mkdir()
    command = [sys.executable, str(tmp_path / "program.py"), str(folder), "0", *map(str, words)]
    return job.run(command, seconds, env={"FOMPI_TIMEOUT": "30", "OMP_NUM_THREADS": "1"}, cwd=tmp_path)


def check(done):
    """Both survivors were told at once, and went on."""
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    assert all(f"rank {rank} went on" in done.stdout for rank in (0, 2)), done.output
    waits = [float(seconds) for seconds in re.findall("told after ([0-9.]+) s", done.stdout)]
    assert len(waits) == 2 and "rank 1" in done.stdout, done.output
    return waits


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_others_go_on_without_a_dead_member(tmp_path, moment):
    assert max(check(start(tmp_path, DIES, moment, 1))) < 10  # not the deadline


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_member_dies_at_any_moment(tmp_path):
    waits = [check(start(tmp_path, DIES, MOMENTS[seed % 6], seed)) for seed in range(50)]
    slowest = max(max(each) for each in waits)
    print(f"told after {slowest:.2f} s at most")
    assert slowest < 1.0
