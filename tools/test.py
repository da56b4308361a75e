"""Run every test of fompi: python tools/test.py [--leg NAME] [--mpi mpich|openmpi] [-k EXPR] [--soak]

First come the legs of `make quick`, in their light environment, then all others, two beside each other: the longest
first, and one that waits more than it computes beside one that computes. In the end come tests that measure links, with
nothing beside them. `make` makes or completes the environments that the chosen legs need, each before its first leg.

A leg that cannot run fails. No test is skipped because something is missing, but for etcd and torchft. Each leg has a
time-out, enforced on every process that it started. Outputs and reports stay in build/test/<leg>/. After each leg its
slowest tests are shown.

build/legs.json keeps the times of the legs that ran whole and passed. The next run shows them beside its own, and
`--table` writes them into CONTRIBUTING.md.

`--soak` runs the tests that repeat for long instead (marked `soak`). Continuous integration does not run them.

The last line is always `N passed, M failed`, over all legs. A leg that counts no tests (lint, types) counts as one
test. So does a leg that ends without a report, and an environment that cannot be made.
"""

import argparse
import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import job

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "test"
LAST_LINES, LAST_COLUMNS = 8, 120
SLOWEST = 10
"""This many of the slowest tests are listed after each leg."""

TIMES = ROOT / "build" / "legs.json"
PAGE = ROOT / "CONTRIBUTING.md"
MARKS = "<!-- the times of the legs -->", "<!-- end -->"
"""Where the table of times is in PAGE."""

MPIS = ("mpich", "openmpi")
ENVIRONMENTS = {"quick": ROOT / ".venv-quick", "mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
ENVIRONMENTS["abi"] = ROOT / ".venv-abi"
READY = {"quick": ".ready-quick", "mpich": ".ready-test", "openmpi": ".ready-test", "abi": ".ready-test"}
RANK = {"mpich": "PMI_RANK", "openmpi": "OMPI_COMM_WORLD_RANK", "abi": "PMI_RANK"}

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

BESIDE_FACTOR = 2
"""With another leg beside it, a leg may take this many times as long."""

QUICK, OTHERS, ALONE = "quick", "others", "alone"
STAGES = {QUICK: 2, OTHERS: 2, ALONE: 1}
"""The stages, one after the other, and how many legs of each run beside each other."""


@dataclass(frozen=True)
class Leg:
    name: str
    environment: str  # the one it runs in
    seconds: float  # its time-out, with nothing beside it
    command: tuple[str, ...]  # of a test leg: the arguments of pytest
    ranks: int = 0  # of mpirun; 0: no mpirun
    is_pytest: bool = True
    stage: str = OTHERS
    waits: bool = False  # more than it computes
    marks: str = ""  # which of its tests, as in `pytest -m`


@dataclass(frozen=True)
class Result:
    leg: Leg
    seconds: float
    counts: dict[str, int]
    problem: str  # empty if the leg passed
    output: str
    slowest: tuple[str, ...] = ()  # the slowest tests of rank 0, with their seconds
    cpu_seconds: float = 0.0

    @property
    def word(self) -> str:
        return "FAILED" if self.problem else "ok"


Times = dict[str, dict[str, float]]
"""Of legs that ran whole and passed: `seconds`, and `cpu_seconds` of all their processes."""


@dataclass(frozen=True)
class Selection:
    """Which tests of the legs run: all but those marked `soak`, unless something is said."""

    expression: str = ""
    soak: bool = False

    @property
    def is_whole(self) -> bool:
        return not (self.expression or self.soak)


def ranks_of(path: Path) -> dict[str, list[int]]:
    """On how many ranks of each MPI a file runs: its mark `pytest.mark.ranks(mpich=[...], openmpi=[...])`, or two.

    A test with a mark of its own runs on fewer of them (tests/mpi/conftest.py).
    """
    found = {mpi: [2] for mpi in MPIS}
    call = re.search(r"^pytestmark = .*?\b(mark\.ranks\(.*?\))", path.read_text(), re.DOTALL | re.MULTILINE)
    if call:
        (node,) = [node for node in ast.walk(ast.parse(call[1])) if isinstance(node, ast.Call)]
        found |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return found


@functools.cache
def legs() -> tuple[Leg, ...]:
    lint = "ruff check . && ruff format --check ."
    found = [
        Leg("lint", "quick", 60, ("sh", "-c", lint), is_pytest=False, stage=QUICK),
        Leg("types", "quick", 240, ("mypy",), is_pytest=False, stage=QUICK),
        Leg("pure", "quick", 450, ("-n", "2", "-W", "error", "tests/pure"), stage=QUICK),
        Leg("local", "mpich", 360, ("-n", "2", "-W", "error", *OF_TORCH, "tests/local")),
    ]
    for mpi in MPIS:
        ranks_of_files = {path: ranks_of(path)[mpi] for path in sorted((ROOT / "tests/mpi").glob("test_*.py"))}
        for size in sorted({size for sizes in ranks_of_files.values() for size in sizes}):
            files = [f"tests/mpi/{path.name}" for path, sizes in ranks_of_files.items() if size in sizes]
            found.append(Leg(f"mpi-{mpi}-{size}", mpi, 600 if size <= 3 else 300, ("--with-mpi", *files), ranks=size))
    found.append(
        Leg("mpi-ucx-2", "mpich", 120, ("--with-mpi", *on_ranks("operations", "messages", "bound_call")), ranks=2)
    )
    if (ROOT / "tests/docs").exists():
        found.append(Leg("docs", "mpich", 600, ("tests/docs",), waits=True))
    found.append(Leg("slurm", "mpich", 420, ("-n", "2", "tests/slurm"), waits=True))  # both MPIs; it needs Slurm
    for mpi in MPIS:
        found.append(Leg(f"faults-{mpi}", mpi, 300, ("-n", "3" if mpi == "mpich" else "4", "tests/faults"), waits=True))
    lab = ("-n", "2", "--dist", "loadfile", "tests/lab")
    for name, stage, marks in (("lab", OTHERS, "not measures"), ("links", ALONE, "measures")):
        found += [Leg(f"{name}-{mpi}", mpi, 240, lab, stage=stage, waits=True, marks=marks) for mpi in MPIS]
    return tuple(found)


def on_request() -> tuple[Leg, ...]:
    """Legs that run only where `--leg` has their whole name: the environment of this one takes minutes to make."""
    files = on_ranks("operations", "native", "bound_call", "ticket")
    return (Leg("mpi-abi-2", "abi", 120, ("--with-mpi", *files), ranks=2),)


def on_ranks(*names: str) -> list[str]:
    """These files of tests/mpi."""
    return [f"tests/mpi/test_{name}.py" for name in names]


def make_environments(chosen: Iterable[Leg]) -> list[Result]:
    """Make or complete those of the legs. What `make` says is shown. A failure is a result."""
    names = sorted({leg.environment for leg in chosen})
    targets = [f"{ENVIRONMENTS[name].name}/{READY[name]}" for name in names]
    status = subprocess.call(["make", "--silent", "-j", "2", *targets], cwd=ROOT) if targets else 0
    leg = Leg("environments", "", 0, (), is_pytest=False)
    return [Result(leg, 0.0, {FAILED: 1}, f"`make {' '.join(targets)}` failed", "")] if status else []


def run_legs(
    waiting: list[Leg], most: int, selection: Selection, before: Times, done: Callable[[Result], None]
) -> None:
    """Run the legs, at most this many beside each other. Each result goes to `done`."""
    waiting, running = list(waiting), dict[str, tuple[Leg, job.Job]]()
    factor = (BESIDE_FACTOR if min(most, len(waiting)) > 1 else 1) * (SOAK_FACTOR if selection.soak else 1)
    try:
        while running or waiting:
            while waiting and len(running) < most:
                leg = next_leg(waiting, [leg for leg, _ in running.values()], before)
                waiting.remove(leg)
                if (ENVIRONMENTS[leg.environment] / "bin/python").exists():
                    running[leg.name] = leg, start(leg, selection, factor)
                else:
                    done(Result(leg, 0.0, {FAILED: 1}, f"there is no {ENVIRONMENTS[leg.environment]}", ""))
            for leg, started in list(running.values()):
                if started.is_over():
                    del running[leg.name]
                    done(judge(leg, selection, started.end()))
            time.sleep(0.05)
    finally:  # after an interrupt
        for _, started in running.values():
            started.end()


def next_leg(waiting: list[Leg], running: list[Leg], before: Times) -> Leg:
    """The longest. One that waits beside one that computes, where possible: together they keep the cores busy."""
    others = [leg for leg in waiting if all(leg.waits != beside.waits for beside in running)]
    return max(others or waiting, key=lambda leg: before.get(leg.name, {}).get("seconds", leg.seconds))


def start(leg: Leg, selection: Selection, factor: float) -> job.Job:
    logs = LOGS / leg.name
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # First in PATH: tests that call `python`, `mpirun` or a tool get those of this environment.
    variables = {**VARIABLES, "PATH": f"{ENVIRONMENTS[leg.environment] / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    if leg.name == "mpi-openmpi-3":  # the engine in Python, which C must equal
        variables["FOMPI_ENGINE"] = "python"
    if leg.name == "mpi-ucx-2":  # the rest runs so by hand: `FOMPI_CARRIER=ucx python tools/test.py --leg mpi-mpich`
        variables["FOMPI_CARRIER"] = "ucx"
    if leg.name == "slurm":  # each rank has a core, and one that yields and polls can starve the kernel's own threads
        variables["OMPI_MCA_mpi_yield_when_idle"] = "0"
    return job.Job(command_of(leg, selection, logs), factor * leg.seconds, env=variables, cwd=ROOT)


def command_of(leg: Leg, selection: Selection, logs: Path) -> list[str]:
    if not leg.is_pytest:
        return list(leg.command)
    # -v names a test before it starts. A test that hangs is thus known.
    pytest = ["python", "-m", "pytest", "-v", *leg.command]
    pytest += ["-k", selection.expression] if selection.expression else []
    one_mpi = "" if leg.environment != "openmpi" else "not one_mpi"
    pytest += ["-m", " and ".join(filter(None, ("soak" if selection.soak else "not soak", leg.marks, one_mpi)))]
    if not leg.ranks:
        return [*pytest, f"--junitxml={logs}/rank-0.xml"]
    # Every rank writes its own report and output. Only the shell that mpirun starts knows the rank.
    rank = f"{logs}/rank-${RANK[leg.environment]}"
    script = f'exec "$0" "$@" -p no:cacheprovider "--junitxml={rank}.xml" >"{rank}.txt" 2>&1'
    return ["mpirun", "-n", str(leg.ranks), "sh", "-c", script, *pytest]


def judge(leg: Leg, selection: Selection, finished: job.Finished) -> Result:
    logs = LOGS / leg.name
    (logs / "launcher.txt").write_text(finished.output)
    reports = {rank: read_report(logs / f"rank-{rank}.xml") for rank in range(max(leg.ranks, 1))}
    tests: dict[str, str] = {}
    for report in reports.values():
        for test, outcome in (report or {}).items():
            tests[test] = worst(outcome, tests.get(test, outcome))
    counts = {word: list(tests.values()).count(word) for word in (PASSED, FAILED, SKIPPED)}
    nothing_selected = not selection.is_whole and not tests and None not in reports.values()

    problem = ""
    if finished.timed_out:
        problem = f"ended after its time-out of {finished.seconds:.0f} s"
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
    slowest = slowest_tests(logs / "rank-0.xml")
    return Result(leg, finished.seconds, counts, problem, output, slowest, finished.cpu_seconds)


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
    parser.add_argument("--mpi", choices=MPIS, help="only the legs in this MPI's environment")
    parser.add_argument("-k", metavar="EXPR", default="", help="only the tests that match, as in pytest")
    parser.add_argument("--soak", action="store_true", help="only the tests that repeat for long")
    parser.add_argument("--table", action="store_true", help="run nothing: write the kept times into CONTRIBUTING.md")
    options = parser.parse_args()
    if options.table:
        write_table(PAGE, kept())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the running legs end too

    begun = time.monotonic()
    chosen, selection, before = select(parser, options), Selection(options.k, options.soak), kept()
    results: list[Result] = []

    def done(result: Result) -> None:
        results.append(result)
        show(result)

    for stage, most in STAGES.items():
        legs_of_stage = [leg for leg in chosen if leg.stage == stage]
        for result in make_environments(legs_of_stage):
            done(result)
        run_legs(legs_of_stage, most, selection, before, done)
    results.sort(key=lambda result: [*chosen, result.leg].index(result.leg))
    summarize(results, time.monotonic() - begun, before)
    if selection.is_whole:
        keep(results, time.monotonic() - begun, before)
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
            and options.mpi in (None, leg.environment)
            and (leg.is_pytest or not (options.k or options.soak))
        )

    selected = [leg for leg in legs() if wanted(leg)]
    selected += [leg for leg in on_request() if leg.name in (options.leg or ())]
    if not selected:
        parser.error(f"no such leg. The legs are {', '.join(leg.name for leg in (*legs(), *on_request()))}")
    return selected


def summarize(results: list[Result], seconds: float, before: Times) -> None:
    totals = dict.fromkeys((PASSED, FAILED, SKIPPED), 0)
    print(f"\n{'leg':<18}{'result':<7}{'time':>8}{'before':>10}{'CPU':>10}{'passed':>8}{'failed':>8}{'skipped':>8}")

    def line(name: str, word: str, times: tuple[float, float], counts: dict[str, int]) -> None:
        last = f"{before[name]['seconds']:.1f} s" if name in before else ""
        print(f"{name:<18}{word:<7}{times[0]:6.1f} s{last:>10}{times[1]:8.1f} s{columns(counts)}")

    for result in results:
        for word in totals:
            totals[word] += result.counts.get(word, 0)
        line(result.leg.name, result.word, (result.seconds, result.cpu_seconds), result.counts)
    line("all", "", (seconds, sum(result.cpu_seconds for result in results)), totals)
    for result in results:
        if result.problem:
            print(f"\n{result.leg.name}: {result.problem}")
            print("".join(f"    {line}\n" for line in ends_of(result.output)), end="")
    print(f"{totals[PASSED]} passed, {totals[FAILED]} failed")


def ends_of(output: str) -> list[str]:
    """What remains readable where only the last lines of a run are kept: which tests failed, or where the leg stood."""
    lines = output.rstrip().splitlines()
    told = re.compile(r"FAILED |ERROR |\++ Timeout|Fatal Python|Aborting: ")
    listed = [line for line in lines if told.match(line)] or lines[-LAST_LINES:]
    listed += [line for line in lines if line.startswith("E   ")][:1]
    begun = [line for line in lines if re.match(r"tests/\S+::((?! PASSED| SKIPPED| FAILED).)*$", line)][-1:]
    frames = re.findall(r'File "\S*?((?:fompi|tests)/[^"]+)", line (\d+),? in (\S+)', output)
    stacks = list(dict.fromkeys(f"{path}:{line} {name}" for path, line, name in frames))
    return [line[:LAST_COLUMNS] for line in (*listed[: LAST_LINES + 1], *begun, *stacks[:LAST_LINES])]


def columns(counts: dict[str, int]) -> str:
    return "".join(f"{counts.get(word, 0):>8}" for word in (PASSED, FAILED, SKIPPED))


def kept() -> Times:
    try:
        return dict(json.loads(TIMES.read_text()))
    except (OSError, ValueError):
        return {}


def keep(results: list[Result], seconds: float, before: Times) -> None:
    new = {r.leg.name: {"seconds": r.seconds, "cpu_seconds": r.cpu_seconds} for r in results if not r.problem}
    if new.keys() >= {leg.name for leg in legs()}:
        new["all"] = {"seconds": seconds, "cpu_seconds": sum(times["cpu_seconds"] for times in new.values())}
    TIMES.write_text(json.dumps({**before, **new}, indent=1))


def write_table(page: Path, times: Times) -> None:
    """Put the kept times between the MARKS of the page."""
    rows = [
        f"| `{name}` | {times[name]['seconds']:.0f} | {times[name]['cpu_seconds']:.0f} |"
        for name in (*(leg.name for leg in legs()), "all")
        if name in times
    ]
    table = "\n".join(("| leg | seconds | CPU seconds |", "|---|---|---|", *rows))
    before, begin, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
