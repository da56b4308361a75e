"""What a rank does when it ends: last words to the others, so that nobody waits for it.

An uncaught exception ends all ranks within two seconds, its traceback printed once. A normal end says goodbye: who
waits for a rank that has left gets an error.
"""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from time import perf_counter, sleep
from types import TracebackType

from fompi.engine import DYING, LEFT, Engine
from fompi.errors import PeerError
from fompi.link import abort, finalized

HEAR_SECONDS, DEFER_SECONDS = 0.1, 1.0


def install(engine: Engine) -> None:
    """Hook into the end of this process. Called once, when the first communicator is made."""
    hook, thread_hook = sys.excepthook, threading.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _end(engine, error, lambda: hook(kind, error, trace))

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        _end(engine, args.exc_value, lambda: thread_hook(args))

    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread
    atexit.register(_leave, engine)


def _end(engine: Engine, error: BaseException | None, report: object) -> None:
    """Print the traceback unless another rank prints its own, then end all ranks."""
    try:
        if _speaks(engine, error):
            report()  # type: ignore[operator]
            sys.stderr.flush()
        else:
            sleep(DEFER_SECONDS)  # the other rank ends us before this is over; if not, it is us who must speak
            report()  # type: ignore[operator]
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not finalized():
            abort(1)


def _speaks(engine: Engine, error: BaseException | None) -> bool:
    """Of all ranks that are ending, the first one speaks; of several at once, the lowest. Never one that follows."""
    if not engine.lock.acquire(timeout=HEAR_SECONDS):  # another thread is inside MPI
        return True
    try:
        _listen(engine, 0.0)
        if any(channel.dying for channel in engine.channels):
            return False
        gone = {rank for channel in engine.channels for rank in channel.left}
        follows = isinstance(error, PeerError) and error.origin not in gone
        if not follows:
            for channel in engine.channels:
                channel.tell_all(DYING, 0)
        _listen(engine, HEAR_SECONDS)
        if follows:
            return False
        return not any(peer < channel.link.rank for channel in engine.channels for peer in channel.dying)
    finally:
        engine.lock.release()


def _listen(engine: Engine, seconds: float) -> None:
    """Take in what the others say; run no kernels."""
    end = perf_counter() + seconds
    while True:
        if not engine.poll() and perf_counter() >= end:
            return
        if seconds:
            sleep(1e-3)


def _leave(engine: Engine) -> None:
    """Say goodbye, and stay until all others have: their last messages to us must find us."""
    if finalized():
        return
    for channel in list(engine.channels):
        channel.tell_all(LEFT, 0, f"rank {channel.link.rank} has ended; its last call was {engine.last_call}")
    end = perf_counter() + engine.timeout
    while perf_counter() < end:
        if all(len(c.left) >= c.link.size - 1 for c in engine.channels):
            break
        if not engine.progress():
            sleep(1e-3)
    for channel in list(engine.channels):
        channel.close()
