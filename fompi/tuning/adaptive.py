"""The public `bind`: it binds a plan, or the best candidate of an explanation, which may change as links change.

step = fompi.bind(plan, comm=tp, x=x, w=w)                          # this plan
step = fompi.bind(fompi.explain(...), comm=tp, x=x, w=w)            # the best candidate by the model
step = fompi.bind(fompi.explain(...), effort="measure", ...)        # the fastest of the best candidates, measured
step = fompi.bind(fompi.explain(...), adapt=True, ...)              # the best one, also after links have changed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, overload

import numpy as np

from fompi.backends.base import Backend
from fompi.base.differences import detail
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
from fompi.runtime.binding import backend_for
from fompi.runtime.binding import bind as bind_plan
from fompi.runtime.executor import Executor
from fompi.schedules.registry import IN_RING_ORDER
from fompi.traces.drift import WARN_DRIFT, Drift, differ
from fompi.traces.trace import Trace

CHECK_CALLS = 8
"""The ranks compare the times of an operation that adapts every CHECK_CALLS calls."""

DRIFT = 1.2
"""Times that differ by more than this factor have changed."""

REFIT_SHARE = 0.2
"""At most this share of the time is spent on measuring links again. Noise may look like a change."""


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

    Collective: the ranks agree here, once, and later calls need no handshake. `out` is the output `y`. Outputs that are
    not given get fresh memory. Every call writes its outputs to the same memory. `kernels={"matmul": f}` replaces a
    kernel by `f(reads, writes)` on lists of arrays. A kernel that the plan declares (`Plan.kernels`) must be given, as
    `f(args, reads, writes)`. A plan that was changed after it was written is verified first. If
    it is wrong, all ranks raise PlanError.

    If `plan` is an Explanation (`fompi.explain`), its winner is bound.

    - `effort="measure"` runs the best candidates and those without overlap, and binds the fastest one.
    - `adapt=True` compares the times of all ranks every 8 calls. If they have changed, the ranks measure their links
      again, and take the best plan from the next call on. An output that was not given may then get other memory.
      Operations that adapt on one communicator must be called in the same order on all ranks.
    - `same_bits=True` lets `adapt` choose only plans that sum every element in the same order (`sums_alike`).

    One DriftWarning is issued if calls take much longer than predicted on the machine of the Explanation, or for a plan
    on the machine of FOMPI_MACHINE. Raises PlanError for options that do not fit, and the errors of the tensors.
    """
    given = {"backend": backend, "kernels": kernels, "out": out, **tensors}
    if isinstance(plan, Explanation):
        return _bind_explanation(plan, Communicator.of(comm), given, effort, adapt, same_bits)
    refusal: Exception | None = None
    if not isinstance(plan, Plan):
        refusal = PlanError(f"bind takes a fompi.Plan or a fompi.Explanation, not a {type(plan).__name__}")
    elif effort != "plan" or adapt or same_bits:
        refusal = PlanError(
            "effort=, adapt= and same_bits= choose between plans: bind fompi.explain(...) instead of one plan"
        )
    elif not isinstance(plan.programs, Programs):  # the plan was changed after a schedule wrote it
        refusal = flaw(lambda: plan)
    if refusal is not None:
        agree(Communicator.of(comm), "bind", refusal)  # raises on all ranks
    step = bind_plan(plan, comm=comm, **given)
    machine = step.comm.machine
    if machine is not None and step.comm.rank == 0 and kernels is None and plan.size <= MOST_RANKS:
        step.drift = Drift(step.compiled.title, machine.name, partial(predict, plan, machine))
    return step


def _bind_explanation(
    explanation: Explanation, comm: Communicator, given: dict[str, Any], effort: str, adapt: bool, same_bits: bool
) -> Adaptive:
    """Check the options on all ranks, choose a candidate, and bind it."""
    refusal: Exception | None = None
    backend_id = 0
    try:
        backend_id = _backend_id(given)
    except AttributeError as error:
        refusal = PlanError(f"backend={given['backend']!r} is not a backend of fompi.backends: {error}")
    except Exception as error:  # its device makes streams
        refusal = error
    if effort not in ("plan", "measure"):
        refusal = PlanError(f"effort={effort!r}: effort must be 'plan' or 'measure'")
    if same_bits and not adapt:
        refusal = PlanError("same_bits=True limits the plans that adapt=True may choose: set both, or neither")
    if explanation.problem.size != comm.size:
        refusal = PlanError(f"the explanation is for {explanation.problem.size} ranks, {comm!r} has {comm.size}")
    text = f"bind({_description(explanation)}, effort {effort}, adapt {adapt}, same_bits {same_bits})"
    backend_ids = agree(comm, text, refusal, value=backend_id)
    best = explanation.winner.candidate
    if effort == "measure":
        best = _measure_fastest(explanation, comm, given, backend_ids)
    return Adaptive(explanation, comm, given, best, adapt, same_bits)


def _description(explanation: Explanation) -> str:
    """A text that must be the same on all ranks."""
    machine = explanation.machine
    return f"{explanation.problem} {explanation.sizes} on {machine.name}{detail('the machine', repr(machine))}"


def _backend_id(given: Mapping[str, Any]) -> int:
    """A number that identifies the kernels. 0 if nothing does: kernels of the user, or of a device."""
    backend = given["backend"] or backend_for(given)
    return 0 if given["kernels"] or backend.asynchronous else 1 + digest(backend.name) % (1 << 32)


def _executor(explanation: Explanation, comm: Communicator, given: Mapping[str, Any], candidate: Candidate) -> Executor:
    announces = candidate.announced or not explanation.machine.announced  # 0: bind measures it
    return bind_plan(explanation.plan_of(candidate), comm=comm, announces=announces, **given)


def _measure_fastest(
    explanation: Explanation, comm: Communicator, given: Mapping[str, Any], backend_ids: Sequence[int]
) -> Candidate:
    """The fastest of the best candidates. `backend_ids` are those of all ranks. Collective.

    The choice is kept only if kernels are identified on all ranks.
    """
    from fompi.tuning import autotune  # few programs measure
    from fompi.tuning.rounds import seconds_of

    steps: dict[Candidate, Executor] = {}

    def time_call(candidate: Candidate) -> float:
        if candidate not in steps:
            steps[candidate] = _executor(explanation, comm, given, candidate)
        return seconds_of(steps[candidate])

    key = f"bound {_description(explanation)}{detail('the backends', '', digest(str(backend_ids)))}"
    listed = partial(autotune.best_by_model, explanation)
    try:
        return autotune.fastest_of(comm, key, listed, explanation.has, time_call, all(backend_ids))
    finally:
        for step in steps.values():
            step.close()


def sums_alike(problem: Problem, one: Candidate, other: Candidate) -> bool:
    """True if both candidates sum every element in the same order.

    For schedules in ring order, the order of an element depends on the rank that owns it. In a reduce-scatter the
    slices do not change the owner. In an all-reduce they do. A weight gradient sums over rows, piece by piece, so its
    slices change the order.
    """
    if one.announced != other.announced:  # each kernel rounds in its own way
        return False
    if problem.gradients:
        return one._replace(window=None) == other._replace(window=None)
    if not problem.sums or one == other:
        return True
    if one.rows != other.rows or not {one.schedule, other.schedule} <= {*IN_RING_ORDER}:
        return (one.schedule, one.slices, one.rows) == (other.schedule, other.slices, other.rows)
    return problem.moves == "reduce_scatter" or one.slices == other.slices


class Switch(NamedTuple):
    """From call number `call` on, this candidate is used. `why` says in words why it was chosen, or kept."""

    call: int
    candidate: Candidate
    why: str

    def __str__(self) -> str:
        return f"from call {self.call}: {self.candidate} ({self.why})"


class Adaptive:
    """An Executor that may change its plan between two calls. `changes` lists when, to which candidate, and why.

    All other attributes are those of `step`, the Executor of the current plan.
    """

    def __init__(
        self,
        explanation: Explanation,
        comm: Communicator,
        given: Mapping[str, Any],
        candidate: Candidate,
        adapt: bool,
        same_bits: bool,
    ):
        self.explanation, self.comm, self.given = explanation, comm, given
        self.adapt, self.same_bits, self.changes = adapt, same_bits, [Switch(1, candidate, "chosen when bound")]
        self.step = _executor(explanation, comm, given, candidate)
        self._count = 0  # calls
        self._usual = 0.0  # seconds of a call on the slowest rank with this plan; 0: not known yet
        self._rests_until = 0.0  # the links are not measured again before this time of perf_counter
        self._recent: list[float] = []  # seconds of the calls since the last comparison
        self._predicted = self._prediction(candidate)
        if not adapt and comm.rank == 0 and given["kernels"] is None:
            self.step.drift = Drift(self.step.compiled.title, explanation.machine.name, lambda: self._predicted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def _prediction(self, candidate: Candidate) -> float:
        return next(each.seconds for each in self.explanation.judged if each.candidate == candidate)

    def __call__(self, counts: Any = None, label: int | str | None = None, out: Any = None, **tensors: Any) -> Any:
        self._before(())
        return self._note(self.step(counts, label, out, **tensors))

    def start(
        self, *partial: str, counts: Any = None, label: int | str | None = None, out: Any = None, **tensors: Any
    ) -> Adaptive:
        """`Executor.start`. The plan may change before the call starts."""
        self._before(partial)
        self.step.start(*partial, counts=counts, label=label, out=out, **tensors)
        return self

    def wait(self, timeout: float | None = None) -> Any:
        """`Executor.wait`. The time of the call is noted."""
        return self._note(self.step.wait(timeout))

    def _note(self, result: Any) -> Any:
        if self.step.seconds is not None:  # count each call once
            if self.step.is_whole:
                self._recent.append(self.step.seconds)
            self.step.seconds = None
        return result

    @property
    def trace(self) -> Trace:
        """The Trace of the last call on this rank. Its title contains the last change."""
        trace = self.step.trace
        return replace(trace, title=f"{trace.title}, {self.changes[-1]}") if len(self.changes) > 1 else trace

    def _before(self, partial: Sequence[str]) -> None:
        """Every CHECK_CALLS calls: compare the times of all ranks with earlier ones. Refused calls do not count."""
        self.step.check_start(partial)
        self._count += 1
        if not self.adapt or self._count == 1 or (self._count - 1) % CHECK_CALLS:
            return
        agree(self.comm, f"a comparison of times before call {self._count} of {self.step.name}")
        own = [median(self._recent) if self._recent else 0.0, perf_counter() < self._rests_until]
        self._recent = []
        of_all_ranks = np.asarray(operations.all_gather(np.array([own]), comm=self.comm, schedule="direct"))
        slowest, rests = float(of_all_ranks[:, 0].max()), bool(of_all_ranks[0, 1])
        if rests or not slowest:  # 0: no rank has waited for a call, so no rank knows a time
            return
        if not self._usual:  # later calls are compared with these, because a prediction is never exact
            self._usual = slowest
            if differ(slowest, self._predicted, WARN_DRIFT):
                self._change(slowest, f"the predicted {1e3 * self._predicted:.3g} ms")
        elif differ(slowest, self._usual, DRIFT):
            self._change(slowest, f"the usual {1e3 * self._usual:.3g} ms")

    def _change(self, slowest: float, expected: str) -> None:
        """Measure the links again and take the best plan for them. All ranks do this before the same call."""
        current, begun = self.changes[-1].candidate, perf_counter()
        self._explain_again(current)
        winner = self.explanation.winner.candidate
        why = f"calls took {1e3 * slowest:.3g} ms instead of {expected}"
        if winner == current:
            why += "; it is still the best"
        else:
            last, self.step = self.step, _executor(self.explanation, self.comm, self.given, winner)
            last.close()
        self._predicted, self._usual = self._prediction(winner), slowest if winner == current else 0.0
        self.changes.append(Switch(self._count, winner, why))
        ended = perf_counter()
        self._rests_until = ended + (ended - begun) / REFIT_SHARE

    def _explain_again(self, current: Candidate) -> None:
        """Measure the links again, and explain the problem on the changed machine. Collective."""
        before = self.explanation
        computes = bool(before.problem.weights or before.problem.gradients)
        machine = import_module("fompi.tuning.calibrate").refit(before.machine, self.comm, computes)  # few need it
        now = explain(before.problem, before.sizes, machine, before.at, events=MOST_EVENTS)
        if self.same_bits:
            alike = tuple(judged for judged in now.judged if sums_alike(before.problem, judged.candidate, current))
            unchanged = tuple(judged for judged in before.judged if judged.candidate == current)
            now = replace(now, judged=alike or unchanged)
        self.explanation = now

    def close(self) -> None:
        """`Executor.close`."""
        self.step.close()

    def __enter__(self) -> Adaptive:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.step.__exit__(*exception)

    def __repr__(self) -> str:
        return f"Adaptive({self.step!r})"
