"""The settings with which fompi starts an MPI library."""

from __future__ import annotations

import re

SETTINGS = """
import ctypes, os
import fompi

before = dict(os.environ)
world = fompi.Communicator()
assert dict(os.environ) == before, "fompi changed the environment"

from fompi.mpi import transport
from mpi4py import MPI

library = ctypes.CDLL(MPI.__file__)

def value(name, kind):
    "The value of a control variable (MPI standard, 15.3.6)."
    index, handle, count, found = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), kind()
    assert library.MPI_T_cvar_get_index(name, ctypes.byref(index)) == 0
    assert library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0
    assert library.MPI_T_cvar_read(handle, ctypes.byref(found)) == 0
    return found.value

words = [transport.library().name]
assert (world.most_nbytes == 4 << 20) == (words == ["Open MPI"]), world.most_nbytes
if words == ["Open MPI"]:
    library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int()))
    words += [value(b"btl_tcp_eager_limit", ctypes.c_size_t), value(b"btl_tcp_flags", ctypes.c_uint) & 2]
os.write(1, f"rank {world.rank}: {words}\\n".encode())
"""


def test_open_mpi_sends_large_messages_at_once(netlab, monkeypatch):
    """Open MPI does not use put over TCP, because two ranks could only use it in turns. A setting of the user wins.

    A message of 4 MiB and its header are within the limit. Above it, two ranks would wait for each other's answers. So
    fompi splits larger messages.
    """
    for limit in ((4 << 20) + 4096, 100_000):
        finished = netlab("--trust", "--hosts=2", "--rate=200mbit", "--size=100kB", code=SETTINGS)
        printed = re.findall(r"^rank \d: \['(.*)'(?:, (\d+), (\d))?\]$", finished.stdout, re.MULTILINE)
        assert finished.returncode == 0 and len(printed) == 2, finished.output
        for name, found, put in printed:
            assert (name, found, put) == ("Open MPI", str(limit), "0") or name == "MPICH"
        monkeypatch.setenv("OMPI_MCA_btl_tcp_eager_limit", "100000")
