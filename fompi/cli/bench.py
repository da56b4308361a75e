"""`fompi bench SUITE`: the benchmarks, which are tools of a checkout (`tools/bench`). Installed is `fompi try`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import fompi
from fompi.base.errors import FompiError

TOOLS = Path(fompi.__file__).resolve().parents[1] / "tools"

EXAMPLE = "{} bench overhead --quick"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _command().add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    status: int = _command().run(options)
    return status


def _command() -> Any:
    """The command line of the benchmarks."""
    if not (TOOLS / "bench").is_dir():
        raise FompiError("bench: the benchmarks are in a checkout of fompi, and not installed; `fompi try M,K,N` is")
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return import_module("bench.command")
