"""Builds what is published, in dist/, and tries it: `make release`.

- An sdist, and from it wheels for x86_64 and aarch64, which need Linux with glibc 2.17, any Python from 3.11 on, and
  any MPI. `zig cc` compiles them; nothing of this machine is in them.
- They are judged: auditwheel, abi3audit, check-wheel-contents, twine; and the texts beside them: validate-pyproject,
  check-jsonschema. A wheel without the part in C is refused: `setup.py` lets a failed compiler pass, because fompi
  also works without that part.
- tests/release installs and runs them, each in an empty environment, and tries the recipes of tools/recipes. It needs
  `apt-get install qemu-user-static buildah mmdebstrap`.

The tools are in build/release. `--no-tests` only builds and judges.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from argparse import ArgumentParser
from collections.abc import Mapping
from os import environ
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build/release", ROOT / "dist"
PYTHON = BUILD / "tools/bin/python"

GLIBC = "2.17"
ARCHITECTURES = ("x86_64", "aarch64")


def run(*command: str | Path, variables: Mapping[str, str] = {}) -> str:
    """The output of a command. The release ends if it fails."""
    print("$", *(Path(word).name if isinstance(word, Path) else word for word in command), flush=True)
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env={**environ, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nThe release ends here: this command failed, with exit status {done.returncode}.")
    return done.stdout


def tool(name: str, *arguments: str | Path) -> str:
    return run(PYTHON.with_name(name), *arguments)


def install_tools() -> None:
    if not PYTHON.exists():
        venv.create(PYTHON.parents[1], with_pip=True)
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["release"]
    run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *tools)


def headers() -> Path:
    """A folder with `pyconfig.h` where Debian's headers of Python look for that of another architecture.

    Its numbers are the same on all that we build for: 64 bits, little-endian, glibc.
    """
    version = Path(sysconfig.get_path("include")).name
    found = sysconfig.get_config_h_filename()
    for architecture in ARCHITECTURES:
        folder = BUILD / "include" / f"{architecture}-linux-gnu" / version
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, folder / "pyconfig.h")
    return BUILD / "include"


def build_sdist() -> Path:
    run(PYTHON, "-m", "build", "--sdist", "--outdir", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    return sdist


def build_wheel(source: Path, architecture: str) -> Path:
    compiler = f"{PYTHON} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC} -I{headers()}"
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    variables = {"CC": compiler, "LDSHARED": f"{compiler} -shared -s", "_PYTHON_HOST_PLATFORM": f"linux-{architecture}"}
    run(
        PYTHON,
        "-m",
        "build",
        "--wheel",
        "--outdir",
        DIST,
        f"-C--build-option=--plat-name={tag}",
        source,
        variables=variables,
    )
    (wheel,) = DIST.glob(f"*{architecture}.whl")
    return wheel


def belongs(name: str) -> bool:
    """Whether a file is for users: the package and its metadata, but no test, no tool, and no table of a bench."""
    is_code = name.startswith("fompi/") and name.endswith((".py", ".pyi", ".cu", ".so", "/py.typed"))
    return name.startswith("fompi-") or (is_code and "/test" not in name)


def judge(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    if "fompi/native/_native.abi3.so" not in names:
        sys.exit(f"{wheel.name} has no part in C: its compiler failed. See the output of the command that built it.")
    if strange := [name for name in names if not belongs(name)]:
        sys.exit(f"{wheel.name} holds what a user does not need: {', '.join(strange)}")
    shown = tool("auditwheel", "show", wheel)
    if f'"{wheel.stem.split("-")[-1]}"' not in shown.replace("\n", " "):
        sys.exit(f"{shown}\n{wheel.name} needs more than its name says.")
    tool("abi3audit", "--strict", wheel)
    tool("check-wheel-contents", wheel)


def judge_texts() -> None:
    tool("validate-pyproject", "pyproject.toml")
    for schema, found in (
        ("github-workflows", sorted(ROOT.glob(".github/workflows/*.yml"))),
        ("compose-spec", [ROOT / "tools/recipes/containers/compose.yaml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ):
        tool("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *found)


def placeholders() -> list[str]:
    """The names in `[project.urls]` that have no address yet: example.* are hosts that nobody can have."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    return [name for name, url in urls.items() if urlsplit(url).netloc.startswith("example.")]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-tests", action="store_true", help="build and judge only")
    options = parser.parse_args()
    install_tools()
    for old in DIST.glob("*"):
        old.unlink()
    judge_texts()
    sdist = build_sdist()
    source = BUILD / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (source,) = source.iterdir()
    built = [build_wheel(source, architecture) for architecture in ARCHITECTURES]
    for wheel in built:
        judge(wheel)
    tool("twine", "check", "--strict", sdist, *built)
    if not options.no_tests:
        print(run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/release"))
    for path in (sdist, *built):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")
    if missing := placeholders():
        print(f"Not ready for an upload: {', '.join(missing)} of [project.urls] in pyproject.toml are placeholders.")


if __name__ == "__main__":
    main()
