"""The row of `fompi bench parallel` with data and tensor parallelism at once, on the same links."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fompi.bench.accelerator import PILOT_ROUNDS, Accelerator, emulated_row
from fompi.bench.cluster import TcpHosts
from fompi.bench.strategies import FEATURES, ROWS, WIDTH
from fompi.engine.communicator import Communicator
from fompi.engine.mesh import Mesh
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.tensor import column_parallel_linear, row_parallel_linear
from fompi.tuning.rounds import Figure, Row, alternate, of_all_ranks, ratio

Array = np.ndarray[Any, Any]

LAYERS, GRADIENT_NBYTES = 8, 2 << 20
ALONE, FIRST_COME, IN_ORDER = "tensor alone", "with data, first come", "with data, priorities"
MOST_BEYOND_ALONE = 1.05


def data_beside_tensor(comm: Communicator, cluster: TcpHosts, rounds: int) -> Row:
    """A backward of TP+SP blocks, T_m = T_c. After each block data parallelism sums the gradients of its layer.

    The time is that of the blocks. What data parallelism exposes after the last of them does not count. Exposed is what
    is beyond the kernels. Alone is the same step with data parallelism of one rank, which moves nothing.
    """
    plain = Mesh(comm, dp=comm.size // 2, tp=2)
    ordered = Mesh(comm, priority=("tp", "dp"), dp=comm.size // 2, tp=2)
    own = comm.split(comm.rank, 0, "own")
    accelerator = Accelerator([own, *plain.values(), *ordered.values()])
    names = [f"w{i}" for i in range(LAYERS)]
    gradients = {name: np.ones(GRADIENT_NBYTES // 4, np.float32) for name in names}
    x = np.zeros((ROWS // 2, WIDTH), np.float32)
    w1, w2 = np.zeros((WIDTH, FEATURES), np.float32), np.zeros((FEATURES, WIDTH), np.float32)

    def step(tp: Communicator, dp: DataParallel) -> float:
        seconds = 0.0
        for name in reversed(names):
            begun = perf_counter()
            row_parallel_linear(column_parallel_linear(x, w1, comm=tp), w2, comm=tp)
            seconds += perf_counter() - begun
            dp.ready(name, gradients[name])
        dp.step()
        for name in names:
            _ = dp[name]
        return seconds

    with accelerator.on():
        dps = [
            DataParallel(gradients, optimizer=SGD(1e-3), comm=axis, zero=1, bucket_nbytes=GRADIENT_NBYTES)
            for axis in (own, plain["dp"], ordered["dp"])
        ]
        contestants = {
            ALONE: partial(step, plain["tp"], dps[0]),
            FIRST_COME: partial(step, plain["tp"], dps[1]),
            IN_ORDER: partial(step, ordered["tp"], dps[2]),
        }
        samples: dict[str, list[float]] = {name: [] for name in contestants}

        def note(name: str, seconds: float) -> None:
            samples[name].append(float(of_all_ranks(comm.link.comm, np.array([seconds])).max()))

        mpi, before = comm.link.comm, accelerator.flops
        contestants[ALONE]()
        flops = accelerator.flops - before
        alternate(mpi, {ALONE: contestants[ALONE]}, PILOT_ROUNDS, idle=cluster.idle, after=note)
        t_m = median(samples.pop(ALONE)[-PILOT_ROUNDS:])
        samples[ALONE] = []
        accelerator.use(flops / t_m)
        whole = alternate(mpi, contestants, rounds, idle=cluster.idle, after=note)
    for dp in dps:
        dp.close()
    for communicator in (own, plain, ordered):
        communicator.close()
    samples = {name: samples[name][-rounds:] for name in contestants}
    exposed = {name: median(taken) - t_m for name, taken in samples.items()}
    figures = [
        Figure(f"exposed, {FIRST_COME} / alone", exposed[FIRST_COME] / exposed[ALONE]),
        Figure(f"exposed, {IN_ORDER} / alone", exposed[IN_ORDER] / exposed[ALONE], most=MOST_BEYOND_ALONE, limit=1.0),
        ratio("whole step, first come / priorities", whole[FIRST_COME], whole[IN_ORDER]),
        Figure("whole step, priorities / alone", median(whole[IN_ORDER]) / median(whole[ALONE])),
    ]
    if cluster.shared:
        figures = [replace(figure, most=None) for figure in figures]
    what = f"data beside tensor parallelism, {comm.size // 2} x 2, T_m / T_c = 1"
    return emulated_row(comm, cluster, what, samples, base=ALONE, limits={"kernels": t_m}, figures=figures)
