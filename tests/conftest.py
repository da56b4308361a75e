"""For every room: a deadline that holds inside C code, and a way to launch a job of ranks."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

import hypothesis
import job
import pytest

ROOT = Path(__file__).resolve().parent.parent
STDERR = pytest.StashKey[int]()

# The same examples on every rank and in every run: what fails here fails again.
hypothesis.settings.register_profile("fompi", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fompi")


def pytest_configure(config):
    # Tracebacks go past pytest's capture, which is lost when a process is ended.
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    # Whoever ends a job that hangs sends SIGTERM first: say where we are, even inside a blocked MPI call.
    faulthandler.register(signal.SIGTERM, file=config.stash[STDERR], chain=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """The second line behind pytest-timeout, whose thread needs the GIL that a blocked call may hold."""
    marker = item.get_closest_marker("timeout")
    seconds = (marker.args or [marker.kwargs["timeout"]])[0] if marker else item.config.getini("timeout")
    faulthandler.dump_traceback_later(float(seconds) + 3, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def mpirun():
    """mpirun(ranks, "script.py", "argument", seconds=20, env={}) -> job.Finished, under this Python's MPI."""
    launcher = Path(sys.executable).parent / "mpirun"  # each test environment brings its own

    def launch(ranks, *arguments, seconds=30, env=None, cwd=ROOT):
        command = [str(launcher), "-n", str(ranks), sys.executable, *map(str, arguments)]
        return job.run(command, seconds, env=env, cwd=cwd)

    return launch


@pytest.fixture
def forgotten():
    """The schedules that a test registers are forgotten after it."""
    from fompi.schedules import registry  # not before a test asks for it: some tests look at what is loaded

    yield
    for name in registry.REGISTERED:
        del registry.SCHEDULES[name]
    registry.REGISTERED.clear()
    for forget in registry.FORGET:
        forget()
