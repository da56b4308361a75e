"""An error at any stage of a call: raised in the k-th function of fompi that it enters, as a kernel or an interrupt may."""

import sys
from pathlib import Path

import fompi
from fompi.parallel import section

HERE = str(Path(fompi.__file__).parent)
STAGES = ("/parallel/", "/torch/")
"""The rooms whose functions are stages."""
OUTSIDE = ("section.py", "<lambda>", "__del__")
"""What is no stage: what ends a section by an error must not fail itself."""


class Injected(Exception):
    """An error of no kind that fompi knows."""


class Stages:
    """Counts the functions that a `with` block enters inside of a section, and raises in number `fails_at`."""

    def __init__(self, fails_at=None, kind=Injected):
        self.fails_at, self.kind, self.count = fails_at, kind, 0

    def __enter__(self):
        sys.settrace(self._entered)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _entered(self, frame, event, arg):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if not path.startswith(HERE) or not any(room in path for room in STAGES):
            return
        if path.endswith(OUTSIDE) or name in OUTSIDE or name == "<module>":
            return
        opened = section._OPEN.section
        if opened is None or not opened.begun or opened.error is not None:
            return
        self.count += 1
        if self.count - 1 == self.fails_at:
            sys.settrace(None)
            raise self.kind(f"in {name}")
