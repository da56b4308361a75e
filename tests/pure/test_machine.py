"""A machine is a handful of numbers, in a file that is checked field by field."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from fompi.errors import LayoutError
from fompi.machine import PRESETS, Machine


@pytest.mark.parametrize("name", PRESETS)
def test_presets_and_files(name, tmp_path):
    machine = Machine.load(name)
    assert machine.name == name and machine.source
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    assert Machine.load(str(tmp_path / "machine.json")) == machine


def test_what_things_cost():
    machine = Machine("simple", latency=2.0, bandwidth=10.0, flops_rate=100.0, memory_rate=50.0, overhead=1.0)
    assert machine.message(0) == 2.0 and machine.message(30) == 5.0
    assert machine.kernel(1000, 0) == 11.0 and machine.kernel(0, 100) == 3.0  # whichever is slower


def test_a_name_that_is_not_there(tmp_path):
    for name in ("cray", tmp_path, tmp_path / "none.json"):
        with pytest.raises(LayoutError) as caught:
            Machine.load(name)
        assert repr(str(name)) in str(caught.value) and "gigabit, laptop, h100-nvlink" in str(caught.value)


GOOD = asdict(Machine.load("laptop"))


@pytest.mark.parametrize("content", ["", "{", "\x00", b"\xff\xfe{}"])
def test_files_that_are_no_json(content, tmp_path):
    path = tmp_path / "machine.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert f"{path} is not JSON" in str(caught.value)


@pytest.mark.parametrize("content", [[], 3, "laptop", None])
def test_files_that_hold_something_else(content, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert str(path) in str(caught.value) and "latency, bandwidth" in str(caught.value)


NUMBERS = ["latency", "bandwidth", "flops_rate", "memory_rate", "overhead"]
BAD_NUMBERS = [-1, float("nan"), float("inf"), 10**400, True, "4e9", None, [1]]


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in NUMBERS for value in BAD_NUMBERS]
    + [(field, 0) for field in ("bandwidth", "flops_rate", "memory_rate")]
    + [("name", 3), ("name", None), ("source", ["here"]), ("colour", "red")],
)
def test_fields_that_cannot_be(field, value, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(GOOD | {field: value}))
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert str(path) in str(caught.value) and field in str(caught.value)


@pytest.mark.parametrize("field", ["name", *NUMBERS])
def test_fields_that_are_missing(field, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != field}))
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert f"{path}: {field} is missing" in str(caught.value)


def test_fields_that_may_be_left_out(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "source"} | {"latency": 0}))
    assert Machine.load(path).source == "" and Machine.load(path).latency == 0
