"""Jobs that fail, hang or end early. Each test writes a script, launches it on some ranks, and checks how it ended."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import job
import pytest

PRELUDE = """\
import os, signal, sys, threading, time
import numpy as np
import fompi

def emit(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write per line: the ranks share the output

def event():
    emit("EVENT", time.time())

"""
WORLD = """\
world = fompi.Communicator()
rank, size = world.rank, world.size
"""


SOON = 15.0
"""On a busy machine, too. The deadline of a job and its time-out are far behind."""


@dataclass(frozen=True)
class Ended:
    """How a job ended, and how many seconds after its first event.

    Whoever waits for a deadline that the test does not name is killed: it is longer than a job may take.
    """

    finished: job.Finished
    seconds: float

    @property
    def output(self) -> str:
        return self.finished.output

    @property
    def tracebacks(self) -> int:
        return len(re.findall(r"^Traceback \(most recent call last\)", self.output, re.MULTILINE))

    def lines(self, word: str) -> list[str]:
        """The rest of every line of output that begins with `word`, sorted."""
        return sorted(re.findall(rf"^{word} (.*)$", self.finished.stdout, re.MULTILINE))

    def assert_clean(self) -> None:
        """A normal end: nothing on stderr, no process is left, exit status 0."""
        assert not self.finished.timed_out and not self.finished.left_behind, self.output
        assert self.finished.returncode == 0 and self.tracebacks == 0, self.output
        assert self.finished.stderr.strip() == "", self.output

    def assert_failed(self, *words: str) -> None:
        """All ranks ended soon after the event, with an error status. One traceback contains `words`."""
        assert not self.finished.timed_out and not self.finished.left_behind, self.output
        assert self.finished.returncode != 0, self.output
        assert self.tracebacks == 1, self.output
        for word in words:
            assert word in self.output, (word, self.output)
        assert self.seconds < SOON, (self.seconds, self.output)


@pytest.fixture
def launch(mpirun, tmp_path):
    """launch(ranks, "code", timeout=2, env={}) -> Ended. The code can use emit(), event(), world, rank and size."""

    def run(ranks, code, timeout=60.0, world=True, env=None):
        script = tmp_path / "script.py"
        script.write_text(PRELUDE + WORLD * world + code)
        finished = mpirun(ranks, script, seconds=40, env={"FOMPI_TIMEOUT": str(timeout), **(env or {})}, cwd=tmp_path)
        ended = time.time()
        events = [float(text) for text in re.findall(r"EVENT ([\d.]+)", finished.stdout)]
        return Ended(finished, ended - min(events, default=ended))

    return run
