"""The row of `fompi bench parallel` with a whole training step as one plan, beside its simulation and its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fompi.backends.emulated import Emulated
from fompi.bench.accelerator import INSTANT, MARK, PILOT_ROUNDS
from fompi.bench.measure import Bench
from fompi.model.pipeline import predicted
from fompi.model.simulate import simulate
from fompi.parallel.step_plan import KERNELS, plan
from fompi.parallel.step_problem import LayerForm
from fompi.tuning.rounds import Figure, Row

Array = np.ndarray[Any, Any]

MICROBATCHES, LAYERS, PARAMETERS, SHAPE = 4, 4, 200_000, (256, 512)
SECONDS = {"F": 0.030, "B": 0.060, "U": 0.002}
ONE_PLAN, OTHER, MOST_BEYOND, MOST_FROM_SIMULATION = "one plan, 1f1b", "one plan, gpipe", 0.03, 1.04


def mesh_of(size: int) -> dict[str, int]:
    """dp x tp x pp of a row: two ranks on as many axes as there can be."""
    dp = 2 if size % 4 == 0 else 1
    return {"dp": dp, "tp": 2, "pp": size // (2 * dp)}


def whole_step(bench: Bench) -> Row:
    """Parameters sharded over dp (ZeRO-3), attention and MLP over tp, stages over pp, sums and updates in one plan.

    Bound: the kernels, the bubble of 1F1B with its messages, the first gather of a stage, and the last sum of one. The
    messages of tp hide behind the kernels. The simulation has the latency and the bandwidth of the links, measured.
    """
    mesh, comm = mesh_of(bench.comm.size), bench.comm
    how: dict[str, Any] = {
        "mesh": mesh,
        "microbatches": MICROBATCHES,
        "layers": [LayerForm(PARAMETERS, "attention"), LayerForm(PARAMETERS)] * (LAYERS // 2),
        "shape": SHAPE,
        "seconds": SECONDS,
    }
    made, other = plan("1f1b", **how), plan("gpipe", **how)
    d, _, _ = made.problem.place(comm.rank)
    own = {f"p{n}": np.zeros(made.problem.shares(n)[d], np.float32) for n in made.problem.held(comm.rank)}
    given: dict[str, Any] = {"kernels": dict.fromkeys(KERNELS, _zeros), "backend": Emulated(INSTANT), **own}
    with ExitStack() as held:
        steps = {ONE_PLAN: bench.bound(held, made, **given), OTHER: bench.bound(held, other, **given)}
        samples = bench.times(steps)
    stage = {kind: LAYERS // mesh["pp"] * SECONDS.get(kind, 0.0) for kind in "FBIW"}
    updates = LAYERS // mesh["pp"] * SECONDS["U"]

    def formula(message: float = 0.0) -> float:
        return predicted("1f1b", mesh["pp"], MICROBATCHES, 1, stage, message) + updates

    limits = {"kernels and bubble": formula()}
    figures = [Figure("gpipe / 1f1b", median(samples[OTHER]) / median(samples[ONE_PLAN]))]
    if not bench.cluster.shared:
        sizes = {"small": 64, "part": 4 * PARAMETERS // mesh["dp"], "rows": 4 * SHAPE[0] * SHAPE[1]}
        hops = {name: partial(bench.cluster.exchange, n) for name, n in sizes.items()}
        seconds = {name: median(taken) for name, taken in bench.times(hops, PILOT_ROUNDS).items()}
        bandwidth = (sizes["rows"] - sizes["small"]) / max(seconds["rows"] - seconds["small"], 1e-9)
        machine = replace(INSTANT, name="these links", latency=seconds["small"], bandwidth=bandwidth)
        bound = formula(seconds["rows"]) + (2 * seconds["part"] if mesh["dp"] > 1 else 0.0)
        limits |= {"bounds of the parts": bound, "simulated": simulate(made, machine).seconds}
        taken = median(samples[ONE_PLAN])
        figures += [
            Figure("beyond the bounds / step", taken / bound - 1, most=MOST_BEYOND, limit=0.0),
            Figure("time / simulated", taken / limits["simulated"], most=MOST_FROM_SIMULATION, limit=1.0),
        ]
    what = f"a step as one plan, {' x '.join(f'{axis} {n}' for axis, n in mesh.items() if n > 1)}"
    return bench.row_of(what, samples, base=ONE_PLAN, limits=limits, figures=figures, marks=[MARK])


def _zeros(args: Any, reads: Any, writes: Sequence[Array]) -> None:
    """A kernel that only takes time, and whose results are numbers."""
    for out in writes:
        out.fill(0)
