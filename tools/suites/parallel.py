"""The strategies on emulated accelerators with real messages.

    mpirun -n 4 python -m fompi bench tools/suites/parallel.py

Every row is one strategy with one ratio of messages to kernels. First its kernels take no time: what the call takes
then is T_m, its messages alone. Then the emulated accelerator gets such a speed that the kernels take T_c, and the row
compares

- fompi: the strategy of `fompi.parallel`, through its public interface;
- kernels alone and messages alone;
- serial: both, one after the other.

`exposed` is the time beyond the kernels alone. `bound` is what must be exposed: no order of these pieces does better on
links that carry one message at a time. Both are shares of T_m. The bound of a row is in the docstring of its function
(`strategy.py`), and in docs/concepts/strategies.md.

On a device (`--device`) the kernels and the messages of a strategy are calls of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import median

from accelerator import INSTANT, MARK, PILOT_ROUNDS, Accelerator
from axes import data_beside_tensor, whole_step
from fompi.bench.measure import Bench, Call
from fompi.tuning.rounds import Row
from pipelines import pipelines
from strategy import (
    EMULATED,
    FOMPI,
    GPU,
    KERNELS,
    MESSAGES,
    ON_DEVICE,
    QUICK_GPU,
    SERIAL,
    SOFTWARE,
    Makers,
    Strategy,
    StrategySetting,
    on_accelerator,
    with_bound,
)


def rows(bench: Bench) -> list[Row]:
    made: list[Row] = []
    accelerator, makers, size = Accelerator(), on_accelerator(bench.comm.size), bench.comm.size
    with accelerator.on([bench.comm]):
        for what, make in makers.items():
            strategy = make(StrategySetting(bench, bench.comm, EMULATED, accelerator))
            ratios = strategy.ratios[: 1 if bench.quick else None]
            for ratio in bench.each(ratios, partial(title, what, strategy)):
                made.append(measured(bench, accelerator, title(what, strategy, ratio), strategy, ratio))
            strategy.close()
    more = {"pipelines": pipelines}
    if size % 2 == 0:
        more["a step as one plan"] = whole_step
    if size > 2 and size % 2 == 0:
        more["data beside tensor parallelism"] = data_beside_tensor
    return [*made, *bench.rows(more)]


def title(what: str, strategy: Strategy, ratio: float) -> str:
    return f"{what}, {strategy.of} = {ratio:g}"


def at(accelerator: Accelerator, flops_rate: float, call: Call) -> Call:
    """The call at this speed of the accelerator."""

    def run() -> None:
        accelerator.use(flops_rate)
        call()

    return run


def measured(bench: Bench, accelerator: Accelerator, what: str, strategy: Strategy, ratio: float) -> Row:
    """A strategy on the accelerator, whose speed makes messages and kernels take their times in this ratio."""
    messages, before = at(accelerator, INSTANT.flops_rate, strategy.call), accelerator.flops
    messages()
    flops = accelerator.flops - before
    t_m = median(bench.times({MESSAGES: messages}, PILOT_ROUNDS)[MESSAGES])
    rate = flops * strategy.t_m_over_t_c(ratio) / t_m
    kernels = at(accelerator, rate, partial(accelerator.spend, flops))
    row = compared(bench, what, at(accelerator, rate, strategy.call), kernels, messages)
    row = replace(row, marks=[MARK])
    return with_bound(row, strategy.bound, bench.asked(strategy.slack))


def compared(bench: Bench, what: str, call: Call, kernels: Call, messages: Call) -> Row:
    """The strategy beside its kernels, its messages, and both one after the other."""

    def serial() -> None:
        bench.place.finished(messages)()
        kernels()

    calls = {FOMPI: call, SERIAL: serial, KERNELS: kernels, MESSAGES: messages}
    return bench.row(what, {name: bench.place.finished(each) for name, each in calls.items()}, base=FOMPI)


def rows_on_device(bench: Bench) -> list[Row]:
    return of_device(bench, ON_DEVICE)


def of_device(bench: Bench, makers: Makers) -> list[Row]:
    """A row of each strategy. Its bound is of the T_c and T_m that were measured."""
    gpu = QUICK_GPU if bench.quick else GPU
    sizes, made = SOFTWARE if bench.place.is_software else gpu, []
    for what in bench.each([*makers]):
        strategy = makers[what](StrategySetting(bench, bench.comm, sizes))
        assert strategy.kernels is not None and strategy.messages is not None
        row = compared(bench, what, strategy.call, strategy.kernels, strategy.messages)
        made.append(with_bound(row, strategy.bound))
        strategy.close()
    return made
