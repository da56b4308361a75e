"""The row of `fompi bench parallel` with a whole training step as one plan, its simulation and its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from fompi.backends.emulated import Emulated
from fompi.bench.accelerator import INSTANT, PILOT_ROUNDS, emulated_row
from fompi.bench.cluster import TcpHosts
from fompi.engine.communicator import Communicator
from fompi.model.pipeline import predicted
from fompi.model.simulate import simulate
from fompi.parallel.step_plan import KERNELS, plan
from fompi.parallel.step_problem import LayerForm
from fompi.runtime.binding import bind
from fompi.tuning.rounds import Figure, Row, alternate

Array = np.ndarray[Any, Any]

MICROBATCHES, LAYERS, PARAMETERS, SHAPE = 4, 4, 200_000, (256, 512)
SECONDS = {"F": 0.030, "B": 0.060, "U": 0.002}
ONE_PLAN, OTHER, MOST_BEYOND, MOST_FROM_SIMULATION = "one plan, 1f1b", "one plan, gpipe", 0.03, 1.04


def mesh_of(size: int) -> dict[str, int]:
    """dp x tp x pp of a row: two ranks on as many axes as there can be."""
    dp = 2 if size % 4 == 0 else 1
    return {"dp": dp, "tp": 2, "pp": size // (2 * dp)}


def whole_step(comm: Communicator, cluster: TcpHosts, rounds: int) -> Row:
    """Parameters sharded over dp (ZeRO-3), attention and MLP over tp, stages over pp, sums and updates in one plan.

    Bound: the kernels, the bubble of 1F1B with its messages, the first gather of a stage, and the last sum of one. The
    messages of tp hide behind the kernels. The simulation has the latency and the bandwidth of the links, measured.
    """
    mesh, mpi = mesh_of(comm.size), comm.link.comm
    how = {
        "microbatches": MICROBATCHES,
        "layers": [LayerForm(PARAMETERS, "attention"), LayerForm(PARAMETERS)] * (LAYERS // 2),
        "shape": SHAPE,
        "seconds": SECONDS,
    }
    made, other = (plan(schedule, mesh=mesh, **how) for schedule in ("1f1b", "gpipe"))  # type: ignore[arg-type]
    d, _, _ = made.problem.place(comm.rank)
    own: dict[str, Any] = {
        f"p{n}": np.zeros(made.problem.shares(n)[d], np.float32) for n in made.problem.held(comm.rank)
    }
    kernels, device = dict.fromkeys(KERNELS, _zeros), Emulated(INSTANT)
    steps = [bind(each, comm=comm, kernels=kernels, backend=device, **own) for each in (made, other)]
    samples = alternate(mpi, dict(zip((ONE_PLAN, OTHER), steps, strict=True)), rounds, idle=cluster.idle)
    for step in steps:
        step.close()
    layers = LAYERS // mesh["pp"]
    stage = {"F": layers * SECONDS["F"], "B": layers * SECONDS["B"], "I": 0.0, "W": 0.0}
    kernel_seconds = predicted("1f1b", mesh["pp"], MICROBATCHES, 1, stage) + layers * SECONDS["U"]
    limits = {"kernels and bubble": kernel_seconds}
    figures = [Figure("gpipe / 1f1b", median(samples[OTHER]) / median(samples[ONE_PLAN]))]
    if not cluster.shared:
        part, rows = 4 * PARAMETERS // max(mesh["dp"], 1), 4 * SHAPE[0] * SHAPE[1]
        sizes = {"small": 64, "part": part, "rows": rows}
        hops = {name: lambda n=n: cluster.exchange(n) for name, n in sizes.items()}
        seconds = {name: median(taken) for name, taken in alternate(mpi, hops, PILOT_ROUNDS, idle=cluster.idle).items()}
        bandwidth = (rows - 64) / max(seconds["rows"] - seconds["small"], 1e-9)
        machine = replace(INSTANT, name="these links", latency=seconds["small"], bandwidth=bandwidth)
        bound = predicted("1f1b", mesh["pp"], MICROBATCHES, 1, stage, seconds["rows"]) + layers * SECONDS["U"]
        bound += 2 * seconds["part"] if mesh["dp"] > 1 else 0.0
        limits |= {"bounds of the parts": bound, "simulated": simulate(made, machine).seconds}
        taken = median(samples[ONE_PLAN])
        figures += [
            Figure("beyond the bounds / step", taken / bound - 1, most=MOST_BEYOND, limit=0.0),
            Figure("time / simulated", taken / limits["simulated"], most=MOST_FROM_SIMULATION, limit=1.0),
        ]
    name = " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1)
    what = f"a step as one plan, {name}"
    return emulated_row(comm, cluster, what, samples, base=ONE_PLAN, limits=limits, figures=figures)


def _zeros(args: Any, reads: Any, writes: Sequence[Array]) -> None:
    """A kernel that only takes time, and whose results are numbers."""
    for out in writes:
        out.fill(0)
