"""The suites on the buffers of a device: mpirun -n 2 python -m fompi bench [SUITE] --device cuda

| suite                    | a row                                                                                     |
|--------------------------|-------------------------------------------------------------------------------------------|
| `fused`, or none         | a bound operation by several schedules, unfused, its product alone and its messages alone |
| `collectives`            | a collective, MPI's own through host memory, and the copies that the path needs           |
| `parallel`, `step`       | strategies and whole steps (`device_strategies`)                                          |

Contestants take turns in interleaved rounds. All tensors are on the device. A time lasts from the call to the end of
the last kernel of the slowest rank. The limit of a fused row is max(product, messages), the median of what each round
allows. That of a collective is the copies alone.

`--device software` runs the same on the software device, whose checker raises races at the end. Its times say nothing
of any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import median
from time import sleep
from typing import Any, NamedTuple

import numpy as np

import fompi
from fompi.backends.cuda import backend_of
from fompi.backends.numbers import for_numpy
from fompi.base.errors import WaitTimeout
from fompi.base.layout import Partial, Shard, Spec
from fompi.bench import collectives
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import DEFAULT, progress
from fompi.bench.options import Options
from fompi.cli.output import UsageError
from fompi.plans.plan import Plan
from fompi.runtime.default_device import device_for
from fompi.tuning.rounds import Contestant, Row, alternate, best_of, checked, ratio, relative_error

SHAPE, QUICK_SHAPE, SOFTWARE_SHAPE = (8192, 8192, 8192), (2048, 2048, 2048), (64, 64, 64)
"""M, K, N of the whole product."""

UNFUSED, PRODUCT, MESSAGES = "unfused", "product alone", "messages alone"

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter")

LIMIT = f"max({PRODUCT}, {MESSAGES})"

PILOT_ROUNDS = 3
"""Rounds in which the best schedule is chosen. They do not count."""

OVERLAPPED = {"ring": ("ring", 1), "direct": ("direct", 1), "direct, 2 slices": ("direct", 2)}
"""The schedules and their slices, by the names of contestants."""

NOT_A_GPU = "software device: no times of a GPU"


class Bench:
    """The device of this rank, and what a row says of it."""

    def __init__(self, kind: str, comm: Any):
        self.device, self.is_software = device_for(kind, comm, "bench"), kind == "software"
        self.marks = (NOT_A_GPU,) if self.is_software else ()
        self._rank = comm.rank

    def up(self, a: np.ndarray) -> Any:
        """The array on the device, for NumPy's functions."""
        return for_numpy(self.device.array(a))

    def drawn(self, *shape: int, seed: int | None = None) -> Any:
        """Small random numbers on the device. With a `seed` all ranks have the same."""
        random = np.random.default_rng(self._rank if seed is None else seed)
        return self.up(random.standard_normal(shape, np.float32) / np.float32(16))

    def setup(self, comm: Any, cluster: TcpHosts) -> str:
        """Where a row ran, in words."""
        return f"{card(self.device)}; {comm.paths(self.device).title}; {cluster}"


def finished(device: Any, call: Callable[[], object], seconds: float) -> Callable[[], object]:
    """The call with a wait for all that it has enqueued in the caller's stream, for at most `seconds`."""
    backend = backend_of(device)

    def run() -> object:
        result = call()
        wait_for(device, backend.entry(), seconds)
        return result

    return run


def wait_for(device: Any, token: Any, seconds: float) -> None:
    """Wait until the token is done. None is done."""
    waits = 0
    while token is not None and not token.done():
        sleep(1e-5)
        waits += 1
        if waits * 1e-5 > seconds:
            raise WaitTimeout(f"the kernels on {device!r} are not done after {seconds:g} s")


def card(device: Any) -> str:
    """The card, and the versions of its driver and of CuPy's CUDA, in words."""
    if device.key == "software":
        return NOT_A_GPU
    runtime = device.runtime
    name = runtime.getDeviceProperties(device.number)["name"].decode()
    return f"{name}, driver for CUDA {runtime.driverGetVersion()}, CuPy for {runtime.runtimeGetVersion()}"


def rows(
    comm: Any, options: Options, kind: str, like: tuple[int, int, int] | None = None, suite: str = "fused"
) -> list[Row]:
    """The rows of a suite. Raises ShapeError, or UsageError if the ranks do not divide the shape of `fused`."""
    bench, found = Bench(kind, comm), list[Row]()
    if suite == "fused":
        found = fused(comm, options, bench, like)
    elif suite == "collectives":
        found = moved(comm, options, bench)
    else:
        found = import_module("fompi.bench.device_strategies").rows(comm, options, bench, suite)
    if bench.is_software:
        bench.device.check()  # it raises the races
    return found


def fused(comm: Any, options: Options, bench: Bench, like: tuple[int, int, int] | None) -> list[Row]:
    """One row for each operation."""
    fits = SOFTWARE_SHAPE if bench.is_software else QUICK_SHAPE if options.quick else SHAPE
    m, k, n = like or fits
    size = comm.size
    if m % size or n % size or k % size:
        raise UsageError(f"--device: {size} ranks must divide M, K and N, not {m},{k},{n}")
    gathered = Spec((m, k), "float32", Shard(0)), Spec((k, n), "float32", Shard(1))
    summed = Spec((m, k), "float32", Shard(1)), Spec((k, n), "float32", Shard(0))
    exchanged = Spec((m, k), "float32", Shard(0)), Spec((m, n), "float32", Partial())
    cases = {
        OPERATIONS[0]: DeviceCase(gathered, ((m // size, k), (k, n // size)), fompi.all_gather, exchanged[0]),
        OPERATIONS[1]: DeviceCase(summed, ((m, k // size), (k // size, n)), fompi.reduce_scatter, exchanged[1]),
    }
    return [measured(comm, bench, options.rounds, name, cases[name]) for name in options.each([*cases])]


class DeviceCase(NamedTuple):
    """An operation: its tensors as a whole and on a rank, and the collective that moves what it moves."""

    specs: tuple[Spec, Spec]
    shapes: tuple[tuple[int, int], tuple[int, int]]
    exchange: Any
    moved: Spec


def measured(comm: Any, bench: Bench, rounds: int, name: str, case: DeviceCase) -> Row:
    """The row of one operation."""
    operation, size, device = getattr(fompi, name), comm.size, bench.device
    random = np.random.default_rng(comm.rank)
    x, w = (random.standard_normal(shape, np.float32) for shape in case.shapes)
    reference = operation(x, w, comm=comm, schedule="unfused")
    (m, k), (_, n) = (spec.shape for spec in case.specs)
    product = (m, case.shapes[0][1], case.shapes[1][1])
    exchanged = case.shapes[0] if case.exchange is fompi.all_gather else case.moved.shape
    with ExitStack() as bound, TcpHosts(comm.link.comm) as cluster:
        tensors = {"x": device.array(x), "w": device.array(w)}

        def step_of(plan: Plan, **given: Any) -> Callable[[], Any]:
            step = bound.enter_context(fompi.bind(plan, comm=comm, **given))

            def call() -> Any:
                result = step()
                assert step.seconds is not None  # the time is known when the last kernel is done
                return result

            return call

        contestants = {
            which: step_of(fompi.plan(operation, *case.specs, ranks=size, schedule=schedule, slices=slices), **tensors)
            for which, (schedule, slices) in {**OVERLAPPED, UNFUSED: ("unfused", 1)}.items()
        }
        mpi = comm.link.comm
        errors = checked(
            mpi, {which: Contestant(call, lambda y: error(y, reference)) for which, call in contestants.items()}
        )
        pilot = alternate(mpi, {which: contestants[which] for which in OVERLAPPED}, PILOT_ROUNDS, idle=cluster.idle)
        best = best_of(pilot)
        contestants[PRODUCT] = product_alone(device, product, comm.engine.timeout)
        alone = fompi.plan(case.exchange, case.moved, ranks=size, schedule="direct")
        contestants[MESSAGES] = step_of(alone, x=device.array(np.ones(exchanged, np.float32)))
        samples = alternate(mpi, contestants, rounds, idle=cluster.idle)
        setup = bench.setup(comm, cluster)
    limits = [max(pair) for pair in zip(samples[PRODUCT], samples[MESSAGES], strict=True)]
    figures = [
        ratio(f"{best} / {LIMIT}", samples[best], limits, limit=1.0),
        ratio(f"{UNFUSED} / {best}", samples[UNFUSED], samples[best]),
    ]
    return Row(
        f"{name} {m},{k},{n} float32",
        setup,
        samples,
        base=UNFUSED,
        limits={LIMIT: median(limits)},
        figures=figures,
        errors=errors,
        progress=progress(comm),
        marks=bench.marks,
    )


def error(y: Any, reference: np.ndarray) -> float:
    """The relative error of a result on the device."""
    return relative_error(y.get(), reference)


def product_alone(device: Any, shape: tuple[int, int, int], seconds: float) -> Callable[[], None]:
    """A call of the product of one rank. It waits for the kernel, at most `seconds`."""
    m, k, n = shape
    a, b = device.array(np.ones((m, k), np.float32)), device.array(np.ones((k, n), np.float32))
    c = device.empty((m, n), np.float32)
    launch = backend_of(device).bind("matmul", [a, b], [c], ["float32"] * 2, ["float32"])

    return lambda: wait_for(device, launch([]), seconds)


# ---------------------------------------------------------------------------------------------------- collectives

TOTALS, SOFTWARE_TOTALS = (4 << 20, 64 << 20, 256 << 20), (1 << 20,)
"""Bytes of the global tensor."""

BOUND, NATIVE, COPIES = "fompi, bound", "MPI through host memory", "copies alone"


def moved(comm: Any, options: Options, bench: Bench) -> list[Row]:
    """A row for each collective and size."""
    totals = SOFTWARE_TOTALS if bench.is_software else TOTALS[:1] if options.quick else TOTALS
    cases = [(name, total) for name in collectives.OPERATIONS for total in totals]
    with TcpHosts(comm.link.comm) as cluster:
        return [collective(comm, cluster, bench, *case, options.rounds) for case in options.each(cases, _title)]


def _title(case: tuple[str, int]) -> str:
    return f"{case[0]} of {case[1] >> 20} MiB"


def collective(comm: Any, cluster: TcpHosts, bench: Bench, name: str, total: int, rounds: int) -> Row:
    """A collective on the device, bound and by the default schedule, compared with MPI's own on copies of the host."""
    mpi, seconds, device, operation = comm.link.comm, comm.engine.timeout, bench.device, getattr(fompi, name)
    x, reference = collectives.problem_of(name, total, comm.rank, comm.size)
    on_device = device.array(x)
    exchange = collectives.native(name, mpi, x, reference.shape)

    def through_host() -> Any:
        x[...] = on_device.get()
        return device.array(exchange())

    with operation.bind(on_device, comm=comm) as step:
        calls = {BOUND: step, DEFAULT: partial(operation, on_device, comm=comm), NATIVE: through_host}
        timed = {which: finished(device, call, seconds) for which, call in calls.items()}
        errors = checked(mpi, {which: Contestant(call, lambda y: error(y, reference)) for which, call in timed.items()})
        timed[COPIES] = finished(device, copies(comm, device, name, total), seconds)
        samples = alternate(mpi, timed, rounds, idle=cluster.idle)
        setup = bench.setup(comm, cluster)
    row = Row(_title((name, total)), setup, samples, base=NATIVE, errors=errors, progress=progress(comm))
    figures = [
        row.ratio(COPIES, BOUND, limit=1.0),
        row.ratio(NATIVE, BOUND),
        row.ratio(NATIVE, DEFAULT),
    ]
    return replace(row, limits={COPIES: row.median(COPIES)}, figures=figures, marks=bench.marks)


def copies(comm: Any, device: Any, name: str, total: int) -> Callable[[], None]:
    """The copies that no path avoids: what a rank receives arrives by one copy on the device.

    A staged message needs two on its way, down and up.
    """
    received = total * (comm.size - 1) // comm.size * (2 if name == "all_reduce" else 1)
    backend, number = backend_of(device), max(1, received // 4)
    source = device.array(np.ones(number, np.float32))
    target = device.array(np.ones(number, np.float32))
    if not any(comm.paths(device).is_staged(comm.rank, peer) for peer in range(comm.size) if peer != comm.rank):
        return lambda: backend.copy((target, source))
    host = backend.empty(comm.engine.arena, (number,), "float32", "host")
    down = backend.bind("download", [source], [host], ["float32"], ["float32"])
    up = backend.bind("upload", [host], [target], ["float32"], ["float32"])

    def staged() -> None:
        backend.leave([up([down([])])])

    return staged
