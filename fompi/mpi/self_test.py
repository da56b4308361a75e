"""Does the MPI library really take addresses of a device? A child process tries it: a false claim ends in SIGSEGV.

    reason = self_test.failure("cuda")     # "" if it works, else one sentence

The child is an MPI job of one rank. It sends to itself: small, large, and with a collective.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import cache

SECONDS = 60
"""How long the child may take. It starts Python, MPI and the device."""

LAUNCHERS = (
    "PMI_", "PMIX_", "PMI2_", "OMPI_COMM_WORLD_", "OMPI_MCA_ess", "PRTE_", "MPI_LOCAL", "HYDI_", "SLURM_", "PALS_"
)  # fmt: skip
"""The beginnings of the variables with which a launcher tells a process which rank it is."""

_CHILD = """
import sys
import numpy as np
import fompi
from mpi4py import MPI

device = fompi.Device(sys.argv[1])
for nbytes in (8, 1 << 20):
    x = device.array(np.arange(nbytes, dtype=np.uint8))
    y = device.array(np.zeros(nbytes, np.uint8))
    source, dest = (MPI.buffer.fromaddress(a.ptr, nbytes) for a in (x, y))
    MPI.COMM_SELF.Sendrecv([source, MPI.BYTE], 0, 1, [dest, MPI.BYTE], 0, 1)
    if (y.get() != x.get()).any():
        sys.exit(3)
"""


def failure(kind: str, environ: Mapping[str, str] | None = None, seconds: float = SECONDS) -> str:
    """Why the MPI library cannot take memory of the device `kind` (`fompi.Device`). Empty: it can.

    Takes some seconds. Needs no MPI in this process, and does not disturb it.
    """
    import subprocess

    environ = os.environ if environ is None else environ
    alone = {name: text for name, text in environ.items() if not name.startswith(LAUNCHERS)}
    alone["FOMPI_GPU_AWARE"] = "0"  # else the child would start a child
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, kind], env=alone, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"a message of its memory was not there after {seconds:g} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"a message of its memory ended the process by {signal.Signals(-done.returncode).name}"
    if done.returncode == 3:
        return "a message of its memory arrived with other bytes"
    reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
    return f"a message of its memory failed: {reason}"


@cache
def failure_once(kind: str) -> str:
    """As `failure`, tried once per process."""
    return failure(kind)
