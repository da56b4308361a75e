"""Measure the figures of docs/results.md: python tools/figures.py [--mpi mpich|openmpi] [--suite NAME]

Each suite but `overhead` runs on a cluster of shaped hosts (tools/netlab.py), with both MPIs, one after the other. The
full output stays in build/figures. The figures that back a claim (tools/claims.py) go to docs/results/SUITE-MPI.json,
one line per figure, with command, date, versions and commit. docs/results.md is written from these files. `--page-only`
only writes the page. Nothing else should run on the machine: netlab refuses to start if the links do not carry what
they should.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from claims import CLAIMS, Claim, Figure, condense, from_line, to_line

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "build" / "figures"
KEPT = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
ENVIRONMENTS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}
HOST_TIME = "host time"
"""The column of a claim that says how much of a figure is time of the cores."""

LINKS = {
    "collectives": (["--hosts", "4", "--rate", "1gbit"], 9),
    "papers": (["--hosts", "4", "--rate", "1gbit"], 7),
    "fused": (["--hosts", "2", "--rate", "1gbit"], 11),
    "parallel": (["--hosts", "4", "--rate", "500mbit"], 3),
    "parallel-2": (["--hosts", "2", "--rate", "500mbit"], 3),
    "host": (["--hosts", "4", "--rate", "8gbit", "--capacity", "32gbit", "--trust"], 5),  # after `parallel`
    "step": (["--hosts", "2", "--rate", "1gbit"], 5),
    "ddp": (["--hosts", "2", "--rate", "1gbit"], 7),
    "programs": (["--hosts", "2", "--rate", "1gbit"], 9),
    "smaller": (["--hosts", "2", "--rate", "1gbit"], 9),
    "decode": (["--hosts", "2", "--rate", "1gbit"], 9),
    "c10d": ([], 5),
    "jit": (["--hosts", "2", "--rate", "500mbit"], 15),
    "peers": (["--hosts", "2", "--rate", "1gbit"], 5),
    "planner": (["--hosts", "2", "--rate", "1gbit"], 7),
    "planner-2x2": (["--groups", "2x2", "--rate", "1gbit", "--between", "100mbit"], 5),
    "planner-2x4": (["--groups", "2x4", "--rate", "400mbit", "--between", "40mbit"], 5),
    "planner-slow": (["--hosts", "4", "--rates", "1gbit,1gbit,250mbit,1gbit"], 5),
    "adapt": (["--hosts", "4", "--rate", "1gbit"], 7),
    "overhead": ([], 15),
}
"""The links of each suite (none: two ranks that share memory), and its rounds. Variants of a suite have a hyphen."""

HEAD = """\
# Results

Every figure is a ratio or a time from one interleaved run on one machine with two cores. Hosts and links are made by
[tools/netlab.py](howto/lab.md) on that machine. A ratio above 1 means that fompi is faster. Brackets hold the 95 %
interval of the median, or the range over several rows. `≥` and `≤` is what was asked for; **bold** values miss it.
[results/](results) holds each figure with its command, date, versions and commit. Files without the versions of Python,
PyTorch and JAX are from 3.11.7, 2.13.0 and 0.10.2. `python tools/figures.py` measures them again. Figures are not
measured again when unrelated code changes.
"""

TAIL = """
## What misses, and why

- Even, within the noise of one machine: DDP (gloo is within 13 % of the bound), `hidden` (a small difference of long
  times), the all-gather of the library, 1F1B.
- Interleaved 1F1B: of a step of 350 ms the busier core works 339 ms, over gloo 324 ms. Why is not known.
- Experts: the time of the cores explains all but 0.05 of the messages. A cold choice: the largest of four plans.
- TP beside DP, the int8 product, peers in slices: not explained. On two hosts ZeRO-1, ring attention, TP+SP and experts
  miss bounds, too: that the time of the cores can explain a miss on four does not prove that it is the only reason.

## Measured by a program of its own

Medians, on two cores, MPICH 5.0.2, Python 3.11.7, NumPy 2.4.6.

- Gather and product, two hosts, 1 Gbit/s, 2026-11-26, four runs: `comm.Allgather(x, full); full @ w` 39 to 40 ms,
  `fompi.all_gather_matmul(x, w)` 27 to 30 ms (Open MPI 5.0.11: 38.8 and 35.7 ms).
  `python -m fompi.lab run --hosts 2 --rate 1gbit -- python examples/before_after.py`
- A training step of a tensor-parallel MLP, four hosts, 500 Mbit/s, 2026-11-25: 334 ms without overlap, 254 ms with.
  `make lab`
- A GPT of 17 million parameters, two hosts, 1 Gbit/s, MPICH, 2026-11-30, two rounds, tokens a second and host: alone
  878, outer steps (H = 30, delay 1) 899 (asked 0.97 of it), DDP over gloo 330, over fompi 325, with int8 610. Four
  hosts as 2 x 2, 40 Mbit/s, 80 ms, int8, delay 10: 0.6 % exposed (1 %). At 100 Mbit/s, delay 12: 1.01 of a lone host.
  `python -m fompi.lab run --hosts 2 --rate 1gbit -- python -m fompi bench islands --rounds 2`;
  `... run --hosts 4 --groups 2x2 --between 40mbit,80ms -- python -m fompi bench islands --row 2x2 --rounds 1`
- Hosts of 0.4, 0.2, 0.2 and 0.1 cores, 1 Gbit/s, MPICH, 2026-11-30, three rounds, equal / balanced shares (asked 1.3):
  MLP 1.87, attention 1.68, a token 1.34, a prompt 1.64, DDP 2.35, ZeRO 2.17, a pipeline 2.93. Time / sum of speeds
  (asked 1.05): 1.5 to 3.3, with messages and the bubble of the pipeline (1.375); DDP with four times the rows 0.87.
  `python -m fompi.lab run --hosts 4 --cores 0.4,0.2,0.2,0.1 -- python -m fompi bench unequal --rounds 3`
- 256 MiB from rows to columns, four hosts, 1 Gbit/s, MPICH, 2026-11-30, `bench reshard`: 1.23 of the wire (asked 1.1),
  to uneven ones 1.08; Alltoallw 0.99 to 1.03, Alltoallv with packing 1.12 to 1.17 times that (asked 1.4). 2 GB saved by
  four ranks, `bench checkpoints`: 1.1 of plain writing (asked 1.15); a step waits for 0.02 of it (`"now"`: 0.15).
"""


def measure(suite: str, mpi: str, trust: bool, quick: bool) -> None:
    """Run a suite and keep its figures."""
    links, rounds = LINKS[suite]
    bin_folder = ENVIRONMENTS[mpi] / "bin"
    if not (bin_folder / "python").exists():
        sys.exit(f"there is no {bin_folder}/python: call `make test` once")
    RAW.mkdir(parents=True, exist_ok=True)
    raw = RAW / f"{suite}-{mpi}.json"
    name = suite.partition("-")[0]
    own = f"tools/suites/{name}.py"  # else a suite of the wheel
    which = own if (ROOT / own).exists() else name
    inner = ["python", "-m", "fompi", "bench", which, "--rounds", str(rounds), *["--quick"] * quick]
    lab = ["python", "tools/netlab.py", "run", *links, "--mpi", mpi] if links else ["mpirun", "-n", "2"]
    shown = shlex.join([*lab, *["--"] * bool(links), *inner])
    print(shown, flush=True)
    variables = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    trusting = ["--trust"] * (trust and bool(links))
    command = [*lab, *trusting, *["--"] * bool(links), *inner, "--json", str(raw)]
    if subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"failed: {shown}")
    if quick:
        print(f"quick figures are not kept; they are in {raw}")
    else:
        keep(suite, mpi, json.loads(raw.read_text()), shown, _commit())


def _commit() -> str:
    """The commit that is measured; a + marks uncommitted changes."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def keep(suite: str, mpi: str, measured: Mapping[str, Any], command: str, commit: str) -> None:
    """Write the figures that back a claim, one line each."""
    about = measured["about"]
    source = {
        "command": command,
        "date": about["date"][:10],
        "mpi": f"{about['mpi']['library']} {about['mpi']['version']}",
        **{name: version for name, version in about["versions"].items() if version},
        "commit": commit,
    }
    lines = []
    for claim in CLAIMS:
        for pick in claim.picks if suite in (claim.suite, *claim.beside.values()) else ():
            figure = condense(pick, measured["rows"])
            if figure is None and suite == claim.suite:
                sys.exit(f"{suite}: no row matches {pick}")
            if figure is None:  # these do not have every row
                continue
            lines.append(json.dumps({**to_line(figure), **source}, ensure_ascii=False))
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{suite}-{mpi}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


# ---------------------------------------------------------------------------------------------------------- the page


def page() -> str:
    """docs/results.md, from the files beside it."""
    return HEAD + "".join("\n" + "\n".join(_section(claim)) + "\n" for claim in CLAIMS) + TAIL


def _section(claim: Claim) -> Iterator[str]:
    lines = {mpi: kept for mpi in NAMES if (kept := _kept(claim.suite, mpi))}
    yield f"## {claim.title}\n"
    yield textwrap.fill(claim.text, 120) + "\n"
    if not lines:
        yield "Not measured yet."
        return
    files = (f"[{NAMES[mpi]}](results/{claim.suite}-{mpi}.json), {of[0]['date']}" for mpi, of in lines.items())
    yield f"`python tools/figures.py --suite {claim.suite}` ({' / '.join(files)}):\n"
    heads = [*(NAMES[mpi] for mpi in lines), "asked", *claim.beside]
    yield f"| | {' | '.join(heads)} |"
    yield f"|---|{'---|' * len(heads)}"
    figures = {mpi: {line["figure"]: from_line(line) for line in of} for mpi, of in lines.items()}
    others = {
        name: {mpi: {line["figure"]: from_line(line) for line in _kept(suite, mpi)} for mpi in NAMES}
        for name, suite in claim.beside.items()
    }
    for pick in claim.picks:
        found = {mpi: of.get(pick.label) for mpi, of in figures.items()}
        beside = {name: [of.get(pick.label) for of in by_mpi.values()] for name, by_mpi in others.items()}
        cells = [_cell(figure, others.get(HOST_TIME, {}).get(mpi, {}).get(pick.label)) for mpi, figure in found.items()]
        more = [" / ".join(_number(figure.value) for figure in of if figure) + _limit(of) for of in beside.values()]
        yield f"| {pick.label} | {' | '.join((*cells, _asked([*found.values()]), *more))} |"


def _limit(figures: list[Figure | None]) -> str:
    asked = _asked(figures)
    return f" ({asked})" if asked else ""


def _kept(suite: str, mpi: str) -> list[dict[str, Any]]:
    """The kept figures of a suite. None: it was not measured."""
    path = KEPT / f"{suite}-{mpi}.json"
    return json.loads(path.read_text()) if path.exists() else []


def _cell(figure: Figure | None, host: Figure | None = None) -> str:
    """Bold: it misses what was asked. Slanted: it would not without the time of the cores (`host`)."""
    if figure is None:
        return ""
    text = _number(figure.value)
    if figure.low is not None and figure.high is not None:
        text += f" [{_number(figure.low)}, {_number(figure.high)}]"
    text += f" {figure.unit}" if figure.unit else ""
    if figure.reached is not False:
        return text
    holds = host is not None and figure.most is not None and figure.value - host.value <= figure.most
    return f"*{text}*" if holds else f"**{text}**"


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value + 0.0:.{digits}f}"


def _asked(figures: list[Figure | None]) -> str:
    for figure in figures:
        if figure is not None and figure.least is not None:
            return f"≥ {figure.least:.4g}"
        if figure is not None and figure.most is not None:
            return f"≤ {figure.most:.4g}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpi", choices=NAMES, action="append")
    parser.add_argument("--suite", choices=LINKS, action="append")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rows, to try it: nothing is kept")
    parser.add_argument("--trust", action="store_true", help="also on links that do not carry what was asked for")
    parser.add_argument("--page-only", action="store_true", help="only write docs/results.md from the kept figures")
    options = parser.parse_args()
    if not options.page_only:
        for suite in options.suite or LINKS:
            for mpi in options.mpi or NAMES:
                measure(suite, mpi, options.trust, options.quick)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
