"""What a rank does when it ends: it tells the other ranks, so that they do not wait for it.

An uncaught exception ends all ranks within two seconds. Its traceback is printed once. A rank that ends normally says
so, and a rank that waits for it gets an error.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from _thread import interrupt_main
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter, sleep
from types import FrameType, TracebackType

from fompi.base.at_exit import at_exit, failure
from fompi.base.errors import PeerError, in_words
from fompi.engine.control import DYING, FELL, Channel
from fompi.engine.engine import Engine
from fompi.engine.frames import DEFER_SECONDS, Hook, hook_of_program, show
from fompi.mpi.link import abort, finalized, free_closed
from fompi.mpi.transport import end_without_others, world

LISTEN_SECONDS = 0.1
"""How long an ending rank waits for messages of other ranks that are ending too."""

BROKEN_SECONDS = 5.0
"""How long a rank waits at exit for the other ranks if a call was abandoned: perhaps they cannot be reached."""

POSTPONE_SECONDS = 1e-3
"""An interrupt that comes in the middle of the engine's work is tried again after this time."""

READ_SECONDS = 0.2
"""A pause before MPI_Abort, in which the launcher reads the output of this rank."""


INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell has it: 128 + SIGINT."""


def install(engine: Engine) -> None:
    """Install hooks for uncaught exceptions and for exit. Called once, when the first communicator is made."""
    alone, hook, thread_hook, process = sys.excepthook, hook_of_program(), threading.excepthook, os.getpid()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process or finalized():  # a forked child does not take part in MPI
            alone(kind, error, trace)
        else:
            _end(engine, error, hook)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if os.getpid() != process or finalized() or issubclass(args.exc_type, SystemExit):  # it ends only the thread
            thread_hook(args)
        else:
            _end(engine, args.exc_value, lambda *_: tell(args))

    def tell(args: threading.ExceptHookArgs) -> None:
        if thread_hook is not threading.__excepthook__:
            threading.__excepthook__(args)  # a hook that keeps what it gets, as pytest's, has no time to show it
        thread_hook(args)

    def leave() -> None:
        if os.getpid() == process:
            error = failure()
            _leave(engine) if error is None else _fall(engine, error)

    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread
    at_exit(leave)
    os.register_at_fork(after_in_child=engine.after_fork)
    _postpone_interrupts()


def _postpone_interrupts() -> None:
    """Let Ctrl-C interrupt a wait, a kernel or the program, but not the work of the engine between them.

    An interrupt between two lines of the engine could lose a message that has just arrived. Programs with a handler of
    their own for SIGINT keep it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if not _is_inside_engine(frame):
            signal.default_int_handler(number, frame)
        again = threading.Timer(POSTPONE_SECONDS, interrupt_main)
        again.daemon = True
        again.start()

    signal.signal(signal.SIGINT, interrupted)


_UNSAFE = ("fompi.engine.", "fompi.runtime.dispatch", "fompi.runtime.program", "fompi.ops.")
_WAITS = (Engine.wait.__code__, Engine._pause.__code__)


def _is_inside_engine(frame: FrameType | None) -> bool:
    """True if `frame` belongs to work of the engine that must not be interrupted."""
    innermost = frame
    while frame is not None:
        if frame.f_code in _WAITS or (frame.f_code is Engine._run.__code__ and frame is not innermost):
            return False  # it waits, or runs a kernel
        if frame.f_globals.get("__name__", "").startswith(_UNSAFE):
            return True
        frame = frame.f_back
    return False


def _end(engine: Engine, error: BaseException | None, hook: Hook) -> None:
    """Print the traceback, unless another rank prints one. Then end all ranks."""
    if isinstance(sys.stderr, io.StringIO):  # the hook of torch.distributed would print it after this function
        sys.stderr = sys.__stderr__ or sys.stderr
    with suppress(Exception):  # MPI may fail, but the error of the program must be printed
        if _follows(engine, error):
            sleep(DEFER_SECONDS)  # the rank that failed first aborts the job in this time, unless it caught its error
        if not _is_first(engine):
            sleep(DEFER_SECONDS)  # the first rank aborts the job in this time; if it does not, this rank must report
    try:
        show(error or RuntimeError("an error without a value"), hook, *world())
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sleep(READ_SECONDS)
        if not finalized():
            abort(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def end_job(reason: str, status: int) -> None:
    """Print the reason, then end all ranks."""
    print(f"fompi: {reason}", file=sys.stderr, flush=True)
    sleep(READ_SECONDS)
    if not finalized():
        abort(status)
    os._exit(status)


def _is_first(engine: Engine) -> bool:
    """True if this rank is the first one that is ending. If several end at once, the lowest rank is the first."""
    if not engine.channels:  # no communicator has been made, so ranks cannot exchange messages
        sleep(DEFER_SECONDS * min(world()[0], 4) / 4)
    if not engine.lock.acquire(timeout=LISTEN_SECONDS):  # another thread is inside MPI
        return True
    try:
        _listen(engine, 0.0)
        if any(channel.dying for channel in engine.channels):
            return False
        for channel in engine.channels:
            channel.send_all(DYING, 0)
        _listen(engine, LISTEN_SECONDS)
        numbers = [(c.link.world_ranks, c.link.rank, peer) for c in engine.channels for peer in c.dying]
        return not any(world_ranks[peer] < world_ranks[own] for world_ranks, own, peer in numbers)
    finally:
        engine.lock.release()


def _follows(engine: Engine, error: BaseException | None) -> bool:
    """True if `error` was caused by the error of another rank, and that rank is still there to report it."""
    departed = {rank for channel in engine.channels for rank in list(channel.departed) if rank not in channel.fallen}
    seen: list[BaseException] = []  # `raise a from b` can close a circle
    while error is not None and error not in seen:
        if isinstance(error, PeerError) and error.origin not in departed:
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _listen(engine: Engine, seconds: float) -> None:
    """Take in control messages for `seconds`, and until there are no more. Runs no kernels."""
    end = perf_counter() + seconds
    while True:
        if not engine.receive_control() and perf_counter() >= end:
            return
        if seconds:
            sleep(1e-3)


def _fall(engine: Engine, error: BaseException) -> None:
    """The end of a child of `multiprocessing` by an error. Its parent hears of it afterwards, so it waits for nobody.

    The other ranks get an error that quotes this one. An error that follows from theirs is not the first that is heard.
    """
    if not finalized():
        cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ is not None else error
        for channel in list(engine.channels):
            words = f"rank {channel.link.rank} has ended by an error: {in_words(cause)}"
            channel.send_all(FELL, channel.in_library[0], words)
        _drive(engine, lambda: True, LISTEN_SECONDS)
        if _follows(engine, error):
            sleep(DEFER_SECONDS)
        _close(engine)


def _leave(engine: Engine) -> None:
    """The normal end of a rank, in three steps.

    1. Send LEFT: this rank starts no new call. Finish the calls in flight.
    2. Send GONE: this rank finishes no call any more.
    3. Wait until all other ranks are gone: they may still send control messages to this rank. Those of an epoch go on
       without it.
    """
    if finalized():
        return
    everything = list(engine.channels)
    channels = [channel for channel in everything if not channel.link.is_of_epoch]
    broken = any(channel.broken is not None for channel in channels)  # perhaps other ranks cannot be reached
    seconds = min(engine.timeout, BROKEN_SECONDS) if broken else engine.timeout
    for channel in everything:
        channel.leave()
    _drive(engine, lambda: any(channel.can_finish() for channel in _with_peers(everything)), seconds)
    for channel in everything:
        channel.go()
    _drive(engine, lambda: bool(_not_gone(channels, False)), seconds)
    _drive(engine, lambda: bool(_not_gone(channels, True)), min(seconds, BROKEN_SECONDS))
    _drive(engine, lambda: engine.is_telling, min(seconds, BROKEN_SECONDS))  # this process may end slowly from here on
    if broken and (unreachable := _not_gone(channels, False)):
        ranks = f"rank{'s' * (len(unreachable) > 1)} {', '.join(map(str, sorted(unreachable)))}"
        end_job(f"rank {world()[0]} ends the job: {ranks} cannot be reached at exit", 1)  # MPI would wait for ever
    if any(channel.fallen for channel in channels):
        end_without_others()
    _close(engine)
    _drive(engine, free_closed, LISTEN_SECONDS)


def _close(engine: Engine) -> None:
    for channel in list(engine.channels):
        channel.close()
    if engine.helper is not None:
        engine.helper.stop()


def _not_gone(channels: Sequence[Channel], is_left: bool) -> set[int]:
    """The world ranks on these channels that have not said on any channel that they are gone.

    `is_left`: on those that this rank has left by an error. A rank that has closed such a channel says nothing on it.
    """
    return {rank for channel in channels if channel.is_left == is_left for rank in channel.not_gone()} - _gone(channels)


def _with_peers(channels: Sequence[Channel]) -> list[Channel]:
    """Those on which another rank still finishes calls."""
    gone = _gone(channels)
    return [c for c in channels if {*c.link.world_ranks} - gone - {c.link.world_ranks[c.link.rank]}]


def _gone(channels: Sequence[Channel]) -> set[int]:
    """The world ranks that have said on one of these channels that they are gone."""
    return {channel.link.world_ranks[rank] for channel in channels for rank in list(channel.gone)}


def _drive(engine: Engine, unfinished: Callable[[], bool], seconds: float) -> None:
    """Make progress while `unfinished()`, for at most `seconds`."""
    end = perf_counter() + seconds
    while unfinished() and perf_counter() < end:
        if not engine.progress() and not engine.receive_control():
            sleep(1e-3)
