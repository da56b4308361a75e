"""Builds the recipe of conda and runs its tests, on stand-ins for the packages of conda-forge: conda.py RECIPE ENV OUT.

A stand-in is an empty package of the right name; that of Python is the one of the virtual environment ENV, and sees
what is installed there. Prints the depends and the files of the package that was built, as JSON.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

from rattler_build import Package, Stage0Recipe, VariantConfig

CONDA_FORGE = VariantConfig({"c_compiler": ["gcc"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.17"]})
EMPTY = {
    "gcc_linux-64": "13",
    "sysroot_linux-64": "2.17",
    "python-abi3": platform.python_version(),
    "pip": "25",
    "setuptools": "80",
    "numpy": "2.4",
    "mpi4py": "4.1",
}


def stand_in(channel: Path, name: str, version: str, *script: str) -> None:
    """Adds a package to the channel. Its script makes its files."""
    recipe = Stage0Recipe.from_dict(
        {"package": {"name": name, "version": version}, "build": {"script": list(script)}, "about": {"license": "MIT"}}
    )
    (package,) = recipe.render()
    package.run_build(output_dir=channel, channels=[])


def make_channel(channel: Path, environment: Path) -> None:
    for name, version in EMPTY.items():
        stand_in(channel, name, version, f"mkdir -p $PREFIX/share && touch $PREFIX/share/{name}")
    major, minor, _ = platform.python_version_tuple()
    packages = f"lib/python{major}.{minor}/site-packages"
    stand_in(
        channel,
        "python",
        platform.python_version(),
        f"mkdir -p $PREFIX/bin $PREFIX/{packages}",
        f"ln -s {environment}/bin/python $PREFIX/bin/python && cp {environment}/pyvenv.cfg $PREFIX",
        f"echo {environment}/{packages} > $PREFIX/{packages}/stand_in.pth",
    )


def main(recipe: Path, environment: Path, out: Path) -> None:
    (package,) = Stage0Recipe.from_file(recipe).render(CONDA_FORGE)
    make_channel(out / "conda-forge", environment)
    channels = [f"file://{out}/conda-forge"]
    (built,) = package.run_build(output_dir=out / "built", channels=channels).packages
    found = Package.from_file(built)
    results = found.run_tests(channel=[f"file://{out}/built", *channels])
    if len(results) != found.test_count or not all(result.success for result in results):
        sys.exit("\n".join(line for result in results for line in result.output))
    print(json.dumps({"depends": found.depends, "files": found.files}))


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:]))
