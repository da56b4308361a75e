"""The keywords that a communicator carries."""

import ast
from pathlib import Path

import numpy as np
import pytest

import fompi
from fompi.base.call_options import CARRIED, CallKeywords, CallOptions, carried, fitting, in_words
from fompi.base.errors import ArgumentError, DtypeError

FOMPI = Path(__file__).parents[2] / "fompi"


def test_what_is_given_last_is_carried_and_a_default_takes_it_away():
    how = carried({}, {"wire": "int8", "order": "ranks"})
    assert how == {"wire": "int8", "order": "ranks"} and in_words(how) == ", wire='int8', order=ranks"
    assert carried(how, {"wire": None}) == {"order": "ranks"}
    assert carried(how, {"order": "any", "slices": 4}) == {"slices": 4, "wire": "int8"}
    assert carried(how, {"schedule": "auto"}) == how
    assert carried(how, {"feedback": True}) == {**how, "feedback": True} and carried(how, {"feedback": False}) == how
    with pytest.raises(TypeError):
        how["wire"] = "int4"


def test_wrong_keywords():
    with pytest.raises(ArgumentError, match="no 'wires'; did you mean 'wire'"):
        carried({}, {"wires": "int8"})
    with pytest.raises(ArgumentError, match="no 'certify'"):
        carried({}, {"certify": True})
    with pytest.raises(DtypeError, match="did you mean int8"):
        carried({}, {"wire": "int9"})


@pytest.mark.parametrize(
    ("x", "op", "has_wire"),
    [
        (np.zeros(2, np.float32), "sum", True),
        (np.zeros(2, np.float32), "mean", True),
        (np.zeros(2, np.float32), "max", False),
        ([np.zeros(2, np.float32)] * 2, "sum", True),
        (np.zeros(2, np.int32), "sum", False),
        (np.zeros(2), "sum", False),
        (np.zeros(2, np.float16), "sum", True),
        (None, "sum", True),
    ],
)
def test_a_wire_is_left_out_where_elements_take_none(x, op, has_wire):
    fits = fitting({"wire": "int8", "slices": 2}, x, op)
    assert fits == ({"wire": "int8", "slices": 2} if has_wire else {"slices": 2})


def test_nobody_else_lists_the_keywords():
    """Signatures, the schemas of torch's operators and what a communicator carries are made from the fields."""

    def names(text):
        tree = [*ast.walk(ast.parse(text))] if "effort" in text else []
        found = {getattr(node, key, None) for node in tree for key in ("id", "arg")}
        return found | {node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    listing = [path.name for path in FOMPI.rglob("*.py") if {"wire", "order", "effort"} <= names(path.read_text())]
    assert listing == ["call_options.py"]
    assert {*CallKeywords.__annotations__} == {"comm", *CallOptions._fields}
    assert {*CallOptions._fields} < {*fompi.all_gather.__signature__.parameters}


def test_a_keyword_of_calls_is_named_where_it_takes_effect_only():
    """A new one is a field of CallOptions, takes effect in `localise`, and is explained. Strategies name none.

    Wrappers neither: they take them from their communicator. A pipeline of another kind has a plan of its own.
    """
    torch = [FOMPI / f"torch/{name}.py" for name in ("nn", "sharded", "data_parallel", "zero", "pipeline")]
    for path in [*(FOMPI / "parallel").glob("*.py"), *torch]:
        if path.name == "pipeline_plan.py":
            continue
        taken = {a.arg for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.arguments)
                 for a in (*f.args, *f.kwonlyargs)}  # fmt: skip
        assert not taken & {"wire", "effort", "certify"}, path  # other things are called order, schedule and slices


def test_how_many_files_a_keyword_enters():
    """`feedback`, the last one: what a communicator carries, where it takes effect, and what is refused."""
    texts = {path: path.read_text() for path in FOMPI.rglob("*.py")}

    def reads(text):
        """The keywords that it reads of what a communicator carries: `how.get(...)`."""
        for node in ast.walk(ast.parse(text)) if "feedback" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("how.get"):
                yield from (each.value for each in node.args if isinstance(each, ast.Constant))

    entered = [path.name for path, text in texts.items() if "feedback" in reads(text)]
    assert sorted(entered) == ["arrays.py", "data.py", "sums.py"] and "feedback" in CARRIED  # and call_options.py
    assert len(named := [path for path, text in texts.items() if "wire=" in text]) <= 11, (
        named
    )  # `advice` says it to people
