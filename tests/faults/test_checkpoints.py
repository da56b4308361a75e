"""A job that is killed while it saves: the checkpoint before stays whole."""

import json
import random

import pytest

from fompi.parallel.opened import open_checkpoint

JOB = """
import os, signal, sys, threading, time
import numpy as np
import fompi

folder, seed = sys.argv[1], int(sys.argv[2])
world = fompi.Communicator()
boxes = fompi.Boxes.over((400_000,), fompi.Shard(0), world.size)
x = np.zeros(boxes.arrays[world.rank])
for step in range(1, 1000):
    x[...] = step
    fompi.save(folder, {"x": (x, boxes), "step": step}, step=step, comm=world)
    if step == 2 and world.rank == seed % world.size:
        delay = seed / 1000 % 0.04
        threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL))).start()
"""


def whole_step(folder):
    """The step of what is in the folder, of which every byte is as it was written."""
    found = open_checkpoint(folder)
    found.check()
    assert found.values["step"] == found.step >= 2
    (stored,) = found.arrays.values()
    assert sum(part.box.shape[0] for part in stored.parts) == 400_000
    return found.step


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_a_rank_is_killed_in_a_save(mpirun, tmp_path, count):
    rng = random.Random(count)
    for number in range(count):
        folder = tmp_path / str(number)
        finished = mpirun(2, "-c", JOB, str(folder), str(rng.randrange(10**6)), seconds=40)
        assert finished.returncode != 0 and not finished.timed_out, finished.output
        whole_step(folder)
        assert json.loads((folder / "checkpoint.json").read_text())["fompi"] == 1


def test_a_full_disk(mpirun, tmp_path):
    """The limit of a file's size, which the kernel refuses as it refuses a full disk."""
    limited = """
import resource
if world.rank == 1:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    fompi.save(folder, {"x": (x, boxes), "step": 9}, step=9, comm=world)
except fompi.FompiError as error:
    os.write(1, f"REFUSED {error}\\n".encode())
"""
    job = JOB.replace("range(1, 1000)", "range(1, 3)").replace("if step == 2", "if step > 2") + limited
    finished = mpirun(2, "-c", job, str(tmp_path / "run"), "0", seconds=40)
    assert finished.returncode == 0 and finished.stdout.count("REFUSED") == 2, finished.output
    assert finished.stdout.count("File too large. The old checkpoint stays") == 2, finished.output
    assert whole_step(tmp_path / "run") == 2
    assert len([*(tmp_path / "run").iterdir()]) == 3
