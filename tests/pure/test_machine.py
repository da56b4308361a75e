"""Machines: what they cost, their files, and the checks of every field."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fompi.base.errors import LayoutError
from fompi.base.file_checks import MOST_FILE_NBYTES
from fompi.model.machine import PRESETS, Level, Machine, interpolate


@pytest.mark.parametrize("name", PRESETS)
def test_presets_and_files(name, tmp_path):
    machine = Machine.load(name)
    assert machine.name == name and machine.source
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    assert Machine.load(str(tmp_path / "machine.json")) == machine


def test_costs_of_messages_and_kernels():
    machine = Machine("simple", latency=2.0, bandwidth=10.0, flops_rate=100.0, memory_rate=50.0, overhead=1.0)
    assert machine.link(0, 1).seconds(0) == 2.0 and machine.link(0, 1).seconds(30) == 5.0
    assert machine.kernel(1000, 0) == 11.0 and machine.kernel(0, 100) == 3.0  # the slower of both counts
    assert replace(machine, pack_rate=4.0).kernel(1000, 0, packed=8) == 13.0
    assert machine.library("all_gather", 30, ranks=3) == 7.0
    assert (
        replace(machine, collectives={"all_gather": ((0.0, 1.0), (10.0, 2.0))}).library("all_gather", 5, ranks=3) == 1.5
    )


def test_the_last_wave_of_a_product_takes_as_long_as_a_full_one():
    machine = Machine("m", 0, 1e9, 1e6, 1e12, 0.0, wave=100)
    assert [machine.kernel(10 * n, 0, 0, n) for n in (1, 100, 101, 300)] == pytest.approx([1e-3, 1e-3, 2e-3, 3e-3])
    assert machine.kernel(1200, 0, 0, 120, 2) == pytest.approx(2e-3), "two products of 60 elements, one by one"
    assert machine.kernel(1200, 0) == pytest.approx(1.2e-3), "no product"
    assert machine.kernel(0, 0, 0, 120) == 0
    assert "products: 100 elements at once" in str(machine)


def test_unknown_names_are_refused(tmp_path):
    for name in ("cray", tmp_path, tmp_path / "none.json"):
        with pytest.raises(LayoutError) as caught:
            Machine.load(name)
        assert repr(str(name)) in str(caught.value) and "gigabit, laptop, laptops, h100-nvlink" in str(caught.value)


GOOD = asdict(Machine.load("laptop"))


@pytest.mark.parametrize("content", ["", "{", "\x00", b"\xff\xfe{}"])
def test_files_that_are_not_json(content, tmp_path):
    path = tmp_path / "machine.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert f"{path}: not JSON" in str(caught.value)


@pytest.mark.parametrize("content", [[], 3, "laptop", None])
def test_json_that_is_not_an_object(content, tmp_path):
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
    + [("unaided_share", value) for value in (*BAD_NUMBERS, 1.5)]
    + [("ports", value) for value in (0, -1, 1.5, True, "2", None, 10**9)]
    + [("lanes", 0), ("lanes", 3), ("lanes", True), ("lanes", "1"), ("pack_rate", 0)]
    + [("curve", 3), ("curve", [[1]]), ("curve", [[1, 2], [1, 3]]), ("curve", [[1, "2"]]), ("curve", [[1, -2]])]
    + [("rates", 1), ("rates", [1, 0]), ("rates", [None]), ("collectives", []), ("collectives", {"all_gather": []})]
    + [
        ("collectives", {"all_gather": [[0, 1e-3], [1000, 9e-4]]}),
        ("collectives", {"allreduce": [[0, 1]]}),
        ("rates", [1.5]),
    ]
    + [("curve", False), ("curve", ""), ("curve", {}), ("lanes", 1.0), ("levels", [[2, 0, 1, True, {}]])]
    + [("collectives", {"all_gather": [[2, 1], [1, 1]]}), ("levels", {}), ("levels", [3]), ("levels", [[2, 0.0]])]
    + [("levels", [[2, 0, 1, 0]]), ("levels", [[0, 0, 1]]), ("levels", [[2.0, 0, 1]]), ("levels", [[2, 0, 0]])]
    + [("levels", [[4, 0, 1], [2, 0, 1]]), ("levels", [[4, 0, 1], [4, 0, 1]]), ("levels", [[2, 0, 1, True, [[1]]]])]
    + [("levels", [[2, 0, 1, True, [], -1]]), ("levels", [[2, 0, 1, True, [], 0, 0]])],
)
def test_wrong_fields_are_refused(field, value, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(GOOD | {field: value}))
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert str(path) in str(caught.value) and field in str(caught.value)


PLAIN = {name: value for name, value in GOOD.items() if name in ("name", *NUMBERS)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(GOOD)[:-1] + ', "latency": 1}', "'latency' appears twice"),
        (json.dumps(GOOD | {"ports": "?"}).replace('"?"', "9" * 10_000), "ports must be an integer"),
        (json.dumps(GOOD | {"poll": "?"}).replace('"?"', "9" * 10_000), "poll=inf must be from"),
        (json.dumps(GOOD | {"name": "\x1b[2J"}), "name must be one line"),
        (json.dumps(GOOD | {"source": "a\nb"}), "source must be one line"),
        (json.dumps(GOOD | {"source": "x" * 10_000}), "source must be one line"),
        (json.dumps(GOOD | {"latency": "x" * 10_000}), "latency must be a number"),
        (json.dumps(GOOD | {"x" * 10_000: 1}), "unknown field"),
        (json.dumps(GOOD | {"levels": [list(range(10_000))]}), r"levels\[0\] must be"),
        (json.dumps(GOOD | {"poll": 1e-320}), "poll=1e-320 must be from"),
        (json.dumps(GOOD | {"curve": [[0, 0], [1e-300, 1e9]]}), r"curve rises by more than 1e\+09 seconds"),
        (json.dumps({**PLAIN, "collectives": {"all_gather": [[0, 1]]}}), "collectives_ranks is missing"),
        ("[" * 100_000, "not JSON"),
        ('"' * 3 + "\0", "not JSON"),
        (json.dumps(GOOD) + " " * MOST_FILE_NBYTES, "longer than 16 MiB"),
    ],
)
def test_malicious_files_are_refused(text, words, tmp_path):
    """The error is one short printable line with the path and the field, for any content."""
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(LayoutError, match=words) as caught:
        Machine.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.isprintable() and len(message) < 1000


def test_infinite_rates_survive_a_file(tmp_path):
    machine = replace(Machine.load("laptop"), bandwidth=math.inf, pack_rate=math.inf, levels=(Level(2, 0.0, math.inf),))
    assert Machine.from_json(machine.to_json()) == machine and machine.link(0, 1).busy(1e12) < 1e-200


@pytest.mark.parametrize("field", ["name", *NUMBERS])
def test_missing_fields_are_refused(field, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != field}))
    with pytest.raises(LayoutError) as caught:
        Machine.load(path)
    assert f"{path}: {field} is missing" in str(caught.value)


def test_optional_fields(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "source"} | {"latency": 0}))
    assert Machine.load(path).source == "" and Machine.load(path).latency == 0


def test_all_fields_survive_a_file(tmp_path):
    levels = (Level(2, 1e-5, 1e9), Level(8, 1e-4, 1e8, True, ((0.0, 1e-4), (1e6, 1e-2)), 1e-3))
    curve, collectives = ((0.0, 1e-6), (1024.0, 2e-6)), {"all_reduce": ((8.0, 1e-5), (1e6, 1e-2))}
    machine = Machine(
        "all", 1e-6, 1e10, 1e12, 1e11, 1e-6, "here", curve, levels, (1.0, 0.5), 1e9, 2, 1e-6, 1e-9, 1e-3, collectives,
        collectives, 0.5, 2, 4, 2e-3,
    )  # fmt: skip
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine


def test_a_slow_rank_takes_longer_per_byte_not_per_message():
    curve = ((1000, 3e-3), (1001000, 1.003))  # 1 MB/s, and 1 ms per message
    slow = replace(Machine.load("laptop"), latency=1e-3, bandwidth=1e6, curve=curve, rates=(1.0, 0.25))
    assert slow.link(0, 2).busy(1000) == pytest.approx(2e-3)
    assert slow.link(0, 1).busy(1000) == pytest.approx(1e-3 + 4e-3)
    assert slow.link(0, 1).busy(0) == pytest.approx(2e-3)  # a curve is level below its first point


def test_links():
    """Ranks 0 to 7 in pairs, and in two groups of four. The ranks of each group share a port."""
    machine = replace(Machine.load("laptop"), levels=(Level(2, 1.0, 1e6), Level(4, 2.0, 1e5, True)), rates=(1.0, 0.5))
    assert machine.link(2, 3).ports == (("out", -1, 2), ("in", -1, 3)) and machine.link(2, 3).seconds(0) == 2e-6
    assert machine.link(0, 2).ports == (("out", 0, 0), ("in", 0, 2)) and machine.link(0, 2).seconds(10**6) == 2.0
    assert machine.link(3, 5).ports == (("out", 1, 0), ("in", 1, 1)) and machine.link(3, 5).seconds(10**5) == 3.0
    assert machine.link(1, 2).busy(10**6) == machine.link(2, 1).busy(10**6) == 2.0


def test_a_collective_without_a_curve():
    """One latency per peer, and the bytes through the outermost link between these ranks, at the slowest rate."""
    flat = Machine("simple", 1.0, 10.0, 1.0, 1.0, 0.0)
    assert flat.library("all_gather", 30, 3) == 2 + 3
    assert replace(flat, rates=(1.0, 0.5)).library("all_gather", 30, 3) == 2 + 6
    groups = replace(flat, levels=(Level(4, 2.0, 5.0, True),))
    assert groups.library("all_gather", 30, 4) == 3 + 3 and groups.library("all_gather", 30, 8) == 14 + 4 * 6


def test_large_integers_in_curves(tmp_path):
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


def test_curves_hold_for_the_measured_number_of_ranks():
    collectives = {"all_gather": ((1e6, 0.5),)}
    measured = replace(Machine.load("gigabit"), collectives=collectives, collectives_ranks=4)
    assert measured.library("all_gather", 1e6, 4) == 0.5
    assert measured.library("all_gather", 1e6, 64) == Machine.load("gigabit").library("all_gather", 1e6, 64)
    assert replace(measured, collectives_ranks=0).library("all_gather", 1e6, 64) == 0.5


@pytest.mark.parametrize("curve", [((1e6, 0.01),), ((0.0, 0.0), (1e6, 0.01)), ((1e3, 1e-4), (1e6, 1e-4))])
def test_no_message_is_faster_than_the_highest_rate(curve):
    """The curves are level, or begin below the latency, so some messages take no time on the link."""
    link = replace(Machine.load("gigabit"), latency=1e-4, curve=curve).link(0, 1)
    for nbytes in (1.0, 1e3, 1e5, 1e6, 1e9):
        assert link.busy(nbytes) >= nbytes / link.level.fastest


def test_a_sampled_link_has_a_speed():
    """A curve as calibrate writes it begins with the latency."""
    link = replace(Machine.load("gigabit"), latency=1e-4, curve=((0.0, 1e-4), (1e6, 0.0101), (4e6, 0.0401))).innermost
    assert link.fastest == pytest.approx(1e8)


def test_an_axis_across_nodes_has_one_port():
    machine = replace(Machine.load("h100-ndr"), ports=4)
    assert machine.part([0, 1, 2, 3], 16).ports == 4 and machine.part([0, 8], 16).ports == 1


def test_curves():
    points = ((1.0, 10.0), (3.0, 20.0), (4.0, 40.0))
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 3.5, 4, 5)] == [10.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0]
    assert interpolate(((5.0, 2.0),), 100.0) == 2.0


def test_the_machine_of_some_ranks():
    """Eight ranks in groups of two and of four. Groups of four share their link. Rank 3 is slow."""
    levels = (Level(2, 1e-5, 1e8), Level(4, 1e-4, 1e7, True))
    rates = (1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0)
    collectives = {"all_gather": ((1.0, 1.0),)}
    machine = Machine("m", 1e-6, 1e9, 1e10, 1e9, 1e-6, levels=levels, rates=rates, collectives=collectives)
    assert machine.part(range(8), 8) is machine
    pair = machine.part([0, 1], 8)
    assert (pair.bandwidth, pair.levels, pair.rates, pair.collectives) == (1e9, (), (1.0, 1.0), {})
    four = machine.part([0, 1, 2, 3], 8)
    assert (four.bandwidth, four.levels, four.rates) == (1e9, levels[:1], rates[:4])
    every_second = machine.part([0, 2, 4, 6], 8)  # each in another group of two
    assert (every_second.bandwidth, every_second.levels) == (1e8, (Level(2, 1e-4, 1e7, True),))
    across = machine.part([3, 7], 8)
    assert (across.bandwidth, across.levels, across.rates) == (1e7, (), (0.5, 1.0))
    odd = machine.part([0, 1, 5], 8)  # not evenly spaced: the slowest link
    assert (odd.bandwidth, odd.levels) == (1e7, ())
    assert machine.part([5], 8).bandwidth == 1e9


NEW = "speeds", "memories", "disk_rates"
"""Fields that older files do not have."""

UNEQUAL = replace(
    Machine.load("laptop"),
    speeds=(1.0, 0.5, ((1.0, 2e-3), (64.0, 4e-3))),
    memories=(16e9, 8e9),
    memory=4e9,
    disk_rates=(0.0, 1e9),
)


def test_ranks_that_are_not_equal():
    machine = Machine.from_json(UNEQUAL.to_json())
    assert machine == UNEQUAL
    older = json.loads(PRESETS["laptop"].to_json())
    assert Machine.from_json(json.dumps({name: older[name] for name in older if name not in NEW})) == PRESETS["laptop"]
    assert [machine.slowness(rank, 1) for rank in (0, 1, 7)] == [1.0, 2.0, 1.0]
    reference = machine.kernel(2 * 64 * 1024**2, 4 * (1024**2 + 2 * 64 * 1024))
    assert machine.slowness(2, 64) == pytest.approx(4e-3 / reference)
    assert [machine.memory_of(rank) for rank in range(3)] == [16e9, 8e9, 4e9]
    assert [machine.disk_rate(rank) for rank in range(3)] == [0.0, 1e9, 0.0]
    two = machine.part([1, 3], 4)
    assert (two.speeds, two.memories, two.disk_rates) == ((0.5, 1.0), (8e9, 4e9), (1e9, 0.0))
    assert "memory of the ranks: 16 GB, 8 GB" in str(
        machine
    ) and "speeds of the ranks: products of one row 1, 0.5," in str(machine)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("speeds", [1, 0], r"speeds\[1\]=0 must be from"),
        ("speeds", [[[1, 0.0], [2, 1]]], r"speeds\[0\]\[0\]\[1\]"),
        ("speeds", [[[2, 1], [1, 2]]], r"speeds\[0\] must have at least one point; x must increase"),
        ("speeds", 0.5, "speeds must be a list"),
        ("memories", [0], r"memories\[0\]=0 must be"),
        ("disk_rates", [-1], r"disk_rates\[0\]=-1 must be"),
    ],
)
def test_wrong_values_of_unequal_ranks(field, value, said):
    with pytest.raises(LayoutError, match=said):
        Machine.from_json(json.dumps(json.loads(PRESETS["laptop"].to_json()) | {field: value}))


def test_a_machine_as_text():
    levels = (Level(4, 1e-4, 1e7, True, (), 2e-3),)
    collectives = {"all_gather": ((1e6, 0.01),)}
    rates = (1.0, 0.25)
    text = str(
        Machine("m", 1e-6, 1e9, 1e10, 1e9, 1e-6, "here", levels=levels, rates=rates, collectives=collectives, ports=3)
    )
    assert text.splitlines() == [
        "m",
        "here",
        "between ranks: 1 us, 1 GB/s, 3 ports per rank",
        "between groups of 4 ranks: 100 us, 10 MB/s, one port per group, a burst of 2 ms after silence",
        "slow ranks: rank 1 at 25%",
        "kernels: 1 us per call, 10 GFLOP/s, 1 GB/s",
        "one core for kernels and messages: each end of a message costs 0 us and 0 ns per byte, a poll every 0 ms",
        "the library's all_gather: 10 ms for 1 MB",
    ]


def test_load_takes_a_name_or_a_path():
    with pytest.raises(LayoutError, match="not 3"):
        Machine.load(3)
    assert Machine.of("laptop") is PRESETS["laptop"] and Machine.of(PRESETS["laptop"]) is PRESETS["laptop"]


def test_equal_machines_are_equal_keys():
    machine = PRESETS["gigabit"]
    same = Machine.from_json(machine.to_json())
    assert same == machine and hash(same) == hash(machine) and same.digest == machine.digest
    assert replace(machine, latency=1.0).digest != machine.digest
