"""Steps of a program that are bound plans, as of a pipeline and of a whole step: how they begin, end and close."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

from fompi.base.errors import FompiError, PeerError, StateError
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.plans.plan import Plan
from fompi.runtime.binding import bind
from fompi.runtime.executor import Executor
from fompi.traces.trace import Trace


class PlannedStep:
    """Runs bound plans, one in each step. It works with `with`."""

    _kind: str
    """What it is, in words."""

    def __init__(self, comm: Any):
        self.comm = Communicator.of(comm)
        self.closed, self._steps = False, 0
        self._executors: list[Executor] = []
        self._latest: Executor | None = None

    def _bind(self, plan: Plan, kernels: Mapping[str, Callable[..., None]], **given: Any) -> Executor:
        """The plan, bound until `close`. Collective."""
        executor = bind(plan, comm=self.comm, kernels=kernels, **given)
        self._executors.append(executor)
        self._latest = self._latest or executor
        return executor

    def _begin(self) -> None:
        """A step begins. Raises StateError if it is closed."""
        if self.closed:
            raise StateError(f"the {self._kind} is closed")
        self._steps += 1

    @contextmanager
    def _step(self, executor: Executor, mode: str = "", checked: bool = True) -> Iterator[None]:
        """The call of `executor` inside is a step. All ranks must run it in the same `mode`. Collective.

        If `checked`, it ends well on all ranks, or all raise an error: a rank that had done its part, PeerError.
        """
        self._latest, work = executor, f"step {self._steps} of {executor.name}"
        end = f"the end of {work}{mode}"
        try:
            with self.comm.joint(work):
                yield
        except BaseException as error:
            is_own = executor.failed_here
            if checked and (isinstance(error, Exception) or is_own):  # who interrupts a wait does not wait for others
                is_theirs = isinstance(error, PeerError) and error.origin >= 0 and not is_own
                failed = error.origin if is_theirs else self.comm.rank  # type: ignore[attr-defined]
                with suppress(FompiError):  # the error of the work says more
                    agree(self.comm, end, value=1 + failed)
            raise
        if checked and (known := max(agree(self.comm, end))) > 0:
            text = f"rank {known - 1} failed in {work}, after this rank had done its part. The error there says why"
            raise PeerError(text, known - 1)

    @property
    def trace(self) -> Trace:
        """The Trace of the last step on this rank: its kernels and messages."""
        assert self._latest is not None
        return self._latest.trace

    def close(self) -> None:
        """Give the memory of the plans back."""
        if not self.closed:
            self.closed = True
            for executor in self._executors:
                executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # after an error the other ranks may never come to close
            self.close()
