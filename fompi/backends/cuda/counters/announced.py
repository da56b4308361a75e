"""Several products as one kernel of a GPU, which raises a flag after each of them.

    made = CudaAnnouncer(device, products, layout(products, tf32=False))
    epoch = made.enqueue(stream)
    while not made.is_raised(0, epoch): ...       # then the first product is written

The kernel is `multiply_groups` of `fompi.backends.cuda.counters.triton`. It works on the arrays of the products where
they are: a table has the addresses of each tile (`signal.in_place`). All products have the same weight.

The last tile of a product writes the flag with release at system scope, behind the stores of all its tiles. So what the
host launches or sends after it has read the flag finds the product. Nothing else may rely on it: a stream that was told
earlier waits for the end of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.cuda.counters.signal import RowRun, Signals, in_place
from fompi.backends.cuda.device import Enqueue, ProductCall
from fompi.backends.cuda.products import Matrix, matrix
from fompi.backends.half import storage
from fompi.base import kept
from fompi.base.version import __version__
from fompi.plans.kernels import find

GROUP_POINTERS = ("tiles", "w", "need", "count", "flag")
GROUP_NUMBERS = ("epoch", "columns", "depth", "x_row", "w_row", "y_row")
"""The parameters of the kernel: addresses, and 32-bit integers. Rows are this many elements apart."""

DTYPES = ("float32", "float16", "bfloat16")
MOST_COUNT = (1 << 31) - 1

WARPS, MOST_STAGES, STAGE_NBYTES = 8, 4, 32 << 10
"""Of a block of the kernel. A stage holds one piece of both operands in shared memory."""

BAND = 8
"""Rows of tiles that start together, so that they share their operands."""

ROUNDS = 7
"""How often both ways are timed. Their medians are compared."""

LEAST_FLOPS = 1e9
"""Below that many floating-point operations a kernel is too short to gain anything: nothing is measured."""


class KernelForm(NamedTuple):
    """What the kernel is compiled for: dtypes of the weight, of x, of the results and of the biases ("": none).

    `even`: no tile reaches over the last column, nor over the depth. `aligned`: addresses and strides are multiples of
    16. `transposed`: the weight has its columns one after the other in memory.
    """

    w: str
    x: str
    y: str
    bias: str
    even: bool
    aligned: bool
    transposed: bool
    tf32: bool

    @property
    def dtypes(self) -> tuple[str, str, str, str]:
        return self[:4]

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows and columns of a tile of the result, and how much of the depth is loaded at a time."""
        return tile_of(self.w)


def tile_of(w: str) -> tuple[int, int, int]:
    return 128, 128, 32 if w == "float32" else 64


class OperandLayout(NamedTuple):
    """Where the operands of all products lie. `groups` has the runs of rows of each product."""

    form: KernelForm
    groups: list[list[RowRun]]
    w: int
    columns: int
    depth: int
    x_row: int
    w_row: int
    y_row: int


def layout(products: Sequence[ProductCall], tf32: bool) -> OperandLayout | None:
    """The operands as the kernel takes them. None: it does not."""
    found = [_runs(product) for product in products]
    if not all(found):
        return None
    runs = [run for each in found for run in each or ()]
    weights, dtypes, biases = (
        {run.w for run in runs},
        {run.dtypes for run in runs},
        {run.of_bias for run in runs} - {""},
    )
    x_rows, y_rows = ({m.stride for m in each if m.rows > 1} for each in ([r.x for r in runs], [r.y for r in runs]))
    if any(len(values) > 1 for values in (weights, dtypes, biases, x_rows, y_rows)):
        return None
    (w,), ((of_w, of_x, of_y),) = weights, dtypes
    numbers = w.columns, w.rows, max(x_rows, default=w.rows), w.stride, max(y_rows, default=w.columns)
    if not (w.rows and w.columns) or max(numbers) > MOST_COUNT:
        return None
    if not {of_w, of_x, of_y, *biases} <= {*DTYPES} or of_w not in (of_x, "float32"):
        return None
    _, broad, deep = tile_of(of_w)
    addresses = (w.ptr, *(m.ptr for run in runs for m in (run.x, run.y)))
    form = KernelForm(
        of_w, of_x, of_y, "".join(biases),
        even=not (w.columns % broad or w.rows % deep),
        aligned=not any(number % 16 for number in (*numbers, *addresses)),
        transposed=w.is_transposed,
        tf32=tf32 and of_w == "float32",
    )  # fmt: skip
    groups = [[RowRun(run.x.ptr, run.y.ptr, run.bias, run.x.rows) for run in each or ()] for each in found]
    return OperandLayout(form, groups, w.ptr, *numbers)


class _Run(NamedTuple):
    """A run of rows of a product, with the address of its bias (0: none). `dtypes` are those of w, x and y."""

    x: Matrix
    y: Matrix
    w: Matrix
    bias: int
    dtypes: tuple[str, str, str]
    of_bias: str


def _runs(product: ProductCall) -> list[_Run] | None:
    """The runs of a product that have rows. None: the kernel cannot address an operand."""
    kernel, runs = find(product.name), []
    (weight, *bias), (of_w, *of_bias) = kernel.wholes(product.reads), kernel.wholes(product.read_dtypes)
    (xs,), (of_xs,) = kernel.rows(product.reads), kernel.rows(product.read_dtypes)
    w, bias_ptr = matrix(weight), bias[0].ptr if bias else 0
    if w is None or any(not b.flags.c_contiguous for b in bias):
        return None
    for x, of_x, y, of_y in zip(xs, of_xs, product.writes, product.write_dtypes, strict=True):
        a, c = matrix(x), matrix(y)
        if a is None or c is None or a.is_transposed or c.is_transposed:
            return None
        if a.rows:
            runs.append(_Run(a, c, w, bias_ptr, (of_w, of_x, of_y), "".join(of_bias)))
    return runs


class CudaAnnouncer:
    """The kernel on the arrays of these products."""

    def __init__(self, device: Any, products: Sequence[ProductCall], found: OperandLayout):
        self.products, form, (high, broad, _) = products, found.form, found.form.tile
        nbytes = [storage(dtype).itemsize for dtype in form.dtypes[1:3]]
        x_row, y_row = (row * each for row, each in zip((found.x_row, found.y_row), nbytes, strict=True))
        table = in_place(found.groups, found.columns, x_row, y_row, high, broad, BAND)
        need = np.bincount(table[:, 5], minlength=len(found.groups)).astype(np.int32)
        self.tables = [device.array(a) for a in (table, need, np.zeros_like(need))]
        self.signals = Signals(device.pinned(need.shape, np.int32))
        tiles, need_at, count = (a.ptr for a in self.tables)
        pointers = tiles, found.w, need_at, count, int(self.signals.flags.ctypes.data)
        numbers = found.columns, found.depth, found.x_row, found.w_row, found.y_row
        self._epoch = np.zeros((), np.int32)
        arguments = (*pointers, self._epoch, *map(np.int32, numbers))
        self.launch: Enqueue = device.library.announced(form, len(table), arguments)

    def enqueue(self, stream: Any) -> int:
        epoch = self.signals.next()
        self._epoch[...] = epoch
        self.launch(stream)
        return epoch

    def is_raised(self, group: int, epoch: int) -> bool:
        return self.signals.is_raised(group, epoch)


# --------------------------------------------------------------------------------------------------- is it worth while


def flops(found: OperandLayout) -> float:
    return 2.0 * sum(run.rows for runs in found.groups for run in runs) * found.columns * found.depth


def is_faster(device: Any, products: Sequence[ProductCall], found: OperandLayout, folder: Path | None) -> bool:
    """True if the one kernel ends earlier than a call of cuBLAS for each product. It is known, or measured now.

    The figures are kept in `folder`, for this card, these versions and these shapes.
    """
    about = {
        "fompi": __version__, "triton": metadata.version("triton"), "card": device.card(), "form": list(found.form),
        "rows": [[run.rows for run in runs] for runs in found.groups], "columns": found.columns, "depth": found.depth,
    }  # fmt: skip
    path = kept.file_of(folder, about, "counters-")
    with suppress(TypeError, ValueError):  # nothing is kept
        one, calls = map(float, kept.load(path, about, "seconds"))
        return one < calls
    one, calls = measured(device, products)
    kept.store(path, about, "seconds", (one, calls))
    return one < calls


def measured(device: Any, products: Sequence[ProductCall]) -> tuple[float, float]:
    """Seconds of the one kernel, and of a call for each product, on results of their own: the medians of ROUNDS."""
    own = [product._replace(writes=[device.empty(y.shape, y.dtype) for y in product.writes]) for product in products]
    found = layout(own, device.tf32)
    assert found is not None
    one, calls = CudaAnnouncer(device, own, found), [device.kernel(*product) for product in own]
    stream = device.stream("measured")

    def each() -> None:
        for call in calls:
            call(stream)

    ways, took = (lambda: one.enqueue(stream), each), ([], [])  # type: ignore[var-annotated]
    for _ in range(1 + ROUNDS):
        for way, seconds in zip(ways, took, strict=True):
            seconds.append(_seconds(way, device, stream))
    return median(took[0][1:]), median(took[1][1:])


def _seconds(way: Callable[[], object], device: Any, stream: Any) -> float:
    begun = perf_counter()
    way()
    event = stream.record(device.event())
    while not event.done():
        pass
    return perf_counter() - begun
