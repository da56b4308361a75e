"""Outer steps between islands that die, come again and come late: what the others add, and what the late ones get."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import job
import numpy as np
import pytest
from island_program import island as a_island
from replay_islands import replay
from stores import Etcd, KilledServer, free_port

from fompi.base.errors import LayoutError, MismatchError
from fompi.members import Server
from fompi.members.epoch_log import lines_of

pytestmark = pytest.mark.one_mpi

ROOT = Path(__file__).parents[2]
EXAMPLE, REPLAY = ROOT / "examples" / "islands.py", ROOT / "tools" / "replay_islands.py"
PROGRAM_OF_ISLAND = ROOT / "tests" / "island_program.py"

PROGRAM = textwrap.dedent("""
    import json, os, signal, subprocess, sys, time
    from pathlib import Path
    folder, port, name, killed_after = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    import numpy as np
    import fompi
    from fompi.parallel.outer import OuterSteps

    def start(name, seconds):
        return subprocess.Popen([sys.executable, __file__, folder, port, name, str(seconds)])

    if name == "a":
        server = fompi.members.Server("127.0.0.1", int(port))
        others = [start("b", 0), start("c", killed_after)]
    drift = {"a": 1.0, "b": 2.0, "c": 6.0}[name]  # what an inner step takes from each parameter
    params = {"w": np.zeros(300), "v": np.zeros(7)}
    log, begun = [], time.monotonic()
    options = dict(sync_every=4, fragments=2, delay=1, outer_lr=1.0, outer_momentum=0.0, on_exchange=log.append)
    with fompi.islands.join(
        f"fompi://127.0.0.1:{port}", name=name, least=1, ttl=2.0, log=folder / f"{name}.epochs"
    ) as membership:
        with OuterSteps(params, comm=membership, **options) as outer:
            params |= outer.received(params.__getitem__)
            first, epochs, restarted = outer.steps, set(), False
            while outer.steps < 240:
                inner = {key: x - drift for key, x in params.items()}
                step, copies = outer.steps + 1, outer.state_dict()["outer"] if outer.steps % 2 else None
                if copies is not None:  # the next step sends something: what this island adds
                    with (folder / "added").open("a") as file:
                        print(step, name, *(float(copies[key][0] - inner[key][0]) for key in ("w", "v")), file=file)
                params = outer.step(inner)
                epochs.add((membership.epoch.number, len(membership.epoch.members)))
                time.sleep(0.02)
                if name == "c" and killed_after and time.monotonic() - begun > killed_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "a" and not restarted and others[1].poll() is not None:
                    others[1], restarted = start("c", 0), True
            print(f"{name} from step {first}: {sorted(epochs)}", flush=True)
            (folder / f"{name}.log").write_text(json.dumps([(n.step, n.fragment, n.islands) for n in log]))
            copies = outer.state_dict()["outer"]
            (folder / f"{name}.outer").write_text(json.dumps([float(copies[key][0]) for key in ("w", "v")]))
            if name == "a":
                time.sleep(1.0)  # it serves the store
    if name == "a":
        [other.wait(20) for other in others]
""")


@pytest.mark.parametrize("killed_after", [1.3, 1.7])
def test_an_island_is_killed_and_comes_again(tmp_path, killed_after):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(tmp_path), str(free_port()), "a", str(killed_after)]
    variables = {"FOMPI_TIMEOUT": "20", "OMP_NUM_THREADS": "1", "FOMPI_MEMBERS_TOKEN": "0123456789abcdef" * 3}
    done = job.run(command, 60, env=variables, cwd=tmp_path)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    assert done.stdout.count("from step 0") != 3, done.output  # c came again, and went on where the others were
    added = {}
    for line in (tmp_path / "added").read_text().splitlines():
        step, name, *terms = line.split()
        added.setdefault(int(step), {})[name] = list(map(float, terms))
    outer, log = [0.0, 0.0], json.loads((tmp_path / "a.log").read_text())
    assert [step for step, _, _ in log] == [*range(2, 240, 2)]  # a has never left one out
    for step, fragment, islands in log:
        here = added[step]
        if len(here) > islands:  # it died on the way
            here.pop("c")
        assert len(here) == islands, (step, here)
        outer[fragment] -= sum(terms[fragment] for terms in here.values()) / islands
    assert {islands for _, _, islands in log} >= {2, 3}, log
    for name in "abc":
        assert json.loads((tmp_path / f"{name}.outer").read_text()) == pytest.approx(outer), name
    replayed(tmp_path)


def island(name):
    """One of the islands of PROGRAM: what it begins with, and its inner step."""
    drift = {"a": 1.0, "b": 2.0, "c": 6.0}[name]
    return {"w": np.zeros(300), "v": np.zeros(7)}, lambda params: {key: x - drift for key, x in params.items()}


def replayed(folder):
    """The log of one island gives the same bits, and so do those of all. A log that was changed is refused."""
    logs = [folder / f"{name}.epochs" for name in "abc"]
    done = replay(logs[:1], island)
    assert done.exchanges == 119 and done.islands == ("a", "b", "c") and done.epochs > 2
    assert replay(logs, island) == done
    with pytest.raises(MismatchError, match=r"exchange \d+ \(fragment . after step \d+, epoch \d+\): .* in the log"):
        replay(logs, lambda name: island("a"))
    whole = logs[1].read_bytes()
    for at in (len(whole) // 2, 20, len(whole) - 3):  # one bit of a line, of its number, of the last line
        logs[1].write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(LayoutError, match=r"b.epochs, line \d+: it is not as it was written"):
            replay(logs, island)


@pytest.mark.timeout(400)
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_the_example(tmp_path, monkeypatch):
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", "0123456789abcdef" * 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    islands: list[subprocess.Popen[bytes]] = []

    def start(name, steps):
        with (tmp_path / name).open("ab") as lines:
            command = [sys.executable, EXAMPLE, server.address, name, str(steps)]
            islands.append(subprocess.Popen(command, stdout=lines, stderr=lines, cwd=tmp_path))
        return islands[-1]

    def wait_for(name, words, seconds=100):
        end = time.monotonic() + seconds
        while words not in (text := (tmp_path / name).read_text()):
            assert time.monotonic() < end, text
            time.sleep(0.05)
        return text

    with Server() as server:
        try:
            start("a", 1000000)
            wait_for("a", "1 islands")
            victim = start("b", 1000000)
            wait_for("a", "2 islands")
            victim.kill()
            (tmp_path / "a").write_text("")
            wait_for("a", "1 islands")
            start("b", 1000000)
            wait_for("a", "2 islands")
            assert "b: step" in wait_for("b", "2 islands")
            (tmp_path / "a").write_text("")
            wait_for("a", "2 islands")
        finally:
            for island in islands:
                island.kill()
                island.wait()
    lines = [line for _, line in lines_of(tmp_path / "a.epochs")]
    assert [0, 1] in [line["lacks"] for line in lines if line["kind"] == "epoch"]  # b has got the moments of a
    command = [sys.executable, REPLAY, "a.epochs", f"{EXAMPLE}:island"]
    done = job.run(command, 150, cwd=tmp_path)
    assert "of a, b: the same bits" in done.stdout, done.output


class Islands:
    """Islands of `island_program.py` as processes of their own, by their names."""

    def __init__(self, folder, address):
        self.folder, self.address, self.jobs = folder, address, {}
        self.said = (folder / "said").open("ab")

    def start(self, name, steps, launcher=(), **options):
        words = [*launcher, sys.executable, PROGRAM_OF_ISLAND, self.address, name, steps, self.folder]
        command = [str(word) for word in [*words, json.dumps(options)]]
        out = {"stdout": self.said, "stderr": self.said, "start_new_session": True, "cwd": self.folder}
        self.jobs[name] = subprocess.Popen(command, **out)

    def kill(self, name):
        """All its processes: torchrun starts each rank in a session of its own."""
        pids = [self.jobs[name].pid]
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError):
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.jobs[name].wait()

    def step(self, name):
        path = self.folder / f"{name}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for(self, name, step, seconds=60):
        end = time.monotonic() + seconds
        while self.step(name) < step:
            assert time.monotonic() < end and self.jobs[name].poll() is None, self.output
            time.sleep(0.02)

    def end(self, names, seconds=60):
        assert [self.jobs[name].wait(seconds) for name in names] == [0] * len(names), self.output

    def longest_pause(self, name):
        return float((self.folder / f"{name}.end").read_text())

    def lines(self, name, kind, key):
        return [line[key] for _, line in lines_of(self.folder / f"{name}.epochs") if line["kind"] == kind]

    def replayed(self, names):
        """The islands of a replay of the logs of these."""
        return replay([self.folder / f"{name}.epochs" for name in names], a_island).islands

    @property
    def output(self):
        return (self.folder / "said").read_text()


@pytest.fixture
def islands(tmp_path, monkeypatch):
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", "0123456789abcdef" * 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FOMPI_TIMEOUT", "60")
    with Server() as server:
        made = Islands(tmp_path, server.address)
        yield made
        for name in made.jobs:
            made.kill(name)
        made.said.close()


LAUNCHERS = {
    "mpirun": (["mpirun", "-n"], 0.01),
    "torchrun": (
        [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node"],
        0.05,
    ),
}
"""And the pause of a step: torchrun takes some seconds to start, in which the others should not come to their end."""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_islands_of_two_ranks(islands, launcher):
    """Jobs, one of which is killed and comes again. One of three ranks is refused on all of them."""
    if launcher == "torchrun":
        pytest.importorskip("torch")
    command, pause = LAUNCHERS[launcher]

    def start(name, ranks=2):
        islands.start(name, 400, [*command, ranks], ranks=ranks, least=2, pause=pause)

    start("a")
    start("b")
    islands.wait_for("b", 20)
    islands.kill("b")
    start("b")
    start("c", ranks=3)
    islands.end("ab", 100)
    assert islands.jobs["c"].wait(60) != 0
    refused = [(islands.folder / f"refused.{rank}").read_text() for rank in range(3)]
    assert refused == ["'c' has 3 ranks, but 'a' has 2"] * 3
    shas = [(islands.folder / f"{name}.{rank}.sha").read_text() for rank in (0, 1) for name in "ab"]
    assert shas[0] == shas[1] and shas[2] == shas[3] and shas[0] != shas[2]
    roles = islands.lines("a", "epoch", "roles")
    assert ["here", "here"] in roles and ["here"] in roles and ["here", "new"] in roles
    assert islands.replayed("a") == ("a", "b")


@pytest.mark.timeout(120)
def test_an_island_comes_in_an_epoch_that_another_does_not_enter(islands):
    """It is new again in the next one: so the log of the other one has all that it has taken over."""
    islands.start("a", 300)
    islands.start("b", 300, leaves=True)
    islands.wait_for("b", 20)
    islands.start("c", 300)
    islands.end("abc")
    times = {name: islands.lines(name, "epoch", "roles").count(["here", "here", "new"]) for name in "ab"}
    assert times["b"] == 1 and times["a"] in (1, 2), times  # 1: b was some steps ahead
    assert islands.replayed("b") == islands.replayed("abc") == ("a", "b", "c")


@pytest.mark.timeout(120)
def test_a_slow_island(islands):
    """The others wait for it so long as they are asked, and what it has trained counts by its rows in the next one."""
    for name, rows in (("a", 1), ("b", 3), ("c", 2)):
        islands.start(name, 350, rows=rows, weights="rows", rests_at=30 * (name == "c"), wait=1.0, least=3)
    islands.end("abc")
    assert islands.longest_pause("a") < 1.8 and islands.longest_pause("c") > 2.9
    assert ["here", "here", "slow"] in islands.lines("a", "epoch", "roles")
    weights = islands.lines("a", "exchange", "weights")
    assert [4, 12, 8] in weights and [4, 12] in weights
    again = next(i for i, each in enumerate(weights) if len(each) == 3 and len(weights[i - 1]) == 2)
    assert weights[again][2] > 8 or weights[again + 1][2] > 8, weights  # what it had trained when it rested
    assert islands.replayed("a") == ("a", "b", "c")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("store", [KilledServer, Etcd])
def test_the_store_is_killed_and_comes_again(islands, store, tmp_path):
    """Islands train on without it. One that dies meanwhile costs the others the time until the store is back."""
    if store is Etcd and not shutil.which("etcd"):
        pytest.skip("there is no etcd: apt-get install etcd-server")
    served = store(tmp_path / "data")
    islands.address = served.address
    try:
        for name in "abc":
            islands.start(name, 500, wait=1.0, least=3, pause=0.02)
        islands.wait_for("c", 40)
        served.stop()
        for name in "abc":  # longer than words in the store live
            begun = islands.step(name)
            time.sleep(1.0)
            islands.wait_for(name, begun + 20)
        islands.kill("c")
        time.sleep(1.0)
        served.start()
        islands.start("c", 500, wait=1.0, pause=0.02)
        islands.end("abc", 100)
    finally:
        served.stop()
    pauses = [islands.longest_pause(name) for name in "ab"]
    print(f"longest pauses: {pauses} s")
    assert max(pauses) < 8, pauses
    assert len({(tmp_path / f"{name}.0.sha").read_text() for name in "abc"}) == 1
    assert "new" in [roles[-1] for roles in islands.lines("a", "epoch", "roles")]
    assert islands.replayed("abc") == islands.replayed("a") == ("a", "b", "c")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_islands_are_killed_again_and_again(islands):
    """Fifty times, at any moment, also while they come. Those that are left end with the same outer copies."""
    chance, kills, steps = random.Random(7), 0, 10000
    for name in "abc":
        islands.start(name, steps)
    end, stood, last, longest = time.monotonic() + 400, time.monotonic(), 0, 0.0
    while kills < 50:
        time.sleep(chance.uniform(0.05, 2.5))
        assert time.monotonic() < end, islands.output
        if islands.step("a") > last:
            longest, stood, last = max(longest, time.monotonic() - stood), time.monotonic(), islands.step("a")
        victim = chance.choice("bc")
        islands.kill(victim)
        islands.start(victim, steps)
        kills += 1
        assert islands.jobs["a"].poll() is None, islands.output
    print(f"{kills} kills, {last} steps, {longest:.1f} s without a step at most")
    assert last > 50 and longest < 30
    for name in "abc":
        islands.kill(name)
    assert "MismatchError" not in islands.output
    command = [sys.executable, REPLAY, *(f"{name}.epochs" for name in "abc"), f"{PROGRAM_OF_ISLAND}:island"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=islands.folder)
    assert "of a, b, c: the same bits" in done.stdout, done
