"""`fompi digest`: the first call with other bits, on a real program; wrong input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import sys, numpy as np, fompi
comm = fompi.Communicator.of(None)
w = np.random.default_rng(0).standard_normal((64, 5)).astype("f4")
x = np.random.default_rng(1).standard_normal((12, 64)).astype("f4")
own = slice(comm.rank * 64 // comm.size, (comm.rank + 1) * 64 // comm.size)
rows = slice(comm.rank * 12 // comm.size, (comm.rank + 1) * 12 // comm.size)
fompi.all_gather(x[rows], comm=comm)
y = fompi.matmul_reduce_scatter(x[:, own], w[own], comm=comm, order=sys.argv[1])
with fompi.all_gather.bind(y, comm=comm) as gather:
    gather()
fompi.all_reduce.start(np.ones(3) / comm.size, comm=comm).wait()
"""


def digest(*arguments, cwd):
    command = [sys.executable, "-m", "fompi", "digest", *arguments]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_leaves_have_the_same_bits(folder):
    status, out, errors = digest("--ranks", "1,2,4", "program.py", "canonical(8)", cwd=folder)
    assert (status, out) == (0, "1 and 2 ranks: 4 results of calls have the same bits\n"
                                "1 and 4 ranks: 4 results of calls have the same bits\n"), errors  # fmt: skip


def test_the_first_call_that_differs(folder):
    status, out, errors = digest("--ranks", "2,4", "--keep", "kept", "--json", "program.py", "any", cwd=folder)
    (found,) = json.loads(out)
    assert status == 1 and found["compared"] == 4, errors
    assert found["differing"][0]["operation"] == "matmul_reduce_scatter"
    assert len([*(folder / "kept").glob("*/rank-*.jsonl")]) == 6


def test_words(folder):
    for arguments, words in (
        (("--ranks", "2", "program.py", "any"), "give two numbers of ranks or more"),
        (("--ranks", "1,2"), "which program?"),
        (("--ranks", "1,2", "nothing.py"), "nothing was compared"),
        (("--ranks", "1,2", "--launcher", "nowhere -n {ranks}", "program.py", "any"), "nowhere"),
        (("--ranks", "1,2", "--launcher", "", "program.py", "any"), "nothing was compared"),
    ):
        status, _, errors = digest(*arguments, cwd=folder)
        assert status == 2 and words in errors, (arguments, errors)
