"""The row of `fompi bench parallel` with data and tensor parallelism at once, on the same links."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from fompi.bench.accelerator import MARK, PILOT_ROUNDS, Accelerator
from fompi.bench.measure import Bench, Call
from fompi.bench.strategies import EMULATED, StrategySetting, tensor_parallel_block
from fompi.engine.mesh import Mesh
from fompi.parallel.data import SGD, DataParallel
from fompi.tuning.rounds import Figure, Row, of_all_ranks, ratio

LAYERS, GRADIENT_NBYTES = 8, 2 << 20
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
    gradients = {f"w{i}": np.ones(GRADIENT_NBYTES // 4, np.float32) for i in range(LAYERS)}
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
