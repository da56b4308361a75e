"""One word for one thing: class names, the glossary, and the table of names that have changed."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

import fompi

HOUSE = Path(fompi.__file__).parent
GLOSSARY = HOUSE.parent / "docs" / "reference" / "glossary.md"

SEVERAL = {
    "Stream": "of the two devices",
    "StreamEvent": "of the two devices",
    "Pipeline": "that of arrays, and that of modules of torch",
    "TrainingStep": "the same",
}
"""Names of several classes, and why."""


def test_a_class_name_stands_for_one_thing():
    places = defaultdict(set)
    for path in HOUSE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path.relative_to(HOUSE)))
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SEVERAL} == {}


def entries():
    for line in GLOSSARY.read_text().splitlines():
        if found := re.fullmatch(r"\| (.+?) \| .+ \| `(fompi[\w.]+)` \|", line):
            yield found.groups()


@pytest.mark.parametrize(("word", "path"), [*entries()])
def test_the_glossary_says_where_the_code_has_it(word, path):
    assert exists(path)


def exists(path):
    parts = path.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
            break
        except ModuleNotFoundError:
            continue
    for name in parts[at:]:
        found = getattr(found, name, None)
    return found is not None


def test_the_glossary_has_each_word_once():
    words = [word for word, _ in entries()]
    assert len(words) == len({*words}) and len(words) > 30


def test_a_name_that_has_changed_has_its_new_name_only():
    """CHANGES.md, the tables of old and new names. (Those of `fompi.torch` need torch.)"""
    tables = re.findall(r"^\| (?!old|---)(.*) \| (.*) \|$", (HOUSE.parent / "CHANGES.md").read_text(), re.MULTILINE)
    old, new = ({*re.findall(r"`(fompi\.(?!torch)[\w.]+)`", " ".join(cells))} for cells in zip(*tables, strict=True))
    assert len(old) > 8 and len(new) > 6
    assert {path for path in old if exists(path)} == set()
    assert {path for path in new if not exists(path)} == set()
