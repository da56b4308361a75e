"""For all tests: a deadline that also works inside C code, and a way to launch a job of ranks."""

import faulthandler
import gc
import os
import signal
import sys
from pathlib import Path

import hypothesis
import job
import pytest

ROOT = Path(__file__).resolve().parent.parent
STDERR = pytest.StashKey[int]()

# Every rank and every run gets the same examples, so a failure can be repeated.
hypothesis.settings.register_profile("fompi", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fompi")


def pytest_configure(config):
    # Write tracebacks to the real stderr: output that pytest has captured is lost when the process is killed.
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    # A job that hangs gets SIGTERM before it is killed. Print a traceback then, even inside a blocked MPI call.
    faulthandler.register(signal.SIGTERM, file=config.stash[STDERR], chain=True)
    # The main thread alone: a dump ends after a hundred threads, and it comes last.
    faulthandler.register(signal.SIGUSR2, file=config.stash[STDERR], all_threads=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A deadline for the case that pytest-timeout fails: its thread needs the GIL, which a blocked call may hold."""
    marker = item.get_closest_marker("timeout")
    seconds = (marker.args or [marker.kwargs["timeout"]])[0] if marker else item.config.getini("timeout")
    faulthandler.dump_traceback_later(float(seconds) + 3, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", autouse=True)
def old_objects():
    """Garbage collections leave out what is there already: modules, and what the files before this one keep."""
    gc.freeze()


@pytest.fixture(scope="session")
def mpirun():
    """mpirun(ranks, "script.py", "argument", seconds=20, env={}) -> job.Finished, under this Python's MPI."""
    launcher = Path(sys.executable).parent / "mpirun"  # each test environment has its own launcher

    def launch(ranks, *arguments, seconds=30, env=None, cwd=ROOT):
        command = [str(launcher), "-n", str(ranks), sys.executable, *map(str, arguments)]
        return job.run(command, seconds, env=env, cwd=cwd)

    return launch


@pytest.fixture(scope="module")
def x64():
    """Enable float64 and int64 in JAX. They are off by default."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def fakecuda():
    """The module fakecuda, imported late: CuPy is in the environment of one MPI library only."""
    import fakecuda

    return fakecuda


@pytest.fixture
def no_collection():
    """No garbage collection during a test that counts memory."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def forgotten():
    """Remove the schedules that a test has registered."""
    from fompi.base.doors import DOORS  # imported late: some tests check which modules are loaded
    from fompi.schedules import registry

    yield
    for name in registry.REGISTERED:
        del registry.SCHEDULES[name]
    registry.REGISTERED.clear()
    DOORS.schedule_registered()
