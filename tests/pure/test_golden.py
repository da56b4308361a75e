"""The texts of plans (one column per rank) and of explanations (a table), compared with tests/golden/*.txt.

After an intended change, `FOMPI_GOLDEN=write python -m pytest tests/pure/test_golden.py` writes the files again. Read
the difference before you commit it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import fompi
from fompi import Partial, Replicate, Shard, Spec
from fompi.model.machine import Level, Machine

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

X, W = Spec((8, 6), "float32", Shard(0)), Spec((6, 8), "float32", Shard(1))
PLANS = {
    "all_gather_matmul-ring-4": (fompi.all_gather_matmul, (X, W), {"ranks": 4, "schedule": "ring"}),
    "all_gather-bidirectional-3": (fompi.all_gather, (X,), {"ranks": 3, "schedule": "bidirectional"}),
    "all_gather_weight_gradient-direct-2-bfloat16": (
        fompi.all_gather_weight_gradient,
        (Spec((8, 6), "bfloat16", Shard(0)), Spec((8, 4), "bfloat16", Shard(1))),
        {"ranks": 2, "schedule": "direct", "packed": True},
    ),
    "matmul_reduce_scatter-direct-4": (
        fompi.matmul_reduce_scatter,
        (Spec((8, 8), "float32", Shard(1)), Spec((8, 5), "float32", Shard(0))),
        {"ranks": 4, "schedule": "direct"},
    ),
    "all_reduce-sliced-3": (
        fompi.all_reduce,
        (Spec((100,), "float64", Partial()),),
        {"ranks": 3, "schedule": "sliced", "slices": 2},
    ),
    "all_reduce-exchange-3-bfloat16": (
        fompi.all_reduce,
        (Spec((100,), "bfloat16", Partial()),),
        {"ranks": 3, "schedule": "exchange"},
    ),
    "all_reduce-doubling-6-bfloat16": (
        fompi.all_reduce,
        (Spec((100,), "bfloat16", Partial()),),
        {"ranks": 6, "schedule": "doubling"},
    ),
    "all_to_all-direct-3": (fompi.all_to_all, (X,), {"ranks": 3, "schedule": "direct", "slices": 2, "window": 1}),
    "matmul_all_to_all_columns-3": (
        fompi.matmul_all_to_all_columns,
        (Spec((7, 4), "float32", Shard(0)), Spec((4, 8), "float32", Replicate())),
        {"ranks": 3, "schedule": "direct", "bias": True},
    ),
    "all_to_all_columns_matmul-3-bfloat16": (
        fompi.all_to_all_columns_matmul,
        (Spec((7, 8), "bfloat16", Shard(1)), Spec((8, 4), "bfloat16", Replicate())),
        {"ranks": 3, "schedule": "unfused_p2p"},
    ),
    "broadcast-ring-4": (
        fompi.broadcast,
        (Spec((4, 3), "int64", Replicate()),),
        {"ranks": 4, "schedule": "ring", "root": 2},
    ),
    "all_gather-ring-12": (fompi.all_gather, (X,), {"ranks": 12, "schedule": "ring"}),
}


EXPLAINED = {
    "explain-matmul_reduce_scatter-4-gigabit": (
        ("matmul_reduce_scatter", Spec((2048, 1024), "float32", Shard(1)), Spec((1024, 1024), "float32", Shard(0))),
        {"ranks": 4, "machine": "gigabit"},
    ),
    "explain-all_gather-4-groups": (
        ("all_gather", Spec((4 << 20, 1), "uint8", Shard(0))),
        {
            "ranks": 4,
            "machine": replace(Machine.load("gigabit"), name="2 x 2", levels=(Level(2, 1e-4, 11.8e6, True),)),
        },
    ),
}


OF_MODELS = ("layouts-llama-8b-64", "outer-period-llama-8b-4x8")


@pytest.mark.parametrize("name", PLANS)
def test_text_of_a_plan(name):
    operation, specs, options = PLANS[name]
    plan = fompi.plan(operation, *specs, **options)
    fompi.verify(plan)
    check(name, f"{plan}\n")


@pytest.mark.parametrize("name", EXPLAINED)
def test_text_of_an_explanation(name):
    arguments, options = EXPLAINED[name]
    check(name, f"{fompi.explain(*arguments, **options)}\n")


def test_text_of_layouts():
    check(OF_MODELS[0], f"{fompi.layouts('llama-8b', 64, 'h100-ndr')}\n")


def test_text_of_outer_periods():
    how = {"islands": 4, "ranks": 8, "between": (6e6, 0.08)}
    check(OF_MODELS[1], f"{fompi.outer_period('h100-ndr', 'llama-8b', **how)}\n")


def check(name, printed):
    """The text equals the golden file. With FOMPI_GOLDEN=write, write the file first."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("FOMPI_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(printed)
    assert printed == path.read_text()


def test_every_golden_file_is_tested():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*PLANS, *EXPLAINED, *OF_MODELS}
