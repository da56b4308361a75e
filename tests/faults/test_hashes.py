"""Ranks with other builds of Python: `hash` is another number on each of them, and the order of a set another one."""

from __future__ import annotations

import pytest

PROGRAM = """
import builtins
import os
import sys

if "PYTHONHASHSEED" not in os.environ:
    seed = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": str(int(seed) + 1)})
of_python = hash
builtins.hash = lambda value: of_python(value) ^ of_python("seed")

import numpy as np
import torch

import fompi
from fompi.parallel.data import SGD, DataParallel

world = fompi.Communicator()
rank, size = world.rank, world.size
torch.manual_seed(0)
for call in range(5):
    x = np.ones((rank + 2, 3), np.float32)
    fompi.all_reduce(np.ones(4, np.float32), comm=world)
    fompi.all_gather(x, comm=world)
    fompi.reduce_scatter(np.ones((5, 3), np.float32), counts=[2, 3], comm=world)
    fompi.all_to_all(np.ones((5, 3)), counts=[2, 3] if rank else [1, 4], comm=world)
    fompi.all_to_all(np.ones((3 + call, 3)), counts=[3, call], comm=world)
    fompi.sum_replicated([x[:2], np.ones(3)], comm=world)
plan = fompi.plan(fompi.all_gather, fompi.Spec((6, 2), "float64", fompi.Shard(0)), ranks=size)
with fompi.bind(plan, comm=world, x=np.ones((3, 2))) as step:
    for counts in ([3, 3], [1, 2], [3, 0], None):
        step(counts=counts)
        step(counts=counts, label=f"counts {counts}")
params = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
for zero in (0, 2):
    with DataParallel(params, optimizer=SGD(0.1), comm=world, zero=zero, wire="int8", feedback=True) as dp:
        for _ in range(3):
            for name, p in params.items():
                dp.ready(name, np.ones_like(p))
            dp.step()
        dp.load_state_dict(dp.state_dict())
module = fompi.torch.DistributedDataParallel(torch.nn.Linear(3, 4), world)
for _ in range(3):
    module(torch.ones(2, 3)).sum().backward()
layer = fompi.torch.nn.ColumnParallelLinear(4, 4, comm=world)
layer(torch.ones(2, 4)).sum().backward()
fompi.torch.nn.load_full_state_dict(layer, fompi.torch.nn.full_state_dict(layer))
mesh = fompi.Mesh(world, dp=1, tp=size)
print("HASHES", of_python("seed") % 1000, flush=True)
world.close()
"""


@pytest.mark.one_mpi
def test_no_hash_of_python_is_exchanged(mpirun, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    finished = mpirun(2, "program.py", seconds=60, cwd=tmp_path, env={"FOMPI_TIMEOUT": "20"})
    hashes = finished.stdout.replace("HASHES", " ").split()
    assert finished.returncode == 0 and len({*hashes}) == 2, finished.output
