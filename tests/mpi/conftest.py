"""All ranks run the same tests in the same order. After each test they exchange whether it passed.

If a rank failed and all ranks returned from the test, the test has failed on every rank. Rank 0 shows the tracebacks of
all ranks, and the next test runs. If some ranks do not return, because they wait inside the test for the rank that
failed, no further test can run. Then the rank that failed prints its report, makes the other ranks print their stacks,
and aborts the job. A test that hangs on all ranks is ended by its deadline.
"""

import functools
import gc
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import fompi
from fompi.backends.cuda.software import SoftwareDevice
from fompi.model.machine import Machine
from fompi.ops import pending
from fompi.tuning import autotune, calibrate, links

GRACE_SECONDS = 10  # how long a rank that failed waits for the other ranks
REPORT_BYTES = 16384  # how much of a report is exchanged: its end, which contains the error
FAILURES = pytest.StashKey[list[str]]()
COLLECTION_ERRORS = []

# A wait of fompi ends before the deadline of the test, because its error says more.
os.environ.setdefault("FOMPI_TIMEOUT", "45")


@pytest.fixture(scope="session")
def comm():
    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def world():
    """The Communicator of all ranks."""
    return fompi.Communicator.of(None)


@pytest.fixture(scope="session")
def tp(world):
    """The same, as tests of tensor parallelism call it. Its cache has the plans of other tests, which saves time."""
    return world


@pytest.fixture
def folder(world, tmp_path):
    """A directory that all ranks share."""
    text = str(tmp_path).encode().ljust(400)
    return Path(fompi.broadcast(np.frombuffer(text, np.uint8), comm=world).tobytes().decode().strip())


@pytest.fixture
def own(comm):
    """A new communicator, for which no schedule has been chosen yet."""
    with fompi.Communicator(comm) as made:
        yield made


@pytest.fixture
def device(world):
    """A device without delays: the checker does not need them."""
    made = SoftwareDevice(seed=world.rank, delay=0)
    yield made
    made.check()
    assert not made.reports


@pytest.fixture(scope="module")
def float64():
    """Tensors of torch have this dtype by default."""
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def group():
    """The group of all ranks of torch.distributed, on fompi. `rank` and `size` are this rank's there."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("fompi")
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def rank(group):
    return group.rank()


@pytest.fixture
def size(group):
    return group.size()


@pytest.fixture
def without_verification(monkeypatch):
    """Skip the verification of plans: `tests/pure` has verified them, and it would take most of the time."""
    monkeypatch.setattr(pending, "VERIFIED_RANKS", 0)


@pytest.fixture
def verified_once(world, monkeypatch):
    """All ranks write the same plan of a call. One of them verifies it: more ranks than cores would wait for all."""
    if world.rank:
        monkeypatch.setattr(pending, "VERIFIED_RANKS", 0)


@pytest.fixture
def machine():
    return Machine.load("gigabit")


@pytest.fixture
def cache(tmp_path_factory, monkeypatch, comm):
    """A new folder, the same on all ranks."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("cache")) if comm.rank == 0 else None)
    monkeypatch.setenv("FOMPI_CACHE", folder)
    return folder


@pytest.fixture
def few_rounds(monkeypatch):
    """Make measurements short. Such tests check no measured value."""
    monkeypatch.setattr(autotune, "ROUNDS", 2)
    monkeypatch.setattr(autotune, "MOST_CANDIDATES", 2)
    for module in (calibrate, links):
        monkeypatch.setattr(module, "ROUNDS", 2)
        monkeypatch.setattr(module, "SIZES", [1 << 10, 1 << 14, 1 << 18])
    monkeypatch.setattr(calibrate, "PRODUCTS", calibrate.PRODUCTS[-4:])
    monkeypatch.setattr(calibrate, "FEW_PRODUCTS", calibrate.PRODUCTS[-2:])
    monkeypatch.setattr(calibrate, "LIBRARY_SIZES", calibrate.LIBRARY_SIZES[:3])


@functools.cache
def meeting():
    """A communicator that only this file uses, and the process ids of all ranks."""
    comm = MPI.COMM_WORLD.Dup()
    return comm, comm.allgather(os.getpid())


def pytest_collection_modifyitems(config, items):
    """A test with a mark `ranks` of its own runs on those ranks of its file only."""
    mpi = "openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich"

    def runs_here(item):
        own = [mark for mark in item.own_markers if mark.name == "ranks"]
        return all(MPI.COMM_WORLD.size in mark.kwargs.get(mpi, [MPI.COMM_WORLD.size]) for mark in own)

    kept = [item for item in items if runs_here(item)]
    config.hook.pytest_deselected(items=[item for item in items if not runs_here(item)])
    items[:] = kept


def pytest_collectreport(report):
    if report.failed:
        COLLECTION_ERRORS.append(report.longreprtext)


def pytest_collection_finish(session):
    others = exchange(session.config, "collection", "\n".join(COLLECTION_ERRORS))
    gc.collect()  # tests/conftest.py leaves the rest out of later collections
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


def exchange(config, place, own_failure):
    """The distinct failures of the other ranks at the same place, as one text. Empty if all ranks passed."""
    comm, _ = meeting()
    message = np.zeros(REPORT_BYTES, np.uint8)
    head = f"{place}\n".encode()
    text = head + own_failure.encode()[-(REPORT_BYTES - len(head)) :]
    message[: len(text)] = np.frombuffer(text, np.uint8)
    messages = np.empty((comm.size, REPORT_BYTES), np.uint8)

    request = comm.Iallgather(message, messages)
    start = time.monotonic()
    while not request.Test():
        if own_failure and time.monotonic() - start > GRACE_SECONDS:
            abort(config, f"{place}: rank {comm.rank} failed, and other ranks do not return from the test", own_failure)
        time.sleep(0.0005)

    ranks_of = {}
    for rank, row in enumerate(messages):
        other_place, _, failure = bytes(row).rstrip(b"\0").decode(errors="replace").partition("\n")
        if other_place != place:
            abort(config, f"{place}: rank {rank} is at {other_place}", "All ranks must run the same tests.")
        ranks_of.setdefault(without_addresses(failure), []).append(rank)
    ranks_of.pop("", None)
    ranks_of.pop(without_addresses(own_failure), None)
    return "\n\n".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())


def without_addresses(failure):
    """The text of a failure that is the same on all ranks with this failure."""
    return re.sub(r"0x[0-9a-f]+", "0x...", failure)


def abort(config, reason, report):
    """End all ranks."""
    comm, pids = meeting()
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nAborting: {reason}. The other ranks print their stacks.\n{report}", flush=True)
    for number in (signal.SIGUSR2, signal.SIGTERM):  # they make a rank print a traceback (tests/conftest.py)
        for rank, pid in enumerate(pids):
            if rank != comm.rank:
                os.kill(pid, number)
        time.sleep(0.5)
    comm.Abort(1)
