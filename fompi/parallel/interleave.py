"""Functions that alternate: what one has sent travels while another one computes.

    y, dx = fompi.interleave(lambda: block(x), lambda: other.backward(dy))

Each function has a thread of its own, and one of them runs at a time. Where it would wait for messages it lets the next
one run (`give_way`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any

import numpy as np

from fompi.base.doors import DOORS
from fompi.base.errors import ArgumentError, PeerError
from fompi.engine.communicator import Communicator, engine_of_process
from fompi.ops.operation import is_compiling
from fompi.parallel.section import Section


class _Here(threading.local):
    """Among which functions this thread runs one, and the number of that one."""

    alternation: Alternation | None = None
    number = 0
    threads: ThreadPoolExecutor | None = None  # for the other functions


_HERE = _Here()

MOST = 32
"""At most this many functions may alternate."""


class _Ended(PeerError):
    """Ends a function because another one has raised an error."""


class Alternation:
    """`functions` that alternate, inside of `section`. Function 0 runs in the thread that calls `run`.

    `calls[i]` is how many calls function i has begun. Function 0 begins its first call, then 1 its first one, and so
    on, then 0 its second one: the order is the same on all ranks, whatever has arrived where. The strategies say where
    they begin one (`call`). Another call is one if it takes a number of its communicator (`meet`): messages do not.
    """

    def __init__(self, functions: tuple[Callable[[], Any], ...], section: Section):
        self.functions, self.section = functions, section
        self.running, self.calls = [*range(len(functions))], [0] * len(functions)
        self.error: BaseException | None = None
        self._is_in_call = [False] * len(functions)
        self._met: list[tuple[Communicator, int] | None] = [None] * len(functions)  # what may have begun since
        self._gates = [
            threading.Lock() for _ in functions
        ]  # function i waits until it may run by acquiring gate i again
        for gate in self._gates:
            gate.acquire()

    def run(self) -> list[Any]:
        """The results of all functions."""
        engine = engine_of_process()
        engine.gate = engine.gate or _meet
        self.section.begin_shared(engine)
        modes, kernels = _modes(), engine.around.kernels

        def run(number: int) -> Any:  # in a kernel, if this thread is in one
            engine.around.kernels = kernels
            return self._run(number, modes)

        if _HERE.threads is None:
            _HERE.threads = ThreadPoolExecutor(MOST - 1, "fompi.interleave")
        start, numbers = _HERE.threads.submit, range(1, len(self.functions))
        others = [start(copy_context().run, run, number) for number in numbers]
        results = [self._run(0, nullcontext), *map(self._result, others)]
        if self.error is not None:
            raise self.error
        return results

    def _result(self, function: Future[Any]) -> Any:
        """The result of a function in another thread. An interrupt ends all functions first."""
        while True:
            try:
                return function.result()
            except BaseException as error:
                if function.done():
                    raise
                self._fail(error)

    def _run(self, number: int, modes: Callable[[], Any]) -> Any:
        """The result of a function; None if it, or another one, raises an error."""
        outside = _HERE.alternation, _HERE.number
        if number:
            self._gates[number].acquire()
        _HERE.alternation, _HERE.number = self, number
        try:
            with modes(), self.section.in_this_thread():
                self._look()
                return self.functions[number]()
        except BaseException as error:
            self._fail(error)
            return None
        finally:
            _HERE.alternation, _HERE.number = outside
            self._count(number)
            following = self._after(number)
            self.running.remove(number)  # before another one runs
            if following != number:
                self._gates[following].release()

    def give_way(self, number: int) -> None:
        """The other functions run until this one may run again."""
        self._count(number)
        following = self._after(number)
        if following != number:
            self._gates[following].release()
            try:
                self._gates[number].acquire()
            except BaseException as error:  # an interrupt, while another function runs: that one ends first
                self._fail(error)
                self._gates[number].acquire()
            self._look()

    @contextmanager
    def call(self, number: int) -> Iterator[None]:
        """Inside, a function begins a call, whatever that needs."""
        self._await_call(number)
        self._is_in_call[number] = True
        try:
            yield
        finally:
            self._is_in_call[number] = False
            self.calls[number] += 1

    def meet(self, number: int, comm: Communicator) -> None:
        """A call may begin on `comm`."""
        if comm.channel.ending is not None:  # of another section
            comm.channel.ending.before_call(comm)
        self.section.begin(comm, comm.calls + 1)
        if comm.channel.lost is not None:
            raise comm.channel.lost
        if not self._is_in_call[number] and self._met[number] != (comm, comm.calls):
            self._await_call(number)
            self._met[number] = comm, comm.calls

    def _await_call(self, number: int) -> None:
        self._count(number)
        while min((self.calls[other], other) for other in self.running) != (self.calls[number], number):
            self.give_way(number)

    def _count(self, number: int) -> None:
        """Count the call that this function has met, if it has begun."""
        met, self._met[number] = self._met[number], None
        if met is not None and met[0].calls != met[1]:
            self.calls[number] += 1

    def _after(self, number: int) -> int:
        """The function that runs next."""
        return self.running[(self.running.index(number) + 1) % len(self.running)]

    def _fail(self, error: BaseException) -> None:
        """All functions end by the first error, on all ranks. What waits in this moment has it, too."""
        if self.error is None:
            self.error = error
            self.section.whole.end_by(error)

    def _look(self) -> None:
        if self.error is not None:
            raise _Ended(f"another function of fompi.interleave raised {type(self.error).__name__}", -1) from self.error


def give_way() -> None:
    """Let the other functions of `interleave` run, until this one may run again. Outside of it: nothing.

    The strategies do this where they wait, and a function does it before it waits for an operation that it has started.
    """
    if _HERE.alternation is not None:
        _HERE.alternation.give_way(_HERE.number)


def begins_call() -> AbstractContextManager[None]:
    """Inside, a call begins, on all ranks. This function of `interleave` is the one that may begin it."""
    return nullcontext() if _HERE.alternation is None else _HERE.alternation.call(_HERE.number)


def _modes() -> Callable[[], AbstractContextManager[None]]:
    """What makes a context with the modes of this thread, for another thread. `copy_context` has those of Python."""
    doors = {"torch": DOORS.modes_of_torch, "jax": DOORS.modes_of_jax}
    makers = [door() for framework, door in doors.items() if framework in sys.modules]
    errors: dict[str, Any] = {**np.geterr(), "call": np.geterrcall()}  # before NumPy 2 a thread has its own
    makers.append(partial(np.errstate, **errors))

    @contextmanager
    def same() -> Iterator[None]:
        with ExitStack() as stack:
            for make in makers:
                stack.enter_context(make())
            yield

    return same


def _meet(comm: Communicator) -> None:
    if _HERE.alternation is not None:
        _HERE.alternation.meet(_HERE.number, comm)


def is_interleaved() -> bool:
    """True inside of a function that `interleave` runs."""
    return _HERE.alternation is not None


def interleave(*functions: Callable[[], Any]) -> list[Any]:
    """[f() for f in functions], where the messages of one travel while another one computes.

        y1, y2 = fompi.interleave(lambda: block(x1), lambda: block(x2))            # two halves of a batch
        y, _ = fompi.interleave(lambda: model(x), lambda: loss.backward())         # a forward under a backward

    The functions run one at a time: each until a strategy of `fompi.parallel`, a module of `fompi.torch.nn` or a call
    of torch's backend "fompi" waits for messages. A call of an operation waits on its own: start it instead, then call
    `fompi.parallel.interleave.give_way()`, then wait.
    Function 0 runs in this thread, the others in threads of their own, with the modes of this one: of torch, JAX, NumPy
    and `contextvars`. StateError names a mode that cannot be in two threads (torch.func, the transformations of JAX,
    torch.profiler). Not for functions that torch.compile reads.

    Collective: all ranks pass functions that make the same calls. Two micro-batches at a time: DeepSeek-V3, section
    3.2.1 (2412.19437). If a function raises an error the others end too, on all ranks, and the error is raised.
    """
    if "torch._dynamo" in sys.modules and is_compiling():
        DOORS.prepare()  # hides `run_interleaved` from the compiler
    for f in functions:
        if not callable(f):
            raise ArgumentError(f"fompi.interleave: {f!r} is no function: pass lambda: ...")
    if len(functions) > MOST:
        raise ArgumentError(f"fompi.interleave: {len(functions)} functions, but at most {MOST} alternate")
    if len(functions) < 2:
        return [f() for f in functions]
    return run_interleaved(functions)


def run_interleaved(functions: tuple[Callable[[], Any], ...]) -> list[Any]:
    """The results of several functions. torch.compile does not read this."""
    with Section("interleave", shared=True) as section:
        return Alternation(functions, section).run()
