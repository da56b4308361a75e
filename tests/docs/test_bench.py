"""python -m fompi bench, as a user types it: every contestant runs, is checked and is timed. No figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from bench import device, fused
from commands import ROOT

import collectives
import peers
import plain_mpi
from fompi.bench.fused import KERNEL, OPERATIONS
from fompi.bench.measure import DEFAULT

SUITES = "tools/suites"
"""The suites that are not in the wheel, from the folder of the project."""


@pytest.mark.timeout(200)
def test_peers(mpirun, tmp_path):
    """mpi4py, gloo and JAX run. A rival that is not installed is named with its reason."""
    files = ["--json", tmp_path / "rows.json"]
    done = mpirun(2, "-m", "fompi", "bench", f"{SUITES}/peers.py", "--quick", "--rounds", "2", *files, seconds=180)
    assert done.returncode == 0 and not done.left_behind, done.output
    *rows, summary = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"].split(",")[0] for row in rows] == list(OPERATIONS)
    for row in rows:
        known = row["samples"].keys() | row["absent"].keys()
        for name in (*plain_mpi.UNFUSED, *peers.FUSED, "gloo blocking", "gloo, 2 slices", "JAX collectives"):
            assert name in known
        assert {"2 slices, library", "2 slices, P2P", "JAX ppermute ring", "kernel alone"} <= row["samples"].keys()
        assert not row["absent"]
        assert row["errors"].keys() == row["samples"].keys() - {"kernel alone"} and max(row["errors"].values()) < 1e-5
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["samples"].values())
        assert "shared memory: no link" in row["setup"] and row["reached"] is None
    assert [figure["value"] > 0 for figure in summary["figures"]] == [True] * 3  # slices, others, others without slices


@pytest.mark.timeout(100)
def test_collectives(mpirun):
    """With --json, standard output holds nothing but JSON."""
    suite = f"{SUITES}/collectives.py"
    done = mpirun(2, "-m", "fompi", "bench", suite, "--quick", "--rounds", "2", "--json", seconds=90)
    assert done.returncode == 0, done.output
    read = json.loads(done.stdout)
    assert read["about"]["mpi"] and read["about"]["command"].startswith(f"python -m fompi bench {suite}")
    assert [row["what"] for row in read["rows"]] == [
        f"{name} of 4 MiB" for name in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    ]
    assert all(set(row["errors"].values()) == {0.0} for row in read["rows"])


DEVICE_SUITES = {
    f"{SUITES}/collectives.py": [*collectives.OPERATIONS],
    f"{SUITES}/parallel.py": ["TP+SP", "ring", "Ulysses", "mixture"],
    f"{SUITES}/step.py": ["a", "a"],
}


TOGETHER = """
import sys
from fompi.cli.main import main
for line in sys.argv[1:]:
    assert main(["bench", *line.split()]) == 0, line
"""
"""Several suites in one job: its ranks import the frameworks once."""


def together(mpirun, folder, ranks, lines, seconds):
    """line of a suite -> its rows."""
    files = {line: folder / f"{number}.json" for number, line in enumerate(lines)}
    done = mpirun(ranks, "-c", TOGETHER, *(f"{line} --json {file}" for line, file in files.items()), seconds=seconds)
    assert done.returncode == 0 and not done.left_behind, done.output
    return {line: json.loads(file.read_text())["rows"] for line, file in files.items()}


@pytest.mark.timeout(130)
def test_device(mpirun, tmp_path):
    """Every line says that its times are of the software device, which finds no race. cuda needs a GPU."""
    of_suites = {f"{suite} --device software --rounds 1": names for suite, names in DEVICE_SUITES.items()}
    rows, *others = together(mpirun, tmp_path, 2, ["--device software --rounds 2", *of_suites], 90).values()
    assert [row["what"] for row in rows] == [f"{name} 64,64,64 float32" for name in OPERATIONS[:2]]
    for row in rows:
        assert row["marks"] == [device.NOT_A_GPU] and device.NOT_A_GPU in row["setup"] and "messages" in row["setup"]
        assert row["samples"].keys() == {*fused.ON_DEVICE, fused.DEVICE_UNFUSED, fused.PRODUCT, fused.MESSAGES}
        assert max(row["errors"].values()) < 1e-5 and min(map(min, row["samples"].values())) > 0
        assert row["figures"][0]["name"].endswith(f" / {fused.LIMIT}")
    for rows, names in zip(others, of_suites.values(), strict=True):
        assert [row["what"].partition(" ")[0] for row in rows] == names
        for row in rows:
            assert row["marks"] == [device.NOT_A_GPU] and row["limits"] and row["figures"][0]["limit"] is not None
            assert len(row["samples"]) == 4 and min(map(min, row["samples"].values())) > 0
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = mpirun(1, "-m", "fompi", "bench", "--device", "cuda", "--like", "64,64,64", env=hidden, seconds=50)
    assert done.returncode == 2 and ("there is no CUDA" in done.output or "needs CuPy" in done.output)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ranks", "suites"),
    [
        (2, {"parallel.py": 12, "step.py": 1, "ddp.py": 1, "c10d.py": 14, "programs.py": 8}),
        (3, {"decode.py": 3, "unequal.py": 7, "checkpoints.py": 1}),
    ],
    ids=["2 ranks", "3 ranks"],
)
def test_strategies(mpirun, tmp_path, ranks, suites):
    """Each row has fompi, its rivals and the compute alone, all timed. On one host no figure is judged."""
    found = together(mpirun, tmp_path, ranks, [f"{SUITES}/{suite} --quick --rounds 1" for suite in suites], 220)
    for (suite, count), rows in zip(suites.items(), found.values(), strict=True):
        assert len(rows) == count, suite
        for row in rows:
            assert all(min(samples) > 0 for samples in row["samples"].values()) and len(row["samples"]) >= 2
            assert row["figures"] and (suite in ("c10d.py", "decode.py", "programs.py") or row["reached"] is None)
            assert "fompi" in row["progress"]


@pytest.mark.timeout(200)
def test_planner(mpirun):
    """The machine comes first, then the shapes. Every simulated candidate is measured, and its result is right."""
    done = mpirun(2, "-m", "fompi", "bench", f"{SUITES}/planner.py", "--quick", "--rounds", "2", "--json", seconds=180)
    assert done.returncode == 0, done.output
    machine, *rows, summary = json.loads(done.stdout)["rows"]
    assert machine["what"] == "the machine" and "kernels:" in machine["setup"]
    firsts, finals = rows[::2], rows[1::2]
    assert len(firsts) == len(finals) == 2 and all(max(row["errors"].values()) < 1e-5 for row in firsts)
    assert all(set(row["predicted"]) == set(row["samples"]) - {KERNEL} for row in rows)
    for first, final in zip(firsts, finals, strict=True):
        assert "unfused" in first["samples"] and {final["base"]} <= set(final["samples"]) <= set(first["samples"])
        assert len(first["samples"]["unfused"]) == 1 and len(final["samples"][final["base"]]) == 4
        assert len(final["figures"]) == 8 and not first["figures"]
    assert len(summary["figures"]) == 14 and summary["reached"] is None


def test_adapt_needs_links_that_can_be_changed(mpirun):
    done = mpirun(2, "-m", "fompi", "bench", f"{SUITES}/adapt.py")
    assert done.returncode != 0 and "python -m fompi.lab" in done.output


SLICES = {f"{n} slices, {way}" for n in (2, 4, 8) for way in ("library", "P2P")}
SHARED = "shared memory: no link"


@pytest.mark.timeout(120)
def test_fused(mpirun):
    """Each operation runs with overlap, without it and in slices. Rows have limits, and the last row sums them up."""
    done = mpirun(2, "-m", "fompi", "bench", f"{SUITES}/fused.py", "--quick", "--rounds", "1", "--json", seconds=110)
    assert done.returncode == 0, done.output
    *rows, summary = json.loads(done.stdout)["rows"]
    assert [row["what"].split(",")[0] for row in rows] == list(OPERATIONS)
    for row in rows:
        names = row["samples"].keys()
        assert names >= {"kernel alone", "bare exchange", "unfused, mpi4py P2P", "unfused, mpi4py blocking", *SLICES}
        (chosen,) = [name for name in names if name.startswith("fompi ")]
        assert DEFAULT in names
        assert row["errors"].keys() > names - {"kernel alone", "bare exchange"} and max(row["errors"].values()) < 1e-5
        assert row["limits"].keys() == {"T_c", "T_m", "bound"}
        assert row["limits"]["bound"] >= max(row["limits"]["T_c"], row["limits"]["T_m"])
        named = [chosen in figure["name"] for figure in row["figures"]]
        assert named == [False, True, True, False, False, True, True, False]
        quartiles = {name: np.quantile(samples, 0.25) for name, samples in row["samples"].items()}
        best_slices = min(quartiles[name] for name in SLICES) / quartiles[chosen]
        assert row["figures"][7]["value"] == pytest.approx(best_slices) and row["figures"][4]["value"] > 0
        assert SHARED in row["setup"] and row["reached"] is None and "helper" in row["progress"]
    assert len(summary["figures"]) == 5 and all(figure["value"] > 0 for figure in summary["figures"])


@pytest.mark.timeout(120)
def test_papers(mpirun):
    """One setting of the paper, with kernels that take their time and no core. The rows do not divide by 3."""
    command = ["bench", f"{SUITES}/papers.py", "--row", "0.56", "--quick", "--rounds", "1", "--json"]
    done = mpirun(3, "-m", "fompi", *command, seconds=110)
    assert done.returncode == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["what"].partition(" = ")[2] for row in rows] == ["0.56"]
    for row in rows:
        assert "emulated accelerator" in row["marks"] and SHARED in row["setup"] and row["reached"] is None
        assert row["samples"].keys() >= {"kernel alone", "bare exchange", "unfused, P2P paced", *SLICES}
        alone, (fompi,) = row["limits"]["T_c"], [s for name, s in row["samples"].items() if name.startswith("fompi ")]
        assert min(fompi) >= 0.9 * alone  # both are measured with noise
    assert rows[0]["figures"][0]["name"] == "exposed / communication" and rows[0]["figures"][0]["value"] > -0.5


@pytest.mark.timeout(120)
def test_overhead(mpirun, tmp_path):
    """Small times are in microseconds, each with its range. Every reference is there."""
    options = ["--quick", "--rounds", "2", "--json", tmp_path / "rows.json"]
    done = mpirun(2, "-m", "fompi", "bench", f"{SUITES}/overhead.py", *options, seconds=110)
    assert done.returncode == 0, done.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"].split(",")[0] for row in rows] == [
        "all-reduce of 1 KiB", "10 all-reduces of 16 KiB in flight", "all-gather in 64 slices", "all-to-all",
        "all-gather", "a plan for 8 ranks", "a choice by the model for 8 ranks", "the same choice again",
    ]  # fmt: skip
    for row in rows:
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["samples"].values())
        assert all(figure["most"] and figure["unit"] in ("us", "ms") for figure in row["figures"])
        assert row["base"] is None or row["base"] in row["samples"]
    text = done.stdout
    units = text.count("| median us |"), text.count("| median ms |")
    assert sum(units) == 8 and min(units) >= 2, text  # on a busy machine a call takes milliseconds


@pytest.mark.timeout(90)
def test_jit(mpirun, tmp_path):
    """A call in a compiled program beside the bound one, and what it hides: all contestants of a row in one run."""
    options = ["--quick", "--rounds", "2", "--json", tmp_path / "rows.json"]
    done = mpirun(2, "-m", "fompi", "bench", f"{SUITES}/jit.py", *options, seconds=80)
    assert done.returncode == 0, done.output
    short, beside = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert short["samples"].keys() == {"fompi bound", "fompi.jax.jit", "jax.jit", "jax.jit of x + 1"}
    assert beside["samples"].keys() == {"product", "all-reduce", "start and wait", "blocking"}
    assert [row["figures"][0]["most"] for row in (short, beside)] == [40, 1.1]


@pytest.mark.timeout(60)
def test_a_shape_without_mpirun():
    """It starts the requested number of ranks, also as root and with fewer cores, for any shape."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_", "PMIX_"))}
    command = [sys.executable, "-m", "fompi", "try", "10,7,9", "--ranks", "3", "--rounds", "2"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"x[10, 7] @ w[7, 9], 3 ranks, {SHARED}, float32\n")
    assert "10, 7: measured" in done.stdout and "matmul_all_to_all" in done.stdout and "verdict: " in done.stdout


@pytest.mark.timeout(60)
def test_a_shape_as_json(mpirun):
    """One document on standard output, with the lines of the table."""
    arguments = ("try", "64,64,64", "--rounds", "2", "--json")
    done = mpirun(3, "-m", "fompi", *arguments, seconds=50)  # ranks that share cores wait for no quiet machine
    assert done.returncode == 0, done.output
    values = json.loads(done.stdout)
    assert values["shape"] == [64, 64, 64] and values["ranks"] == 3 and values["verdict"].endswith(".")
    assert [outcome["operation"] for outcome in values["outcomes"]] == list(OPERATIONS)
    for outcome in values["outcomes"]:
        unfused, *others = outcome["lines"]
        assert outcome["verdict"] in ("gain", "nothing", "slower") and unfused["gain"] is None
        assert bool(outcome["reason"]) == (outcome["verdict"] != "gain")
        for line in others[:-1]:
            assert line["gain_low"] <= line["gain"] <= line["gain_high"]
        assert others[-1]["gain"] == pytest.approx(unfused["seconds"] / others[-1]["seconds"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("try 0,8,8", "fompi: '0,8,8': each size must be an integer >= 1"),
        ("try 90000000,90000000,8", "fompi: Unable to allocate"),
        ("bench fused --quick --row nothing", "fompi: bench fused: no row has 'nothing' in its name"),
        ("bench overhead --device software", "fompi: bench overhead: the suite has no rows_on_device(bench)"),
        ("bench nowhere.py", "fompi: bench nowhere.py: No such file or directory"),
        ("bench fused --quick --json /no/such/folder/rows.json", "No such file or directory"),
    ],
)
def test_an_error_is_printed_once(mpirun, arguments, words):
    """Before anything is measured. An error on a single rank ends the job."""
    done = mpirun(2, "-m", "fompi", *arguments.split(), seconds=50)
    assert done.returncode != 0 and not done.timed_out and done.output.count(words) == 1, done.output
    assert "Traceback" not in done.output


@pytest.mark.timeout(60)
def test_a_suite_of_ones_own(mpirun, tmp_path):
    """The file of the page. What it imports is looked for in its folder."""
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    code = page.partition("```python\n# sums.py\n")[2].partition("```")[0]
    (tmp_path / "sums.py").write_text(f"import beside\n{code}")
    (tmp_path / "beside.py").touch()
    done = mpirun(2, "-m", "fompi", "bench", tmp_path / "sums.py", "--rounds", "2", "--json", seconds=50)
    assert done.returncode == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["what"] == "a sum of 1 MiB" and row["samples"].keys() == {"fompi", "MPI"}


@pytest.mark.timeout(60)
def test_an_error_on_one_rank_ends_a_benchmark(mpirun, tmp_path):
    """While the others measure: the line of that rank is printed, and no process is left."""
    script = tmp_path / "one.py"
    script.write_text(
        "import sys\nimport fompi\nfrom fompi.__main__ import main\nfrom fompi.cli import tools\n"
        "sys.path.append(str(tools.TOOLS))\nfrom bench import overhead\n"
        "from fompi.tuning.rounds import WrongResult, meet\n"
        "def rows(bench):\n"
        "    if bench.comm.rank == 1:\n"
        "        raise WrongResult('something is wrong')\n"
        "    meet(bench.mpi)\n"
        "overhead.rows = rows\n"
        "sys.exit(main(['bench', 'overhead']))\n"
    )
    done = mpirun(2, script, seconds=40)
    assert done.returncode != 0 and not done.timed_out and not done.left_behind, done.output
    assert "fompi: rank 1: something is wrong" in done.output


@pytest.mark.timeout(60)
def test_a_shape_of_ones_own(mpirun, tmp_path):
    """A table for each of four operations, and a verdict. "Nothing gained" is one, too.

    With a name, JSON is a file beside the table.
    """
    file = tmp_path / "trial.json"
    # Three ranks share the cores, so they wait for no quiet machine.
    done = mpirun(3, "-m", "fompi", "try", "96,96,96", "--rounds", "2", "--json", file, seconds=50)
    assert done.returncode == 0, done.output
    head, *lines = filter(None, done.stdout.splitlines())
    assert head == f"x[96, 96] @ w[96, 96], 3 ranks, {SHARED}, float32"
    tables, ending = [lines[start : start + 5] for start in range(0, 20, 5)], lines[20:]
    assert [table[0].split() for table in tables] == [[name, "ms", "spread", "gain"] for name in OPERATIONS]
    for table in tables:
        names = [line.split("  ")[0].partition(" (")[0] for line in table[1:]]
        assert names == ["without overlap", "default schedule", "best schedule", "perfect overlap of the same"]
    assert ending[0].startswith("verdict: ") and "gain" in ending[0]
    assert all(
        line.startswith(("warning: ", "with a network between hosts: fompi try 96,96,96 ")) for line in ending[1:]
    )
    values = json.loads(file.read_text())
    assert values["shape"] == [96, 96, 96] and ending[0] == f"verdict: {values['verdict']}"
