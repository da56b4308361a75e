"""mypy reads the signatures of the public operations: it accepts good calls and refuses bad ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CALLS = """
import numpy as np
import fompi

x = np.ones((2, 2))
comm = fompi.Communicator()
fompi.all_gather(x, dim=1, comm=comm, schedule="ring", slices=(1, 2))
fompi.all_gather(x, shedule="ring")  # wrong
fompi.all_gather(x, x)  # wrong
fompi.all_gather(dim=0)  # wrong
fompi.matmul_reduce_scatter(x, x, bias=None, counts=[1, 1], effort="measure")
fompi.matmul_reduce_scatter(x)  # wrong
fompi.matmul_reduce_scatter(x, x, dim="rows")  # wrong
fompi.all_to_all.start(x, counts=[1, 1]).counts[0].bit_length()
fompi.all_to_all.start(x, slices="many")  # wrong
fompi.all_gather_matmul_many(x, (w for w in (x, x)), biases=None)
fompi.calibrate(comm, seconds_per_step=3)  # wrong
"""


@pytest.mark.timeout(200)
def test_calls(tmp_path):
    program = tmp_path / "calls.py"
    program.write_text(CALLS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", program],
        cwd=ROOT, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    refused = {int(line) for line in re.findall(r"calls\.py:(\d+): error", done.stdout)}
    wrong = {number for number, line in enumerate(CALLS.splitlines(), 1) if "# wrong" in line}
    assert refused == wrong, done.stdout + done.stderr
    assert 'did you mean "schedule"' in done.stdout
