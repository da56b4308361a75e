"""Products that raise counters, in Triton. Needs the extra `triton`, but neither Triton nor a compiler while it runs.

`compiled` compiles it for a GPU, which need not be there; Triton keeps the code on disk. CuPy loads and launches it:

    made = compiled("bfloat16", order, capability=90, even=True)
    launch = made.launch(order, a, b, c, tables, epoch)

`multiply` stores pieces of tiles in the slots of an Order. `multiply_groups` computes the products of a plan, each
where the plan has it (`fompi.backends.cuda.announced` launches it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fompi.backends.cuda.announced import GROUP_NUMBERS, GROUP_POINTERS, MOST_STAGES, WARPS, Form
from fompi.backends.cuda.kernels import Launch
from fompi.backends.cuda.signal import Order, Tiling

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
POINTERS = ("a", "b", "c", "launched", "place", "group", "need", "count", "flag")
NUMBERS = ("epoch", "shard", "columns", "depth", "a_row", "b_row")
DEEP = 64


@triton.jit
def multiply(
    a, b, c, launched, place, group, need, count, flag, epoch, shard, columns, depth, a_row, b_row,
    HIGH: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr, SHARE: tl.constexpr, PIECE: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the pieces of the t-th tile of a @ b in their slots of c. The last tile of a group raises its flag.

    The names are those of `fompi.backends.cuda.signal`: SHARE is `Tiling.share`, PIECE is `Order.high`.
    """
    t = tl.program_id(0)
    across = tl.cdiv(columns, BROAD)
    tile = tl.load(launched + t)
    m, n = tile // across, tile % across
    r, column, k = tl.arange(0, HIGH), n * BROAD + tl.arange(0, BROAD), tl.arange(0, DEEP)
    owner, q = r // SHARE, m * SHARE + r % SHARE
    at_a = a + (owner * shard + q).to(tl.int64)[:, None] * a_row + k[None, :]
    at_b = b + k.to(tl.int64)[:, None] * b_row + column[None, :]
    total = tl.zeros((HIGH, BROAD), tl.float32)
    for done in range(0, depth, DEEP):
        if EVEN:
            x, w = tl.load(at_a), tl.load(at_b)
        else:
            x = tl.load(at_a, mask=(q < shard)[:, None] & (k < depth - done)[None, :], other=0.0)
            w = tl.load(at_b, mask=(k < depth - done)[:, None] & (column < columns)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        at_a += DEEP
        at_b += DEEP * b_row

    of_shard = tl.cdiv(shard, PIECE)
    is_stored = q // PIECE < of_shard
    slot = tl.load(place + (owner * of_shard + q // PIECE) * across + n, mask=is_stored, other=0).to(tl.int64)
    at_c = c + ((slot * PIECE + q % PIECE) * BROAD)[:, None] + tl.arange(0, BROAD)[None, :]
    tl.store(at_c, total.to(c.dtype.element_ty), mask=is_stored[:, None])

    g = tl.load(group + t)
    tl.debug_barrier()  # all threads have stored before the counter is raised
    if tl.atomic_add(count + g, 1, sem="acq_rel", scope="gpu") == tl.load(need + g) - 1:
        tl.atomic_xchg(count + g, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag + g, epoch, sem="release", scope="sys")


@triton.jit
def multiply_groups(
    tiles, w, need, count, flag, epoch, columns, depth, x_row, w_row, y_row,
    X: tl.constexpr, Y: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x @ w + bias for the t-th tile of the table `tiles`. The last tile of a group raises its flag.

    The words of a tile are `fompi.backends.cuda.signal.WORDS`. `epoch` is the number of the launch.
    """
    words = tiles + tl.program_id(0) * 6
    x, y = tl.load(words).to(tl.pointer_type(X)), tl.load(words + 1).to(tl.pointer_type(Y))
    rows, n, g = tl.load(words + 3).to(tl.int32), tl.load(words + 4).to(tl.int32), tl.load(words + 5)
    if ALIGNED:
        x, y = tl.multiple_of(x, 16), tl.multiple_of(y, 16)
    r, column, k = tl.arange(0, HIGH), n * BROAD + tl.arange(0, BROAD), tl.arange(0, DEEP)
    at_x = x + tl.minimum(r, rows - 1).to(tl.int64)[:, None] * x_row + k[None, :]  # rows over the edge are not stored
    if TRANSPOSED:
        at_w = w + column.to(tl.int64)[None, :] * w_row + k[:, None]
    else:
        at_w = w + k.to(tl.int64)[:, None] * w_row + column[None, :]
    total = tl.zeros((HIGH, BROAD), tl.float32)
    for done in range(0, depth, DEEP):
        if EVEN:
            a, b = tl.load(at_x), tl.load(at_w)
        else:
            a = tl.load(at_x, mask=(k < depth - done)[None, :], other=0.0)
            b = tl.load(at_w, mask=(k < depth - done)[:, None] & (column < columns)[None, :], other=0.0)
        total = tl.dot(a.to(w.dtype.element_ty), b, total, input_precision=PRECISION)
        at_x += DEEP
        if TRANSPOSED:
            at_w += DEEP
        else:
            at_w += DEEP * w_row
    if BIAS is not None:
        address = tl.load(words + 2)
        biased = tl.where(address != 0, columns, 0)
        bias = tl.load(address.to(tl.pointer_type(BIAS)) + column, mask=column < biased, other=0.0)
        total += bias.to(tl.float32)[None, :]
    at_y = y + r.to(tl.int64)[:, None] * y_row + column[None, :]
    tl.store(at_y, total.to(Y), mask=(r < rows)[:, None] & (column < columns)[None, :])

    tl.debug_barrier()  # all threads have stored before the counter is raised
    if tl.atomic_add(count + g, 1, sem="acq_rel", scope="gpu") == tl.load(need + g) - 1:
        tl.atomic_xchg(count + g, 0, sem="relaxed", scope="gpu")
        tl.atomic_xchg(flag + g, epoch, sem="release", scope="sys")


def is_even(tiling: Tiling, depth: int) -> bool:
    """True if no tile reaches over the edge of the product, so that loads need no masks."""
    return not (tiling.shard % tiling.share or tiling.columns % tiling.broad or depth % DEEP)


def constants(order: Order, even: bool, precision: str = "tf32", deep: int = DEEP) -> dict[str, Any]:
    tiling = order.tiling
    return {
        "HIGH": tiling.high, "BROAD": tiling.broad, "DEEP": deep, "SHARE": tiling.share, "PIECE": order.high,
        "EVEN": even, "PRECISION": precision,
    }  # fmt: skip


class Tables(NamedTuple):
    """Addresses of 32-bit words: `Tiling.launched` and those of an Order on the device, zeros, and the flags."""

    launched: int
    place: int
    group: int
    need: int
    counters: int
    flags: int


class Compiled(NamedTuple):
    """The machine code of a product. `shared` bytes must be allowed for the function before it is launched."""

    code: bytes
    function: str
    shared: int
    scratch: int

    def launch(self, order: Order, a: Any, b: Any, c: Any, tables: Tables, epoch: int) -> Launch:
        """The launch on DeviceArrays: contiguous rows of a and b, and c with room for all slots."""
        tiling, itemsize = order.tiling, a.dtype.itemsize
        numbers = (epoch, tiling.shard, tiling.columns, a.shape[1], a.strides[0] // itemsize, b.strides[0] // itemsize)
        args = (a.ptr, b.ptr, c.ptr, *tables, *map(np.int32, numbers), *[0] * self.scratch)
        return Launch(self.function, (tiling.tiles,), (32 * WARPS,), args, self.shared)


def compiled(dtype: str, order: Order, capability: int, even: bool, precision: str = "tf32") -> Compiled:
    """The product of this order for a GPU of this compute capability: 80, 90, 100 ...

    The memory of a, b and c must be aligned to 16 bytes. If `even`, their rows must be, too (`is_even`).
    """
    types = {**dict.fromkeys(POINTERS, "*i32"), **dict.fromkeys(NUMBERS, "i32")}
    types.update(dict.fromkeys("abc", f"*{TYPES[dtype]}"))
    aligned = (*POINTERS[:3], *(("depth", "columns", "a_row", "b_row") if even else ()))
    return _compiled(multiply, types, constants(order, even, precision), aligned, capability)


def group_constants(form: Form) -> dict[str, Any]:
    high, broad, deep = form.tile
    dtypes = {
        name: getattr(tl, dtype) if dtype else None
        for name, dtype in zip(("X", "Y", "BIAS"), form.dtypes[1:], strict=True)
    }
    return {
        **dtypes, "HIGH": high, "BROAD": broad, "DEEP": deep, "EVEN": form.even, "ALIGNED": form.aligned,
        "TRANSPOSED": form.transposed, "PRECISION": "tf32" if form.tf32 else "ieee",
    }  # fmt: skip


def compiled_groups(form: Form, capability: int, stages: int = MOST_STAGES) -> Compiled:
    """The kernel `multiply_groups` of this form, for a GPU of this compute capability."""
    types = {**dict.fromkeys(GROUP_POINTERS, "*i32"), **dict.fromkeys(GROUP_NUMBERS, "i32")}
    types.update(tiles="*i64", w=f"*{TYPES[form.w]}")
    aligned = ("w", "columns", "depth", "x_row", "w_row", "y_row") if form.aligned else ()
    return _compiled(multiply_groups, types, group_constants(form), aligned, capability, stages)


def _compiled(
    kernel: Any,
    types: dict[str, str],
    fixed: dict[str, Any],
    aligned: Sequence[str],
    capability: int,
    stages: int = MOST_STAGES,
) -> Compiled:
    """`types` are those of the parameters. Those that are `aligned` are multiples of 16."""
    names = [*types]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    signature = {**types, **dict.fromkeys(fixed, "constexpr")}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": WARPS, "num_stages": stages, "enable_fp_fusion": True},
    )
    entry = next(line for line in made.asm["ptx"].splitlines() if ".entry" in line)
    text = made.asm["ptx"].split(entry, 1)[1].split(")", 1)[0]
    return Compiled(made.asm["cubin"], made.metadata.name, made.metadata.shared, text.count(".param") - len(names))
