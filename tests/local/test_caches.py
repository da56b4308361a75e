"""What fompi keeps on disk for later runs. If nothing can be written, a program gets the same results, silently."""

from __future__ import annotations

import pytest

PROGRAM = """
import resource, sys
import numpy as np
import fompi
from fompi.backends import in_c, numpy as backend
from numba.core.caching import FunctionCache

def save(*arguments, keep=FunctionCache.save_overload):
    print(f"compiled code is kept by rank {comm.rank}", flush=True)
    keep(*arguments)

FunctionCache.save_overload = save
comm, in_c.run = fompi.Communicator(), None  # sums of half types are those of Numba
if "full" in sys.argv:  # from now on, each write to a file fails
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
x = np.arange(12.0).reshape(4, 3)
out = fompi.all_gather_matmul(x, np.eye(3), comm=comm, effort="measure")
assert (out == np.tile(x, (comm.size, 1))).all()
a, c = np.full(backend.LARGE + 1, 0x3F80, np.uint16), np.empty(backend.LARGE + 1, np.uint16)
backend.Numpy().bind("add", [a, a], [c], ["bfloat16"] * 2, ["bfloat16"])()
assert (c == 0x4000).all()
print("right", flush=True)
"""


def variables(home, temporary):
    """Those of a user with this home folder. Empty ones count as not set."""
    ours = {"HOME": str(home), "NUMBA_CACHE_DIR": f"{home}/numba", "TMPDIR": str(temporary)}
    return {**ours, "XDG_CACHE_HOME": "", "FOMPI_CACHE": ""}


@pytest.mark.parametrize("state", ["fine", "full", "read-only"])
def test_a_home(mpirun, state, tmp_path):
    """If it is fine, one rank of the host writes."""
    program, folder = tmp_path / "program.py", tmp_path / "home"
    program.write_text(PROGRAM)
    folder.mkdir()
    home = folder if state != "read-only" else "/dev/null/home"  # below a file: root cannot write there, either
    temporary = tmp_path if state == "fine" else "/dev/null/temporary"
    done = mpirun(2, program, state, env=variables(home, temporary))
    assert done.returncode == 0 and done.stdout.count("right") == 2 and not done.stderr, done.output
    kept = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kept == ({".json", ".nbi", ".nbc"} if state == "fine" else set())
    if state == "fine":
        assert done.stdout.count("compiled code is kept by rank 0") == done.stdout.count("compiled code is kept") == 1
