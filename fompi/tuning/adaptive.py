"""`bind` as users call it: a plan, or the explanation of many, of which the best is measured, or changes as links do.

step = fompi.bind(plan, comm=tp, x=x, w=w)                          # this plan
step = fompi.bind(fompi.explain(...), comm=tp, x=x, w=w)            # the best by the model
step = fompi.bind(fompi.explain(...), effort="measure", ...)        # the fastest of the best few, by measurement
step = fompi.bind(fompi.explain(...), adapt=True, ...)              # the best, also when links change
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, overload

import numpy as np

from fompi.backends.base import Backend
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree, digest
from fompi.model.simulate import MOST_RANKS, predict
from fompi.ops import operations
from fompi.planner.candidates import Candidate
from fompi.planner.explain import MOST_EVENTS, Explanation, explain
from fompi.plans.plan import Plan, Programs
from fompi.plans.problems import Problem
from fompi.plans.verify import flaw
from fompi.runtime import executor
from fompi.runtime.executor import Executor
from fompi.schedules.registry import IN_RING_ORDER
from fompi.traces.drift import WARN_DRIFT, Drift, differ
from fompi.traces.trace import Trace
from fompi.tuning import autotune as efforts
from fompi.tuning.calibrate import refit

CHECK_CALLS = 8
"""The ranks compare their times every so many calls of an operation that adapts."""

DRIFT = 1.2
"""Times that differ by this factor have changed."""

LOOK_SHARE = 0.2
"""Of the time goes into looking at the links again, at most: noise may look like a change."""


@overload
def bind(plan: Plan, **given: Any) -> Executor: ...


@overload
def bind(plan: Explanation, **given: Any) -> Adaptive: ...


def bind(
    plan: Plan | Explanation,
    *,
    comm: Any = None,
    out: Any = None,
    backend: Backend | None = None,
    kernels: Mapping[str, Callable[..., object]] | None = None,
    effort: str = "plan",
    adapt: bool = False,
    same_bits: bool = False,
    **tensors: Any,
) -> Executor | Adaptive:
    """An Executor of `plan` on these tensors, by the names of its buffers: `bind(plan, comm=tp, x=x, w=w, out=y)`.

    Collective: the ranks agree here, once, and later calls need no agreement. `out` is the output `y`; outputs that
    are not given are made, and every call writes them again. `kernels={"matmul": f}` replaces a kernel by
    `f(reads, writes)` on lists of arrays. A plan that was changed after it was written is verified first, and refused
    on all ranks if it is wrong.

    An Explanation (`fompi.explain`) may come instead of a plan: its winner is bound. `effort="measure"`: the fastest
    of its best few and of those without overlap, by running them (`fompi.tuning.autotune`). `adapt=True`: every 8 calls
    the ranks compare their times; where these have drifted, they measure their links again, and go over to what is
    best now, between two calls (an output that was not given may move then); those that adapt on one communicator are
    called in one order on all its ranks. With `same_bits` only to what sums every element in the same order: `ring`
    and those with messages straight to each rank do, with any slices of a reduce-scatter, and with the same slices of
    an all-reduce; a weight gradient keeps its plan. A DriftWarning says when calls take much longer than predicted: on
    the machine of the Explanation, or on that of FOMPI_MACHINE.
    """
    given = {"backend": backend, "kernels": kernels, "out": out, **tensors}
    if isinstance(plan, Explanation):
        communicator = Communicator.of(comm)
        binding = _Binding(plan, communicator, given, same_bits)
        refusal, kernels_of = None, 0
        try:
            kernels_of = binding.backend
        except AttributeError as error:
            refusal = PlanError(f"backend={backend!r} is none of fompi.backends: {error}")
        if effort not in ("plan", "measure"):
            refusal = PlanError(f"effort={effort!r}: take 'plan' or 'measure'")
        if same_bits and not adapt:
            refusal = PlanError("same_bits=True bounds what adapt=True may go over to: give both, or none")
        if plan.problem.size != communicator.size:
            refusal = PlanError(
                f"the explanation is for {plan.problem.size} ranks, {communicator!r} has {communicator.size}"
            )
        words = f"bind({binding.words}, effort {effort}, adapt {adapt}, same_bits {same_bits})"
        backends = agree(communicator, words, refusal, value=kernels_of)
        candidate = binding.race(backends) if effort == "measure" else plan.winner.candidate
        return Adaptive(binding, candidate, adapt)
    wrong: Exception | None = None
    if not isinstance(plan, Plan):
        wrong = PlanError(f"bind takes a fompi.Plan or a fompi.Explanation, not a {type(plan).__name__}")
    elif effort != "plan" or adapt or same_bits:
        wrong = PlanError(
            "effort=, adapt= and same_bits= are for many plans: bind(fompi.explain(...), ...) instead of one plan"
        )
    elif not isinstance(plan.programs, Programs):  # not as a schedule has written it
        wrong = flaw(lambda: plan)
    if wrong is not None:
        agree(Communicator.of(comm), "bind", wrong)  # raises, on all ranks
    bound = executor.bind(plan, comm=comm, **given)
    machine = bound.comm.machine
    if machine is not None and bound.comm.rank == 0 and kernels is None and plan.size <= MOST_RANKS:
        bound.drift = Drift(bound.compiled.title, machine.name, partial(predict, plan, machine))
    return bound


class _Binding:
    """An explanation, and all that an executor needs beside a plan."""

    def __init__(self, explained: Explanation, comm: Communicator, given: dict[str, Any], same_bits: bool):
        self.explained, self.comm, self.given, self.same_bits = explained, comm, given, same_bits

    @property
    def words(self) -> str:
        """What all ranks must have alike."""
        explained = self.explained
        return f"{explained.problem} {explained.sizes} on {explained.machine.digest}"

    @property
    def backend(self) -> int:
        """What tells its kernels from those of others; 0: nothing does, they are the user's, or a device's."""
        backend = self.given["backend"] or Numpy()
        return 0 if self.given["kernels"] or backend.asynchronous else 1 + digest(backend.name) % (1 << 32)

    def executor(self, candidate: Candidate) -> Executor:
        return executor.bind(self.explained.plan_of(candidate), comm=self.comm, **self.given)

    def race(self, backends: Sequence[int]) -> Candidate:
        """The fastest of the best few, with these `backends` of all ranks."""
        steps: dict[Candidate, Executor] = {}

        def timed(candidate: Candidate) -> float:
            if candidate not in steps:
                steps[candidate] = self.executor(candidate)
            begun = perf_counter()
            steps[candidate]()
            return perf_counter() - begun

        def listed() -> list[Candidate]:
            return efforts.few(self.explained)

        key = f"bound {self.words} by {digest(str(backends)):014x}"
        try:
            return efforts.race(self.comm, key, listed, self.explained.has, timed, keep=all(backends))
        finally:
            for step in steps.values():
                step.close()

    def again(self, now: Candidate) -> None:
        """Look at the links again, and explain anew. Collective."""
        before = self.explained
        computes = bool(before.problem.weights or before.problem.gradients)
        machine = refit(before.machine, self.comm, computes)
        found = explain(before.problem, before.sizes, machine, before.at, events=MOST_EVENTS)
        if self.same_bits:
            alike = tuple(one for one in found.judged if sums_alike(before.problem, one.candidate, now))
            found = replace(found, judged=alike or tuple(one for one in before.judged if one.candidate == now))
        self.explained = found


def sums_alike(problem: Problem, one: Candidate, other: Candidate) -> bool:
    """Whether every element is summed in the same order by both.

    The order goes by the rank that owns the element, and slices do not change that in a reduce-scatter, unless half of
    them go the other way round. They do in an all-reduce, whose ranks own other elements then. A weight gradient sums
    over rows, in the pieces in which they are multiplied.
    """
    if problem.gradients:
        return one._replace(window=None) == other._replace(window=None)
    if problem.moves not in ("reduce_scatter", "all_reduce") or one == other:
        return True
    if one.rows != other.rows or not {one.schedule, other.schedule} <= {*IN_RING_ORDER}:
        return (one.schedule, one.slices, one.rows) == (other.schedule, other.slices, other.rows)
    return problem.moves == "reduce_scatter" or one.slices == other.slices


class Change(NamedTuple):
    """Before call number `call` the ranks went over to another plan, or stayed, and why."""

    call: int
    candidate: Candidate
    why: str

    def __str__(self) -> str:
        return f"from call {self.call} on {self.candidate}: {self.why}"


class Adaptive:
    """An Executor, now of this plan and now of that: `changes` tells when it went over, and why.

    What is not here is that of the present Executor, `step`.
    """

    def __init__(self, binding: _Binding, candidate: Candidate, adapt: bool):
        self.binding, self.adapt, self.changes = binding, adapt, [Change(1, candidate, "the best at first")]
        self.step = binding.executor(candidate)
        self._count, self._usual, self._rests_until = 0, 0.0, 0.0
        self._recent: list[float] = []
        self._predicted = self._prediction(candidate)
        if not adapt and binding.comm.rank == 0 and binding.given["kernels"] is None:
            title, machine = self.step.compiled.title, binding.explained.machine.name
            self.step.drift = Drift(title, machine, lambda: self._predicted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def _prediction(self, candidate: Candidate) -> float:
        return next(one.seconds for one in self.binding.explained.judged if one.candidate == candidate)

    def __call__(self, counts: Any = None) -> Any:
        self._before(())
        return self._noting(self.step(counts))

    def start(self, *partial: str, counts: Any = None) -> Adaptive:
        """As that of an Executor; here plans change."""
        self._before(partial)
        self.step.start(*partial, counts=counts)
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """As that of an Executor; the time of the call is noted."""
        return self._noting(self.step.wait(timeout))

    def _noting(self, result: Any) -> Any:
        if self.step.seconds is not None:  # each call once
            if self.step.is_whole:
                self._recent.append(self.step.seconds)
            self.step.seconds = None
        return result

    @property
    def trace(self) -> Trace:
        """What this rank did in the last call; its title tells of the last change."""
        trace = self.step.trace
        return replace(trace, title=f"{trace.title}, {self.changes[-1]}") if len(self.changes) > 1 else trace

    def _before(self, partial: Sequence[str]) -> None:
        """Every CHECK_CALLS calls: whether the ranks see other times than before. A call that is refused is none."""
        self.step.check_start(partial)
        self._count += 1
        if not self.adapt or self._count == 1 or (self._count - 1) % CHECK_CALLS:
            return
        comm = self.binding.comm
        agree(comm, f"the times of {self.step.name} before call {self._count}")
        mine, self._recent = [median(self._recent) if self._recent else 0.0, perf_counter() < self._rests_until], []
        everyone = np.asarray(operations.all_gather(np.array([mine]), comm=comm, schedule="direct"))
        slowest, rests = float(everyone[:, 0].max()), bool(everyone[0, 1])
        if rests or not slowest:  # nobody has waited for a call: their times are not known
            return
        if not self._usual:  # the first ones say what is usual: a prediction is a little off
            self._usual = slowest
            if differ(slowest, self._predicted, WARN_DRIFT):
                self._change(slowest, f"{1e3 * self._predicted:.3g} were predicted")
        elif differ(slowest, self._usual, DRIFT):
            self._change(slowest, f"{1e3 * self._usual:.3g} were usual")

    def _change(self, slowest: float, before: str) -> None:
        """The links are looked at again, and the best plan for them taken. All ranks come here before the same call."""
        now, begun = self.changes[-1].candidate, perf_counter()
        self.binding.again(now)
        winner = self.binding.explained.winner.candidate
        why = f"calls took {1e3 * slowest:.3g} ms, {before}" + ("; it stays the best" if winner == now else "")
        if winner != now:
            last, self.step = self.step, self.binding.executor(winner)
            last.close()
        self._predicted, self._usual = self._prediction(winner), 0.0 if winner != now else slowest
        self.changes.append(Change(self._count, winner, why))
        ended = perf_counter()
        self._rests_until = ended + (ended - begun) / LOOK_SHARE

    def close(self) -> None:
        """As that of an Executor."""
        self.step.close()

    def __enter__(self) -> Adaptive:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.step.__exit__(*exception)

    def __repr__(self) -> str:
        return f"Adaptive({self.step!r})"
