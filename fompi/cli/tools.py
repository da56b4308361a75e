"""Subcommands that are tools of a checkout, and not installed: `fompi bench`, `digest`, `check`, `lab`, `islands`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import fompi
from fompi.base.errors import FompiError

HOMES = Path(fompi.__file__).resolve().parents[1], Path.cwd()
"""Where a checkout may be: around the package, or here, where an installed fompi is called."""

TOOLS = next((home / "tools" for home in HOMES if (home / "tools" / "bench").is_dir()), HOMES[0] / "tools")

SCRIPTS = {"check": "check", "islands": "replay_islands.py", "lab": "netlab.py"}
"""Subcommands that are programs of their own."""


def load(name: str) -> Any:
    """The module of a subcommand: "tools.digest" is tools/digest.py, any other name one of fompi."""
    room, _, own = name.partition(".")
    if room != "tools":
        return import_module(name)
    path(own.replace(".", "/"))
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return import_module(own)


def run_script(arguments: Sequence[str]) -> None:
    """If the first word is that of a program, run it with the others, and end by SystemExit, as it does."""
    if arguments and arguments[0] in SCRIPTS:
        script = path(SCRIPTS[arguments[0]])
        sys.path.insert(0, str(script.parent))
        sys.argv = [str(script), *arguments[1:]]
        runpy.run_path(str(script), run_name="__main__")


def path(name: str) -> Path:
    """A file or a folder of the tools."""
    found = TOOLS / name
    if not found.exists() and not found.with_suffix(".py").exists():
        raise FompiError(f"tools/{name} of a checkout of fompi does this, and is not installed: call it in a checkout")
    return found
