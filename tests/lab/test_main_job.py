"""`make lab`: the main job with wide layers on shaped hosts, with the command of the Makefile, at a smaller size."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import job
import pytest
from cluster.values import Rate

ROOT = Path(__file__).resolve().parent.parent.parent
HOSTS, RATE, WIDTH, BATCH = 2, "200mbit", 512, 512
SMALLER = f"--width {WIDTH} --batch {BATCH} --hidden 128 --epochs 16"  # argparse takes the last value of an option


@pytest.mark.measures
@pytest.mark.one_mpi
def test_make_lab(kernel, tmp_path):
    picture = tmp_path / "lab.svg"
    variables = [f"LAB=--hosts {HOSTS} --rate {RATE} --trust", f"ARGS={SMALLER} --timelines {picture}"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(
        ["make", "-n", "lab", *variables], cwd=ROOT, env=clean, capture_output=True, text=True, check=True
    )
    command = shown.stdout[shown.stdout.index("OMP_NUM_THREADS=1") :].replace("\\\n", "")
    words = shlex.split(command.replace(f"{ROOT}/.venv/bin/python", sys.executable))
    assert words.count(sys.executable) == 2 and {"--timelines", "--trust-slow"} <= {*words}, command

    finished = job.run(["env", *words], 50, cwd=ROOT)
    assert finished.returncode == 0 and not finished.left_behind, finished.output
    assert float(re.search(r"^test accuracy ([\d.]+)%$", finished.stdout, re.MULTILINE)[1]) >= 95
    steps = dict(re.findall(r"^  (with overlap|without)((?: +\d+\.\d){6})$", finished.stdout, re.MULTILINE))
    assert set(steps) == {"with overlap", "without"}, finished.output
    # A step moves x, y, the gradient of y, and x again: the part that is on other hosts. The links allow no less time.
    wire = 1e3 * 4 * (HOSTS - 1) / HOSTS * WIDTH * BATCH * 4 / Rate.parse(RATE).goodput
    for name, figures in steps.items():
        step, _, _, messages, _, _ = map(float, figures.split())
        print(f"{name}: a step {step} ms, its messages alone {messages} ms, at the shaped rate {wire:.1f} ms")
        assert 0.95 * wire < messages < 4 * wire and step > 0.95 * wire, finished.output
    assert f"All {HOSTS} ranks, and what moves their messages, share" in finished.stdout

    words = [text.text for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    for host in range(HOSTS):
        assert words.count(f"rank {host} (h{host}), compute") == 2
