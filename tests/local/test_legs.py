"""tools/test.py: legs beside each other, how they end, and the times that are kept."""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

import job
import pytest

TOOL = Path(job.__file__).with_name("test.py")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The module, by its path: `test` is a package of Python's library. Its environment is that of this process."""
    spec = importlib.util.spec_from_file_location("legs_of_fompi", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(module, "ENVIRONMENTS", {"mpich": tmp_path, "openmpi": tmp_path / "nowhere"})
    monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(module, "TIMES", tmp_path / "legs.json")
    return module


def shell(tool, name, code, seconds=20, environment="mpich"):
    return tool.Leg(name, environment, seconds, ("sh", "-c", code), is_pytest=False)


def run(tool, *legs, most=2):
    results = []
    tool.run_legs([*legs], most, tool.Selection(), {}, results.append)
    return {result.leg.name: result for result in results}


def test_two_legs_run_beside_each_other_and_the_third_when_one_has_ended(tool, tmp_path):
    """The first two wait for each other. The third finds what the first one has left at its end."""
    meet = f"cd {tmp_path}; touch ONE; while [ ! -e OTHER ]; do sleep 0.02; done"
    results = run(
        tool,
        shell(tool, "a", f"{meet.replace('ONE', 'a1').replace('OTHER', 'b1')}; sleep 0.1; touch a2"),
        shell(tool, "b", f"{meet.replace('ONE', 'b1').replace('OTHER', 'a1')}; while [ ! -e c ]; do sleep 0.02; done"),
        shell(tool, "c", f"cd {tmp_path}; test -e a2; echo seen; touch c"),
    )
    assert [results[name].problem for name in "abc"] == [""] * 3 and results["c"].output == "seen\n"


def test_the_longest_leg_is_next_and_one_that_waits_beside_one_that_computes(tool):
    """As long as it took before, else as its time-out."""
    legs = [replace(shell(tool, name, "", 30), waits=name in "xy") for name in "abxy"]
    a, b, x, y = legs
    before = {"a": {"seconds": 10}, "x": {"seconds": 20}, "y": {"seconds": 40}}
    assert tool.next_leg(legs, [], before) is y and tool.next_leg([a, b, x], [y], before) is b
    assert tool.next_leg([a, x], [b], before) is x and tool.next_leg([a], [b], before) is a


def test_a_leg_that_fails_hangs_or_leaves_something_is_one_failure_and_the_others_go_on(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "BESIDE_FACTOR", 1)
    monkeypatch.setattr(job, "GRACE_SECONDS", 0.3)
    results = run(
        tool,
        shell(tool, "fails", "exit 3"),
        shell(tool, "hangs", "echo here; sleep 60", seconds=3),
        shell(tool, "no environment", "", environment="openmpi"),
        shell(tool, "leaves", "sleep 61 >/dev/null & true"),
        shell(tool, "last", "true"),
    )
    problems = {name: result.problem for name, result in results.items()}
    assert problems == {
        "fails": "exit status 3",
        "hangs": "ended after its time-out of 3 s",
        "no environment": f"there is no {tmp_path / 'nowhere'}",
        "leaves": "left processes behind: sleep 61",
        "last": "",
    }
    assert results["hangs"].output == "here\n"
    assert all(result.counts["failed"] == bool(result.problem) for result in results.values())


def test_an_interrupt_ends_all_legs(tool, tmp_path):
    legs = [shell(tool, name, f"echo $$ >{tmp_path}/{name}.pid; exec sleep 62") for name in "ab"]
    legs.append(shell(tool, "ends", f"while [ ! -s {tmp_path}/a.pid -o ! -s {tmp_path}/b.pid ]; do sleep 0.02; done"))

    def interrupt(result):
        sys.exit("terminated")

    with pytest.raises(SystemExit):
        tool.run_legs(legs, 3, tool.Selection(), {}, interrupt)
    assert not any(Path(f"/proc/{(tmp_path / f'{name}.pid').read_text().strip()}").exists() for name in "ab")


def test_an_environment_that_cannot_be_made_is_a_failure(tool, monkeypatch):
    called = []
    monkeypatch.setattr(tool.subprocess, "call", lambda command, **_: called.append(command[4:]) or 2)
    monkeypatch.setattr(tool, "READY", dict.fromkeys(tool.ENVIRONMENTS, "ready"))
    (result,) = tool.make_environments([shell(tool, "a", ""), shell(tool, "b", "")])
    folder = tool.ENVIRONMENTS["mpich"].name
    assert called == [[f"{folder}/ready"]] and result.counts == {"failed": 1}
    assert result.problem == f"`make {folder}/ready` failed" and not tool.make_environments([])


def test_the_last_line_counts_all_legs_and_the_times_are_kept(tool, tmp_path, capsys):
    tool.TIMES.write_text('{"a": {"seconds": 7.25, "cpu_seconds": 1}, "gone": {"seconds": 1, "cpu_seconds": 1}}')
    legs = [shell(tool, "a", "python -c 'sum(range(10**6))'"), shell(tool, "b", "false")]
    before, results = tool.kept(), [*run(tool, *legs, most=1).values()]
    tool.summarize(results, 3.0, before)
    a, b, _, _, problem, last = capsys.readouterr().out.splitlines()[-6:]
    assert last == "1 passed, 1 failed" and a.split()[4:6] == ["7.2", "s"] and b.split()[:2] == ["b", "FAILED"]
    assert problem == "b: exit status 1"
    assert results[0].cpu_seconds > 0
    tool.keep(results, 3.0, before)
    times = tool.kept()
    assert times.keys() == {"a", "gone"} and times["a"]["seconds"] < 7, "a leg that failed has no time"

    page = tmp_path / "page.md"
    page.write_text("Before.\n{}\nold\n{}\nAfter.\n".format(*tool.MARKS))
    tool.write_table(page, {"lint": {"seconds": 1.6, "cpu_seconds": 1}, "all": {"seconds": 9, "cpu_seconds": 20}})
    begin, end = tool.MARKS
    table = "| leg | seconds | CPU seconds |\n|---|---|---|\n| `lint` | 2 | 1 |\n| `all` | 9 | 20 |"
    assert page.read_text() == f"Before.\n{begin}\n\n{table}\n\n{end}\nAfter.\n"


def test_a_leg_on_request_runs_only_by_its_whole_name(tool):
    def chosen(*names):
        options = Namespace(leg=names or None, mpi=None, k="", soak=False)
        return {leg.name for leg in tool.select(ArgumentParser(), options)}

    assert "mpi-openmpi-2" in chosen() & chosen("mpi") and "mpi-abi-2" not in chosen() | chosen("mpi")
    assert chosen("mpi-abi-2") == {"mpi-abi-2"}


def test_the_ranks_of_a_file(tool, tmp_path):
    """Those of its `pytestmark`. The mark of a test does not add any."""
    file = tmp_path / "test_some.py"
    own = "@pytest.mark.ranks(mpich=[8])\ndef test_it(): ...\n"
    for text, wanted in (
        ("pytestmark = pytest.mark.ranks(mpich=[3], openmpi=[])\n", {"mpich": [3], "openmpi": []}),
        ("pytestmark = [\n    pytest.mark.ranks(mpich=[2, 4]),\n]\n", {"mpich": [2, 4], "openmpi": [2]}),
        ("", {"mpich": [2], "openmpi": [2]}),
    ):
        file.write_text(text + own)
        assert tool.ranks_of(file) == wanted


def test_every_file_of_tests_is_in_a_leg(tool):
    """Also of tests/mpi, on each MPI for which it names ranks; tests that measure links run alone."""
    legs = tool.legs()
    words = {word for leg in legs for word in leg.command}
    rooms = {path.name for path in (tool.ROOT / "tests").iterdir() if [*path.glob("test_*.py")]}
    elsewhere = {"mpi", "gpu", "release", "wheels"}
    assert rooms - elsewhere == {w.removeprefix("tests/") for w in words if w[5:6] == "/" and w.count("/") == 1}
    assert {f"tests/mpi/{path.name}" for path in (tool.ROOT / "tests/mpi").glob("test_*.py")} <= words
    alone = [leg.name for leg in legs if leg.stage == tool.ALONE]
    assert alone == ["links-mpich", "links-openmpi"] and tool.STAGES[tool.ALONE] == 1
    assert {leg.stage for leg in legs} == tool.STAGES.keys()
