"""The Makefile: what it would run, in a folder without environments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def dry(tmp_path):
    """dry("run", "ARGS=...") -> the commands, one per line."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "TORCH_INDEX"))
    }

    def run(*words):
        done = subprocess.run(
            ["make", "-n", *words], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.replace("\\\n", " ")

    return run


@pytest.mark.parametrize("arguments", ["--framework torch", "--framework=torch --epochs 2", "--framework jax"])
def test_a_framework_that_is_named_is_installed(dry, arguments):
    """Before the program starts. Without it the light environment is made."""
    name = re.search("torch|jax", arguments)[0]
    commands = dry("run", f"ARGS={arguments}")
    assert re.findall(r"-e '\.\[(.*)\]'", commands) == ["mpich,numba,example", name]
    assert commands.index(f"-e '.[{name}]'") < commands.index("mpirun")
    assert re.findall(r"-e '\.\[(.*)\]'", dry("run")) == ["mpich,numba,example"]


def test_the_index_of_torch_is_a_choice(dry):
    """By default pip is used as it is configured."""
    assert "--extra-index-url" not in dry("run", "ARGS=--framework torch") + dry("environments")
    for target in ("run", "environments"):
        assert f"--extra-index-url {INDEX} -e" in dry(target, f"TORCH_INDEX={INDEX}", "ARGS=--framework torch")


def test_the_wheelhouse_holds_fompi_and_what_it_needs(dry):
    """With the extras that are named. The line that it prints installs the same, without an index."""
    for words, extras in (((), ""), (("WITH=numba,example",), "[numba,example]")):
        commands = dry("wheelhouse", *words)
        assert re.search(rf"pip wheel .*\s--wheel-dir build/wheelhouse '\.{re.escape(extras)}'", commands), commands
        assert f"pip install --no-index --find-links wheelhouse 'fompi{extras}'" in commands


def test_mpi4py_for_the_standard_abi_is_compiled_once(dry):
    """Only if no wheel of it is kept. It is there before fompi is installed, which would get another one."""
    commands = dry(".venv-abi/.ready-test")
    kept, compiled, installed = map(
        commands.index, ("--find-links build/wheels", "MPICC=mpicc_abi", "-e '.[mpich,quick]'")
    )
    assert kept < compiled < installed


def test_advice_names_commands_that_work_in_a_checkout():
    """fompi is on no index, so an extra of it is installed from the checkout: every named extra exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [
        path
        for room in ("fompi", "tools", "examples")
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".sbatch")
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for path in files:
        for asked, named in re.findall(r"pip install ['\"](\w*\.?)\[([\w,]+)\]", path.read_text()):
            assert asked == "." and set(named.split(",")) <= extras.keys(), path


@pytest.mark.parametrize("page", ["README.md", "docs/howto/slurm.md", "docs/start.md"])
def test_pages_that_run_an_example_install_what_it_needs(page):
    assert 'pip install ".[example]"' in (ROOT / page).read_text()
