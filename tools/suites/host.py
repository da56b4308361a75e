"""How much of what the suite `parallel` exposes is time of the cores: its calls on links that take hardly any time.

    python -m fompi.lab run --hosts 4 --rate 8gbit --capacity 32gbit -- python -m fompi bench tools/suites/host.py

Kernels take the seconds that they took in the last run of that suite on this MPI (build/figures). What is exposed here
is host time: routing, copies and sums of four ranks on two cores, and their threads. As there, it is a share of T_m.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from accelerator import INSTANT, MARK, Accelerator
from fompi.bench.measure import Bench, Call
from fompi.mpi.transport import library
from fompi.tuning.rounds import Figure, Row, median_interval
from parallel import at, title
from strategy import EMULATED, FOMPI, KERNELS, MESSAGES, Strategy, StrategySetting, on_accelerator

RAW = Path(__file__).parents[2] / "build" / "figures"


def rows(bench: Bench) -> list[Row]:
    kept = json.loads((RAW / f"parallel-{'openmpi' if 'Open' in library().name else 'mpich'}.json").read_text())
    before = {row["what"]: row["samples"] for row in kept["rows"]}
    accelerator, made = Accelerator(), list[Row]()
    with accelerator.on([bench.comm]):
        for what, make in on_accelerator(bench.comm.size).items():
            strategy = make(StrategySetting(bench, bench.comm, EMULATED, accelerator))
            for ratio in bench.each(strategy.ratios, partial(title, what, strategy)):
                name = title(what, strategy, ratio)
                t_c, t_m = (median(before[name][which]) for which in (KERNELS, MESSAGES))
                made.append(measured(bench, accelerator, name, strategy, t_c, t_m))
            strategy.close()
    return made


def measured(bench: Bench, accelerator: Accelerator, what: str, strategy: Strategy, t_c: float, t_m: float) -> Row:
    """A strategy whose kernels take t_c seconds, and those alone."""
    accelerator.use(INSTANT.flops_rate)
    strategy.call()
    before = accelerator.flops
    strategy.call()
    flops = accelerator.flops - before
    calls: dict[str, Call] = {FOMPI: strategy.call, KERNELS: partial(accelerator.spend, flops)}
    row = bench.row(what, {name: at(accelerator, flops / t_c, call) for name, call in calls.items()}, base=FOMPI)
    host = [(t - c) / t_m for t, c in zip(row.samples[FOMPI], row.samples[KERNELS], strict=True)]
    return replace(row, figures=[Figure("exposed / messages", median(host), "", median_interval(host))], marks=[MARK])
