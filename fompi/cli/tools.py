"""Tools of a checkout as subcommands: `fompi bench`, `fompi check`, `fompi islands replay`. They are not installed."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import fompi
from fompi.base.errors import FompiError

TOOLS = Path(fompi.__file__).resolve().parents[1] / "tools"

SCRIPTS = {("check",): "check", ("islands", "replay"): "replay_islands.py"}
"""Subcommands that are programs of their own, by their words."""

EXAMPLE = "{} bench overhead --quick"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `fompi bench`."""
    _bench().add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    status: int = _bench().run(options)
    return status


def run_script(arguments: Sequence[str]) -> None:
    """If these are the words of a program, run it with the others, and end by SystemExit, as it does."""
    for words, name in SCRIPTS.items():
        if tuple(arguments[: len(words)]) == words:
            script = _path(" ".join(words), name)
            sys.argv = [str(script), *arguments[len(words) :]]
            runpy.run_path(str(script), run_name="__main__")


def _bench() -> Any:
    _path("bench", "bench")
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return import_module("bench.command")


def _path(what: str, name: str) -> Path:
    if not (TOOLS / name).exists():
        raise FompiError(f"{what} is a tool of a checkout of fompi (tools/{name}), and not installed")
    return TOOLS / name
