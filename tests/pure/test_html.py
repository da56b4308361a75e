"""Values in notebooks: well-formed HTML that has what their text has."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import fompi
from fompi.base.layout import Shard, Spec
from fompi.traces.proof import RankDependencies, prove

X, W = Spec((4096, 512), "float32", Shard(0)), Spec((512, 1024), "float32", Shard(1))
PLAN = fompi.plan("all_gather_matmul", X, W, ranks=3, schedule="ring", slices=2)
TRACE = fompi.simulate(PLAN, fompi.Machine.load("gigabit"))


@pytest.mark.parametrize(
    "value",
    [
        PLAN,
        fompi.plan("all_reduce", Spec((1 << 20,), "float32", fompi.Partial()), ranks=12, slices=9, schedule="ring"),
        prove(TRACE, RankDependencies(PLAN, 1), compute_alone=0.001, messages_alone=0.002),
        fompi.explain("all_gather_matmul", X, W, ranks=3, machine="gigabit"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_words_of_the_text_are_in_the_html(value):
    tree = ElementTree.fromstring(f"<div>{value._repr_html_()}</div>")
    html, text = " ".join(tree.itertext()), str(value)
    missing = [word for word in re.findall(r"[\w.]+", text) if word not in html]
    assert not [word for word in missing if word not in ("ms", "in", "more", "ops")], missing
    assert {len(row) for row in tree.iter("tr")} == {len(next(tree.iter("tr")))}


def test_a_trace_is_a_picture():
    assert ElementTree.fromstring(TRACE._repr_html_()).tag.endswith("svg")
