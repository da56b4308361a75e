"""What the pages show is run: Python blocks that name an mpirun, commands of fompi, links, job scripts.

A block runs if its first line is `# mpirun -n N python NAME.py`; `tests/blocks.py` lists them:

    python tests/blocks.py
"""

from __future__ import annotations

import re
import shlex
import subprocess

import blocks
import pytest

from fompi.model.machine import Machine
from fompi.planner.layers import step

RUNNABLE = [block for block in blocks.python() if block.ranks]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_a_block_runs(mpirun, tmp_path, block):
    """With as many ranks as it says, in an empty folder."""
    script = tmp_path / block.file
    script.write_text(block.code)
    done = mpirun(block.ranks, script, seconds=90, cwd=tmp_path, env={"PYTHONPATH": str(blocks.ROOT)})
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_the_readme_shows_runs_on_any_number_of_ranks(mpirun, tmp_path, ranks):
    block = next(block for block in RUNNABLE if block.page == "README.md")
    script = tmp_path / block.file
    script.write_text(block.code)
    done = mpirun(ranks, script, seconds=50, cwd=tmp_path, env={"PYTHONPATH": str(blocks.ROOT)})
    assert done.returncode == 0, done.output


def test_the_readme_shows_a_program():
    """Twenty lines of use, not less: an extractor that finds nothing proves nothing."""
    assert any(block.page == "README.md" and block.ranks >= 2 for block in RUNNABLE)


@pytest.mark.parametrize("block", blocks.python(), ids=str)
def test_every_block_is_python(block):
    compile(block.code, block.page, "exec")


@pytest.mark.parametrize("command", blocks.commands(), ids=str)
def test_a_command_is_understood(command):
    """Those that need no MPI do what they say; info and bench have tests of their own."""
    words = shlex.split(command.partition("#")[0])
    at = words.index("-m")
    if words[at + 2] in ("plan", "simulate", "explain") and "machine.json" not in words:
        done = subprocess.run([blocks.PYTHON, *words[at:]], cwd=blocks.ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout, done.stderr
    else:
        assert words[at + 2] in ("info", "bench", "calibrate", "explain")


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Those to files of ours."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            path, _, _ = target.partition("#")
            assert not path or (page.parent / path).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("script", sorted(blocks.ROOT.glob("examples/slurm/*.sbatch")), ids=lambda path: path.name)
def test_job_scripts_are_bash(script):
    """`bash -n`; and what they start is there."""
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr, done.stderr
    text = script.read_text()
    assert "#SBATCH --ntasks-per-node" in text and "python -m fompi info" in text
    for example in re.findall(r"examples/\w+\.py", text):
        assert (blocks.ROOT / example).is_file()


def test_there_are_job_scripts():
    assert len(list(blocks.ROOT.glob("examples/slurm/*.sbatch"))) >= 2


@pytest.mark.timeout(120)
def test_what_the_study_at_scale_says_of_eight_ranks():
    """The first row of each of its tables, on both machines, as the command above the table prints it."""
    page = (blocks.ROOT / "docs" / "scale.md").read_text()
    rows = re.findall(r"^\| 8 \|(.*)\|$", page, re.MULTILINE)
    asked = [shlex.split(words) for words in re.findall(r"^python -m fompi simulate step (.*)", page, re.MULTILINE)]
    assert len(rows) == len(asked) == 3
    for row, words in zip(rows, asked, strict=True):
        options = dict(zip(words[::2], words[1::2], strict=True))
        cells = [cell.strip() for cell in row.split("|")]
        for machine, said in (("h100-ndr", cells[:3]), ("a800-hdr", cells[3:])):
            tokens = int(options.get("--tokens", 2048))
            made = step("llama-7b", options["--parallel"], 8, Machine.load(machine), tokens)
            gain = made.unfused / made.fused
            assert said == [f"{1e3 * made.unfused:.1f}", f"{1e3 * made.fused:.1f}", f"{gain:.2f}x"], (words, machine)
