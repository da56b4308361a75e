"""The bare exchange: only the messages that a collective must move. It measures T_m of every figure."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import numpy as np

from fompi.base.errors import WaitTimeout
from fompi.mpi import launcher
from fompi.mpi.link import request_testsome

NAP_SECONDS = 3e-4
"""How long a wait sleeps between two polls. It keeps the exchange's CPU time far below its own time."""


def bare_exchange(own: Any, nbytes: int, pieces: int, round_the_ring: bool = False) -> Callable[[], object]:
    """Every rank sends `nbytes` for each other rank, in pieces. A piece starts when the piece before has left.

    Messages go in the permutations rank -> rank + d. With `round_the_ring` all of them go to the next rank, as a ring
    does. `own` is a communicator of mpi4py for these messages alone. All receives are posted first, and waits sleep.
    Raises WaitTimeout after FOMPI_TIMEOUT seconds without a message.
    """
    patience = launcher.timeout()
    rank, size, testsome = own.Get_rank(), own.Get_size(), request_testsome()
    cuts = [nbytes * i // pieces for i in range(pieces + 1)]
    outgoing, incoming = np.ones((size, nbytes), np.uint8), np.empty((size, nbytes), np.uint8)
    steps = [(d, i, 1 if round_the_ring else d) for d in range(1, size) for i in range(pieces)]

    def nap(since: float) -> None:
        if perf_counter() - since > patience:
            raise WaitTimeout(f"rank {rank} waited {patience:g} s (FOMPI_TIMEOUT) for a message of a bare exchange")
        sleep(NAP_SECONDS)

    def exchange() -> None:
        receives = [
            own.Irecv(incoming[d, cuts[i] : cuts[i + 1]], (rank - hop) % size, d * pieces + i) for d, i, hop in steps
        ]
        for d, i, hop in steps:
            send = own.Isend(outgoing[d, cuts[i] : cuts[i + 1]], (rank + hop) % size, d * pieces + i)
            since = perf_counter()
            while not send.Test():
                nap(since)
        since = perf_counter()
        while receives:
            done = testsome(receives) or []
            receives = [request for i, request in enumerate(receives) if i not in done]
            if done:
                since = perf_counter()
            elif receives:
                nap(since)

    return exchange
