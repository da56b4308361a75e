"""The yardsticks of a Proof: what a rank's kernels take without messages, and what the messages take without kernels.

Both run on fresh memory, so that a call may be measured at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

from fompi.backends.base import Backend
from fompi.base.layout import Extents
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.runtime.compiled import COMPUTE, NATIVE, Compiled
from fompi.runtime.program import Run

ROUNDS = 3
ONE = {"bfloat16": 0x3F80}
"""The number one in the dtypes that are stored as something else: kernels are not to meet NaN or tiny numbers."""


class Alone(NamedTuple):
    """Seconds of all kernels of one rank, in program order, and of each; medians over rounds."""

    seconds: float
    by_op: dict[int, float]


class _Done:
    """The token of a kernel that there is none of."""

    begun = due = 0.0

    def done(self) -> bool:
        return True


_DONE = _Done()


def _nothing(after: Sequence[object] = ()) -> _Done:
    return _DONE


def _memory(compiled: Compiled, extents: Extents, backend: Backend, take: Callable[..., Any]) -> dict[str, Any]:
    """Every buffer of the program, full of ones."""
    shapes = compiled.sized(extents).shapes
    arrays = {}
    for buffer in compiled.program.buffers:
        array = take(shapes[buffer.name], backend.storage(buffer.dtype))
        array[...] = ONE.get(buffer.dtype, 1)
        arrays[buffer.name] = array
    return arrays


def compute_alone(
    compiled: Compiled,
    extents: Extents,
    backend: Backend,
    take: Callable[..., Any],
    kernels: Mapping[str, Callable[..., object]] | None = None,
    rounds: int = ROUNDS,
) -> Alone:
    """Run the kernels of a program in its order, without any message, after a round to warm up."""
    arrays = _memory(compiled, extents, backend, take)
    actions = compiled.resolve(arrays, compiled.sized(extents).starts, backend, lambda *collective: None, kernels)
    ours = [i for i, kind in enumerate(compiled.kinds) if kind == COMPUTE]
    totals, each = [], []
    for _ in range(rounds + 1):
        begun = perf_counter()
        each.append(_enqueued(actions, ours, compiled.follows) if compiled.asynchronous else _called(actions, ours))
        totals.append(perf_counter() - begun)
    return Alone(median(totals[1:]), {i: median(seconds[i] for seconds in each[1:]) for i in ours})


def _called(actions: Sequence[Any], ours: Sequence[int]) -> dict[int, float]:
    seconds = {}
    for i in ours:
        begun = perf_counter()
        actions[i]()
        seconds[i] = perf_counter() - begun
    return seconds


def _enqueued(actions: Sequence[Any], ours: Sequence[int], follows: Sequence[Sequence[int]]) -> dict[int, float]:
    """On a device, which may run kernels at one time that do not follow each other."""
    tokens: dict[int, Any] = {}
    for i in ours:
        tokens[i] = actions[i]([tokens[j] for j in follows[i]])
    for token in tokens.values():
        while not token.done():
            sleep(max(0.0, min(1e-3, token.due - perf_counter() - 1e-4)))
    return {i: token.due - token.begun for i, token in tokens.items()}


def messages_alone(
    compiled: Compiled, comm: Communicator, extents: Extents, backend: Backend, rounds: int = ROUNDS
) -> float:
    """Run the messages of a program without its kernels, all ranks together: the median of this rank's seconds.

    Collective. The ranks meet before every round; there is one more to warm up.
    """
    what, refusal = f"the messages of {compiled.title} alone", None
    try:
        arrays = _memory(compiled, extents, backend, comm.engine.arena.take)
    except Exception as error:
        refusal = error
    agree(comm, what, refusal)
    link = comm.link.duplicate() if NATIVE in compiled.kinds else comm.link
    actions = compiled.resolve(arrays, compiled.sized(extents).starts, backend, link.collective)
    actions = [_nothing if kind == COMPUTE else a for kind, a in zip(compiled.kinds, actions, strict=True)]
    instance, seconds = comm.next_bound(), []
    for call in range(rounds + 1):
        agree(comm, what)
        begun = perf_counter()
        with comm.engine.lock:
            run = Run(compiled, comm, *comm.bound_call(instance, call + 1))
            run.start(actions)
        comm.engine.wait(run, comm.channel)
        seconds.append(perf_counter() - begun)
        if run.error is not None:
            raise run.error
    if link is not comm.link:
        link.close()
    return median(seconds[1:])
