"""The planner's predictions and choices against measurements.

    mpirun -n 2 python -m fompi bench tools/suites/planner.py

The machine is calibrated first, in the same run. The speed of the cores is measured again before each shape, with the
products of the calibration, because it changes within minutes if others share the cores. With `--quick` the preset
`laptop` is taken instead of a calibration.

- Between equal hosts: fused operations of the shapes of `fompi.bench.fused`, and of random shapes that the calibration
  never saw. The suite compares the prediction with the measurement, and the chosen plan with the best plan.
- Between groups of hosts, or with a slow host: plain collectives. The suite compares the chosen plan with schedules
  that do not know about links, and with the lower bound.

First all promising plans run in a few rounds. Then the finalists run in many rounds: the chosen plan and those that may
be better. Only the final rounds count, because the best of many plans is partly the best by luck. A plan's time in one
round is compared with the plan that is the best in all other rounds. The table also says how often a plan is within 2 %
of itself, in one half of the rounds against the other half.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
from bench.fused import grid

import fompi
from collectives import MIB, problem_of
from fompi.bench.fused import KERNEL, OPERATIONS, FusedCase, kernel_of
from fompi.bench.measure import Bench, specs
from fompi.model.fit import product_seconds, slowed
from fompi.model.lower_bound import lower_bound
from fompi.model.machine import NO_PACKING, Machine
from fompi.model.simulate import predict
from fompi.planner.candidates import UNFUSED, Candidate
from fompi.planner.explain import Explanation
from fompi.runtime.report import percentile
from fompi.tuning.calibrate import calibrate, slowdown
from fompi.tuning.rounds import Figure, Row, best_of, median_interval
from noise import watched

RANDOM_SHAPES, QUICK_SHAPES, SEED = 100, 2, 2026

MOST_MEDIAN_ERROR, MOST_ERROR = 0.04, 0.10
"""Targets for the error of the prediction: its median and its 95th percentile."""

NEAR_BEST, LEAST_NEAR, MOST_SLOWER = 1.02, 0.95, 1.02
"""A plan is near the best within this factor. The target for the share of such shapes, and for chosen / unfused."""

MOST_RIVALS = 10
"""Plans that run in the first rounds. Between two ranks the model walks through about fifty, which would take a minute
per row."""

NEAR, FINALISTS = 1.05, 4
"""Plans within this factor of the chosen plan in the first rounds may be better. The best of them run in the final
rounds, at most this many."""

TOTAL, QUICK_TOTAL = 8 * MIB, 2 * MIB
"""Bytes of the global tensor of a plain collective."""

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")

BLIND = ("direct", "ring", "bidirectional")
"""Schedules that do not know about links."""

LEAST_OVER_BLIND, OF_BOUND_GROUPS, OF_BOUND_SLOW = 1.3, 1 / 1.08, 1 / 1.05
"""Targets: the best blind schedule / the chosen plan; bound / time between groups, and with a slow host."""


def rows(bench: Bench) -> list[Row]:
    machine = Machine.load("laptop") if bench.quick else calibrate(bench.comm)
    description = _described(machine)
    if machine.levels or machine.rates:
        makers = {operation: partial(_collective, machine=machine, operation=operation) for operation in COLLECTIVES}
        return [description, *bench.rows(makers)]
    bench, runs = watched(bench)
    measured = [_measured(bench, machine, case, runs) for case in bench.each([*_shapes(bench.quick, bench.comm.size)])]
    if not measured:
        return []
    return [description, *(row for both in measured for row in both), _summary(bench, measured)]


def _described(machine: Machine) -> Row:
    """The calibrated machine, as figures."""
    links = [machine.innermost, *machine.levels]
    figures = [Figure(f"between groups of {link.ranks}", 1e-6 * link.fastest, "MB/s") for link in links]
    figures += [Figure(f"rate of rank {rank}", rate) for rank, rate in enumerate(machine.rates) if rate < 1]
    figures.append(Figure("products", 1e-9 * machine.flops_rate, "GFLOP/s"))
    if machine.pack_rate < NO_PACKING:
        figures.append(Figure("operands are packed", 1e-9 * machine.pack_rate, "GB/s"))
    figures += [
        Figure("sums", 1e-9 * machine.memory_rate, "GB/s"),
        Figure("a message costs a core", 1e6 * machine.cpu_message, "us"),
    ]
    return Row("the machine", str(machine), figures=figures)


# ----------------------------------------------------------------------------------------------- fused operations


def _shapes(quick: bool, size: int) -> Iterator[FusedCase]:
    """The grid of the suite `fused`, then random shapes."""
    generator = random.Random(SEED)
    if not quick:
        yield from grid(quick)
    count, part = (QUICK_SHAPES, 4) if quick else (RANDOM_SHAPES, 1)
    for i in range(count):
        m = size * generator.randrange(256 // size, 2049 // size)
        n, k = generator.randrange(256, 2049), generator.randrange(128, 3073)
        yield FusedCase(OPERATIONS[i % len(OPERATIONS)], -(-m // part // size) * size, n // part, k // part)


def explained_for(machine: Machine, operation: str, size: int, *tensors: np.ndarray) -> Explanation:
    return fompi.explain(operation, *specs(operation, size, *tensors), ranks=size, machine=machine)


class _Measured(NamedTuple):
    """A shape: all plans in the first rounds, and the finalists in the final rounds, with figures."""

    first: Row
    final: Row

    def median(self, name: str) -> float:
        return (self.final if name in self.final.samples else self.first).median(name)


def _measured(bench: Bench, machine: Machine, case: FusedCase, runs: Callable[[], str]) -> _Measured:
    """Measure the chosen plan, the best others by the model, and those without overlap."""
    comm, timed, rounds = bench.comm, bench.timed, bench.rounds
    x, w = case.operands(comm.rank, comm.size)
    measure = partial(slowdown, machine, comm)
    machine = slowed(machine, measure() if timed is None else timed(measure))
    explained = explained_for(machine, case.operation, comm.size, x, w)
    best_first = [(one.candidate, one.seconds) for one in explained.judged if one.proof is not None]
    walked = {c: seconds for i, (c, seconds) in enumerate(best_first) if i < MOST_RIVALS or c in UNFUSED}
    times = partial(bench.times, warmup=1, timed=timed)  # each ran once in `checked`
    with ExitStack() as held:
        calls = {str(each): bench.bound(held, explained.plan_of(each), x=x, w=w) for each in walked}
        errors = bench.checked(calls, case.reference(comm.rank, comm.size))
        calls[KERNEL] = kernel_of(case)
        chosen = str(explained.winner.candidate)
        samples = times(calls, max(1, rounds // 2))
        first = bench.row_of(f"{case}, first rounds", samples, base=chosen, errors=errors)
        finalists = {name: calls[name] for name in _finalists(first)}
        final = Row(str(case), str(bench.cluster), times(finalists, 2 * rounds), chosen)
    now = slowed(machine, first.median(KERNEL) / product_seconds(machine, *case.product))
    seconds = {str(candidate): seconds for candidate, seconds in walked.items()}
    at_kernels = {str(candidate): predict(explained.plan_of(candidate), now) for candidate in walked}
    limits = {"T_c": first.median(KERNEL), "bound": explained.lower_bound.seconds}
    measured = _Measured(
        replace(first, limits=limits, predicted=seconds, progress=f"{bench.progress}; {runs()}"),
        replace(final, predicted={name: seconds[name] for name in final.samples}),
    )
    return measured._replace(final=replace(measured.final, figures=_compared(measured, at_kernels)))


def over_best(samples: Mapping[str, Sequence[float]], chosen: str) -> float:
    """The time of `chosen`, divided by the time of the best contestant: the median over the rounds.

    In each round the best contestant is the one with the least median of all other rounds. So no contestant is the best
    because it was lucky in that round.
    """
    ratios = []
    for i, seconds in enumerate(samples[chosen]):
        others = {name: [*times[:i], *times[i + 1 :]] or times for name, times in samples.items()}
        ratios.append(seconds / samples[best_of(others)][i])
    return median(ratios)


def _finalists(first: Row) -> list[str]:
    """The chosen plan, the best of those that may be better, and the best plan without overlap if it may be better."""
    assert first.base is not None
    plans = sorted(first.errors, key=first.median)
    near = [name for name in plans if first.median(name) <= NEAR * first.median(first.base)]
    unfused = first.best(str(c) for c in UNFUSED)
    return list(dict.fromkeys([first.base, *near[:FINALISTS], *(name for name in near if name == unfused)]))


def _compared(measured: _Measured, at_kernels: Mapping[str, float]) -> list[Figure]:
    """Predictions and the chosen plan against the measurement.

    `at_kernels` are predictions with kernels as fast as they were in this row.
    """
    first, final = measured
    assert first.base is not None
    chosen, unfused, rivals = first.base, first.best(str(c) for c in UNFUSED), final.samples
    picked = best_of({name: samples[0::2] for name, samples in rivals.items()})
    later = {name: samples[1::2] for name, samples in rivals.items()}
    samples = rivals if unfused in rivals else first.samples
    slower = median_interval([a / b for a, b in zip(samples[chosen], samples[unfused], strict=True)])
    predictions = {"": first.predicted, ", at this row's kernel speed": at_kernels}
    return [
        *(
            Figure(f"predicted / measured, {name}{how}", seconds[name] / measured.median(name))
            for name in (chosen, unfused)
            for how, seconds in predictions.items()
        ),
        Figure(f"chosen / best ({best_of(rivals)})", over_best(rivals, chosen)),
        Figure(f"picked by half of the rounds ({picked}) / best of the others", over_best(later, picked)),
        Figure("chosen / itself, in other rounds", median(rivals[chosen][0::2]) / median(later[chosen])),
        Figure("low end of chosen / unfused", slower.low, most=MOST_SLOWER),
    ]


def _summary(bench: Bench, measured: list[_Measured]) -> Row:
    def share(kind: int, least: float = 0.0) -> float:
        return sum(least <= final.figures[kind].value <= NEAR_BEST for _, final in measured) / len(measured)

    def errors(words: str, deviations: Sequence[float], targets: Sequence[float] = ()) -> Iterator[Figure]:
        most = [*map(bench.asked, targets), None, None]
        yield Figure(f"median error of the prediction, {words}", median(deviations), most=most[0])
        yield Figure(f"95th percentile of that error, {words}", percentile(deviations, 0.95), most=most[1])

    figures: list[Figure] = []
    for kind, name in enumerate(("chosen plan", "chosen plan, at kernel speed", "unfused", "unfused, at kernel speed")):
        deviations = [abs(final.figures[kind].value - 1) for _, final in measured]
        figures += errors(name, deviations, () if kind else (MOST_MEDIAN_ERROR, MOST_ERROR))
    every = [
        abs(seconds / both.median(name) - 1) for both in measured for name, seconds in both.first.predicted.items()
    ]
    worst = max(final.figures[7].value for _, final in measured)
    figures += [
        *errors("all plans that ran", every),
        Figure("share of shapes within 2 % of the best", share(4), least=bench.asked(LEAST_NEAR)),
        Figure("the same for the plan that one half of the rounds picks, in the other half", share(5)),
        Figure("share of shapes within 2 % of itself, in other rounds", share(6, 1 / NEAR_BEST)),
        Figure("worst low end of chosen / unfused", worst, most=bench.asked(MOST_SLOWER)),
    ]
    return Row(f"all {len(measured)} shapes", str(bench.cluster), figures=figures)


# ---------------------------------------------------------------------------------------------- unequal links


def shaped(machine: Machine, size: int) -> Machine:
    """The machine with the links as `fompi.lab` shapes them, one host per rank. Calibrated links may be slower.

    Without netlab, or with several ranks on a host, the machine does not change.
    """
    hosts, _, between = os.environ.get("NETLAB_PAYLOAD", "").partition(";")
    rates = [float(rate) for rate in hosts.split(",") if rate]
    if len(rates) != size:
        return machine
    levels = machine.levels
    if between:
        levels = tuple(level._replace(bandwidth=float(between), shared=True, curve=()) for level in levels)
    shares = tuple(rate / max(rates) for rate in rates) if min(rates) < max(rates) else ()
    return replace(machine, bandwidth=max(rates), curve=(), levels=levels, rates=shares)


def _collective(bench: Bench, machine: Machine, operation: str) -> Row:
    size, total = bench.comm.size, QUICK_TOTAL if bench.quick else TOTAL
    x, reference = problem_of(operation, total, bench.comm.rank, size)
    explained = explained_for(machine, operation, size, x)
    chosen = explained.winner.candidate
    rivals = [Candidate(name, slices) for name in BLIND for slices in (1, 4)]
    rivals += [Candidate("direct", 1, 1), Candidate("direct", 4, 1), Candidate("unfused")]
    with ExitStack() as held:
        calls = {str(each): bench.bound(held, explained.plan_of(each), x=x) for each in (chosen, *rivals)}
        errors = bench.checked(calls, reference)
        row = bench.row(f"{operation} of {total // MIB} MiB", calls, base=str(chosen), errors=errors)
    blind = row.best(str(c) for c in rivals if c.schedule != "unfused")
    least_time = lower_bound(explained.problem, explained.sizes, shaped(machine, size))
    least = OF_BOUND_GROUPS if machine.levels else OF_BOUND_SLOW
    figures = [
        Figure("bound / time", least_time.seconds / row.median(str(chosen)), least=least, limit=1.0),
        row.ratio(blind, str(chosen), least=LEAST_OVER_BLIND if machine.levels else None),
        Figure("predicted / measured", explained.winner.seconds / row.median(str(chosen))),
    ]
    marks = [f"bound: {least_time.what}"]
    return replace(row, limits={"bound": least_time.seconds}, figures=figures, marks=marks)
