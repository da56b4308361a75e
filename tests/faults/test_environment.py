"""Variables under MPI: all ranks refuse a bad value at once, a misspelt name is one warning, LD_PRELOAD works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("name", "text"), [("FOMPI_TIMEOUT", "abc"), ("FOMPI_PROGRESS", "x"), ("FOMPI_REPORT", "maybe")]
)
@pytest.mark.parametrize("ranks", ["all", "one"])
def test_a_bad_value_ends_all_ranks(launch, name, text, ranks):
    """Also if only one rank has it. The error names the variable, the value and what is allowed."""
    here = "True" if ranks == "all" else "rank == 1"
    code = f"""
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
if {here}:
    os.environ[{name!r}] = {text!r}
try:
    fompi.Communicator()
except fompi.FompiError as error:
    emit("CAUGHT", type(error).__name__, error)
"""
    ended = launch(3, code, world=False)
    caught = ended.lines("CAUGHT")
    assert len(caught) == 3 and all(f"{name}={text}: give " in line for line in caught), ended.output
    assert sum(line.startswith("LaunchError") for line in caught) == (3 if ranks == "all" else 1)


@pytest.mark.one_mpi
def test_a_misspelt_name_is_one_warning(launch):
    ended = launch(3, "fompi.Communicator().split(0)\nfompi.Communicator()", world=False, env={"FOMPI_TIMOUT": "3"})
    assert ended.finished.returncode == 0
    assert ended.output.count("UserWarning: FOMPI_TIMOUT is no variable of fompi: FOMPI_TIMEOUT is one") == 1, (
        ended.output
    )


PROFILER = """
#include <mpi.h>
static long sends;
int MPI_Isend(const void *data, int n, MPI_Datatype kind, int to, int tag, MPI_Comm comm, MPI_Request *request)
{
    ++sends;
    return PMPI_Isend(data, n, kind, to, tag, comm, request);
}
long sends_seen(void) { return sends; }
"""


def test_a_preloaded_profiler_sees_the_messages_of_c(launch, tmp_path):
    """It wraps MPI_Isend by LD_PRELOAD, and C calls the functions that mpi4py calls."""
    environment = Path(sys.executable).parents[1]
    library = next((environment / "lib").glob("libmpi.so.[0-9]*"))
    (tmp_path / "profiler.c").write_text(PROFILER)
    flags = ["-shared", "-fPIC", f"-I{environment}/include", f"-Wl,-rpath,{library.parent}", "-o", "profiler.so"]
    subprocess.run(["gcc", *flags, "profiler.c", library], cwd=tmp_path, check=True)
    code = f"""
import ctypes
seen = ctypes.CDLL({str(tmp_path / "profiler.so")!r}).sends_seen
from fompi.engine.native import engine
for call in range(30):
    before = seen()
    fompi.all_reduce(np.ones(4), comm=world)
emit("SEEN", seen() - before, engine())
world.close()
"""
    ended = launch(2, code, env={"LD_PRELOAD": str(tmp_path / "profiler.so")})
    assert ended.lines("SEEN") == ["1 C, and Python where C does not go on"] * 2, ended.output
