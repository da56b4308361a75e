"""The pages are true: their code runs and prints what they show, their commands exist, their links lead somewhere.

`tests/blocks.py` has the rules, and lists the blocks: `python tests/blocks.py`. All blocks with the same number of
ranks and the same variables run in one job, one after the other.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import blocks
import job
import pytest
from blocks import Block
from commands import run_here
from scale import step

from fompi.model.machine import Machine

README = "README.md"
RUNNABLE = [block for block in blocks.python() if block.ranks]
FIRST = next((block for block in RUNNABLE if block.page == README), None)
OTHER_RANKS = [replace(FIRST, ranks=ranks, output=None) for ranks in (1, 3)] if FIRST else []
"""The first program of the README, on numbers of ranks that the page does not name."""

PURE = ("plan", "simulate", "explain", "layout", "balance")
"""The commands that need no MPI and print the same every time. (`tools/scale.py` has a test of its own.)"""

MOST_LINES = {"README.md": 130, "docs/howto/": 80}

Outputs = Callable[[Block], str]


@pytest.fixture(scope="module")
def printed(mpirun, tmp_path_factory) -> Outputs:
    """printed(block): what all ranks printed, rank 0 first. It starts the job of the block when it is first needed."""

    @functools.cache
    def launch(ranks: int, variables: str) -> tuple[Path, job.Finished]:
        folder = tmp_path_factory.mktemp("blocks")
        together = [b for b in RUNNABLE + OTHER_RANKS if (b.ranks, b.variables) == (ranks, variables)]
        for block in together:
            (folder / script_of(block)).write_text(block.code)
        runner = blocks.ROOT / "tests" / "docs" / "run_blocks.py"
        environment = {"PYTHONPATH": str(blocks.ROOT), "JAX_PLATFORMS": "cpu", "FOMPI_TIMEOUT": "60"}
        environment |= together[0].environment
        return folder, mpirun(ranks, runner, folder, seconds=150, cwd=folder, env=environment)

    def of(block: Block) -> str:
        folder, done = launch(block.ranks, block.variables)
        outputs = [folder / script_of(block, f".{rank}.out") for rank in range(block.ranks)]
        assert all(output.exists() for output in outputs), f"{block} did not end well:\n{done.output}"
        assert not done.left_behind, done.output
        return "".join(output.read_text() for output in outputs)

    return of


def script_of(block: Block, suffix: str = ".py") -> str:
    """A name of its own; the names sort in the order of the pages."""
    return f"{re.sub(r'[^a-z]+', '-', block.page.lower())}-{block.line:03}{suffix}"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("block", RUNNABLE + OTHER_RANKS, ids=str)
def test_a_block_runs_and_prints_what_the_page_shows(printed, block):
    text = printed(block)
    if block.output is not None:
        assert text == block.output


def test_each_kind_of_page_has_programs():
    """An extractor that finds nothing would prove nothing."""
    pages = [block.page for block in RUNNABLE]
    assert pages.count(README) >= 2
    assert all(any(page.startswith(room) for page in pages) for room in ("docs/start", "docs/howto", "docs/concepts"))
    assert sum(block.output is not None for block in RUNNABLE) >= 6


@pytest.mark.parametrize("block", blocks.python(), ids=str)
def test_a_block_is_python(block):
    compile(block.code, block.page, "exec")


run_once = functools.cache(run_here)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("command", blocks.commands(), ids=str)
def test_a_command_exists(command):
    """Those that need no MPI run, and print what the page shows. The help names the options of the others."""
    words = command.words
    status, out, err = run_once(*words) if is_pure(words) else run_once(*words[:1], "--help")
    assert status == 0 and out, err
    if not is_pure(words):
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert all(re.search(rf"{option}\b", out) for option in options), out
    elif command.block.output is not None and command.is_alone:
        assert re.fullmatch(pattern(command.block.output), out), out


@pytest.mark.parametrize("block", [b for b in blocks.fenced() if b.language == "sh"], ids=str)
def test_commands_are_bash(block):
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr, done.stderr


def is_pure(words: list[str]) -> bool:
    has_files = any(word.endswith((".json", ".py")) for word in words)
    return bool(words) and words[0] in PURE and not has_files


def pattern(shown: str) -> str:
    """A regular expression for an output in which a line `...` stands for any lines."""
    return "".join(r"(?:.*\n)*?" if line == "..." else re.escape(f"{line}\n") for line in shown.splitlines())


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: str(page.relative_to(blocks.ROOT)))
def test_links_lead_somewhere(page):
    """Links to files of ours, and to their headings."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if heading and file.suffix == ".md":
            assert heading in headings(file), f"{page.name}: {target}; there are {sorted(headings(file))}"


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: str(page.relative_to(blocks.ROOT)))
def test_files_exist(page):
    """The files of the project that a page names. Those that the program writes are in build/."""
    named = re.findall(r"(?<![\w/.])(?:fompi|examples|tools|tests|docs)/[\w./-]*\w", page.read_text())
    missing = [name for name in named if not (blocks.ROOT / name).exists()]
    assert not missing


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Sphinx make them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: str(page.relative_to(blocks.ROOT)))
def test_a_page_is_short(page):
    name = str(page.relative_to(blocks.ROOT))
    for start, most in MOST_LINES.items():
        if name.startswith(start):
            assert len(page.read_text().splitlines()) <= most


@pytest.mark.parametrize("script", sorted(blocks.ROOT.glob("examples/slurm/*.sbatch")), ids=lambda path: path.name)
def test_a_job_script_is_bash(script):
    """`bash -n` accepts it, and the files that it starts exist."""
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr, done.stderr
    text = script.read_text()
    assert "#SBATCH --ntasks-per-node" in text and re.search(r"(python -m )?fompi info", text)
    for example in re.findall(r"examples/\w+\.py", text):
        assert (blocks.ROOT / example).is_file()


def test_there_are_job_scripts():
    assert len(list(blocks.ROOT.glob("examples/slurm/*.sbatch"))) >= 2


@pytest.mark.timeout(120)
def test_the_study_at_scale_on_eight_ranks():
    """The first row of each of its tables, on both machines, is what the command above the table prints."""
    (page,) = blocks.ROOT.glob("docs/**/scale.md")
    text = page.read_text()
    rows = re.findall(r"^\| 8 \|(.*)\|$", text, re.MULTILINE)
    asked = [shlex.split(words) for words in re.findall(r"^python tools/scale.py (.*)", text, re.M)]
    assert len(rows) == len(asked) == 3
    for row, words in zip(rows, asked, strict=True):
        options = dict(zip(words[::2], words[1::2], strict=True))
        cells = [cell.strip() for cell in row.split("|")]
        for machine, shown in (("h100-ndr", cells[:3]), ("a800-hdr", cells[3:])):
            tokens = int(options.get("--tokens", 2048))
            made = step("llama-7b", options["--parallel"], 8, Machine.load(machine), tokens)
            gain = made.unfused / made.fused
            assert shown == [f"{1e3 * made.unfused:.1f}", f"{1e3 * made.fused:.1f}", f"{gain:.2f}x"], (words, machine)
