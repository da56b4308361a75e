"""The rows of the suite `parallel` on several axes: data beside tensor parallelism, and a whole step as one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from accelerator import INSTANT, MARK, PILOT_ROUNDS, Accelerator
from emulated import Emulated
from fompi.bench.measure import Bench, Call
from fompi.engine.communicator import Communicator
from fompi.engine.mesh import Mesh
from fompi.model.pipeline import predicted
from fompi.model.simulate import simulate
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.step_plan import KERNELS, plan
from fompi.parallel.step_problem import LayerForm
from fompi.plans.plan import Plan
from fompi.runtime.binding import bind
from fompi.tuning.rounds import Figure, Row, of_all_ranks, ratio
from links import ring
from strategy import EMULATED, StrategySetting, tensor_parallel_block

Array = np.ndarray[Any, Any]

BLOCKS, GRADIENT_NBYTES = 8, 2 << 20
ALONE, FIRST_COME, IN_ORDER = "tensor alone", "with data, first come", "with data, priorities"
MOST_BEYOND_ALONE = 1.05


def data_beside_tensor(bench: Bench) -> Row:
    """A backward of TP+SP blocks, T_m = T_c. After each block data parallelism sums the gradients of its layer.

    The time is that of the blocks. What data parallelism exposes after the last of them does not count. Exposed is what
    is beyond the kernels. Alone is the same step with data parallelism of one rank, which moves nothing.
    """
    comm, accelerator = bench.comm, Accelerator()
    plain = Mesh(comm, dp=comm.size // 2, tp=2)
    ordered = Mesh(comm, priority=("tp", "dp"), dp=comm.size // 2, tp=2)
    own = comm.split(comm.rank, 0, "own")
    gradients = {f"w{i}": np.ones(GRADIENT_NBYTES // 4, np.float32) for i in range(BLOCKS)}
    taken: dict[str, list[float]] = {ALONE: [], FIRST_COME: [], IN_ORDER: []}

    def step(block: Call, dp: DataParallel) -> float:
        seconds = 0.0
        for name in reversed(gradients):
            begun = perf_counter()
            block()
            seconds += perf_counter() - begun
            dp.ready(name, gradients[name])
        dp.step()
        for name in gradients:
            _ = dp[name]
        return seconds

    def note(name: str, seconds: float) -> None:
        taken[name].append(float(of_all_ranks(bench.mpi, np.array([seconds])).max()))

    with accelerator.on([own, *plain.values(), *ordered.values()]):
        contestants: dict[str, Callable[[], float]] = {}
        dps = []
        for name, mesh, axis in zip(taken, (plain, plain, ordered), (own, plain["dp"], ordered["dp"]), strict=True):
            dps.append(DataParallel(gradients, optimizer=SGD(1e-3), comm=axis, zero=1, bucket_nbytes=GRADIENT_NBYTES))
            block = tensor_parallel_block(StrategySetting(bench, mesh["tp"], EMULATED, accelerator)).call
            contestants[name] = partial(step, block, dps[-1])
        before = accelerator.flops
        contestants[ALONE]()
        flops = accelerator.flops - before
        bench.times({ALONE: contestants[ALONE]}, PILOT_ROUNDS, after=note)
        t_m = median(taken[ALONE][-PILOT_ROUNDS:])
        accelerator.use(flops / t_m)
        whole = bench.times(contestants, after=note)
    for dp in dps:
        dp.close()
    for held in (own, plain, ordered):
        held.close()
    samples = {name: each[-bench.rounds :] for name, each in taken.items()}
    exposed = {name: median(each) - t_m for name, each in samples.items()}
    most = bench.asked(MOST_BEYOND_ALONE)
    figures = [
        Figure(f"exposed, {FIRST_COME} / alone", exposed[FIRST_COME] / exposed[ALONE]),
        Figure(f"exposed, {IN_ORDER} / alone", exposed[IN_ORDER] / exposed[ALONE], most=most, limit=1.0),
        ratio("whole step, first come / priorities", whole[FIRST_COME], whole[IN_ORDER]),
        Figure("whole step, priorities / alone", median(whole[IN_ORDER]) / median(whole[ALONE])),
    ]
    what = f"data beside tensor parallelism, {comm.size // 2} x 2, T_m / T_c = 1"
    return bench.row_of(what, samples, base=ALONE, limits={"kernels": t_m}, figures=figures, marks=[MARK])


# ------------------------------------------------------------------------------------------ a whole step as one plan

MICROBATCHES, LAYERS, PARAMETERS, SHAPE = 4, 4, 200_000, (256, 512)
SECONDS = {"F": 0.030, "B": 0.060, "U": 0.002}
ONE_PLAN, OTHER, MOST_BEYOND, MOST_FROM_SIMULATION = "one plan, 1f1b", "one plan, gpipe", 0.03, 1.04
ON_TWO_AXES, COMPOSED = "one plan, dp x pp", "Pipeline + DataParallel, dp x pp"
STEPS = 2
"""Steps of a call on dp x pp: the gathers of one step may hide in the next one."""


def mesh_of(size: int) -> dict[str, int]:
    """dp x tp x pp of a row: two ranks on as many axes as there can be."""
    dp = 2 if size % 4 == 0 else 1
    return {"dp": dp, "tp": 2, "pp": size // (2 * dp)}


def whole_step(bench: Bench) -> Row:
    """Parameters sharded over dp (ZeRO-3), attention and MLP over tp, stages over pp, sums and updates in one plan.

    Bound: the kernels, the bubble of 1F1B with its messages, the first gather of a stage, and the last sum of one. The
    messages of tp hide behind the kernels. The simulation has the latency and the bandwidth of the links, measured.
    On dp x pp alone the plan is compared with `Pipeline` and `DataParallel`, on kernels that take the same seconds.
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
    given: dict[str, Any] = {"kernels": dict.fromkeys(KERNELS, _zeros), "backend": Emulated(INSTANT)}
    given |= _own(made, comm.rank)
    with ExitStack() as held, on_two_axes(comm, mesh["dp"]) as more:
        steps = {ONE_PLAN: bench.bound(held, made, **given), OTHER: bench.bound(held, other, **given)}
        samples = bench.times(steps | more)
    samples |= {name: [seconds / STEPS for seconds in samples[name]] for name in more}
    stage = {kind: LAYERS // mesh["pp"] * SECONDS.get(kind, 0.0) for kind in "FBIW"}
    updates = LAYERS // mesh["pp"] * SECONDS["U"]

    def formula(message: float = 0.0) -> float:
        return predicted("1f1b", mesh["pp"], MICROBATCHES, 1, stage, message) + updates

    limits = {"kernels and bubble": formula()}
    figures = [
        Figure("gpipe / 1f1b", median(samples[OTHER]) / median(samples[ONE_PLAN])),
        ratio(f"{COMPOSED} / one plan", samples[COMPOSED], samples[ON_TWO_AXES]),
    ]
    if not bench.cluster.shared:
        sizes = {"small": 64, "part": 4 * PARAMETERS // mesh["dp"], "rows": 4 * SHAPE[0] * SHAPE[1]}
        with ring(bench.cluster) as link:
            hops = {name: partial(link.exchange, n) for name, n in sizes.items()}
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


def _own(made: Plan, rank: int) -> dict[str, Any]:
    """The parameters that a rank keeps."""
    d, _, _ = made.problem.place(rank)
    return {f"p{n}": np.zeros(made.problem.shares(n)[d], np.float32) for n in made.problem.held(rank)}


@contextmanager
def on_two_axes(comm: Communicator, dp: int) -> Iterator[dict[str, Callable[[], object]]]:
    """STEPS steps as one plan, and by `Pipeline` and `DataParallel` with zero=1, whose buckets are layers."""
    inputs, pp = [np.zeros(SHAPE, np.float32)] * MICROBATCHES, comm.size // dp
    params = {f"w{n}": np.zeros(PARAMETERS, np.float32) for n in range(LAYERS // pp)}
    how = {"mesh": {"dp": dp, "pp": pp}, "layers": [PARAMETERS] * LAYERS, "shape": SHAPE, "seconds": SECONDS}
    made = plan("1f1b", microbatches=MICROBATCHES, **how)  # type: ignore[arg-type]
    model, kernels = _Layers(params), dict.fromkeys(KERNELS, _zeros)
    buckets = {"microbatches": MICROBATCHES, "bucket_nbytes": 4 * PARAMETERS}
    with (
        bind(made, comm=comm, kernels=kernels, backend=Emulated(INSTANT), **_own(made, comm.rank)) as one_plan,
        Mesh(comm, pp=pp, dp=dp) as mesh,
        DataParallel(params, optimizer=model, comm=mesh["dp"], **buckets) as model.dp,
        Pipeline([model], comm=mesh["pp"], microbatches=MICROBATCHES, activations=SHAPE, loss=_loss) as pipe,
    ):

        def steps() -> None:
            for _ in range(STEPS):
                one_plan()

        def composed() -> None:
            for _ in range(STEPS):
                pipe.step(inputs, inputs)
                model.dp.step()
            for name in params:
                _ = model.dp[name]

        yield {ON_TWO_AXES: steps, COMPOSED: composed}


def _loss(y: Array, target: Array) -> tuple[float, Array]:
    return 0.0, y


class _Layers:
    """The layers of a stage, and their optimizer, whose kernels only take time. `dp` has the parameters."""

    dp: DataParallel

    def __init__(self, gradients: dict[str, Array]):
        self.device, self.gradients, self.array = Accelerator(), gradients, np.zeros(SHAPE, np.float32)
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
