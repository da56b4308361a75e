"""What a rank does when it ends: last words to the others, so that nobody waits for it.

An uncaught exception ends all ranks within two seconds, its traceback printed once. A normal end says goodbye: who
waits for a rank that has left gets an error.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from time import perf_counter, sleep
from types import TracebackType

from fompi.base.errors import PeerError
from fompi.engine.control import DYING, GONE, LEFT, Channel
from fompi.engine.engine import Engine
from fompi.mpi.link import abort, finalized
from fompi.mpi.transport import world

HEAR_SECONDS, DEFER_SECONDS = 0.1, 1.0
BROKEN_SECONDS = 5.0
"""For a goodbye, where a call was given up."""

READ_SECONDS = 0.2
"""For the launcher to read what we said, before it ends us."""


def install(engine: Engine) -> None:
    """Hook into the end of this process. Called once, when the first communicator is made."""
    hook, thread_hook, process = sys.excepthook, threading.excepthook, os.getpid()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:  # a child by fork has no part in MPI
            hook(kind, error, trace)
        else:
            _end(engine, error, lambda: hook(kind, error, trace))

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != process or issubclass(args.exc_type, SystemExit):  # that ends the thread, and nothing else
            thread_hook(args)
        else:
            _end(engine, args.exc_value, lambda: thread_hook(args))

    def at_exit() -> None:
        if os.getpid() == process:
            _leave(engine)

    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread
    atexit.register(at_exit)


def _end(engine: Engine, error: BaseException | None, report: Callable[[], object]) -> None:
    """Print the traceback unless another rank prints its own, then end all ranks."""
    try:
        if _follows(engine, error):
            sleep(DEFER_SECONDS)  # the rank that failed ends us before this is over, unless it goes on
        if not _is_first(engine):
            sleep(DEFER_SECONDS)  # the first ends us before this is over; if not, it is us who must speak
        report()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sleep(READ_SECONDS)
        if not finalized():
            abort(1)


def end_job(words: str, status: int) -> None:
    """Say why, and end all ranks."""
    print(f"fompi: {words}", file=sys.stderr, flush=True)
    sleep(READ_SECONDS)
    abort(status)


def _is_first(engine: Engine) -> bool:
    """Of all ranks that are ending, the first one; of several at once, the lowest."""
    if not engine.channels:  # the first communicator was never made: we cannot ask
        sleep(DEFER_SECONDS * min(world()[0], 4) / 4)
    if not engine.lock.acquire(timeout=HEAR_SECONDS):  # another thread is inside MPI
        return True
    try:
        _listen(engine, 0.0)
        if any(channel.dying for channel in engine.channels):
            return False
        for channel in engine.channels:
            channel.send_all(DYING, 0)
        _listen(engine, HEAR_SECONDS)
        return not any(_is_lower(channel, peer) for channel in engine.channels for peer in channel.dying)
    finally:
        engine.lock.release()


def _follows(engine: Engine, error: BaseException | None) -> bool:
    """Whether this error only reports that of another rank, which will speak for itself."""
    gone = {rank for channel in engine.channels for rank in channel.departed}
    while error is not None:
        if isinstance(error, PeerError) and error.origin not in gone:
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_lower(channel: Channel, peer: int) -> bool:
    """Whether a rank of this channel comes before us among all ranks that MPI started."""
    numbers = channel.link.world_ranks
    return numbers[peer] < numbers[channel.link.rank]


def _listen(engine: Engine, seconds: float) -> None:
    """Take in what the others say; run no kernels."""
    end = perf_counter() + seconds
    while True:
        if not engine.receive_control() and perf_counter() >= end:
            return
        if seconds:
            sleep(1e-3)


def _leave(engine: Engine) -> None:
    """Say goodbye, finish what we started, and stay until all others have: their last words must find us."""
    if finalized():
        return
    channels = list(engine.channels)
    broken = any(channel.broken is not None for channel in channels)  # perhaps since nobody can be reached
    seconds = min(engine.timeout, BROKEN_SECONDS) if broken else engine.timeout
    for channel in channels:
        channel.send_all(LEFT, 0, f"rank {channel.link.rank} has ended; its last call was {engine.last_call}")
    _drive(engine, lambda: any(channel.can_finish() for channel in channels), seconds)
    for channel in channels:
        channel.send_all(GONE, 0)
    _drive(engine, lambda: any(channel.missed() for channel in channels), seconds)
    if missed := {rank for channel in channels if broken for rank in channel.missed()}:
        who = f"rank{'s' * (len(missed) > 1)} {', '.join(map(str, sorted(missed)))}"
        end_job(f"rank {world()[0]} ends the job: {who} cannot be reached to say goodbye", 1)  # MPI would wait for ever
    for channel in channels:
        channel.close()
    if engine.helper is not None:
        engine.helper.stop()


def _drive(engine: Engine, unfinished: Callable[[], bool], seconds: float) -> None:
    end = perf_counter() + seconds
    while unfinished() and perf_counter() < end:
        if not engine.progress() and not engine.receive_control():
            sleep(1e-3)
