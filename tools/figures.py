"""Measure every figure of docs/benchmarks.md again: python tools/figures.py [--mpi mpich|openmpi] [--suite NAME]

Each suite but `overhead` runs on a cluster of shaped hosts (tools/netlab.py), with both MPIs, one after the other. Its
tables go to docs/benchmarks/SUITE-MPI.md, what they come to into docs/benchmarks.md. Nothing else should run on the
machine meanwhile: netlab refuses if the links do not carry what they should.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "benchmarks"
ENVIRONMENTS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}

SUITES = {
    "collectives": ("Plain collectives", ["--hosts", "4", "--rate", "1gbit"], 9),
    "papers": ("The papers' settings, on an emulated accelerator", ["--hosts", "4", "--rate", "1gbit"], 7),
    "fused": ("Fused operations on real GEMMs", ["--hosts", "2", "--rate", "1gbit"], 11),
    "peers": ("Peers", ["--hosts", "2", "--rate", "1gbit"], 5),
    "planner": ("The planner, on fused operations", ["--hosts", "2", "--rate", "1gbit"], 7),
    "planner-2x2": (
        "The planner, two groups of two hosts",
        ["--groups", "2x2", "--rate", "1gbit", "--between", "100mbit"],
        5,
    ),
    "planner-2x4": (
        "The planner, two groups of four hosts",
        ["--groups", "2x4", "--rate", "400mbit", "--between", "40mbit"],
        5,
    ),
    "adapt": ("Links that change", ["--hosts", "4", "--rate", "1gbit"], 7),
    "overhead": ("What a call costs", [], 15),
    "planner-slow": ("The planner, a slow host", ["--hosts", "4", "--rates", "1gbit,1gbit,250mbit,1gbit"], 5),
}
"""Title, links (none: two ranks that share memory), rounds; the suite is what stands before the hyphen."""

MOST_LINES = 160

HEAD = """\
# Benchmarks

Everything here was measured by the command beside it, on one machine with two cores; what netlab starts, on hosts made
by [tools/netlab.py](lab.md): network namespaces with shaped links of their own. `python tools/figures.py` measures all
of it again. Contestants run in turns, within one run; a figure is a ratio of medians, its interval that of the median
of the ratios of each round (sign test). Every contestant's result is checked before it is timed. Where kernels run on
cores that others use too, a turn waits for a while until small products are not disturbed, and is taken again if those
just before or after it were; what the turn itself took has no say in that. Limits: `T_c` is the kernel alone, `T_m` the
bare exchange, `wire` a plain TCP stream of the same size after the same silence. The p99 of a row is that of its
rounds: of so few it is nearly the slowest.

"""


def measure(suite: str, mpi: str, trust: bool, quick: bool) -> None:
    _, links, rounds = SUITES[suite]
    bin_folder = ENVIRONMENTS[mpi] / "bin"
    if not (bin_folder / "python").exists():
        sys.exit(f"there is no {bin_folder}/python: call `make test` once")
    inner = ["python", "-m", "fompi", "bench", suite.partition("-")[0], "--rounds", str(rounds), *["--quick"] * quick]
    page = PAGES / f"{suite}-{mpi}.md"
    lab = ["python", "tools/netlab.py", "run", *links, "--mpi", mpi] if links else ["mpirun", "-n", "2"]
    trusting = ["--trust"] * (trust and bool(links))
    shown = shlex.join([*lab, *["--"] * bool(links), *inner])
    print(shown, flush=True)
    variables = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [*lab, *trusting, *["--"] * bool(links), *inner, "--markdown", str(page)]
    if subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"failed: {shown}")
    text = page.read_text().partition("\n")[2]  # its own first line is the command inside the lab
    page.write_text(f"# {SUITES[suite][0]}, {NAMES[mpi]}\n\n    {shown}\n\n{text}")


def shortened(table: str) -> str:
    """Of a table of very many rows those that sum up."""
    lines = table.splitlines()
    return table if len(lines) <= MOST_LINES else "\n".join(lines[:2] + [line for line in lines if "| all " in line])


def summary() -> str:
    """The first table of every page."""
    sections = [HEAD]
    for suite, (title, _, _) in SUITES.items():
        for mpi, name in NAMES.items():
            page = PAGES / f"{suite}-{mpi}.md"
            if page.exists():
                blocks = page.read_text().split("\n\n")
                command, about, table = blocks[1], blocks[2].partition("\n")[0], blocks[2:4]
                figures = shortened(next(block for block in table if block.startswith("|")))
                link = f"All times: [benchmarks/{page.name}](benchmarks/{page.name})."
                sections.append(f"## {title}, {name}\n\n{command}\n\n{about}. {link}\n\n{figures}\n\n")
    return "".join(sections).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpi", choices=NAMES, action="append")
    parser.add_argument("--suite", choices=SUITES, action="append")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rows")
    parser.add_argument("--trust", action="store_true", help="also on links that are not what was asked for")
    parser.add_argument(
        "--pages-only", action="store_true", help="write docs/benchmarks.md from the tables that are there"
    )
    options = parser.parse_args()
    PAGES.mkdir(exist_ok=True)
    if not options.pages_only:
        for suite in options.suite or SUITES:
            for mpi in options.mpi or NAMES:
                measure(suite, mpi, options.trust, options.quick)
    (ROOT / "docs" / "benchmarks.md").write_text(summary())


if __name__ == "__main__":
    main()
