"""Outer steps between islands that die, come again and come late: what the others add, and what the late ones get."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import socket
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
from replay_islands import replay

from fompi.base.errors import LayoutError, MismatchError
from fompi.members import Server
from fompi.members.epoch_log import lines_of

pytestmark = pytest.mark.one_mpi

ROOT = Path(__file__).parents[2]
EXAMPLE, REPLAY = ROOT / "examples" / "islands.py", ROOT / "tools" / "replay_islands.py"

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


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


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


ISLAND = textwrap.dedent("""
    import json, sys, time
    from pathlib import Path
    import numpy as np
    import fompi
    from fompi.parallel.outer import OuterSteps

    def island(name, rank=0):
        waves = {"w": np.cos(np.arange(3000) + ord(name) + rank), "v": np.cos(np.arange(7) + ord(name))}
        start = {key: np.zeros(wave.shape, np.float32) for key, wave in waves.items()}
        return start, lambda params: {key: x - (waves[key] + x / 50).astype(x.dtype) for key, x in params.items()}

    def run(address, name, steps, folder, rests_at=0, rows=1, wait=None, least=1, ranks=1, **options):
        comm = fompi.Communicator() if ranks > 1 else None
        rank = comm.rank if comm else 0
        params, inner = island(name, rank)
        options = dict(sync_every=4, fragments=2, delay=1, wire="int8", feedback=True) | options
        log, last, longest = folder / f"{name}.epochs", time.monotonic(), 0.0
        how = dict(least=least, alone=True, ttl=1.5, wait=wait, log=log, comm=comm)
        with fompi.islands.join(address, name=name, **how) as islands:
            with OuterSteps(params, comm=islands, **options) as outer:
                params |= outer.received(params.__getitem__)
                while outer.steps < steps:
                    params = outer.step(inner(params), rows=rows)
                    (folder / f"{name}.step").write_text(str(outer.steps))
                    time.sleep(3 if outer.steps == rests_at else 0.01)
                    last, longest = time.monotonic(), max(longest, time.monotonic() - last)
                (folder / f"{name}.{rank}.sha").write_text(outer.sha256(0) + outer.sha256(1))
        (folder / f"{name}.end").write_text(f"{longest:.2f}")

    if __name__ == "__main__":
        try:
            run(*sys.argv[1:3], int(sys.argv[3]), Path(sys.argv[4]), **json.loads([*sys.argv, "{}"][5]))
        except fompi.MismatchError as error:
            sys.exit(Path(f"refused.{fompi.Communicator().rank}").write_text(str(error)))
""")


@pytest.mark.timeout(120)
def test_islands_of_two_ranks(tmp_path, monkeypatch):
    """Jobs of mpirun, one of which is killed and comes again. One of three ranks is refused on all of them."""
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", "0123456789abcdef" * 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "island.py").write_text(ISLAND)
    jobs = {}
    with Server() as server, (tmp_path / "said").open("ab") as said:

        def start(name, ranks=2):
            program = ["island.py", server.address, name, "400", tmp_path, json.dumps({"ranks": ranks, "least": 2})]
            command = ["mpirun", "-n", str(ranks), sys.executable, *program]
            jobs[name] = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True, cwd=tmp_path)

        def wait_for(name, step):
            end, path = time.monotonic() + 60, tmp_path / f"{name}.step"
            while not path.exists() or int(path.read_text() or 0) < step:
                assert time.monotonic() < end and jobs[name].poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.02)

        try:
            start("a")
            start("b")
            wait_for("b", 20)
            os.killpg(jobs["b"].pid, signal.SIGKILL)
            start("b")
            start("c", ranks=3)
            assert [jobs[name].wait(60) for name in "ab"] == [0, 0], (tmp_path / "said").read_text()
            assert jobs["c"].wait(60) != 0
        finally:
            for each in jobs.values():
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    refused = [(tmp_path / f"refused.{rank}").read_text() for rank in range(3)]
    assert refused == ["'c' has 3 ranks, but 'a' has 2"] * 3
    shas = [(tmp_path / f"{name}.{rank}.sha").read_text() for rank in (0, 1) for name in "ab"]
    assert shas[0] == shas[1] and shas[2] == shas[3] and shas[0] != shas[2]
    roles = [line.get("roles") for _, line in lines_of(tmp_path / "a.epochs")]
    assert ["here", "here"] in roles and ["here"] in roles and ["here", "new"] in roles
    make = runpy.run_path(str(tmp_path / "island.py"), run_name="replayed")["island"]
    assert replay([tmp_path / "a.epochs"], make).islands == ("a", "b")


@pytest.mark.timeout(120)
def test_a_slow_island(tmp_path, monkeypatch):
    """The others wait for it so long as they are asked, and what it has trained counts by its rows in the next one."""
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", "0123456789abcdef" * 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "island.py").write_text(ISLAND)
    with Server() as server:
        islands = []
        for name, rows in (("a", 1), ("b", 3), ("c", 2)):
            more = {"rows": rows, "weights": "rows", "rests_at": 30 * (name == "c"), "wait": 1.0, "least": 3}
            command = ["island.py", server.address, name, "350", tmp_path, json.dumps(more)]
            islands.append(subprocess.Popen([sys.executable, *command], cwd=tmp_path))
        try:
            assert [island.wait(60) for island in islands] == [0, 0, 0]
        finally:
            for island in islands:
                island.kill()
                island.wait()
    assert float((tmp_path / "a.end").read_text()) < 2.8 and float((tmp_path / "c.end").read_text()) > 2.9
    lines = [line for _, line in lines_of(tmp_path / "a.epochs")]
    roles = [line["roles"] for line in lines if line["kind"] == "epoch"]
    assert ["here", "here", "slow"] in roles, roles
    weights = [line["weights"] for line in lines if line["kind"] == "exchange"]
    assert [4, 12, 8] in weights and [4, 12] in weights
    again = next(i for i, each in enumerate(weights) if len(each) == 3 and len(weights[i - 1]) == 2)
    assert weights[again][2] > 8 or weights[again + 1][2] > 8, weights  # what it had trained when it rested
    make = runpy.run_path(str(tmp_path / "island.py"), run_name="replayed")["island"]
    assert replay([tmp_path / "a.epochs"], make).islands == ("a", "b", "c")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_islands_are_killed_again_and_again(tmp_path, monkeypatch):
    """Fifty times, at any moment, also while they come. Those that are left end with the same outer copies."""
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", "0123456789abcdef" * 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "island.py").write_text(ISLAND)
    chance, kills, steps = random.Random(7), 0, 10000
    with Server() as server, (tmp_path / "said").open("ab") as said:

        def start(name):
            command = [sys.executable, tmp_path / "island.py", server.address, name, str(steps), tmp_path]
            return subprocess.Popen(command, stdout=said, stderr=said)

        def step_of(name):
            path = tmp_path / f"{name}.step"
            return int(path.read_text() or 0) if path.exists() else 0

        islands = {name: start(name) for name in "abc"}
        try:
            end, stood, last, longest = time.monotonic() + 400, time.monotonic(), 0, 0.0
            while kills < 50:
                time.sleep(chance.uniform(0.05, 2.5))
                assert time.monotonic() < end, (tmp_path / "said").read_text()
                if step_of("a") > last:
                    longest, stood, last = max(longest, time.monotonic() - stood), time.monotonic(), step_of("a")
                victim = chance.choice("bc")
                islands[victim].kill()
                islands[victim].wait()
                kills, islands[victim] = kills + 1, start(victim)
                assert islands["a"].poll() is None, (tmp_path / "said").read_text()
            print(f"{kills} kills, {last} steps, {longest:.1f} s without a step at most")
            assert last > 50 and longest < 30
        finally:
            for island in islands.values():
                island.kill()
                island.wait()
    assert "MismatchError" not in (tmp_path / "said").read_text()
    command = [sys.executable, REPLAY, *(f"{name}.epochs" for name in "abc"), "island.py:island"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert "of a, b, c: the same bits" in done.stdout, done
