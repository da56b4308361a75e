"""The product that raises counters, in Triton, without a GPU: by Triton's interpreter, and its machine code.

Needs the wheels triton (some 640 MB; it brings nvdisasm) and torch, whose tensors the interpreter takes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import numpy as np
from fompi.backends.cuda import triton as product
from fompi.backends.cuda.signal import Signals, Tiling, by_destination, by_owner, by_tile, received

def orders(rows, columns, high, broad, sizes, ranks=4):
    plain, owned = Tiling(rows, columns, high, broad, band=2), Tiling(rows, columns, high, broad, ranks)
    to = np.arange(rows) ** 2 % 7 % ranks
    return [by_tile(plain, sizes(plain.tiles)), by_owner(owned, sizes(owned.tiles)),
            by_destination(plain, sizes(plain.tiles), to, ranks)]
"""

INTERPRETED = """
import torch
rng = np.random.default_rng(0)

def tensor(array):
    return torch.from_numpy(np.ascontiguousarray(array))

def restored(pieces, index, shape):
    across = -(-shape[1] // pieces.shape[2])
    out = np.zeros(shape)
    for p, slot in enumerate(index):
        i, j = p // across * pieces.shape[1], p % across * pieces.shape[2]
        part = out[i : i + pieces.shape[1], j : j + pieces.shape[2]]
        part[...] = pieces[slot][: part.shape[0], : part.shape[1]]
    return out

runs = 0
for rows, columns, depth in ((64, 96, 32), (72, 50, 40)):
    for dtype in (torch.float32, torch.float16):
        for order in orders(rows, columns, 16, 32, lambda tiles: (1, tiles // 2, tiles - 1 - tiles // 2)):
            tiling, groups = order.tiling, len(order.need)
            even = product.is_even(tiling, depth) or (rows == 64 and depth % 16 == 0)
            place, group, need, launched = map(tensor, (order.place, order.group, order.need, tiling.launched))
            count, flags = torch.zeros(groups, dtype=torch.int32), torch.zeros(groups, dtype=torch.int32)
            signals = Signals(flags.numpy())
            for call in range(3):
                a, b = (rng.integers(-3, 4, shape).astype("f4") for shape in ((rows, depth), (depth, columns)))
                c = torch.full((len(order.place), order.high, tiling.broad), float("nan"), dtype=dtype)
                epoch = signals.begin()
                product.multiply[(tiling.tiles,)](
                    tensor(a).to(dtype), tensor(b).to(dtype), c, launched, place, group, need, count, flags, epoch,
                    tiling.shard, columns, depth, depth, columns,
                    **product.constants(order, even, "ieee", deep=16))
                assert [*signals.new()] == [*range(groups)] and not count.any()
                out = c.float().numpy()
                for r in range(order.counts.shape[1]):
                    mine = (a @ b)[order.receiver[:: tiling.across] == r] if order.high == 1 else (
                        (a @ b)[r * tiling.shard : (r + 1) * tiling.shard])
                    arrived = np.concatenate([out[order.run(g, r).start : order.run(g, r).stop] for g in range(groups)])
                    assert (restored(arrived, received(order, r), mine.shape) == mine).all()
                runs += 1
print("runs", runs)
"""

IN_PLACE = """
import itertools
import torch
from fompi.backends.cuda import announced
from fompi.backends.cuda.announced import Form
from fompi.backends.cuda.signal import Rows, in_place
announced.tile_of = lambda w: (16, 32, 16)  # small tiles: the interpreter is slow
rng = np.random.default_rng(0)
TYPES = {"float32": torch.float32, "float16": torch.float16}

def address(tensor):
    return tensor.data_ptr()

runs = 0
for rows, columns, depth in ((64, 64, 32), (50, 40, 24), (7, 3, 5)):
    for dtypes, transposed in itertools.product(("32 16 16 ", "16 16 32 32"), (False, True)):
        of_w, of_x, of_y, of_bias = ("float" + bits if bits else "" for bits in dtypes.split(" "))
        cut = sorted(rng.choice(np.arange(1, rows), 3, replace=False).tolist())
        a, b, c = cut
        groups = [[(0, a)], [(c, rows), (a, b)], [(b, c)]]  # the second product has two runs of rows
        form = Form(of_w, of_x, of_y, of_bias, not (columns % 32 or depth % 16), False, transposed, False)
        bias = torch.from_numpy(rng.integers(-3, 4, columns).astype("f4"))
        x_store, y_store = torch.zeros((rows, depth + 3), dtype=TYPES[of_x]), [
            torch.zeros((rows, columns), dtype=TYPES[of_y]) for _ in groups]  # a buffer for each product
        need = count = flag = None
        signals = None
        for call in range(2):
            x = rng.integers(-3, 4, (rows, depth)).astype("f4")
            w = rng.integers(-3, 4, (depth, columns)).astype("f4")
            x_store[:, :depth] = torch.from_numpy(x)
            w_store = torch.from_numpy(np.ascontiguousarray(w.T if transposed else w)).to(TYPES[of_w])
            size = x_store.element_size(), y_store[0].element_size()
            listed = [[Rows(address(x_store[i:]), address(y[i:]), address(bias) * (g == 1 and of_bias != ""), j - i)
                       for i, j in group] for g, (group, y) in enumerate(zip(groups, y_store))]
            table = in_place(listed, columns, (depth + 3) * size[0], columns * size[1], 16, 32, band=2)
            tiles = torch.from_numpy(table)
            if flag is None:
                need = torch.from_numpy(np.bincount(table[:, 5]).astype("i4"))
                count, flag = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
                signals = Signals(flag.numpy())
            for y in y_store:
                y.fill_(float("nan"))
            epoch = signals.next()
            assert not any(signals.is_raised(g, epoch) for g in range(3))
            product.multiply_groups[(len(table),)](
                tiles, w_store, need, count, flag, epoch, columns, depth, depth + 3,
                depth if transposed else columns, columns, **product.group_constants(form))
            assert all(signals.is_raised(g, epoch) for g in range(3)) and not count.any()
            for g, (group, y) in enumerate(zip(groups, y_store)):
                wanted, is_mine = x @ w + (bias.numpy() if g == 1 and of_bias else 0), np.zeros(rows, bool)
                for i, j in group:
                    is_mine[i:j] = True
                got = y.float().numpy()
                assert (got[is_mine] == wanted[is_mine]).all() and np.isnan(got[~is_mine]).all()
            runs += 1
print("runs", runs)
"""

DISASSEMBLED_IN_PLACE = """
import sys
from fompi.backends.cuda.announced import Form
_, capability, path = sys.argv
made = product.compiled_groups(Form("bfloat16", "bfloat16", "bfloat16", "bfloat16", False, True, False, False),
                               int(capability))
open(path, "wb").write(made.code)
print(made.function, made.shared, made.scratch)
"""

DISASSEMBLED = """
import sys
(_, capability, path), order = sys.argv, orders(4096, 4096, 128, 128, lambda tiles: (tiles,))[1]
made = product.compiled("bfloat16", order, int(capability), True)
open(path, "wb").write(made.code)
array = type("Array", (), {"ptr": 16, "shape": (4096, 4096), "strides": (8192, 2), "dtype": np.dtype("u2")})
launch = made.launch(order, array, array, array, product.Tables(*range(6)), 7)
print(made.function, made.shared, made.scratch, len(launch.args), launch.grid, launch.block)
"""


def python(code, *arguments, **variables):
    assert find_spec("triton"), "there is no Triton: pip install triton"
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(300)
def test_all_orders_by_the_interpreter():
    """Two shapes, one of them uneven, three orders, two dtypes, and three calls on the same counters."""
    assert python(INTERPRETED, TRITON_INTERPRET="1") == "runs 36\n"


@pytest.mark.timeout(300)
def test_products_in_place_by_the_interpreter():
    """Uneven rows, odd sizes, a buffer for each product, two runs of rows, a bias of one product, two calls."""
    assert python(IN_PLACE, TRITON_INTERPRET="1") == "runs 24\n"


STEPS = {
    "store": r"STG|UTMASTG",
    "barrier": r"BAR",
    "device fence": r"MEMBAR[.A-Z]*GPU",
    "count": r"ATOMG[.A-Z0-9]*ADD",
    "system fence": r"MEMBAR[.A-Z]*SYS",
    "flag": r"ATOMG[.A-Z0-9]*EXCH",
}
"""Instructions by what they are for."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", ["multiply", "multiply_groups"])
def test_the_machine_code_has_its_fences_in_order(tmp_path, capability, kernel):
    """The last store, a barrier, a fence of the device, the counter, a fence of the system, the flag."""
    code = DISASSEMBLED if kernel == "multiply" else DISASSEMBLED_IN_PLACE
    said = python(code, capability, tmp_path / "code.cubin").split(maxsplit=4)
    assert said[0] == kernel and int(said[1]) > 0
    assert kernel != "multiply" or int(said[3]) == 15 + int(said[2])
    tool = Path(find_spec("triton").origin).parent / "backends/nvidia/bin/nvdisasm"
    done = subprocess.run([tool, "-c", tmp_path / "code.cubin"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    at = {name: [] for name in STEPS}
    for number, line in enumerate(done.stdout.splitlines()):
        for name, text in STEPS.items():
            at[name] += [number] * bool(re.search(rf"\b({text})", line))
    assert all(at.values()), at
    (count,), store, flag = at["count"], at["store"][-1], at["flag"][-1]
    barrier, fence = (max(n for n in at[name] if n < count) for name in ("barrier", "device fence"))
    assert store < barrier < fence < count, at
    assert any(count < n < flag for n in at["system fence"]), at
