"""The log of fompi, and programs of mpi4py that run unedited."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import logging
logging.basicConfig(format="%(levelname)s %(name)s %(message)s", level=logging.DEBUG)
import numpy as np
import fompi
comm = fompi.Communicator()
for _ in range(3):
    fompi.all_reduce(np.ones(3), comm=comm)
"""

UNEDITED = """
import sys
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
total, part = np.empty(200_000), np.empty(3)
request = comm.Iallreduce(np.full(200_000, comm.rank + 1.0), total)
request.Wait()
rows = comm.Split(comm.rank % 2)
rows.Allreduce(np.ones(3), part)
comm.Barrier()
if comm.rank == 0:
    print(type(comm).__module__, type(rows).__module__, total[0], part[0], sys.argv[1:])
"""


def test_the_log():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if " fompi " in line]
    assert done.returncode == 0 and len(lines) == 2, done.stderr  # a call whose plan exists logs nothing
    assert lines[0].startswith("INFO fompi world: rank 0 of 1, messages move by ")
    assert lines[1].startswith("DEBUG fompi world: rank 0 planned all_reduce(float64[:]) by ")


def test_a_program_of_mpi4py(mpirun, tmp_path):
    (tmp_path / "solve.py").write_text(UNEDITED)
    done = mpirun(2, "-m", "fompi.mpi", tmp_path / "solve.py", "--size", "5", seconds=50)
    assert done.returncode == 0 and not done.left_behind, done.output
    assert "fompi.ops.intracomm fompi.ops.intracomm 3.0 1.0 ['--size', '5']" in done.stdout, done.output
    assert "fompi report: 2 ranks" in done.stderr and "all_reduce(float64 x[200000])" in done.stderr
