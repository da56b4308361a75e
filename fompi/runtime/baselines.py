"""The Proof of a call and its baselines: a rank's kernels without messages, and its messages without kernels.

Both baselines run on fresh memory. So they can be measured at any time, and no tensor of the program changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Any

from fompi.backends.base import Backend
from fompi.base.errors import StateError
from fompi.base.layout import Extents
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.runtime.compiled import COLLECTIVE, COMPUTE, Compiled
from fompi.runtime.program import Run
from fompi.traces.proof import Proof, RankDependencies, prove

ROUNDS = 3
"""Rounds of a measurement, after one round to warm up. The median of three rounds ignores one disturbed round."""

STORED_ONES = {"bfloat16": 0x3F80}
"""The bits of the number 1 in dtypes that are stored as integers.

Buffers are filled with ones, because NaN and denormal numbers slow some kernels down.
"""


class _Done:
    """The token of a kernel that was left out: it is done at once."""

    begun = due = 0.0
    queue = None

    def done(self) -> bool:
        return True


_DONE = _Done()


def _skip_kernel(after: Sequence[object] = ()) -> _Done:
    return _DONE


def _memory(compiled: Compiled, extents: Extents, backend: Backend, arena: Any) -> dict[str, Any]:
    """Fresh arrays for every buffer of the program, full of ones."""
    shapes = compiled.sized(extents).shapes
    arrays = {}
    for buffer in compiled.program.buffers:
        one, shape = STORED_ONES.get(buffer.dtype, 1), shapes[buffer.name]
        filled = getattr(backend, "filled", None)  # only a device can write its memory
        if filled is None:
            arrays[buffer.name] = backend.empty(arena, shape, buffer.dtype)
            arrays[buffer.name][...] = one
        else:
            arrays[buffer.name] = filled(shape, buffer.dtype, one, buffer.place)
    return arrays


def compute_alone(
    compiled: Compiled,
    extents: Extents,
    backend: Backend,
    arena: Any,
    kernels: Mapping[str, Callable[..., object]] | None = None,
    rounds: int = ROUNDS,
) -> float:
    """The seconds of the kernels of a program in program order, without any message: the median of the rounds.

    `arena` gives host memory. `kernels` replaces kernels by name, as in `fompi.bind`. A device may run kernels that are
    independent at the same time.
    """
    arrays = _memory(compiled, extents, backend, arena)
    actions = compiled.resolve(arrays, compiled.sized(extents).starts, backend, lambda *collective: None, kernels)
    ops, seconds = [i for i, kind in enumerate(compiled.kinds) if kind == COMPUTE], []
    for _ in range(rounds + 1):
        begun, tokens = perf_counter(), dict[int, Any]()
        for i in ops:
            if compiled.asynchronous:
                tokens[i] = actions[i]([tokens[j] for j in compiled.follows[i]])
            else:
                actions[i]()
        for token in tokens.values():
            while not token.done():
                sleep(max(0.0, min(1e-3, token.due - perf_counter() - 1e-4)))
        seconds.append(perf_counter() - begun)
    return median(seconds[1:])


def messages_alone(
    compiled: Compiled, comm: Communicator, extents: Extents, backend: Backend, rounds: int = ROUNDS
) -> float:
    """The time of a program's messages without its kernels, on this rank, in seconds: the median of the rounds.

    Collective: all ranks run the messages together. They synchronise before every round.
    """
    title, refusal = f"the messages of {compiled.title} alone", None
    try:
        arrays = _memory(compiled, extents, backend, comm.engine.arena)
    except Exception as error:
        refusal = error
    agree(comm, title, refusal)
    link = comm.link.duplicate() if COLLECTIVE in compiled.kinds else comm.link
    skipped = {kernel.name: _skip_kernel for kernel in compiled.plan.kernels}
    actions = compiled.resolve(arrays, compiled.sized(extents).starts, backend, link.collective, skipped)
    actions = [_skip_kernel if kind == COMPUTE else a for kind, a in zip(compiled.kinds, actions, strict=True)]
    instance, seconds = comm.next_bound(), []
    for call in range(rounds + 1):
        agree(comm, title)
        begun = perf_counter()
        with comm.engine.lock:
            run = Run(compiled, comm, *comm.bound_call(instance, call + 1))
            if backend.device is not None:
                run.paths = comm.paths(backend.device)
            run.start(actions)
        comm.engine.wait(run, comm.channel)
        seconds.append(perf_counter() - begun)
        if run.error is not None:
            raise run.error
    if link is not comm.link:
        link.close()
    return median(seconds[1:])


class Baselines:
    """The baselines of a bound plan, each as last measured and for the rows of that measurement, and its proofs."""

    def __init__(
        self,
        compiled: Compiled,
        comm: Communicator,
        backend: Backend,
        kernels: Mapping[str, Callable[..., object]] | None,
    ):
        self.compiled, self.comm, self.backend, self.kernels = compiled, comm, backend, kernels
        self._dependencies: RankDependencies | None = None
        self._compute: tuple[Extents, float] | None = None
        self._messages: tuple[Extents, float] | None = None

    def compute(self, extents: Extents, rounds: int) -> float:
        """Measure the kernels. Raises StateError for kernels of the user: they may change what the program holds."""
        if self.compiled.is_opaque:
            raise StateError(f"{self.compiled.title} has kernels of the user, which cannot be run alone")
        engine = self.comm.engine
        measured = compute_alone(self.compiled, extents, self.backend, engine.arena, self.kernels, rounds)
        self._compute = extents, measured
        if engine.report is not None:
            engine.report.measured(self.compiled, extents, measured)
        return measured

    def messages(self, extents: Extents, rounds: int) -> float:
        """Measure the messages. Collective."""
        seconds = messages_alone(self.compiled, self.comm, extents, self.backend, rounds)
        self._messages = extents, seconds
        return seconds

    def proof(self, run: Run, extents: Extents, returned_at: float | None) -> Proof:
        """The proof of a finished call with these rows. `returned_at` is when its `start` returned to the program."""
        if not run.finished or run.error is not None:
            raise StateError(f"{self.compiled.title} has no finished call: there is no proof yet")
        if self._dependencies is None:
            self._dependencies = RankDependencies(self.compiled.plan, self.comm.rank)
        compute, messages = (
            known[1] if known is not None and known[0] == extents else None for known in (self._compute, self._messages)
        )
        run.settle()
        return prove(
            run.trace(extents),
            self._dependencies,
            compute_alone=compute,
            messages_alone=messages,
            progress=self.comm.engine.progress_mode,
            elsewhere=run.elsewhere(returned_at),
        )
