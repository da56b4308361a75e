"""The row of `fompi bench parallel` with a whole training step as one plan, beside its simulation and its bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fompi.backends.emulated import Emulated
from fompi.bench.accelerator import INSTANT, PILOT_ROUNDS, Accelerator, emulated_row
from fompi.bench.cluster import TcpHosts
from fompi.engine.communicator import Communicator
from fompi.engine.mesh import Mesh
from fompi.model.pipeline import predicted
from fompi.model.simulate import simulate
from fompi.parallel.data import DataParallel
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.step_plan import KERNELS, plan
from fompi.parallel.step_problem import LayerForm
from fompi.plans.plan import Plan
from fompi.runtime.binding import bind
from fompi.runtime.executor import Executor
from fompi.tuning.rounds import Figure, Row, alternate, ratio

Array = np.ndarray[Any, Any]

MICROBATCHES, LAYERS, PARAMETERS, SHAPE = 4, 4, 200_000, (256, 512)
SECONDS = {"F": 0.030, "B": 0.060, "U": 0.002}
ONE_PLAN, OTHER, MOST_BEYOND, MOST_FROM_SIMULATION = "one plan, 1f1b", "one plan, gpipe", 0.03, 1.04
TWO_AXES, COMPOSED = "one plan, dp x pp", "Pipeline + DataParallel, dp x pp"
STEPS = 2
"""Steps of a call on dp x pp: the gathers of one step may hide in the next one."""


def mesh_of(size: int) -> dict[str, int]:
    """dp x tp x pp of a row: two ranks on as many axes as there can be."""
    dp = 2 if size % 4 == 0 else 1
    return {"dp": dp, "tp": 2, "pp": size // (2 * dp)}


def whole_step(comm: Communicator, cluster: TcpHosts, rounds: int) -> Row:
    """Parameters sharded over dp (ZeRO-3), attention and MLP over tp, stages over pp, sums and updates in one plan.

    Bound: the kernels, the bubble of 1F1B with its messages, the first gather of a stage, and the last sum of one. The
    messages of tp hide behind the kernels. The simulation has the latency and the bandwidth of the links, measured.
    On dp x pp alone the plan is compared with `Pipeline` and `DataParallel`, on kernels that take the same seconds.
    """
    mesh, mpi = mesh_of(comm.size), comm.link.comm
    two_axes = {"pp": comm.size // mesh["dp"], "dp": mesh["dp"]}
    made = _plan("1f1b", mesh)
    with ExitStack() as until:
        one, other, two = (
            until.enter_context(_bound(comm, each)) for each in (made, _plan("gpipe", mesh), _plan("1f1b", two_axes))
        )
        composed = until.enter_context(_composed(comm, two_axes))
        calls: dict[str, Callable[[], object]] = {ONE_PLAN: one, OTHER: other, TWO_AXES: partial(_repeat, two)}
        calls[COMPOSED] = composed
        samples = alternate(mpi, calls, rounds, idle=cluster.idle)
    samples |= {name: [seconds / STEPS for seconds in samples[name]] for name in (TWO_AXES, COMPOSED)}
    layers = LAYERS // mesh["pp"]
    stage = {"F": layers * SECONDS["F"], "B": layers * SECONDS["B"], "I": 0.0, "W": 0.0}
    kernel_seconds = predicted("1f1b", mesh["pp"], MICROBATCHES, 1, stage) + layers * SECONDS["U"]
    limits = {"kernels and bubble": kernel_seconds}
    figures = [
        Figure("gpipe / 1f1b", median(samples[OTHER]) / median(samples[ONE_PLAN])),
        ratio(f"{COMPOSED} / one plan", samples[COMPOSED], samples[TWO_AXES]),
    ]
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


def _plan(schedule: str, mesh: dict[str, int]) -> Plan:
    layers = [LayerForm(PARAMETERS, "attention"), LayerForm(PARAMETERS)] * (LAYERS // 2)
    return plan(schedule, mesh=mesh, microbatches=MICROBATCHES, layers=layers, shape=SHAPE, seconds=SECONDS)


def _bound(comm: Communicator, made: Plan) -> Executor:
    d, _, _ = made.problem.place(comm.rank)
    own: dict[str, Any] = {
        f"p{n}": np.zeros(made.problem.shares(n)[d], np.float32) for n in made.problem.held(comm.rank)
    }
    return bind(made, comm=comm, kernels=dict.fromkeys(KERNELS, _zeros), backend=Emulated(INSTANT), **own)


def _repeat(step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        step()


@contextmanager
def _composed(comm: Communicator, axes: dict[str, int]) -> Iterator[Callable[[], None]]:
    """STEPS steps by `Pipeline` and `DataParallel` with zero=1. Layers are buckets."""
    inputs = [np.zeros(SHAPE, np.float32)] * MICROBATCHES
    params = {f"w{n}": np.zeros(PARAMETERS, np.float32) for n in range(LAYERS // axes["pp"])}
    model = _Layers(params)
    buckets: dict[str, Any] = {"microbatches": MICROBATCHES, "bucket_nbytes": 4 * PARAMETERS}
    with (
        Mesh(comm, pp=axes["pp"], dp=axes["dp"]) as mesh,
        DataParallel(params, optimizer=model, comm=mesh["dp"], **buckets) as model.dp,
        Pipeline([model], comm=mesh["pp"], microbatches=MICROBATCHES, activations=SHAPE, loss=_loss) as pipe,
    ):

        def step() -> None:
            pipe.step(inputs, inputs)
            model.dp.step()

        def steps() -> None:
            _repeat(step)
            for name in params:
                _ = model.dp[name]

        yield steps


def _loss(y: Array, target: Array) -> tuple[float, Array]:
    return 0.0, y


class _Layers:
    """The layers of a stage, and their optimizer, whose kernels only take time. `dp` has the parameters."""

    dp: DataParallel

    def __init__(self, gradients: dict[str, Array]):
        self.device, self.gradients, self.array = Accelerator([]), gradients, np.zeros(SHAPE, np.float32)
        self.device.use(1.0)  # what it spends is seconds

    def forward(self, x: Array) -> tuple[Array, None]:
        for name in self.gradients:
            _ = self.dp[name]
            self.device.spend(SECONDS["F"])
        return self.array, None

    def backward(self, saved: None, dy: Array) -> Array:
        for name in reversed(self.gradients):
            self.device.spend(SECONDS["B"])
            self.dp.ready(name, self.gradients[name])
        return self.array

    def state(self, p: Array) -> dict[str, Any]:
        return {}

    def update(self, p: Array, g: Array, state: dict[str, Any]) -> None:
        self.device.spend(SECONDS["U"])


def _zeros(args: Any, reads: Any, writes: Sequence[Array]) -> None:
    """A kernel that only takes time, and whose results are numbers."""
    for out in writes:
        out.fill(0)
