"""The strategies on emulated accelerators with real messages: mpirun -n 4 python -m fompi bench parallel

Every row is one strategy with one ratio of messages to kernels. First its kernels take no time: what the call takes
then is T_m, its messages alone. Then the emulated accelerator gets such a speed that the kernels take T_c, and the row
compares

- fompi: the strategy of `fompi.parallel`, through its public interface;
- serial: the same kernels and messages, but no kernel runs while a message moves;
- kernels alone and messages alone.

`exposed` is the time beyond the kernels alone. `bound` is what must be exposed: no order of these pieces does better on
links that carry one message at a time. Both are shares of T_m. The bound of a row is in the docstring of its function
(`fompi.bench.strategies`), and in docs/concepts/strategies.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fompi.bench.accelerator import INSTANT, PILOT_ROUNDS, Accelerator, emulated_row
from fompi.bench.cluster import TcpHosts
from fompi.bench.options import Options
from fompi.bench.pipelines import pipelines
from fompi.bench.strategies import CASES, FOMPI, KERNELS, MESSAGES, SERIAL, StrategyCase, with_bound
from fompi.bench.two_axes import data_beside_tensor
from fompi.bench.whole_step import whole_step
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import Row, alternate

Array = np.ndarray[Any, Any]


def rows(comm: Communicator, options: Options) -> list[Row]:
    measured_rows: list[Row] = []
    with TcpHosts(comm.link.comm) as cluster:
        accelerator = Accelerator([comm])
        with accelerator.on():
            for make in CASES:
                case = make(comm, accelerator)
                if case is not None:
                    ratios = case.ratios[:1] if options.quick else case.ratios
                    for ratio in options.each(ratios, partial(_title, case)):
                        measured_rows.append(measured(comm, cluster, accelerator, case, ratio, options.rounds))
                    case.close()
        more = {"pipelines": pipelines}
        if comm.size % 2 == 0:
            more["a step as one plan"] = whole_step
        if comm.size > 2 and comm.size % 2 == 0:
            more["data beside tensor parallelism"] = data_beside_tensor
        measured_rows += [more[name](comm, cluster, options.rounds) for name in options.each([*more])]
    return measured_rows


def _title(case: StrategyCase, ratio: float) -> str:
    return f"{case.what}, {case.of} = {ratio:g}"


def measured(
    comm: Communicator, cluster: TcpHosts, accelerator: Accelerator, case: StrategyCase, ratio: float, rounds: int
) -> Row:
    mpi = comm.link.comm

    def on(flops_rate: float, serial: bool, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            accelerator.use(flops_rate, serial)
            return call()

        return run

    def kernels() -> None:
        accelerator.spend(flops)

    instant = on(INSTANT.flops_rate, False, case.call)
    before = accelerator.flops
    instant()
    flops = accelerator.flops - before
    pilot = alternate(mpi, {MESSAGES: instant}, PILOT_ROUNDS, idle=cluster.idle)
    rate = flops * case.t_m_over_t_c(ratio) / median(pilot[MESSAGES])
    contestants = {
        FOMPI: on(rate, False, case.call),
        SERIAL: on(rate, True, case.serial or case.call),
        KERNELS: on(rate, False, kernels),
        MESSAGES: instant,
    }
    samples = alternate(mpi, contestants, rounds, idle=cluster.idle)
    row = emulated_row(comm, cluster, _title(case, ratio), samples, base=FOMPI)
    return with_bound(row, case.bound, None if cluster.shared else case.slack)
