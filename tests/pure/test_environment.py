"""The environment variables: one table, bad values, misspelt names. Under MPI: tests/faults/test_environment.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fompi.base.errors import LaunchError
from fompi.mpi import environment, launcher
from fompi.mpi.environment import VARIABLES, check, refusal, unknown, value

ROOT = Path(__file__).resolve().parents[2]

BAD = {
    "FOMPI_TIMEOUT": ("abc", "-1", "0", "nan"),
    "FOMPI_PROGRESS": ("x", "AUTO", "helper "),
    "FOMPI_CARRIER": ("gloo", "UCX"),
    "FOMPI_CONNECTIONS": ("0", "17", "2.5", "many"),
    "FOMPI_ENGINE": ("C", "Native"),
    "FOMPI_DIGEST": (__file__,),
    "FOMPI_RECORD": (__file__,),
    "FOMPI_REPORT": ("maybe", "2", "yes", "/nowhere/report.json", "report.txt"),
    "FOMPI_CACHE": (str(Path(__file__)),),
    "FOMPI_GPU_AWARE": ("maybe", "2"),
    "FOMPI_PATH": ("rdma", "IPC"),
    "FOMPI_DEVICE": ("cuda:x", "1"),
    "FOMPI_COUNTERS": ("2", "on"),
    "FOMPI_SINGLETONS": ("yes",),
    "FOMPI_TORCH": ("gloo",),
    "FOMPI_DEBUG": ("yes", "2"),
}
GOOD = {
    "FOMPI_TIMEOUT": ("10", "0.5", "inf"),
    "FOMPI_PROGRESS": ("auto", "helper", "library", "poll"),
    "FOMPI_CARRIER": ("auto", "mpi", "ucx"),
    "FOMPI_CONNECTIONS": ("1", "4", "16"),
    "FOMPI_ENGINE": ("auto", "native", "python"),
    "FOMPI_DIGEST": ("digests", "/tmp"),
    "FOMPI_RECORD": ("run", "/tmp"),
    "FOMPI_REPORT": ("0", "1", "short", "full", "report.json"),
    "FOMPI_MACHINE": ("gigabit", "/any/file.json"),
    "FOMPI_CACHE": ("0", "/any/folder", str(ROOT)),
    "FOMPI_GPU_AWARE": ("auto", "0", "1"),
    "FOMPI_PATH": ("auto", "staged", "direct", "ipc"),
    "FOMPI_DEVICE": ("auto", "software", "cuda"),
    "FOMPI_COUNTERS": ("auto", "0", "1"),
    "FOMPI_SINGLETONS": ("0", "1"),
    "FOMPI_TORCH": ("0", "1"),
    "FOMPI_MEMBERS_TOKEN": ("0123456789abcdef0123456789abcdef", "sl4mgsqxqqVnKMGpxPmGHA"),
    "FOMPI_DEBUG": ("0", "1"),
    "FOMPI_AGAIN": (str(ROOT / "again"),),
}


def test_the_page_lists_the_table():
    """The same variables in the same order, with the same defaults."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    rows = re.findall(r"^\| `(FOMPI_\w+)` \| (.*?) \|", page, re.MULTILINE)
    shown = [(name, "" if default == "none" else default.strip("`")) for name, default in rows]
    assert shown == [(name, variable.default) for name, variable in VARIABLES.items()]


def test_the_program_reads_no_other_variable():
    """Every name that starts like a variable of fompi and stands in its source is in the table."""
    named = {
        name for path in (ROOT / "fompi").rglob("*.py") for name in re.findall(r"FOMPI_[A-Z_]*[A-Z]", path.read_text())
    }
    assert named == set(VARIABLES)
    readers = [path for path in (ROOT / "fompi").rglob("*.py") if re.search(r'environ\W.*"FOMPI_', path.read_text())]
    assert not readers, "read variables by fompi.mpi.environment"


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused(name):
    for text in BAD[name]:
        error = refusal({name: text})
        assert isinstance(error, LaunchError)
        assert str(error).startswith(f"{name}={text}: give {VARIABLES[name].takes}")
        assert value(name, {name: text}) == VARIABLES[name].default, (
            "all ranks get the error, so nothing is raised here"
        )
        with pytest.raises(LaunchError, match=name):
            check(name, text)


@pytest.mark.parametrize("text", ["secret", "a" * 32, "abcdefg" * 5])
def test_a_bad_token_is_refused_and_not_shown(text):
    words = str(refusal({"FOMPI_MEMBERS_TOKEN": text}))
    assert words == "FOMPI_MEMBERS_TOKEN=...: give a random text of 22 characters or more"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_good_value(name):
    for text in GOOD[name]:
        assert refusal({name: text}) is None and value(name, {name: text}) == text
    assert refusal({name: ""}) is None and value(name, {name: ""}) == value(name, {}) == VARIABLES[name].default


def test_one_error_names_all_bad_values():
    assert str(refusal({"FOMPI_TIMEOUT": "x", "FOMPI_PROGRESS": "y"})) == (
        "FOMPI_TIMEOUT=x: give a number of seconds above 0; FOMPI_PROGRESS=y: give one of auto, helper, library, poll"
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("FOMPI_TIMOUT", "FOMPI_TIMEOUT is one"),
        ("fompi_timeout", "FOMPI_TIMEOUT is one"),
        ("FOMPI_REPORTS", "FOMPI_REPORT is one"),
        ("FOMPI_PROGESS", "FOMPI_PROGRESS is one"),
        ("FOMPI_GPUAWARE", "FOMPI_GPU_AWARE is one"),
        ("FOMPI_XYZ", f"there are {', '.join(VARIABLES)}"),
    ],
)
def test_a_misspelt_name(name, advice):
    assert unknown({name: "1", "HOME": "/", "FOMPI_TIMEOUT": "1"}) == [f"{name} is no variable of fompi: {advice}"]


def test_the_warning(monkeypatch):
    monkeypatch.setenv("FOMPI_TIMOUT", "3")
    with pytest.warns(UserWarning, match="FOMPI_TIMOUT is no variable of fompi") as found:
        environment.warn_of_unknown()
    assert (found[0].filename, found[0].lineno) == ("<fompi>", 0)  # no line of source is printed
    monkeypatch.delenv("FOMPI_TIMOUT")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.warn_of_unknown()


def test_the_timeout(monkeypatch):
    monkeypatch.setenv("FOMPI_TIMEOUT", "2.5")
    assert launcher.timeout() == 2.5
    monkeypatch.delenv("FOMPI_TIMEOUT")
    assert launcher.timeout() == 300


@pytest.mark.parametrize(("name", "status"), [("FOMPI_TIMOUT", 0), ("FOMPI_TIMEOUT", 2)])
def test_a_command_without_mpi(name, status):
    """A misspelt name is a line on standard error. A bad value ends the command."""
    command = [sys.executable, "-m", "fompi", "plan", "all_gather", "8x2", "--ranks", "2"]
    environ = {**os.environ, name: "abc"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=50)
    assert done.returncode == status and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "fompi: warning: FOMPI_TIMOUT is no" if not status else "fompi: FOMPI_TIMEOUT=abc: give"
    )
