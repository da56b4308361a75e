"""Subcommands that are tools of a checkout, and not installed: `fompi bench`, `digest`, `check`, `islands replay`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import fompi
from fompi.base.errors import FompiError

TOOLS = Path(fompi.__file__).resolve().parents[1] / "tools"

SCRIPTS = {"check": "check", "islands": "replay_islands.py"}
"""Subcommands that are programs of their own."""


def load(name: str) -> Any:
    """The module of a subcommand: "tools.digest" is tools/digest.py, any other name one of fompi."""
    room, _, own = name.partition(".")
    if room != "tools":
        return import_module(name)
    _path(own.replace(".", "/"))
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return import_module(own)


def run_script(arguments: Sequence[str]) -> None:
    """If the first word is that of a program, run it with the others, and end by SystemExit, as it does."""
    if arguments and arguments[0] in SCRIPTS:
        script = _path(SCRIPTS[arguments[0]])
        sys.argv = [str(script), *arguments[1:]]
        runpy.run_path(str(script), run_name="__main__")


def _path(name: str) -> Path:
    """A file or a folder of the tools."""
    path = TOOLS / name
    if not path.exists() and not path.with_suffix(".py").exists():
        raise FompiError(f"this is a tool of a checkout of fompi, tools/{name}, which is not installed")
    return path
