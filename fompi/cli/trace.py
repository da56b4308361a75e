"""`fompi trace`: what a job has noted in the file of FOMPI_REPORT, as text, for Perfetto, and as a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fompi
from fompi.base import file_checks
from fompi.base.errors import LayoutError
from fompi.cli.output import UsageError, check_picture, check_writable
from fompi.runtime.report_text import full_text, text
from fompi.traces.timeline import timelines
from fompi.traces.trace import Trace

MOST_NBYTES = 256 << 20
"""Of a file. A report is some MiB."""

EXAMPLE = "{} trace run.json --picture run.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="what a job with FOMPI_REPORT=run.json has written")
    parser.add_argument("--save", metavar="FILE", help="Chrome JSON, for Perfetto (run.trace.json, next to the file)")
    parser.add_argument("--picture", metavar="FILE", help="the timeline of the newest calls, as .svg")
    parser.add_argument("--full", action="store_true", help="all operations, with a line for each rank")


def run(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if options.picture:
        check_picture(options.picture)
    shown, trace = _read(path, full_text if options.full else text)
    saved = Path(options.save or path.with_suffix(".trace.json"))
    for wanted in filter(None, (saved, options.picture)):
        check_writable(wanted)
    print(shown)
    if trace.events:
        trace.save(saved)
        print(f"\n{fompi.timeline(trace)}\n\n{saved}: opens in ui.perfetto.dev")
        if options.picture:
            Path(options.picture).write_text(timelines({trace.title: trace}))
    return 0


def _read(path: Path, in_words: Callable[[Any], str]) -> tuple[str, Trace]:
    """The report of the file as text, and the trace in it. Raises UsageError if it is not such a file."""
    try:
        report = json.loads(file_checks.read(path, MOST_NBYTES))
        return in_words(report), Trace.from_json(report["trace"])
    except (OSError, LayoutError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UsageError(f"{path} is no report of a job: FOMPI_REPORT=run.json writes one") from None
