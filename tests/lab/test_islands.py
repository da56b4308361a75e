"""Islands on hosts of their own: the cable of one is cut for some time. The others train on, and it comes again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from island_program import island
from replay_islands import replay

from fompi.members.epoch_log import lines_of

pytestmark = pytest.mark.one_mpi

WAIT = 2.0

PROGRAM = """
import os, sys, threading, time
from pathlib import Path

rank = int(os.environ["PMI_RANK"])
for name in [name for name in os.environ if name.startswith("PMI")]:
    del os.environ[name]  # an island is a process that knows of no other one
os.environ.update(FOMPI_TIMEOUT="60", FOMPI_MEMBERS_TOKEN="0123456789abcdef" * 3)
sys.path.insert(0, {tests!r})
import fompi
from island_program import run

def cut():
    while not Path("c.step").exists() or int(Path("c.step").read_text() or 0) < 40:
        time.sleep(0.05)
    for what in ("cut", "restore"):
        Path(os.environ["NETLAB_CONTROL"]).write_text(f"h2 {{what}}\\n")
        time.sleep({seconds})

if rank == 0:
    server = fompi.members.Server("10.77.0.1", 7777)
    threading.Thread(target=cut, daemon=True).start()
run("fompi://10.77.0.1:7777", "abc"[rank], {steps}, Path(), least=3, wait={wait}, pause=0.05)
time.sleep(3 if rank == 0 else 0)  # it serves the store
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("seconds", [5, pytest.param(30, marks=pytest.mark.soak)])
def test_a_cable_is_cut_for_some_time(netlab, tmp_path, seconds):
    code = PROGRAM.format(tests=str(Path(__file__).parents[1]), seconds=seconds, steps=100 + 20 * seconds, wait=WAIT)
    options = ("--hosts", 3, "--rate", "100mbit", "--trust-slow")
    done = netlab(*options, code=code, python=sys.executable, seconds=120)
    assert done.returncode == 0 and not done.timed_out, done.output
    pauses = {name: float((tmp_path / f"{name}.end").read_text()) for name in "abc"}
    print(f"longest pauses: {pauses} s")
    assert max(pauses["a"], pauses["b"]) < WAIT + 0.5, pauses
    assert seconds - WAIT < pauses["c"] < seconds + 10, pauses
    epochs = [line for _, line in lines_of(tmp_path / "a.epochs") if line["kind"] == "epoch"]
    assert [epoch["islands"] for epoch in epochs] == [["a", "b", "c"], ["a", "b"], ["a", "b", "c"]]
    assert len({(tmp_path / f"{name}.0.sha").read_text() for name in "abc"}) == 1
    logs = [tmp_path / f"{name}.epochs" for name in "abc"]
    assert replay(logs, island) == replay(logs[:1], island)
