"""Run every test of fompi: python tools/test.py [--leg NAME] [--mpi mpich|openmpi] [-k EXPR] [--soak]

The legs run one after the other. A leg that cannot run fails. No test is skipped because something is missing.
Each leg has a time-out, enforced on every process that it started. Outputs and reports stay in build/test/<leg>/.
After each leg come its slowest tests.

`--soak` runs the tests that repeat for long instead (marked `soak`). Continuous integration does not run them.

The last line is always `N passed, M failed`, over all legs. A leg that counts no tests (lint, types) counts as one
test. So does a leg that ends without a report.
"""

import argparse
import ast
import os
import re
import shutil
import signal
import sys
import time
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

import job

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "test"
SLOWEST = 10
"""This many of the slowest tests are listed after each leg."""

ENVIRONMENTS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
RANK = {"mpich": "PMI_RANK", "openmpi": "OMPI_COMM_WORLD_RANK"}

VARIABLES = {
    # Compiled modules are kept, here: without them each process that imports PyTorch compiles it for seconds.
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "pycache"),
    # One thread per rank: there are more ranks than cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    # Open MPI refuses root, and more ranks than cores, without these. MPICH reads none of them.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

OF_TORCH = ("-W", "ignore:`torch.jit.script`:DeprecationWarning", "-W", "ignore:The PyTorch API of nested:UserWarning")
"""What torch says of itself."""

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

# Hidden from the output: tests that passed, and the frames of pytest itself in a traceback.
NOISE = re.compile(
    "|".join(
        (
            r"^.* PASSED +\[ *\d+%\]\n",
            r"^\[gw\d+\].* PASSED .*\n|^tests/\S+::.* ?\n",  # with two processes
            r'^  File "[^"]*/(?:_pytest|pytest|pluggy)/[^"]*", line .*\n(?:    .*\n)?',
        )
    ),
    re.MULTILINE,
)

SOAK_FACTOR = 10
"""With --soak a leg may take this many times as long."""


@dataclass(frozen=True)
class Leg:
    name: str
    mpi: str  # whose environment it runs in
    seconds: float  # its time-out
    command: tuple[str, ...]  # of a test leg: the arguments of pytest
    ranks: int = 0  # of mpirun; 0: no mpirun
    is_pytest: bool = True


@dataclass(frozen=True)
class Result:
    leg: Leg
    seconds: float
    counts: dict[str, int]
    problem: str  # empty if the leg passed
    output: str
    slowest: tuple[str, ...] = ()  # the slowest tests of rank 0, with their seconds

    @property
    def word(self) -> str:
        return "FAILED" if self.problem else "ok"


def ranks_of(path: Path) -> dict[str, list[int]]:
    """On how many ranks of each MPI a file runs: its mark `pytest.mark.ranks(mpich=[...], openmpi=[...])`, or two."""
    found = {mpi: [2] for mpi in ENVIRONMENTS}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "ranks":
            found |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return found


def legs() -> list[Leg]:
    lint = "ruff check . && ruff format --check ."
    found = [
        Leg("lint", "mpich", 60, ("sh", "-c", lint), is_pytest=False),
        Leg("types", "mpich", 240, ("mypy",), is_pytest=False),
        Leg("pure", "mpich", 300, ("-n", "2", "-W", "error", "tests/pure")),
        Leg("local", "mpich", 360, ("-n", "2", "-W", "error", *OF_TORCH, "tests/local")),
    ]
    for mpi in ENVIRONMENTS:
        ranks_of_files = {path: ranks_of(path)[mpi] for path in sorted((ROOT / "tests/mpi").glob("test_*.py"))}
        for size in sorted({size for sizes in ranks_of_files.values() for size in sizes}):
            files = [f"tests/mpi/{path.name}" for path, sizes in ranks_of_files.items() if size in sizes]
            found.append(Leg(f"mpi-{mpi}-{size}", mpi, 420 if size == 2 else 300, ("--with-mpi", *files), ranks=size))
    for mpi in ENVIRONMENTS:
        found.append(Leg(f"faults-{mpi}", mpi, 300, ("-n", "3" if mpi == "mpich" else "4", "tests/faults")))
    for mpi in ENVIRONMENTS:
        found.append(Leg(f"lab-{mpi}", mpi, 240, ("-n", "2", "--dist", "loadfile", "tests/lab")))
    found.append(Leg("slurm", "mpich", 420, ("-n", "2", "tests/slurm")))  # both MPIs; it needs Slurm
    if (ROOT / "tests/docs").exists():
        found.append(Leg("docs", "mpich", 600, ("-n", "2", "--dist", "loadgroup", "tests/docs")))
    return found


def run(leg: Leg, expression: str | None, marker: str = "") -> Result:
    logs = LOGS / leg.name
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    bin_folder = ENVIRONMENTS[leg.mpi] / "bin"
    if not (bin_folder / "python").exists():
        return Result(leg, 0.0, {FAILED: 1}, f"there is no {bin_folder}/python: call `make test`", "")
    # First in PATH: tests that call `python`, `mpirun` or a tool get those of this environment.
    variables = {**VARIABLES, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    if leg.name == "mpi-openmpi-3":  # the engine in Python, which C must equal
        variables["FOMPI_ENGINE"] = "python"
    if leg.name == "slurm":  # each rank has a core, and one that yields and polls can starve the kernel's own threads
        variables["OMPI_MCA_mpi_yield_when_idle"] = "0"
    seconds = SOAK_FACTOR * leg.seconds if marker else leg.seconds
    finished = job.run(command_of(leg, expression, logs, marker), seconds, env=variables, cwd=ROOT)
    (logs / "launcher.txt").write_text(finished.output)
    return judge(leg, bool(expression or marker), logs, finished)


def command_of(leg: Leg, expression: str | None, logs: Path, marker: str) -> list[str]:
    if not leg.is_pytest:
        return list(leg.command)
    # -v names a test before it starts. A test that hangs is thus known.
    pytest = ["python", "-m", "pytest", "-v", *leg.command, *(("-k", expression) if expression else ())]
    markers = [marker or "not soak", *(["not one_mpi"] if leg.mpi != "mpich" else [])]
    pytest += ["-m", " and ".join(markers)]
    if not leg.ranks:
        return [*pytest, f"--junitxml={logs}/rank-0.xml"]
    # Every rank writes its own report and output. Only the shell that mpirun starts knows the rank.
    rank = f"{logs}/rank-${RANK[leg.mpi]}"
    script = f'exec "$0" "$@" -p no:cacheprovider "--junitxml={rank}.xml" >"{rank}.txt" 2>&1'
    return ["mpirun", "-n", str(leg.ranks), "sh", "-c", script, *pytest]


def judge(leg: Leg, is_selection: bool, logs: Path, finished: job.Finished) -> Result:
    reports = {rank: read_report(logs / f"rank-{rank}.xml") for rank in range(max(leg.ranks, 1))}
    tests: dict[str, str] = {}
    for report in reports.values():
        for test, outcome in (report or {}).items():
            tests[test] = worst(outcome, tests.get(test, outcome))
    counts = {word: list(tests.values()).count(word) for word in (PASSED, FAILED, SKIPPED)}
    nothing_selected = is_selection and not tests and None not in reports.values()

    problem = ""
    if finished.timed_out:
        problem = f"ended after its time-out of {leg.seconds:.0f} s"
    elif finished.left_behind:
        problem = f"left processes behind: {'; '.join(finished.left_behind)}"
    elif counts[FAILED]:
        problem = f"{counts[FAILED]} failed"
    elif finished.returncode and not nothing_selected:
        problem = f"exit status {finished.returncode}"
    elif leg.is_pytest and None in reports.values():
        problem = "a rank left no report"
    if problem and not counts[FAILED]:
        counts[FAILED] = 1
    if not problem and not leg.is_pytest:
        counts[PASSED] = 1
    output = gather_output(leg, logs, finished, reports)
    return Result(leg, finished.seconds, counts, problem, output, slowest_tests(logs / "rank-0.xml"))


def read_report(path: Path) -> dict[str, str] | None:
    """test -> outcome; None if pytest did not get to write the report."""
    try:
        root = xml.etree.ElementTree.parse(path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return None
    tests: dict[str, str] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        tags = {child.tag for child in case}
        outcome = FAILED if tags & {"failure", "error"} else SKIPPED if "skipped" in tags else PASSED
        tests[name] = worst(outcome, tests.get(name, outcome))  # a test that fails in its teardown too is listed twice
    return tests


def slowest_tests(path: Path) -> tuple[str, ...]:
    """Those of one rank's report, with their seconds."""
    try:
        cases = list(xml.etree.ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):
        return ()
    cases.sort(key=lambda case: -float(case.get("time", 0)))
    names = [(float(case.get("time", 0)), f"{case.get('classname', '')}::{case.get('name')}") for case in cases]
    return tuple(f"{seconds:6.1f} s  {name.removeprefix('tests.')[:90]}" for seconds, name in names[:SLOWEST])


def worst(*outcomes: str) -> str:
    return min(outcomes, key=(FAILED, PASSED, SKIPPED).index)


def gather_output(leg: Leg, logs: Path, finished: job.Finished, reports: dict[int, dict[str, str] | None]) -> str:
    """The output of rank 0, and of each rank that wrote no report or that has other failures."""
    if not leg.ranks:
        return NOISE.sub("", finished.output)
    known = failures(reports[0])
    others = [rank for rank in reports if rank and (reports[rank] is None or failures(reports[rank]) - known)]
    parts = [finished.output]
    for rank in (0, *others):
        path = logs / f"rank-{rank}.txt"
        text = path.read_text(errors="replace") if path.exists() else "(this rank did not start)"
        heading = f"--- rank {rank} ---\n" if others else ""
        parts.append(f"{heading}{NOISE.sub('', text).rstrip()}\n")
    return "".join(parts)


def failures(report: dict[str, str] | None) -> set[str]:
    return {test for test, outcome in (report or {}).items() if outcome == FAILED}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests of fompi.")
    parser.add_argument("--leg", action="append", metavar="NAME", help="only this leg, or all of NAME-*")
    parser.add_argument("--mpi", choices=list(ENVIRONMENTS), help="only the legs in this MPI's environment")
    parser.add_argument("-k", metavar="EXPR", help="only the tests that match, as in pytest")
    parser.add_argument("--soak", action="store_true", help="only the tests that repeat for long")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the running leg ends too

    start = time.monotonic()
    results = []
    for leg in select(parser, options):
        result = run(leg, options.k, "soak" if options.soak else "")
        results.append(result)
        show(result)
    summarize(results, time.monotonic() - start)
    return 1 if any(result.problem for result in results) else 0


def show(result: Result) -> None:
    lines = result.output.rstrip().splitlines()
    say = result.problem or "".join(lines[-1:]).strip("= ")
    print(f"{result.leg.name:<18}{result.word:<7}{result.seconds:6.1f} s  {say}", flush=True)
    for line in result.slowest:
        print(f"{'':18}{line}", flush=True)
    if result.problem:
        print("\n".join(f"    {line}" for line in lines), flush=True)


def select(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Leg]:
    def wanted(leg: Leg) -> bool:
        names = options.leg or [leg.name]
        return (
            any(leg.name == name or leg.name.startswith(f"{name}-") for name in names)
            and options.mpi in (None, leg.mpi)
            and (leg.is_pytest or not (options.k or options.soak))
        )

    selected = [leg for leg in legs() if wanted(leg)]
    if not selected:
        parser.error(f"no such leg. The legs are {', '.join(leg.name for leg in legs())}")
    return selected


def summarize(results: list[Result], seconds: float) -> None:
    totals = dict.fromkeys((PASSED, FAILED, SKIPPED), 0)
    print(f"\n{'leg':<18}{'result':<7}{'time':>8}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for result in results:
        for word in totals:
            totals[word] += result.counts.get(word, 0)
        print(f"{result.leg.name:<18}{result.word:<7}{result.seconds:6.1f} s", columns(result.counts), sep="")
    print(f"{'all':<25}{seconds:6.1f} s", columns(totals), sep="")
    print(f"{totals[PASSED]} passed, {totals[FAILED]} failed")


def columns(counts: dict[str, int]) -> str:
    return "".join(f"{counts.get(word, 0):>8}" for word in (PASSED, FAILED, SKIPPED))


if __name__ == "__main__":
    sys.exit(main())
