"""What fompi keeps on disk for later runs. If nothing can be written, a program gets the same results, silently."""

from __future__ import annotations

import pytest

PROGRAM = """
import resource, sys
import numpy as np
import fompi

comm = fompi.Communicator()
if "full" in sys.argv:  # from now on, each write to a file fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
x = np.arange(12.0).reshape(4, 3)
out = fompi.all_gather_matmul(x, np.eye(3), comm=comm, effort="measure")
assert (out == np.tile(x, (comm.size, 1))).all()
print("right", flush=True)
"""


def variables(home, temporary):
    """Those of a user with this home folder. Empty ones count as not set."""
    ours = {"HOME": str(home), "TMPDIR": str(temporary)}
    return {**ours, "XDG_CACHE_HOME": "", "FOMPI_CACHE": ""}


@pytest.mark.parametrize("state", ["fine", "full", "read-only"])
def test_a_home(mpirun, state, tmp_path):
    program, folder = tmp_path / "program.py", tmp_path / "home"
    program.write_text(PROGRAM)
    folder.mkdir()
    home = folder if state != "read-only" else "/dev/null/home"  # below a file: root cannot write there, either
    temporary = tmp_path if state == "fine" else "/dev/null/temporary"
    done = mpirun(2, program, state, env=variables(home, temporary))
    assert done.returncode == 0 and done.stdout.count("right") == 2 and not done.stderr, done.output
    kept = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kept == ({".json"} if state == "fine" else set())
