"""The row of the suite `parallel` with all schedules of a pipeline, each compared with its formula."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import numpy as np

from accelerator import INSTANT, MARK, PILOT_ROUNDS
from emulated import Emulated
from fompi.bench.measure import Bench
from fompi.model.pipeline import has_chunks, predicted
from fompi.parallel.pipeline import SCHEDULES, Pipeline
from fompi.tuning.rounds import Figure, Row, of_all_ranks
from links import ring

Array = np.ndarray[Any, Any]

STAGE_SECONDS = {"F": 0.010, "B": 0.020, "I": 0.010, "W": 0.010}
MICROBATCHES, CHUNKS = 8, 2
ACTIVATION = (256, 256)
MOST_BEYOND_FORMULA = 1.03


class _Stage:
    """A stage whose kernels only take time. It hands on what it was given."""

    def __init__(self, width: int):
        self.array = np.zeros((ACTIVATION[0], width), np.float32)

    def forward(self, x: Array) -> tuple[Array, None]:
        return self.array, None

    def backward(self, saved: None, dy: Array) -> Array:
        return self.array

    def backward_input(self, saved: None, dy: Array) -> tuple[Array, None]:
        return self.array, None

    def backward_weight(self, rest: None) -> None:
        pass


def chunks_of(schedule: str) -> int:
    """The stages of a rank."""
    return 1 if schedule != "interleaved" and has_chunks(schedule, 1) else CHUNKS


def pipelines(bench: Bench) -> Row:
    """All schedules of a pipeline, each with what its formula says. The time is that of the busiest rank's kernels."""
    comm, cluster = bench.comm, bench.cluster
    spans: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    inputs = [np.zeros(ACTIVATION, np.float32)] * MICROBATCHES
    seconds = {name: {kind: s / chunks_of(name) for kind, s in STAGE_SECONDS.items()} for name in SCHEDULES}
    pipes = {
        name: Pipeline(
            [_Stage(ACTIVATION[1]) for _ in range(chunks_of(name))],  # each has a part of the work
            comm=comm,
            microbatches=MICROBATCHES,
            schedule=name,
            activations=ACTIVATION,
            loss=lambda y, target: (0.0, y),
            seconds=seconds[name],
            backend=Emulated(INSTANT),
        )
        for name in SCHEDULES
    }

    def note(name: str, _: object) -> None:
        kernels = [e for e in pipes[name].trace.events if e.is_compute and e.rank == comm.rank]
        span = np.array([max(e.end for e in kernels) - min(e.start for e in kernels)])
        spans[name].append(float(of_all_ranks(bench.mpi, span).max()))

    bench.times({name: partial(pipe.step, inputs, inputs) for name, pipe in pipes.items()}, after=note)
    c = 0.0
    if not cluster.shared:
        with ring(cluster) as link:
            hop = {"hop": partial(link.exchange, int(np.prod(ACTIVATION)) * 4)}
            c = median(bench.times(hop, PILOT_ROUNDS)["hop"])
    samples = {name: each[-bench.rounds :] for name, each in spans.items()}
    formula = {name: predicted(name, comm.size, MICROBATCHES, chunks_of(name), seconds[name], c) for name in SCHEDULES}
    figures, most = [], bench.asked(MOST_BEYOND_FORMULA)
    for name, pipe in pipes.items():
        figures.append(Figure(f"{name}: time / formula", median(samples[name]) / formula[name], most=most, limit=1.0))
        pipe.close()
    what = f"pipeline, {comm.size} stages, {MICROBATCHES} micro-batches, a message {1e3 * c:.1f} ms"
    return bench.row_of(what, samples, predicted=formula, figures=figures, marks=[MARK])
