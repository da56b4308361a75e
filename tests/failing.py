"""An error at any stage of a call: raised in the k-th function of fompi that it enters."""

import sys
import threading
import time
from pathlib import Path

import fompi
from fompi.parallel import section

HERE = Path(fompi.__file__).parent
OTHER_FILES = ("section.py", "interleave.py", "products.py")
"""The files that end a section, and a file of kernels."""

OUTSIDE = ("<lambda>", "__del__", "<module>")


class Injected(Exception):
    """An error of no kind that fompi knows."""


def in_a_section(path, name):
    """Within a section that has begun, in the rooms of strategies, but not in what ends the section."""
    opened = section._OPEN.section
    here = path.parts[0] in ("parallel", "torch") and path.name not in OTHER_FILES
    if opened is not None and opened._ends_with is not None:
        opened = opened._ends_with
    return here and opened is not None and opened.begun and opened.error is None


class Stages:
    """Counts the functions of fompi that a `with` block enters where `within`, and raises in number `fails_at`.

    After `late` seconds, in which the other ranks go on as far as they can.
    """

    def __init__(self, fails_at=None, within=in_a_section, kind=Injected, late=0.0):
        self.fails_at, self.within, self.kind, self.late, self.count = fails_at, within, kind, late, 0

    def __enter__(self):
        sys.settrace(self._entered)
        threading.settrace(self._entered)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        threading.settrace(None)

    def _entered(self, frame, event, arg):
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if name in OUTSIDE or not path.is_relative_to(HERE) or not self.within(path.relative_to(HERE), name):
            return
        self.count += 1
        if self.count - 1 == self.fails_at:
            sys.settrace(None)
            time.sleep(self.late)
            raise self.kind(f"in {name}")
