"""Collectives of `fompi.mpi.Comm` in which nothing can be gained: the MPI library's own carry them out.

A blocking collective hides nothing. What is left to gain is a faster plan, and that only for large sums and for
messages that two ranks of Open MPI would send in turns (docs/inside/overhead.md). One with I in front may be hidden,
but on one host it takes little longer than fompi needs to begin it, up to the same sizes. Between hosts a small one
needs no thread to move it. All ranks decide alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter, sleep

from fompi.engine.control import Channel
from fompi.engine.faults import end_job
from fompi.mpi import launcher
from fompi.mpi.transport import thread_levels, world

ALWAYS = 1 << 62
SUMS, MOVES = (1 << 20) - 1, 4 << 20

LIMITS: dict[str, int] = {
    **dict.fromkeys(("Allreduce", "Reduce", "Reduce_scatter_block"), SUMS),
    **dict.fromkeys(("Bcast", "Gather", "Scatter", "Allgather", "Allgatherv", "Alltoall"), MOVES),
    **dict.fromkeys(("Gatherv", "Scatterv", "Alltoallv"), ALWAYS),  # no rank knows how large they are
}
"""The most bytes, of all ranks together in a move, with which the library carries out a collective."""

STARTED = 1 << 14
"""The most bytes of one with I in front, between hosts."""

SIZED: dict[str, tuple[int, bool]] = {
    **dict.fromkeys(("Bcast", "Reduce"), (0, False)),
    **dict.fromkeys(("Allreduce", "Allgather", "Allgatherv", "Alltoall"), (1, False)),
    "Gather": (0, True),
    **dict.fromkeys(("Scatter", "Reduce_scatter_block"), (1, True)),
}
"""Which argument says how large a collective is, and whether it is only one part for each rank."""


def most_started(name: str, network: bool) -> int:
    """The most bytes of one with I in front that the library carries out. -1: none. `network`: several hosts."""
    limit = LIMITS.get(name, -1)
    return -1 if limit == ALWAYS else min(limit, STARTED) if network else limit


INSIDE: list[tuple[str, object, Channel | None]] = []
"""The calls of the library in which threads are: a name, what no other call has, where ranks say that they leave."""

NOTED: list[Callable[..., None]] = []
"""What notes a call that has returned, if FOMPI_RECORD is set (`fompi.runtime.recorder`)."""

LOOK_SECONDS = 0.25
"""How often the watch looks at the call that lasts."""

_WATCHED = threading.Event()


def watch() -> None:
    """Start the watch, once per process. The library's collectives cannot be left: the watch ends the job instead."""
    if not _WATCHED.is_set():
        _WATCHED.set()
        threading.Thread(target=_watch, args=(launcher.timeout(),), name="fompi watch", daemon=True).start()


def _watch(seconds: float) -> None:
    (rank, size), call, since = world(), None, perf_counter()
    may_listen = thread_levels()[1] == "multiple"
    while True:
        sleep(min(LOOK_SECONDS, seconds / 4))
        first = next(iter([*INSIDE]), None)
        if first is None or first is not call:
            call, since = first, perf_counter()
            continue
        name, _, channel = call
        absent = channel.absent_from(name, channel.in_library[0]) if channel is not None and may_listen else None
        if absent is not None and first in INSIDE:
            end_job(f"rank {rank} of {size} ends: PeerError: {absent}", status=1)
        if perf_counter() - since > seconds:
            end_job(
                f"rank {rank} of {size} ends: WaitTimeout: it has waited {seconds:g} s (FOMPI_TIMEOUT) in {name} of "
                "the MPI library: another rank has not called it, or has other arguments",
                status=1,
            )
