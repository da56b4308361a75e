"""Smaller messages.

    mpirun -n 2 python -m fompi bench tools/suites/smaller.py

| row                         | what it is                                                                            |
|-----------------------------|---------------------------------------------------------------------------------------|
| `all_reduce 16 MiB`         | the sum with each wire, beside that of float32 as it is                               |
| `matmul_reduce_scatter`     | a product whose messages take twice as long as it does, with each wire                |
| `DDP, int8`                 | a step of the GPT of `programs.py` with `fompi.torch.wire("int8")`, beside gloo as it |
|                             | is and with torch's `fp16_compress_hook`                                              |
| `encode`, `decode_add`      | the kernels of int8 on 16 MiB of float32, beside a copy                               |
| `tensor`, `experts`, ...    | steps of the strategies (`strategy.py`)                                      |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np

import fompi
from fompi.backends.numpy import Numpy
from fompi.base.wires import WIRES
from fompi.bench.measure import Bench, Call, Calls
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import Row
from means import median_figure, with_wires
from strategy import (
    Dimensions,
    Makers,
    StrategySetting,
    mixture_of_experts,
    pipeline,
    ring,
    tensor_parallel_block,
    zero_1,
)

PLAIN = "float32"

SHOWN = ("bfloat16", "int8", "int4")

LEAST_SUM, LEAST_OVER_BFLOAT16, LEAST_PRODUCT, LEAST_STEP, LEAST_OVER_HOOK = 3.3, 1.7, 1.8, 1.6, 1.15
MOST_SECONDS = 8e-3
"""Asked for between hosts: float32 / int8 and bfloat16 / int8 of a sum, float32 / int8 of a product, gloo and gloo with
its hook / int8 of a step. A kernel takes at most MOST_SECONDS for 16 MiB, which is 2 GB/s.
"""

COUNT, QUICK_COUNT = 4 << 20, 4096

PRODUCT, QUICK_PRODUCT = (2048, 1024), (64, 32)
"""The rows and columns of the product. How long its rows are is found out here."""

TIMES_LONGER = 2.0
"""The rows are chosen so that messages take this many times as long as the product."""


DIMENSIONS = Dimensions(1024, 1024, 128, 1024, 8, 64, 1024, 128, 256, 512)
QUICK_DIMENSIONS = Dimensions(64, 64, 128, 64, 8, 64, 64, 128, 16, 32)

STRATEGIES: Makers = {
    "tensor": tensor_parallel_block,
    "ring attention": ring,
    "experts": mixture_of_experts,
    "pipeline": pipeline,
    "ZeRO": zero_1,
}
"""They run forward and backward: a pipeline and ZeRO a step."""


def rows(bench: Bench) -> list[Row]:
    return bench.rows(
        {
            "all_reduce 16 MiB": _sum,
            "matmul_reduce_scatter": _product,
            "DDP, int8": _step,
            "encode": partial(_kernel, "encode_int8"),
            "decode_add": partial(_kernel, "decode_add_int8"),
            **{name: partial(_strategy, name) for name in STRATEGIES},
        }
    )


def _compared(bench: Bench, name: str, calls: Calls, **targets: float) -> Row:
    """A row of one call with each wire."""
    row = bench.row(name, calls, base="int8")
    wanted = {} if bench.cluster.shared else targets
    slower = [each for each in calls if each not in ("int8", "int4")]
    return replace(row, figures=[row.ratio(each, "int8", least=wanted.get(each)) for each in slower])


def _with_wires(call: Callable[..., object], comm: Communicator) -> Calls:
    return {name: partial(call, comm=carrier) for name, carrier in with_wires(comm, (None, *SHOWN)).items()}


def _sum(bench: Bench) -> Row:
    x = np.random.default_rng(bench.comm.rank).standard_normal(QUICK_COUNT if bench.quick else COUNT, np.float32)
    targets = {PLAIN: LEAST_SUM, "bfloat16": LEAST_OVER_BFLOAT16}
    return _compared(bench, "all_reduce 16 MiB", _with_wires(partial(fompi.all_reduce, x), bench.comm), **targets)


def _product(bench: Bench) -> Row:
    m, n = QUICK_PRODUCT if bench.quick else PRODUCT
    draw, inner = np.random.default_rng(bench.comm.rank), _inner(bench, m, n)
    x, w = (draw.standard_normal(shape, np.float32) for shape in ((m, inner), (inner, n)))
    calls = _with_wires(partial(fompi.matmul_reduce_scatter, x, w), bench.comm)
    return _compared(bench, f"matmul_reduce_scatter {m}x{inner}x{n}", calls, **{PLAIN: LEAST_PRODUCT})


def _inner(bench: Bench, m: int, n: int) -> int:
    """The length of the rows with which the messages take TIMES_LONGER as long as the product."""
    y = np.zeros((m, n), np.float32)

    def fastest(call: Call, **how: float) -> float:
        return min(bench.times({"call": call}, 5, **how)["call"])

    message, inner = fastest(partial(fompi.reduce_scatter, y, comm=bench.comm)), 64
    for _ in range(1 if bench.quick else 8):
        x, w = np.ones((m, inner), np.float32), np.ones((inner, n), np.float32)
        times = message / fastest(partial(np.matmul, x, w, out=y), idle=0.0) / TIMES_LONGER
        if abs(times - 1) < 0.05:
            break
        inner = max(8, int(inner * times))
    return inner


def _step(bench: Bench) -> Row:
    if find_spec("torch") is None:
        return bench.row_of("DDP, int8", {}, absent={"gloo": "torch is not installed"})
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from c10d import beside_torch
    from fompi.torch.comm_hook import wire
    from programs import FULL, QUICK
    from training import data_parallel

    with beside_torch(bench) as (beside, group):
        ways = {"gloo": (None, None), "gloo, fp16": (None, fp16_compress_hook), "int8": (group, wire("int8"))}
        size = QUICK if bench.quick else FULL
        calls = {way: data_parallel(size.task(bench.comm.rank), *how) for way, how in ways.items()}
        return _compared(beside, "DDP, int8", calls, **{"gloo": LEAST_STEP, "gloo, fp16": LEAST_OVER_HOOK})


def _strategy(name: str, bench: Bench) -> Row:
    sizes, comms = QUICK_DIMENSIONS if bench.quick else DIMENSIONS, with_wires(bench.comm, (None, "bfloat16", "int8"))
    made = {wire: STRATEGIES[name](StrategySetting(bench, comm, sizes)) for wire, comm in comms.items()}
    row = _compared(bench, name, {wire: each.both_ways or each.call for wire, each in made.items()})
    for strategy in made.values():
        strategy.close()
    return row


def _kernel(kernel: str, bench: Bench) -> Row:
    """On rank 0 alone: the others wait."""
    count = QUICK_COUNT if bench.quick else COUNT
    x, y = np.random.default_rng(0).standard_normal(count, np.float32), np.zeros(count, np.float32)
    m = np.zeros(WIRES["int8"].nbytes(count), np.uint8)
    encode = Numpy().bind("encode_int8", [x], [m], [PLAIN], ["uint8"])
    encode()
    add = Numpy().bind("decode_add_int8", [m, x], [y], ["uint8", PLAIN], [PLAIN])
    calls: Calls = {kernel: encode if kernel == "encode_int8" else add, "copy": partial(np.copyto, y, x)}
    alone: Calls = {name: call if bench.comm.rank == 0 else _nothing for name, call in calls.items()}
    most = None if bench.quick else 1e3 * MOST_SECONDS
    what = f"{kernel.removesuffix('_int8')} of int8"
    row = bench.row_of(what, bench.times(alone, idle=0.0), base=kernel, progress="no messages")
    return replace(row, figures=[median_figure("16 MiB", row.samples[kernel], "ms", most=most)])


def _nothing() -> None:
    """What a rank does that only waits."""
