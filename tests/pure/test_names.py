"""The public names: `dir(fompi)` shows them, and nothing is a function and a module at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fompi

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "jax", "parallel", "members", "islands", "plans", "model", "planner", "traces")


def test_dir_shows_public_names_only():
    assert dir(fompi) == sorted([*fompi.__all__, *PACKAGES, "__version__"])
    assert len(fompi.__all__) == len(set(fompi.__all__))
    assert all(hasattr(fompi, name) for name in fompi.__all__)


def test_packages_that_documents_use_are_shown():
    """Those that a reader is told to import from, in the pages for users and in the examples."""
    pages = [*(ROOT / "docs" / "howto").glob("*.md"), *(ROOT / "docs" / "concepts").glob("*.md"), ROOT / "README.md"]
    pages += (ROOT / "examples").glob("*.py")
    lines = [line for page in pages for line in page.read_text().splitlines() if "# noqa" not in line]
    used = {name for line in lines for name in re.findall(r"^\s*(?:from|import) fompi\.(\w+)", line)}
    assert used and used <= {*PACKAGES}


@pytest.mark.parametrize("package", ["fompi", "fompi.jax"])
def test_no_module_has_the_path_of_a_public_name(package):
    """`import fompi.plan` must not hide the function `fompi.plan` behind a module."""
    folder = ROOT / Path(*package.split("."))
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert modules and not modules & {*fompi.__all__}


def test_public_names_stay_what_they_are_after_all_imports():
    """A module that is imported becomes an attribute of its package. None replaces a public name."""
    before = {name: getattr(fompi, name) for name in fompi.__all__}
    for room in ("base", "plans", "schedules", "traces", "model", "planner", "runtime", "ops", "tuning"):
        for path in {*(ROOT / "fompi" / room).glob("*.py")} - {ROOT / "fompi/ops/intracomm.py"}:  # it loads mpi4py
            import_module(f"fompi.{room}.{path.stem}" if path.stem != "__init__" else f"fompi.{room}")
    assert {name: getattr(fompi, name) for name in fompi.__all__} == before


def test_importing_fompi_is_enough_for_the_report():
    """FOMPI_REPORT works although no module of the program imports `fompi.runtime.report`."""
    code = "import fompi\nfrom fompi.base.doors import DOORS\nprint(DOORS.report())"
    env = {name: value for name, value in os.environ.items() if name != "FOMPI_REPORT"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout == "None\n", done.stderr  # the module was found, and asked
