"""Overlapped operations on device buffers: mpirun -n 2 python -m fompi bench --device cuda

A row compares the bound operation by several schedules with the unfused one, with its product alone, and with its
messages alone, in interleaved rounds. All tensors are on the device. A time lasts from the call to the end of the last
kernel of the slowest rank. The limit of a row is max(product, messages), the median of what each round allows.

`--device software` runs the same on the software device. Its times say nothing of any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import sleep
from typing import Any, NamedTuple

import numpy as np

import fompi
from fompi.backends.cuda import Device, backend_of
from fompi.base.errors import WaitTimeout
from fompi.base.layout import Partial, Shard, Spec
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.options import Options, shape_of
from fompi.cli.output import UsageError
from fompi.engine.handshake import agree
from fompi.plans.plan import Plan
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


def device_for(kind: str, comm: Any) -> Any:
    """The device of this rank. Collective: an error of one rank is raised on all."""
    device, refusal = None, None
    try:
        device = Device(kind, seed=comm.rank, check=False, delay=0.0) if kind == "software" else Device(kind)
    except Exception as error:
        refusal = error
    agree(comm, f"bench --device {kind}", refusal)
    return device


def card(device: Any) -> str:
    """The card, and the versions of its driver and of CuPy's CUDA, in words."""
    if device.key == "software":
        return NOT_A_GPU
    runtime = device.runtime
    name = runtime.getDeviceProperties(device.number)["name"].decode()
    return f"{name}, driver for CUDA {runtime.driverGetVersion()}, CuPy for {runtime.runtimeGetVersion()}"


def rows(comm: Any, options: Options, kind: str, like: str | None = None) -> list[Row]:
    """One row for each operation. Raises ShapeError, or UsageError if the ranks do not divide the shape."""
    fits = SOFTWARE_SHAPE if kind == "software" else QUICK_SHAPE if options.quick else SHAPE
    m, k, n = fits if like is None else shape_of(like)
    size = comm.size
    if m % size or n % size or k % size:
        raise UsageError(f"bench --device: {size} ranks must divide M, K and N, not {m},{k},{n}")
    device = device_for(kind, comm)
    gathered = Spec((m, k), "float32", Shard(0)), Spec((k, n), "float32", Shard(1))
    summed = Spec((m, k), "float32", Shard(1)), Spec((k, n), "float32", Shard(0))
    moved = Spec((m, k), "float32", Shard(0)), Spec((m, n), "float32", Partial())
    cases = {
        OPERATIONS[0]: DeviceCase(gathered, ((m // size, k), (k, n // size)), fompi.all_gather, moved[0]),
        OPERATIONS[1]: DeviceCase(summed, ((m, k // size), (k // size, n)), fompi.reduce_scatter, moved[1]),
    }
    return [measured(comm, device, options.rounds, name, cases[name]) for name in options.progress.each([*cases])]


class DeviceCase(NamedTuple):
    """An operation: its tensors as a whole and on a rank, and the collective that moves what it moves."""

    specs: tuple[Spec, Spec]
    shapes: tuple[tuple[int, int], tuple[int, int]]
    exchange: Any
    moved: Spec


def measured(comm: Any, device: Any, rounds: int, name: str, case: DeviceCase) -> Row:
    """The row of one operation."""
    operation, size = getattr(fompi, name), comm.size
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
        setup, path = str(cluster), comm.paths(device).title
    limits = [max(pair) for pair in zip(samples[PRODUCT], samples[MESSAGES], strict=True)]
    figures = [
        ratio(f"{best} / {LIMIT}", samples[best], limits, limit=1.0),
        ratio(f"{UNFUSED} / {best}", samples[UNFUSED], samples[best]),
    ]
    return Row(
        f"{name} {m},{k},{n} float32",
        f"{card(device)}; {path}; {setup}",
        samples,
        base=UNFUSED,
        limits={LIMIT: median(limits)},
        figures=figures,
        errors=errors,
        progress=progress(comm),
        marks=(NOT_A_GPU,) if device.key == "software" else (),
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

    def call() -> None:
        token, waits = launch([]), 0
        while not token.done():
            sleep(1e-5)
            waits += 1
            if waits * 1e-5 > seconds:
                raise WaitTimeout(f"a product on {device!r} is not done after {seconds:g} s")

    return call
