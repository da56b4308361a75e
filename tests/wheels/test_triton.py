"""The kernel that announces products, in Triton, without a GPU: by Triton's interpreter, and its machine code.

Needs the wheels triton (some 640 MB; it brings nvdisasm) and torch, whose tensors the interpreter takes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fompi.backends.cuda.counters.announced import KernelForm

ROOT = Path(__file__).resolve().parents[2]

KERNEL = "fompi.backends.cuda.counters.triton"

INTERPRETED = """
import importlib
import itertools
import sys
import numpy as np
import torch
from fompi.backends.cuda.counters import announced
from fompi.backends.cuda.counters.announced import Form
from fompi.backends.cuda.counters.signal import Rows, Signals, in_place
announced.tile_of = lambda w: (16, 32, 16)  # small tiles: the interpreter is slow
rng = np.random.default_rng(0)
TYPES = {"float32": torch.float32, "float16": torch.float16}

def address(tensor):
    return tensor.data_ptr()

def check(product):
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
            for call in range(3):
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
            count.zero_()
            product.multiply_groups[(len(table),)](
                tiles, w_store, need + 1, count, flag, signals.next(), columns, depth, depth + 3,
                depth if transposed else columns, columns, **product.group_constants(form))
            assert (count == need).all() and (flag == epoch).all()  # a tile is missing: no flag is raised

for name in sys.argv[1:]:
    try:
        check(importlib.import_module(name))
        print(name, "is right")
    except AssertionError:
        print(name, "is wrong")
"""

DISASSEMBLED = """
import importlib
import json
import sys
from fompi.backends.cuda.counters.announced import Form
_, name, form, capability, path = sys.argv
made = importlib.import_module(name).compiled_groups(Form(*json.loads(form)), int(capability))
open(path, "wb").write(made.code)
print(made.function, made.shared, made.scratch)
"""


def python(code, *arguments, **variables):
    assert find_spec("triton"), "there is no Triton: pip install triton"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def plant(folder, name, old, new):
    """A module `name` in `folder`: the kernel with `new` in place of `old`."""
    source = (ROOT / f"{KERNEL.replace('.', '/')}.py").read_text()
    assert source.count(old) == 1
    (folder / f"{name}.py").write_text(source.replace(old, new))
    return name


PLANTED = (
    ('tl.atomic_xchg(count + g, 0, sem="relaxed", scope="gpu")', "pass"),
    ("flag + g, epoch,", "flag + g, 1,"),
    ("== tl.load(need + g) - 1", "== 0"),
    ("tl.load(words + 5)", "tl.load(words + 4)"),
    ("at_x += DEEP", "at_x += 0"),
    ("biased = tl.where(address != 0, columns, 0)", "biased = 0"),
)
"""What each bug replaces in the kernel."""


@pytest.mark.timeout(300)
def test_products_in_place_by_the_interpreter(tmp_path):
    """Uneven groups, odd sizes, a buffer for each product, two runs of rows, a bias of one product.

    Three calls use the same counters and flags. Each planted bug is found.
    """
    planted = [plant(tmp_path, f"planted_{i}", *each) for i, each in enumerate(PLANTED)]
    said = python(INTERPRETED, KERNEL, *planted, TRITON_INTERPRET="1", PYTHONPATH=str(tmp_path))
    assert said.splitlines() == [f"{KERNEL} is right", *(f"{name} is wrong" for name in planted)]


STEPS = {
    "store": r"STG|UTMASTG",
    "barrier": r"BAR",
    "device fence": r"MEMBAR[.A-Z]*GPU",
    "count": r"ATOMG[.A-Z0-9]*ADD",
    "system fence": r"MEMBAR[.A-Z]*SYS",
    "flag": r"ATOMG[.A-Z0-9]*EXCH",
}
"""Instructions by what they are for."""

FORMS = (
    KernelForm("bfloat16", "bfloat16", "bfloat16", "bfloat16", even=True, aligned=True, transposed=False, tf32=False),
    KernelForm("float32", "bfloat16", "float32", "float32", even=False, aligned=False, transposed=True, tf32=True),
)


def has_fences_in_order(code):
    """The last store, a barrier, a fence of the device, the counter, a fence of the system, the flag."""
    tool = Path(find_spec("triton").origin).parent / "backends/nvidia/bin/nvdisasm"
    done = subprocess.run([tool, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    at = {name: [] for name in STEPS}
    for number, line in enumerate(done.stdout.splitlines()):
        for name, text in STEPS.items():
            at[name] += [number] * bool(re.search(rf"\b({text})", line))
    (count,), store, flag = at["count"], at["store"][-1], at["flag"][-1]
    barrier, fence = (max((n for n in at[name] if n < count), default=-1) for name in ("barrier", "device fence"))
    return store < barrier < fence < count and any(count < n < flag for n in at["system fence"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("form", FORMS, ids=["aligned", "masked"])
def test_the_machine_code_has_its_fences_in_order(tmp_path, capability, form):
    path = tmp_path / "code.cubin"
    function, shared, scratch = python(DISASSEMBLED, KERNEL, json.dumps(form), capability, path).split()
    assert function == "multiply_groups" and int(shared) > 0 and int(scratch) >= 0
    assert has_fences_in_order(path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "old, new",
    [
        ('sem="acq_rel", scope="gpu"', 'sem="relaxed", scope="gpu"'),
        ('epoch, sem="release", scope="sys"', 'epoch, sem="relaxed", scope="sys"'),
        ('epoch, sem="release", scope="sys"', 'epoch, sem="release", scope="gpu"'),
    ],
)
def test_missing_fences_are_found(tmp_path, old, new):
    path = tmp_path / "code.cubin"
    name = plant(tmp_path, "planted", old, new)
    python(DISASSEMBLED, name, json.dumps(FORMS[0]), 90, path, PYTHONPATH=str(tmp_path))
    assert not has_fences_in_order(path)
