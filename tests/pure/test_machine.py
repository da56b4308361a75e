"""A machine is a handful of numbers, in a file that is checked field by field."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fompi.base.errors import LayoutError
from fompi.base.file_checks import MOST_FILE_NBYTES
from fompi.model.machine import PRESETS, Level, Machine, at


@pytest.mark.parametrize("name", PRESETS)
def test_presets_and_files(name, tmp_path):
    machine = Machine.load(name)
    assert machine.name == name and machine.source
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    assert Machine.load(str(tmp_path / "machine.json")) == machine


def test_what_things_cost():
    machine = Machine("simple", latency=2.0, bandwidth=10.0, flops_rate=100.0, memory_rate=50.0, overhead=1.0)
    assert machine.link(0, 1).seconds(0) == 2.0 and machine.link(0, 1).seconds(30) == 5.0
    assert machine.kernel(1000, 0) == 11.0 and machine.kernel(0, 100) == 3.0  # whichever is slower
    assert replace(machine, pack_rate=4.0).kernel(1000, 0, packed=8) == 13.0
    assert machine.native("all_gather", 30, ranks=3) == 7.0
    assert replace(machine, natives={"all_gather": ((0.0, 1.0), (10.0, 2.0))}).native("all_gather", 5, ranks=3) == 1.5


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
    assert f"{path}: not JSON" in str(caught.value)


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
    + [("name", 3), ("name", None), ("source", ["here"]), ("colour", "red")]
    + [(field, value) for field in ("cpu_message", "cpu_byte", "poll", "pack_rate", "burst") for value in BAD_NUMBERS]
    + [("native_share", value) for value in (*BAD_NUMBERS, 1.5)]
    + [("ports", value) for value in (0, -1, 1.5, True, "2", None, 10**9)]
    + [("lanes", 0), ("lanes", 3), ("lanes", True), ("lanes", "1"), ("pack_rate", 0)]
    + [("curve", 3), ("curve", [[1]]), ("curve", [[1, 2], [1, 3]]), ("curve", [[1, "2"]]), ("curve", [[1, -2]])]
    + [("rates", 1), ("rates", [1, 0]), ("rates", [None]), ("natives", []), ("natives", {"all_gather": []})]
    + [("natives", {"all_gather": [[0, 1e-3], [1000, 9e-4]]}), ("natives", {"allreduce": [[0, 1]]}), ("rates", [1.5])]
    + [("curve", False), ("curve", ""), ("curve", {}), ("lanes", 1.0), ("levels", [[2, 0, 1, True, {}]])]
    + [("natives", {"all_gather": [[2, 1], [1, 1]]}), ("levels", {}), ("levels", [3]), ("levels", [[2, 0.0]])]
    + [("levels", [[2, 0, 1, 0]]), ("levels", [[0, 0, 1]]), ("levels", [[2.0, 0, 1]]), ("levels", [[2, 0, 0]])]
    + [("levels", [[4, 0, 1], [2, 0, 1]]), ("levels", [[4, 0, 1], [4, 0, 1]]), ("levels", [[2, 0, 1, True, [[1]]]])]
    + [("levels", [[2, 0, 1, True, [], -1]]), ("levels", [[2, 0, 1, True, [], 0, 0]])],
)
def test_fields_that_cannot_be(field, value, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(GOOD | {field: value}))
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert str(path) in str(caught.value) and field in str(caught.value)


PLAIN = {name: value for name, value in GOOD.items() if name in ("name", *NUMBERS)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(GOOD)[:-1] + ', "latency": 1}', "'latency' is there twice"),
        (json.dumps(GOOD | {"ports": "?"}).replace('"?"', "9" * 10_000), "ports must be a whole number"),
        (json.dumps(GOOD | {"poll": "?"}).replace('"?"', "9" * 10_000), "poll=inf is out of range"),
        (json.dumps(GOOD | {"name": "\x1b[2J"}), "name must be a line"),
        (json.dumps(GOOD | {"source": "a\nb"}), "source must be a line"),
        (json.dumps(GOOD | {"source": "x" * 10_000}), "source must be a line"),
        (json.dumps(GOOD | {"latency": "x" * 10_000}), "latency must be a number"),
        (json.dumps(GOOD | {"x" * 10_000: 1}), "unknown field"),
        (json.dumps(GOOD | {"levels": [list(range(10_000))]}), r"levels\[0\] must be"),
        (json.dumps(GOOD | {"poll": 1e-320}), "poll=1e-320 is out of range"),
        (json.dumps(GOOD | {"curve": [[0, 0], [1e-300, 1e9]]}), r"curve is steeper than 1e\+09 seconds"),
        (json.dumps({**PLAIN, "natives": {"all_gather": [[0, 1]]}}), "natives_ranks is missing"),
        ("[" * 100_000, "not JSON"),
        ('"' * 3 + "\0", "not JSON"),
        (json.dumps(GOOD) + " " * MOST_FILE_NBYTES, "longer than 16 MiB"),
    ],
)
def test_files_that_were_made_to_harm(text, words, tmp_path):
    """One line that names the file and the field, whatever is in it."""
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(LayoutError, match=words) as caught:
        Machine.load(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ") and said.isprintable() and len(said) < 1000


def test_what_is_infinitely_fast_comes_back(tmp_path):
    machine = replace(Machine.load("laptop"), bandwidth=math.inf, pack_rate=math.inf, levels=(Level(2, 0.0, math.inf),))
    assert Machine.from_json(machine.to_json()) == machine and machine.link(0, 1).busy(1e12) < 1e-200


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


def test_everything_comes_back_from_a_file(tmp_path):
    levels = (Level(2, 1e-5, 1e9), Level(8, 1e-4, 1e8, True, ((0.0, 1e-4), (1e6, 1e-2)), 1e-3))
    curve, natives = ((0.0, 1e-6), (1024.0, 2e-6)), {"all_reduce": ((8.0, 1e-5), (1e6, 1e-2))}
    machine = Machine(
        "all", 1e-6, 1e10, 1e12, 1e11, 1e-6, "here", curve, levels, (1.0, 0.5), 1e9, 2, 1e-6, 1e-9, 1e-3, natives,
        natives, 0.5, 2, 4, 2e-3,
    )  # fmt: skip
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine


def test_a_slow_rank_stretches_bytes_not_what_a_message_costs():
    curve = ((1000, 3e-3), (1001000, 1.003))  # a MB/s, and a millisecond for each message
    slow = replace(Machine.load("laptop"), latency=1e-3, bandwidth=1e6, curve=curve, rates=(1.0, 0.25))
    assert slow.link(0, 2).busy(1000) == pytest.approx(2e-3)
    assert slow.link(0, 1).busy(1000) == pytest.approx(1e-3 + 4e-3)
    assert slow.link(0, 1).busy(0) == pytest.approx(2e-3)  # below its first point a curve is level


def test_links():
    """Ranks 0 to 7: pairs, and two groups of four whose ranks share a port."""
    machine = replace(Machine.load("laptop"), levels=(Level(2, 1.0, 1e6), Level(4, 2.0, 1e5, True)), rates=(1.0, 0.5))
    assert machine.link(2, 3).ports == (("out", -1, 2), ("in", -1, 3)) and machine.link(2, 3).seconds(0) == 2e-6
    assert machine.link(0, 2).ports == (("out", 0, 0), ("in", 0, 2)) and machine.link(0, 2).seconds(10**6) == 2.0
    assert machine.link(3, 5).ports == (("out", 1, 0), ("in", 1, 1)) and machine.link(3, 5).seconds(10**5) == 3.0
    assert machine.link(1, 2).busy(10**6) == machine.link(2, 1).busy(10**6) == 2.0


def test_a_collective_without_a_curve():
    """A latency a rank, and the bytes through the outermost link that these ranks need, at the slowest rate."""
    flat = Machine("simple", 1.0, 10.0, 1.0, 1.0, 0.0)
    assert flat.native("all_gather", 30, 3) == 2 + 3
    assert replace(flat, rates=(1.0, 0.5)).native("all_gather", 30, 3) == 2 + 6
    groups = replace(flat, levels=(Level(4, 2.0, 5.0, True),))
    assert groups.native("all_gather", 30, 4) == 3 + 3 and groups.native("all_gather", 30, 8) == 14 + 4 * 6


def test_large_numbers_are_numbers(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(GOOD | {"curve": [[0, 0], [1, 10**9]]}))
    assert Machine.load(path).link(0, 1).seconds(200_000_000) == pytest.approx(2e17)


@pytest.mark.parametrize(
    "wrong",
    [{"bandwidth": 0.0}, {"latency": -1.0}, {"rates": (0.0,)}, {"ports": 0}, {"levels": (Level(2, 0.0, 0.0),)}],
)
def test_a_machine_made_in_python_is_checked_too(wrong):
    with pytest.raises(LayoutError, match=next(iter(wrong))):
        replace(Machine.load("gigabit"), **wrong)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "machine.json"
    path.write_text(Machine.load("gigabit").to_json())

    def denied(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(LayoutError, match=r"machine\.json' cannot be read: Permission denied"):
        Machine.load(path)
    with pytest.raises(LayoutError, match="cannot be read: File name too long"):
        Machine.load("m" * 5000)


def test_collectives_are_known_for_as_many_ranks_as_were_measured():
    natives = {"all_gather": ((1e6, 0.5),)}
    measured = replace(Machine.load("gigabit"), natives=natives, natives_ranks=4)
    assert measured.native("all_gather", 1e6, 4) == 0.5
    assert measured.native("all_gather", 1e6, 64) == Machine.load("gigabit").native("all_gather", 1e6, 64)
    assert replace(measured, natives_ranks=0).native("all_gather", 1e6, 64) == 0.5


@pytest.mark.parametrize("curve", [((1e6, 0.01),), ((0.0, 0.0), (1e6, 0.01)), ((1e3, 1e-4), (1e6, 1e-4))])
def test_nothing_is_faster_than_the_fastest(curve):
    """A level curve, or one that begins below the latency: any size may take no time at all."""
    link = replace(Machine.load("gigabit"), latency=1e-4, curve=curve).link(0, 1)
    for nbytes in (1.0, 1e3, 1e5, 1e6, 1e9):
        assert link.busy(nbytes) >= nbytes / link.level.fastest


def test_a_sampled_link_has_a_speed():
    """As calibrate writes it: from the latency on."""
    link = replace(Machine.load("gigabit"), latency=1e-4, curve=((0.0, 1e-4), (1e6, 0.0101), (4e6, 0.0401))).innermost
    assert link.fastest == pytest.approx(1e8)


def test_an_axis_across_nodes_has_one_port():
    machine = replace(Machine.load("h100-ndr"), ports=4)
    assert machine.part([0, 1, 2, 3], 16).ports == 4 and machine.part([0, 8], 16).ports == 1


def test_curves():
    points = ((1.0, 10.0), (3.0, 20.0), (4.0, 40.0))
    assert [at(points, x) for x in (0, 1, 2, 3, 3.5, 4, 5)] == [10.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0]
    assert at(((5.0, 2.0),), 100.0) == 2.0


def test_the_part_that_an_axis_sees():
    """Eight ranks in groups of two and of four, with a shared link between the larger ones; rank 3 is slow."""
    levels = (Level(2, 1e-5, 1e8), Level(4, 1e-4, 1e7, True))
    rates = (1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0)
    natives = {"all_gather": ((1.0, 1.0),)}
    machine = Machine("m", 1e-6, 1e9, 1e10, 1e9, 1e-6, levels=levels, rates=rates, natives=natives)
    assert machine.part(range(8), 8) is machine
    pair = machine.part([0, 1], 8)
    assert (pair.bandwidth, pair.levels, pair.rates, pair.natives) == (1e9, (), (1.0, 1.0), {})
    four = machine.part([0, 1, 2, 3], 8)
    assert (four.bandwidth, four.levels, four.rates) == (1e9, levels[:1], rates[:4])
    every_second = machine.part([0, 2, 4, 6], 8)  # each in a group of two of its own
    assert (every_second.bandwidth, every_second.levels) == (1e8, (Level(2, 1e-4, 1e7, True),))
    across = machine.part([3, 7], 8)
    assert (across.bandwidth, across.levels, across.rates) == (1e7, (), (0.5, 1.0))
    odd = machine.part([0, 1, 5], 8)  # the slowest link between any two
    assert (odd.bandwidth, odd.levels) == (1e7, ())
    assert machine.part([5], 8).bandwidth == 1e9


def test_a_machine_in_words():
    levels = (Level(4, 1e-4, 1e7, True, (), 2e-3),)
    natives = {"all_gather": ((1e6, 0.01),)}
    rates = (1.0, 0.25)
    text = str(Machine("m", 1e-6, 1e9, 1e10, 1e9, 1e-6, "here", levels=levels, rates=rates, natives=natives, ports=3))
    assert text.splitlines() == [
        "m",
        "here",
        "between ranks: 1 us, 1 GB/s, 3 ports a rank",
        "between groups of 4: 100 us, 10 MB/s, shared by the group, after silence 2 ms of that at once",
        "slower: rank 1 25%",
        "kernels: 1 us and 10 GFLOP/s, 1 GB/s",
        "one core for kernels and messages: each end costs 0 us and 0 ns a byte, a poll every 0 ms",
        "the library's all_gather: 10 ms for 1 MB",
    ]


def test_names_that_are_none():
    with pytest.raises(LayoutError, match="not by 3"):
        Machine.load(3)
    assert Machine.of("laptop") is PRESETS["laptop"] and Machine.of(PRESETS["laptop"]) is PRESETS["laptop"]


def test_equal_machines_are_equal_keys():
    machine = PRESETS["gigabit"]
    same = Machine.from_json(machine.to_json())
    assert same == machine and hash(same) == hash(machine) and same.digest == machine.digest
    assert replace(machine, latency=1.0).digest != machine.digest
