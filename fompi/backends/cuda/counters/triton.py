"""The kernel that computes several products and raises a flag after each, in Triton. It needs the extra `triton`.

`compiled_groups` compiles it for a GPU, which need not be there; Triton keeps the code on disk. Neither Triton nor a
compiler is needed while it runs: `fompi.backends.cuda.library` loads and launches it by CuPy, with the tables of
`fompi.backends.cuda.counters.announced`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fompi.backends.cuda.counters.announced import GROUP_NUMBERS, GROUP_POINTERS, MOST_STAGES, WARPS, KernelForm

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@triton.jit
def multiply_groups(
    tiles, w, need, count, flag, epoch, columns, depth, x_row, w_row, y_row,
    X: tl.constexpr, Y: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, BROAD: tl.constexpr, DEEP: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x @ w + bias for the t-th tile of the table `tiles`. The last tile of a group raises its flag.

    The words of a tile are `fompi.backends.cuda.counters.signal.WORDS`. `epoch` is the number of the launch.
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


def group_constants(form: KernelForm) -> dict[str, Any]:
    high, broad, deep = form.tile
    dtypes = {
        name: getattr(tl, dtype) if dtype else None
        for name, dtype in zip(("X", "Y", "BIAS"), form.dtypes[1:], strict=True)
    }
    return {
        **dtypes, "HIGH": high, "BROAD": broad, "DEEP": deep, "EVEN": form.even, "ALIGNED": form.aligned,
        "TRANSPOSED": form.transposed, "PRECISION": "tf32" if form.tf32 else "ieee",
    }  # fmt: skip


class MachineCode(NamedTuple):
    """The machine code of a kernel. `shared` bytes must be allowed for the function before it is launched.

    Behind its parameters the function takes `scratch` addresses that are not used.
    """

    code: bytes
    function: str
    shared: int
    scratch: int


def compiled_groups(form: KernelForm, capability: int, stages: int = MOST_STAGES) -> MachineCode:
    """The kernel `multiply_groups` of this form, for a GPU of this compute capability: 80, 90, 100 ..."""
    types = {**dict.fromkeys(GROUP_POINTERS, "*i32"), **dict.fromkeys(GROUP_NUMBERS, "i32")}
    types.update(tiles="*i64", w=f"*{TYPES[form.w]}")
    fixed, names = group_constants(form), [*types]
    aligned = ("w", "columns", "depth", "x_row", "w_row", "y_row") if form.aligned else ()
    made = triton.compile(
        ASTSource(
            fn=multiply_groups,
            signature={**types, **dict.fromkeys(fixed, "constexpr")},
            constexprs=fixed,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": WARPS, "num_stages": stages, "enable_fp_fusion": True},
    )
    entry = next(line for line in made.asm["ptx"].splitlines() if ".entry" in line)
    text = made.asm["ptx"].split(entry, 1)[1].split(")", 1)[0]
    return MachineCode(made.asm["cubin"], made.metadata.name, made.metadata.shared, text.count(".param") - len(names))
