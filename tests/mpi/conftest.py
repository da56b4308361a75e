"""All ranks run the same tests in the same order, and agree after each whether it passed.

If some rank failed and every rank came back, the test has failed on every rank: rank 0 shows the tracebacks
of all, and the next test runs. If ranks do not come back (they wait inside the test for the one that failed)
nothing sensible can follow: the rank that failed prints its report, has the others print where they are, and
aborts the job. A test that hangs on all ranks is ended by its deadline.
"""

import functools
import gc
import os
import re
import signal
import time

import numpy as np
import pytest
from mpi4py import MPI

import fompi
from fompi.model.machine import Machine
from fompi.tuning import autotune, calibrate, links

GRACE_SECONDS = 10  # for the others to come back after a failure here
REPORT_BYTES = 16384  # the end of a report, where the error stands
FAILURES = pytest.StashKey[list[str]]()
COLLECTION_ERRORS = []

# Where a test waits in vain, fompi says for whom, before the test's own deadline.
os.environ.setdefault("FOMPI_TIMEOUT", "20")


@pytest.fixture(scope="session")
def comm():
    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def world():
    """All ranks, as fompi's Communicator."""
    return fompi.Communicator.of(None)


@pytest.fixture
def own(comm):
    """A communicator that knows of no choice yet."""
    with fompi.Communicator(comm) as made:
        yield made


@pytest.fixture
def machine():
    return Machine.load("gigabit")


@pytest.fixture
def cache(tmp_path_factory, monkeypatch, comm):
    """A folder of rank 0's, on all ranks."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("cache")) if comm.rank == 0 else None)
    monkeypatch.setenv("FOMPI_CACHE", folder)
    return folder


@pytest.fixture
def few_rounds(monkeypatch):
    """Measurements are short: no figure is judged."""
    monkeypatch.setattr(autotune, "ROUNDS", 2)
    monkeypatch.setattr(autotune, "FEW", 2)
    for module in (calibrate, links):
        monkeypatch.setattr(module, "ROUNDS", 2)
        monkeypatch.setattr(module, "SIZES", [1 << 10, 1 << 14, 1 << 18])


@functools.cache
def meeting():
    """Where the ranks agree: a communicator of its own, whatever a test does to the world, and all pids."""
    own = MPI.COMM_WORLD.Dup()
    return own, own.allgather(os.getpid())


def pytest_collectreport(report):
    if report.failed:
        COLLECTION_ERRORS.append(report.longreprtext)


def pytest_collection_finish(session):
    others = exchange(session.config, "collection", "\n".join(COLLECTION_ERRORS))
    gc.collect()
    gc.freeze()  # what was imported stays: a collection in a test takes its time from eight ranks on two cores
    if others:
        pytest.exit(f"the collection failed on other ranks\n{others}", returncode=1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    failures = item.stash.setdefault(FAILURES, [])
    if report.failed:
        error = call.excinfo.exconly().partition("\n")[0] if call.excinfo else "failed"
        failures.append(f"{report.when}: {error}\n{report.longreprtext}")
    if report.when == "teardown":
        others = exchange(item.config, item.nodeid, "\n".join(failures))
        if others and failures:
            report.sections.append(("teardown on other ranks", others))
        elif others:
            report.outcome, report.longrepr = "failed", others
    return report


def exchange(config, place, mine):
    """The distinct failures of the other ranks at the same place as one text; empty where all passed."""
    own, _ = meeting()
    message = np.zeros(REPORT_BYTES, np.uint8)
    head = f"{place}\n".encode()
    text = head + mine.encode()[-(REPORT_BYTES - len(head)) :]
    message[: len(text)] = np.frombuffer(text, np.uint8)
    messages = np.empty((own.size, REPORT_BYTES), np.uint8)

    request = own.Iallgather(message, messages)
    start = time.monotonic()
    while not request.Test():
        if mine and time.monotonic() - start > GRACE_SECONDS:
            give_up(config, f"{place}: rank {own.rank} failed and the others do not come back", mine)
        time.sleep(0.0005)

    ranks_of = {}
    for rank, row in enumerate(messages):
        theirs, _, failure = bytes(row).rstrip(b"\0").decode(errors="replace").partition("\n")
        if theirs != place:
            give_up(config, f"{place}: rank {rank} is at {theirs}", "All ranks must run the same tests.")
        ranks_of.setdefault(without_addresses(failure), []).append(rank)
    ranks_of.pop("", None)
    ranks_of.pop(without_addresses(mine), None)
    return "\n\n".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())


def without_addresses(failure):
    """So that the same failure on two ranks reads the same."""
    return re.sub(r"0x[0-9a-f]+", "0x...", failure)


def give_up(config, reason, report):
    own, pids = meeting()
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{reason}. Aborting: the other ranks print where they are.\n{report}", flush=True)
    for rank, pid in enumerate(pids):
        if rank != own.rank:
            os.kill(pid, signal.SIGTERM)  # answered with a traceback: see tests/conftest.py
    time.sleep(0.5)
    own.Abort(1)
