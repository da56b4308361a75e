"""An epoch over real links: a host that is cut off says nothing, and the deadline finds it."""

from __future__ import annotations

import re

CUT = """
import os, sys, time
from pathlib import Path

rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
for name in [name for name in os.environ if name.startswith(("PMI", "OMPI", "PRTE"))]:
    del os.environ[name]  # nothing but UCX knows of the others
os.environ.update(FOMPI_CARRIER="ucx", FOMPI_TIMEOUT="3")
import numpy as np
import fompi

folder = Path("meeting")
folder.mkdir(exist_ok=True)
(folder / f"new{rank}").write_text(fompi.members.handle())
(folder / f"new{rank}").rename(folder / f"h{rank}")
while len([*folder.glob("h*")]) < 3:
    time.sleep(0.01)
handles = [(folder / f"h{each}").read_text() for each in range(3)]
comm, x = fompi.members.join("first", handles, 20), np.ones(50000)
last, calls = time.monotonic(), 0
try:
    while True:
        assert (fompi.all_reduce(x, comm=comm) == 3).all()
        last, calls = time.monotonic(), calls + 1
        if rank == 1 and calls == 20:
            Path(os.environ["NETLAB_CONTROL"]).write_text("h1 cut\\n")
except (fompi.WaitTimeout, fompi.PeerError) as error:
    print(f"rank {rank}: {time.monotonic() - last:.1f} s: {error}", flush=True)
if rank != 1:
    comm.abort("rank 1 is cut off")
    comm = fompi.members.join("second", [handles[0], handles[2]], 20)
    assert (fompi.all_reduce(x, comm=comm) == 2).all()
    print(f"rank {rank} went on", flush=True)
"""


def test_a_host_that_is_cut_off(netlab):
    done = netlab("--hosts", 3, "--rate", "100mbit", "--trust-slow", code=CUT)
    assert done.returncode == 0 and not done.timed_out, done.output
    seconds = [float(text) for text in re.findall(r"rank [02]: ([0-9.]+) s: .*?no progress for 3 s", done.stdout)]
    assert len(seconds) == 2 and max(seconds) < 10, done.output
    assert "root cause: rank 1 does not answer" in done.stdout, done.output
    assert all(f"rank {rank} went on" in done.stdout for rank in (0, 2)), done.output
