"""Smaller messages: mpirun -n 2 python -m fompi bench smaller

| row                         | what it is                                                                            |
|-----------------------------|---------------------------------------------------------------------------------------|
| `all_reduce 16 MiB`         | the sum with each wire, compared with that of float32 as it is                        |
| `matmul_reduce_scatter`     | a product whose messages take twice as long as it does, with each wire                |
| `DDP, int8`                 | a step of the GPT of `bench train` with `fompi.torch.wire("int8")`, beside gloo as it |
|                             | is and with torch's `fp16_compress_hook`                                              |
| `encode`, `decode_add`      | the kernels of int8 on 16 MiB of float32, compared with a copy                        |
| `tensor`, `experts`, ...    | steps of the strategies (`fompi.bench.smaller_strategies`)                            |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

import fompi
from fompi.backends.numpy import Numpy
from fompi.base.wires import WIRES
from fompi.bench import smaller_strategies
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.options import Options
from fompi.bench.rivals.gloo import Gloo
from fompi.bench.train import FULL, QUICK, data_parallel
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import Figure, Row, alternate, median_figure

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


def rows(comm: Communicator, options: Options) -> list[Row]:
    makers: dict[str, Callable[..., Row]] = {
        "all_reduce 16 MiB": _sum,
        "matmul_reduce_scatter": _product,
        "DDP, int8": _step,
        "encode": partial(_kernel, "encode_int8"),
        "decode_add": partial(_kernel, "decode_add_int8"),
        **dict.fromkeys(smaller_strategies.NAMES, _strategy),
    }
    with TcpHosts(comm.link.comm, options.quick) as cluster:
        return [makers[name](name, comm, cluster, options) for name in options.each([*makers])]


Calls = dict[str, Callable[[], object]]


def _compared(
    name: str, comm: Communicator, cluster: TcpHosts, options: Options, calls: Calls, **targets: float
) -> Row:
    """A row of one call with each wire."""
    samples = alternate(comm.link.comm, calls, options.rounds, idle=cluster.idle)
    row = Row(name, str(cluster), samples, base="int8", progress=progress(comm))
    wanted: dict[str, float] = {} if cluster.shared else targets
    figures = [row.ratio(slow, "int8", least=wanted.get(slow)) for slow in (PLAIN, "bfloat16")]
    return Row(**{**vars(row), "figures": figures})


def _sum(name: str, comm: Communicator, cluster: TcpHosts, options: Options) -> Row:
    x = np.random.default_rng(comm.rank).standard_normal(QUICK_COUNT if options.quick else COUNT, np.float32)
    calls: Calls = {wire or PLAIN: partial(fompi.all_reduce, x, wire=wire, comm=comm) for wire in (None, *SHOWN)}
    targets = {PLAIN: LEAST_SUM, "bfloat16": LEAST_OVER_BFLOAT16}
    return _compared(name, comm, cluster, options, calls, **targets)


def _product(name: str, comm: Communicator, cluster: TcpHosts, options: Options) -> Row:
    m, n = QUICK_PRODUCT if options.quick else PRODUCT
    draw = np.random.default_rng(comm.rank)
    inner = _inner(comm, cluster, options, m, n)
    x, w = (draw.standard_normal(shape, np.float32) for shape in ((m, inner), (inner, n)))
    calls: Calls = {
        wire or PLAIN: partial(fompi.matmul_reduce_scatter, x, w, wire=wire, comm=comm) for wire in (None, *SHOWN)
    }
    row = _compared(name, comm, cluster, options, calls, **{PLAIN: LEAST_PRODUCT})
    return Row(**{**vars(row), "what": f"{name} {m}x{inner}x{n}"})


def _inner(comm: Communicator, cluster: TcpHosts, options: Options, m: int, n: int) -> int:
    """The length of the rows with which the messages take TIMES_LONGER as long as the product."""
    y = np.zeros((m, n), np.float32)
    send = {"messages": partial(fompi.reduce_scatter, y, comm=comm)}
    message = min(alternate(comm.link.comm, send, 5, idle=cluster.idle)["messages"])
    inner = 64
    for _ in range(1 if options.quick else 8):
        x, w = np.ones((m, inner), np.float32), np.ones((inner, n), np.float32)
        product = min(alternate(comm.link.comm, {"product": partial(np.matmul, x, w, out=y)}, 5)["product"])
        if abs(message / product / TIMES_LONGER - 1) < 0.05:
            break
        inner = max(8, int(inner * message / product / TIMES_LONGER))
    return inner


def _step(name: str, comm: Communicator, cluster: TcpHosts, options: Options) -> Row:
    try:
        import torch.distributed as distributed
    except ImportError:
        return Row(name, str(cluster), absent={"gloo": "torch is not installed"})
    from fompi.torch.autoload import register

    register()
    size = QUICK if options.quick else FULL
    with closing(Gloo(comm.link.comm, cluster.rendezvous())):
        group, ours = distributed.group.WORLD, distributed.new_group(backend="fompi")
        ways: dict[str, tuple[Any, dict[str, Any]]] = {
            "gloo": (group, {}), "gloo, fp16": (group, {"half": True}), "int8": (ours, {"wire": "int8"})
        }  # fmt: skip
        calls = {way: data_parallel(size, on, comm.rank, comm.size, **how)[0] for way, (on, how) in ways.items()}
        samples = alternate(comm.link.comm, calls, options.rounds, idle=cluster.idle)
    row = Row(name, str(cluster), samples, base="int8", progress=f"{progress(comm)}; gloo: threads")
    least = {} if cluster.shared else {"gloo": LEAST_STEP, "gloo, fp16": LEAST_OVER_HOOK}
    figures = [row.ratio(slow, "int8", least=least.get(slow)) for slow in ("gloo", "gloo, fp16")]
    return Row(**{**vars(row), "figures": figures})


def _strategy(name: str, comm: Communicator, cluster: TcpHosts, options: Options) -> Row:
    wires = (None, "bfloat16", "int8")
    calls: Calls = {wire or PLAIN: smaller_strategies.step_of(name, comm, wire, options.quick) for wire in wires}
    return _compared(name, comm, cluster, options, calls)


def _kernel(kernel: str, name: str, comm: Communicator, cluster: TcpHosts, options: Options) -> Row:
    """On rank 0 alone: the others wait."""
    count = QUICK_COUNT if options.quick else COUNT
    x, y = np.random.default_rng(0).standard_normal(count, np.float32), np.zeros(count, np.float32)
    m = np.zeros(WIRES["int8"].nbytes(count), np.uint8)
    encode = Numpy().bind("encode_int8", [x], [m], [PLAIN], ["uint8"])
    encode()
    add = Numpy().bind("decode_add_int8", [m, x], [y], ["uint8", PLAIN], [PLAIN])
    calls: Calls = {kernel: encode if kernel == "encode_int8" else add, "copy": partial(np.copyto, y, x)}
    alone: Calls = {each: call if comm.rank == 0 else _nothing for each, call in calls.items()}
    samples = alternate(comm.link.comm, alone, options.rounds)
    figure: Figure = median_figure("16 MiB", samples[kernel], "ms", most=None if options.quick else 1e3 * MOST_SECONDS)
    return Row(f"{name} of int8", str(cluster), samples, base=kernel, figures=[figure], progress="no messages")


def _nothing() -> None:
    """What a rank does that only waits."""
