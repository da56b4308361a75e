"""What pyproject.toml says stands in other files too: they agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import fompi

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tools/recipes"
WRITTEN = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = WRITTEN["project"]


def minimum(requirement):
    """("numpy", "1.26") of "numpy>=1.26"."""
    return re.fullmatch(r"([\w.-]+) ?>=([\w.]+)", requirement).groups()


RUN = [minimum(requirement) for requirement in PROJECT["dependencies"]]
BUILD = [minimum(requirement) for requirement in WRITTEN["build-system"]["requires"]]
PYTHON = PROJECT["requires-python"].removeprefix(">=")


def test_the_address_of_the_project_stands_in_one_place():
    """Before a release, replace the placeholders of [project.urls] in pyproject.toml, and nothing else."""
    address = PROJECT["urls"]["Source"]
    assert all(url.startswith(address) for url in PROJECT["urls"].values())
    found = subprocess.run(["git", "grep", "-l", "-F", address], cwd=ROOT, text=True, capture_output=True, timeout=30)
    assert found.stdout.split() == ["pyproject.toml"], "write the address in pyproject.toml only"


def test_the_package_of_spack_depends_on_what_pyproject_does(monkeypatch):
    said = {"depends_on": [], "license": [], "version": []}
    stand_in = ModuleType("spack.package")
    stand_in.PythonPackage = object
    for name, calls in said.items():
        setattr(stand_in, name, lambda *values, calls=calls, **kinds: calls.append((*values, kinds)))
    monkeypatch.setitem(sys.modules, "spack", ModuleType("spack"))
    monkeypatch.setitem(sys.modules, "spack.package", stand_in)
    exec(compile((RECIPES / "spack/package.py").read_text(), "package.py", "exec"), {"__name__": "py_fompi"})
    needed = {f"py-{name}@{version}:": "run" for name, version in RUN}
    needed |= {f"py-{name}@{version}:": "build" for name, version in BUILD}
    needed |= {f"python@{PYTHON}:": "run", "mpi": "run", "c": "build"}
    depends = {what: kinds["type"] for what, kinds in said["depends_on"]}
    assert depends.keys() == needed.keys()
    assert all(kind in depends[what] for what, kind in needed.items())
    assert said["license"] == [(PROJECT["license"], {})]


def test_the_recipe_of_conda_depends_on_what_pyproject_does():
    recipe = (RECIPES / "conda/recipe.yaml").read_text()
    for title, needed in (("host", BUILD), ("run", [("python", PYTHON), *RUN])):
        section = re.search(rf"^  {title}:\n((?:    .*\n)+)", recipe, re.MULTILINE)[1]
        named = re.findall(r"^    - ([\w-]+ >=[\w.]+)", section, re.MULTILINE)
        assert [minimum(requirement) for requirement in named] == needed
    assert f"python {PYTHON}.*" in recipe and f"license: {PROJECT['license']}" in recipe


def test_every_file_says_the_same_version():
    for page in ("CITATION.cff", "tools/recipes/conda/recipe.yaml"):
        pattern = r'^ *version: "?([\d.]+)"?$'
        assert re.search(pattern, (ROOT / page).read_text(), re.MULTILINE)[1] == fompi.__version__
    wheels = re.findall(r"fompi-([\d.]+)-cp311", (ROOT / "docs/howto/install.md").read_text())
    assert wheels and {*wheels} == {fompi.__version__}
