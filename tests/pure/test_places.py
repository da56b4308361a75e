"""A new operation is entered in three places of the product (CONTRIBUTING, "An operation")."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

import fompi
from fompi.ops.operations import OPERATIONS

HOUSE = Path(fompi.__file__).parent
PLACES = {"plans/meaning.py", "ops/operations.py", "ops/adjoints.py"}
USERS = (
    "parallel",
    "bench",
    "tuning",
    "torch/parallel.py",
    "planner/layers.py",
    "ops/replicated.py",
)
"""Files that call operations, as a program does."""

ALSO = {
    "all_gather_matmul_many": {"torch/compile.py", "torch/operators.py"},  # its result is nested
    "matmul_all_reduce": {"torch/operators.py"},  # the backward of `fompi.torch.replicated_matmul`
}

FUSED = [name for name in OPERATIONS if "matmul" in name or "gradient" in name]


def words_of(path):
    """The names and the strings of a file, but for docstrings and comments."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {t.string.strip("\"'") for t in tokens if t.type in (tokenize.NAME, tokenize.STRING)}


WORDS = {str(path.relative_to(HOUSE)): words_of(path) for path in HOUSE.rglob("*.py")}


@pytest.mark.parametrize("name", FUSED)
def test_an_operation_is_entered_in_three_places(name):
    here = {path for path, words in WORDS.items() if name in words and not path.startswith(USERS)}
    assert here - ALSO.get(name, set()) <= PLACES
    assert {"plans/meaning.py", "ops/operations.py"} <= here
