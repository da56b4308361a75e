"""On shaped hosts: a link that is cut, and a schedule that waits when it should not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fompi.engine.progress import pause_between_polls

CUT = """
import os, time
import numpy as np
os.environ["FOMPI_TIMEOUT"] = "2"
import fompi

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

world = fompi.Communicator()
spec = fompi.Spec((2_000_000,), "float64", fompi.Partial())
plan = fompi.plan(fompi.all_reduce, spec, ranks=world.size, schedule="SCHEDULE")
step = fompi.bind(plan, comm=world, x=np.ones(2_000_000))
small = np.ones(3)
fompi.all_reduce(small, comm=world)
if world.rank == 0:
    time.sleep(0.3)  # the others have the last message, too
    with open(os.environ["NETLAB_CONTROL"], "w") as control:
        print("h1 cut", file=control)
say("BEGUN", time.time())
try:
    step()
except fompi.FompiError as error:
    say("SAID", world.rank, time.time(), error)
    raise
"""


@pytest.mark.parametrize("schedule", ["ring", "unfused"])
def test_a_cut_link_ends_the_operation(netlab, schedule):
    """It ends within the deadline. The error names the rank that cannot be reached. No process is left on any host."""
    finished = netlab("--trust", "--hosts=3", "--rate=200mbit", code=CUT.replace("SCHEDULE", schedule))
    assert not finished.timed_out and not finished.left_behind, finished.output
    assert finished.returncode not in (0, 2, 3), finished.output
    begun = [float(text) for text in re.findall(r"^BEGUN ([\d.]+)$", finished.stdout, re.MULTILINE)]
    printed = re.findall(r"^SAID (\d) ([\d.]+) (.*)$", finished.stdout, re.MULTILINE)
    assert len(begun) == 3 and printed, finished.output
    assert min(float(when) for _, when, _ in printed) - max(begun) < 2 + 3, finished.output
    silent = {"0": "root cause: rank 1 does not answer:", "2": "root cause: rank 1 does not answer:"}
    for rank, _, words in printed:
        assert "(FOMPI_TIMEOUT)" in words and "or cannot be reached" in words, words
        if rank in silent:
            assert silent[rank] in words, words
        else:
            assert re.search(r"root cause: rank \d does not answer \(nor does rank \d\):", words), words


def test_a_cut_link_ends_a_program_that_goes_on(netlab):
    """A program that catches the error and ends normally would wait for a last message, and MPI for its connections."""
    code = CUT.replace("SCHEDULE", "ring").replace("    raise\n", '    say("CAUGHT")\n')
    finished = netlab("--trust", "--hosts=3", "--rate=200mbit", code=code, seconds=40)
    assert not finished.timed_out and not finished.left_behind, finished.output
    assert finished.returncode != 0 and "CAUGHT" in finished.stdout, finished.output
    assert re.search(r"fompi: rank \d ends the job: ranks? [\d, ]+ cannot be reached", finished.stderr), finished.output


SUITES = Path(__file__).resolve().parents[2] / "tools" / "suites"

SUITE = """
import os, sys
sys.path.insert(0, "SUITES")
import numpy as np
import fompi
import papers
from fompi.bench.measure import BenchHosts
from fompi.bench.measure import Bench

world = fompi.Communicator()
papers.M, papers.K, papers.N, papers.PIECES, papers.PILOT_ROUNDS = 240, 64, 2048, (4,), 1
papers.UNFUSED = {"unfused": {"schedule": "unfused_p2p"}}
papers.SLICED = {"slices": {"schedule": "sliced_p2p", "slices": 4}}
good = {"fompi ring, 4 slices": {"schedule": "ring", "slices": 4}}
bad = {"fompi ring, 4 slices": {"schedule": "unfused_p2p", "slices": 4}}  # every message waits for the whole kernel
with BenchHosts(world.link.comm) as cluster:
    setting = papers.FusedCase("matmul_reduce_scatter", papers.M, papers.N, papers.K)
    bench = Bench(world, cluster, 3)
    exchange = papers.best_exchange(bench, setting)
    for name, candidates in (("good", good), ("spoilt", bad)):
        papers.CANDIDATES = candidates
        row = papers.measured(bench, setting, exchange, 1.0)
        if world.rank == 0:
            os.write(1, f"{name} {row.figures[0].value:.3f} {row.reached}\\n".encode())
"""


@pytest.mark.measures
@pytest.mark.soak
@pytest.mark.one_mpi
@pytest.mark.timeout(100)
def test_a_row_of_a_suite_misses_its_target_without_overlap(netlab):
    """A row of the suite `papers`, with its own targets. One schedule claims to overlap and does not."""
    finished = netlab("--trust", "--hosts=3", "--rate=200mbit", code=SUITE.replace("SUITES", str(SUITES)), seconds=90)
    assert finished.returncode == 0, finished.output
    printed = dict((name, (float(value), reached)) for name, value, reached in
                re.findall(r"^(good|spoilt) ([\d.]+) (\w+)$", finished.stdout, re.MULTILINE))  # fmt: skip
    assert printed["good"][0] > 1.5 and printed["spoilt"][0] < 1.3 and printed["spoilt"][1] == "False", finished.output


INFO = """
import os, sys
os.environ["FOMPI_PROGRESS"] = "CHOICE"
from fompi.cli.main import main
sys.exit(main(["info", "--json"]))
"""

PLANTED = """
import os, sys
sys.path.insert(0, "SUITES")
from dataclasses import replace
from statistics import median
import numpy as np
import fompi
from fompi import Machine, Shard, Spec
from emulated import CORNER, Emulated, corner
from fompi.tuning.rounds import Figure, Row, alternate, ratio

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

world = fompi.Communicator()
n, rows, k, columns, calls = world.size, 480, 64, 2048, 5
specs = Spec((rows, k * n), "float32", Shard(1)), Spec((k * n, columns), "float32", Shard(0))
tensors = {"x": np.ones((rows, k), np.float32), "w": np.ones((k, columns), np.float32)}

def plan(schedule, slices):
    return fompi.plan(fompi.matmul_reduce_scatter, *specs, ranks=n, schedule=schedule, slices=slices)

good = plan("ring", 4)
bad = replace(plan("unfused_p2p", 4), schedule="ring")  # every message waits for the whole kernel

def bind(plan, machine):
    return fompi.bind(plan, comm=world, backend=Emulated(machine), **tensors)

with bind(good, Machine("no time", 0.0, 1.0, 1e15, 1e15, 0.0)) as step:
    mine, everywhere = np.array([step.messages_seconds()]), np.empty(n)
world.link.comm.Allgather(mine, everywhere)
t_m = float(everywhere.max())
machine = Machine("as long as its messages", 0.0, 1.0, 2 * rows * k * columns / t_m, 1e15, 0.0)
steps = {
    "ring": bind(good, machine),
    "spoilt": bind(bad, machine),
    "unfused": bind(plan("unfused_p2p", 1), machine),
}
samples = alternate(world.link.comm, steps, 5)
for name in ("ring", "spoilt"):
    step = steps[name]
    step.compute_seconds()
    step.messages_seconds()
    warnings = []
    for _ in range(calls):
        assert (corner(step()) == CORNER * n).all()
        warnings += [step.proof.warning] * (step.proof.warning is not None)
    figures = [
        Figure("exposed / communication", (median(samples[name]) - t_m) / t_m, most=0.5),  # T_c is t_m
        ratio("unfused / " + name, samples["unfused"], samples[name], least=1.5),
    ]
    row = Row(name, "three hosts", samples, figures=figures)
    values = [(figure.name, round(figure.value, 3), figure.reached) for figure in row.figures]
    say(name, world.rank, row.reached, values, "|", len(warnings), *warnings[-1:])
"""


@pytest.mark.measures
@pytest.mark.one_mpi
def test_a_schedule_without_overlap_is_found_by_proof_and_figures(netlab):
    """Its messages wait for the whole kernel, although it claims to overlap. Its result is right, its time is not."""
    finished = netlab("--trust", "--hosts=3", "--rate=200mbit", code=PLANTED.replace("SUITES", str(SUITES)))
    assert finished.returncode == 0, finished.output
    printed = re.findall(r"^(\w+) (\d) (\w+) .*? \| (.*)$", finished.stdout, re.MULTILINE)
    assert len(printed) == 6, finished.output
    assert {reached for name, _, reached, _ in printed if name == "ring"} == {"True"}, finished.output
    assert {reached for name, _, reached, _ in printed if name == "spoilt"} == {"False"}, finished.output
    warned = {
        name: sum(int(text.split()[0]) for other, *_, text in printed if other == name) for name in ("ring", "spoilt")
    }
    assert warned["spoilt"] >= 5 and warned["spoilt"] > warned["ring"], (warned, finished.output)  # of 15 calls
    warnings = " ".join(text for name, *_, text in printed if name == "spoilt")
    assert re.search(r"(no overlap|slower than without overlap) on rank \d.* from rank", warnings), finished.output


@pytest.mark.measures
@pytest.mark.parametrize("choice", ["auto", "library"])
def test_info_measures_what_the_library_moves_without_help(netlab, choice):
    """A slow link makes it measurable: a message takes about 30 ms. Each rank has one core here."""
    finished = netlab("--trust", "--hosts=2", "--rate=200mbit", code=INFO.replace("CHOICE", choice))
    assert finished.returncode == 0, finished.output
    progress = json.loads(finished.stdout)["progress"]
    native = progress["unaided"]
    assert 0.01 < native["seconds"] < 0.1 and 0 <= native["share"] <= 1 and native["skipped"] is None, progress
    assert progress["mode"] == {"auto": "helper", "library": "library"}[choice]
    assert progress["seconds_between_polls"] == list(pause_between_polls(progress["mode"], cores=1))
