"""Calls of a bound plan that run in C, and how Python goes on with a call at any point (docs/inside/native.md).

C knows only the good case. A call that C does not finish soon, or in which MPI fails, becomes a `Run`: from then on
everything is as if Python had begun it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fompi.backends.numpy import Numpy
from fompi.engine.communicator import Communicator
from fompi.engine.native import engine
from fompi.engine.tasks import Task
from fompi.mpi.transport import start_mpi
from fompi.runtime.compiled import Compiled, Sized
from fompi.runtime.lower import CallTable, table
from fompi.runtime.program import Run

if TYPE_CHECKING:
    from fompi.native._native import Call

FINISHED = 0
"""What `Call.run` returns if the call is finished."""

IN_C_SECONDS, STALL_SECONDS = 5e-3, 1e-3
"""So long a call may take in C, and so long without progress. Then Python goes on: it looks after deadlines, signals,
control messages and other calls.
"""


def native_call(compiled: Compiled, sized: Sized, comm: Communicator, backend: Any) -> Call | None:
    """The program with these rows as a call in C. None: it must run in Python."""
    library = engine().library
    if library is None or comm.size == 1 or comm.urgency is not None or type(backend) is not Numpy:
        return None
    if compiled.is_long(sized):
        return None  # messages must progress while its kernels run: that is the helper thread's work
    made = table(compiled, sized, comm.most_nbytes)
    if made is None:
        return None
    return made_call(library, made, comm, compiled.is_small(sized))


def made_call(library: Any, made: CallTable, comm: Communicator, is_small: bool) -> Call:
    """The call of this table on `comm`. `is_small`: sums run where they are released."""
    from fompi.native._native import Call

    lists = *made.on_start, *made.on_done, made.blockers, made.first, made.nbytes
    return Call(library, made.ops.view(np.uint8), *lists, comm.link.comm.handle, is_small, comm.engine.spins)


def taken_over(
    call: Call, run: Run, actions: list[Any], is_small: bool, front: int = 0, beside: Task | None = None
) -> None:
    """`run` goes on with the call where C has left it. The engine is locked. Raises the error of MPI, if it has failed.

    An op has begun if it has a time, and waits for nothing if its counter is zero: those that do neither can start.
    The first `front` ops are those of an agreement, which is over. `beside` owns their sends.
    """
    MPI, channel = start_mpi(), run.comm.channel
    code = call.error
    blockers, times, requests = call.export()
    run.actions, run.is_small, run.awaited = actions, is_small, True
    run.blockers = np.frombuffer(blockers, np.int32)[front:].tolist()
    _take_times(run, call, times, front)
    channel.begin(run.stamp, run)
    for handle, op in requests:
        task = run if op >= front or beside is None else beside
        run.comm.engine.post(MPI.Request.fromhandle(handle), task, op - front)
    try:
        if code:
            raise MPI.Exception(code)
        run.start_ops([i for i, count in enumerate(run.blockers) if not count and not run.begun[i]])
    except Exception as error:  # MPI has failed
        channel.fail(run, error)
        raise
    if run.unfinished == 0 and not run.finished:
        run.finish()


def finished_run(call: Call, run: Run, actions: list[Any]) -> Run:
    """The `Run` of a call that C has finished: for its trace."""
    run.actions = actions
    _take_times(run, call, call.times())
    run.finished = True
    return run


def _take_times(run: Run, call: Call, times: bytes, front: int = 0) -> None:
    both = np.frombuffer(times, np.float64).tolist()
    run.begun, run.ended = both[front : len(both) // 2], both[len(both) // 2 + front :]
    run.unfinished = run.ended.count(0.0)
    run.started, run.moved_at = call.started, call.moved_at
