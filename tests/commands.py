"""The command line in this process. A process for each command would spend most of its time on imports."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from fompi.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = (sys.executable, "-m", "fompi")
"""The same in a process of its own: for commands that start MPI, and to see that there is such a program."""


def run_here(*words: object, variables: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """The exit status, standard output and standard error of `python -m fompi WORDS`, in the folder of the project."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, variables or {}),
        patch.object(sys, "argv", ["__main__.py", *map(str, words)]),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = main(sys.argv[1:])
        except SystemExit as end:  # of argparse
            status = end.code
    return status, out.getvalue(), err.getvalue()
