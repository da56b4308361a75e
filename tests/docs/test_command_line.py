"""python -m fompi: prints what the functions return, and one line with status 2 for what cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import fompi
from fompi.base.layout import Partial, Replicate, Shard, Spec
from fompi.plans.plan import Plan, programs_from_json

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, status=0, machine=""):
    """Standard output, then standard error, of a command that ends with `status`."""
    command = [sys.executable, "-m", "fompi", *map(str, arguments)]
    environ = {**os.environ, "FOMPI_MACHINE": machine}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


PLANS = {
    "all_gather_matmul 512x64 64x256 --ranks 4 --schedule ring": partial(
        fompi.plan,
        fompi.all_gather_matmul,
        Spec((512, 64), "float32", Shard(0)),
        Spec((64, 256), "float32", Shard(1)),
        ranks=4,
        schedule="ring",
    ),
    "matmul_reduce_scatter 7x64 64x5 --ranks 3 --dtype bfloat16 --slices 1:3 --window 1": partial(
        fompi.plan,
        fompi.matmul_reduce_scatter,
        Spec((7, 64), "bfloat16", Shard(1)),
        Spec((64, 5), "bfloat16", Shard(0)),
        ranks=3,
        slices=(1, 3),
        window=1,
    ),
    "all_to_all_weight_gradient 8x4 8x6 --ranks 2": partial(
        fompi.plan,
        fompi.all_to_all_weight_gradient,
        Spec((8, 4), "float32", Shard(0)),
        Spec((8, 6), "float32", Shard(0)),
        ranks=2,
    ),
    "all_reduce 10 --ranks 8 --schedule unfused": partial(
        fompi.plan, fompi.all_reduce, Spec((10,), "float32", Partial()), ranks=8, schedule="unfused"
    ),
    "broadcast 3x3 --ranks 1": partial(fompi.plan, fompi.broadcast, Spec((3, 3), "float32", Replicate()), ranks=1),
}


@pytest.mark.parametrize("arguments", PLANS)
def test_plan(arguments):
    """The grid is str(plan), the JSON is plan.to_json(), from which the same plan can be made."""
    plan = PLANS[arguments]()
    ops = sum(len(program.ops) for program in plan.programs)
    assert run("plan", *arguments.split(), "--verify") == (f"{plan}\n", f"verified: {plan.size} ranks, {ops} ops\n")
    text, _ = run("plan", *arguments.split(), "--json")
    assert text == f"{plan.to_json()}\n"
    problem, fields = programs_from_json(text)
    assert problem["operation"] == arguments.split()[0]
    again = Plan(problem=plan.problem, **fields)
    assert again == plan and again.to_json() == plan.to_json()


@pytest.mark.parametrize("arguments", PLANS)
def test_simulate(arguments, tmp_path):
    """The table is str(trace), of the best plan if none is named; the file is its JSON, with every rank and lane."""
    trace = fompi.simulate(PLANS[arguments](machine="laptop"), fompi.Machine.load("laptop"))
    saved = tmp_path / "trace.json"
    assert run("simulate", *arguments.split(), "--machine", "laptop", "--save", saved) == (f"{trace}\n", "")
    events = json.loads(saved.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(trace.events) and {e["pid"] for e in spans} == set(trace.ranks)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans} <= named


def test_a_machine_from_a_file(tmp_path):
    slow = fompi.Machine("slow", 1.0, 1e3, 1e9, 1e9, 0.0)
    slow.save(tmp_path / "slow.json")
    table, _ = run("simulate", "all_gather", "4x250", "--ranks", 2, "--machine", tmp_path / "slow.json")
    plan = fompi.plan(fompi.all_gather, Spec((4, 250), "float32", Shard(0)), ranks=2, machine=slow)
    assert table == f"{fompi.simulate(plan, slow)}\n" and "on slow" in table


GATHER = "all_gather_matmul 512x64 64x256 --ranks 4"


def test_explain(tmp_path):
    """The table is str(explanation); `plan --machine` takes the winner."""
    specs = Spec((512, 64), "float32", Shard(0)), Spec((64, 256), "float32", Shard(1))
    found = fompi.explain("all_gather_matmul", *specs, ranks=4, machine="laptop")
    picture = tmp_path / "best.svg"
    text, _ = run("explain", *GATHER.split(), "--machine", "laptop", "--timeline", "--plot", picture)
    assert text == f"{found}\n{found.timeline()}\n" and picture.read_text() == found.plot()
    assert run("plan", *GATHER.split(), "--machine", "laptop") == (f"{found.plan}\n", "")
    text, _ = run("explain", *GATHER.split(), "--top", 1, machine="laptop")
    assert text == f"{found.text(1)}\n"
    pixels = tmp_path / "best.png"
    run("explain", *GATHER.split(), "--machine", "laptop", "--plot", pixels)
    assert pixels.read_bytes().startswith(b"\x89PNG") and len(pixels.read_bytes()) > 5000


WRONG = {
    "plan all_gather_matmul 512x64 --ranks 4": "all_gather_matmul takes x, w: not 1 tensors",
    "plan all_gather_matmul 512x64 64 --ranks 4": "w needs the shape (64, n), not (64,)",
    "plan all_gather_matmul 512x64 63x256 --ranks 4": "w needs the shape (64, n)",
    "plan all_gather_matmul 512xa 64x256 --ranks 4": "'512xa' is not a shape like 4096x1024",
    "plan all_gather_matmul 512x-4 64x256 --ranks 4": "numbers >= 0",
    "plan all_gather 64x4 --ranks 0": "ranks=0: a plan needs at least one rank",
    "plan all_gather 64x4 --ranks -2": "ranks=-2",
    "plan all_gather 64x4 --ranks 4 --schedule hierarchical(3)": "4 ranks are no groups of 3; take auto, ",
    f"plan all_gather 64x4 --ranks 4 --schedule hierarchical({'9' * 5000})": "; take auto, ",
    "plan all_gather_matmul 64x8 8x4 --ranks 2 --dtype bool": "a product of bool has no meaning",
    f"explain {GATHER} --top 0": "--top 0: show one candidate at least",
    f"explain {GATHER} --plot picture.pdf": "picture.pdf: a picture is SVG or PNG",
    "plan all_to_all 64x4 --ranks 4 --schedule ring": "no schedule 'ring' for all_to_all; take auto, unfused",
    "plan all_reduce 64 --ranks 4 --dtype bfloat16 --schedule sliced": "does not sum bfloat16 in float32",
    "plan all_reduce 64 --ranks 4 --dtype bool": "a sum of bool has no meaning",
    f"plan {GATHER} --dtype float31": "unknown dtype 'float31'; known: float64",
    f"plan {GATHER} --slices 0": "slices=0: give a number >= 1",
    f"plan {GATHER} --slices 1,x": "--slices takes a number, or sizes in proportion, for example 1,2,4, not '1,x'",
    f"plan {GATHER} --window 0": "at least one message must be under way",
    f"explain {GATHER} --machine nowhere": "no machine 'nowhere': neither a file nor one of gigabit",
    f"plan {GATHER} --machine nowhere": "no machine 'nowhere': neither a file nor one of gigabit",
    f"simulate {GATHER} --machine nowhere": "no machine 'nowhere': neither a file nor one of gigabit",
    "simulate step --ranks 0": "ranks=0, tokens=2048: both are from 1 to",
    "simulate step --ranks 8 --model gpt9": "no model 'gpt9'; there are",
    f"simulate {GATHER} --save /no/such/folder/trace.json": "No such file or directory",
}
MISSPELT = {
    "": "the following arguments are required: COMMAND",
    "paln": "invalid choice: 'paln'",
    "plan all_gathr 64x4 --ranks 4": "invalid choice: 'all_gathr'",
    "plan all_gather 64x4": "the following arguments are required: --ranks",
    "plan all_gather 64x4 --ranks four": "invalid int value: 'four'",
    "bench collectives --rounds 0": "--rounds and --ranks are 1 or more",
    "bench --like 64,64,64 --ranks 0": "--rounds and --ranks are 1 or more",
    "bench everything": "invalid choice: 'everything'",
    "simulate step --ranks 4 --schedule ring": "simulate step takes --model, --parallel, --ranks",
    "simulate step 4x4 --ranks 4": "simulate step takes --model, --parallel, --ranks",
    "info --yaml": "unrecognized arguments: --yaml",
}


def test_a_machine_of_the_environment_that_cannot_be():
    for command in ("plan", "simulate", "explain"):
        _, error = run(command, *GATHER.split(), status=2, machine="/nowhere.json")
        assert error.startswith("fompi: FOMPI_MACHINE: no machine '/nowhere.json'") and error.count("\n") == 1


@pytest.mark.parametrize("arguments", WRONG)
def test_what_cannot_be_is_one_line(arguments):
    _, error = run(*arguments.split(), status=2)
    assert error.startswith("fompi: ") and error.count("\n") == 1 and WRONG[arguments] in error


@pytest.mark.parametrize("arguments", MISSPELT)
def test_what_is_misspelt_is_told_with_the_usage(arguments):
    _, error = run(*arguments.split(), status=2)
    assert error.startswith("usage: python -m fompi") and MISSPELT[arguments] in error.splitlines()[-1]


def test_a_file_that_is_no_machine(tmp_path):
    for text, why in (("{", "not JSON"), ("[]", "is an object"), ('{"name": "x"}', "latency")):
        (tmp_path / "machine.json").write_text(text)
        _, error = run("simulate", *GATHER.split(), "--machine", tmp_path / "machine.json", status=2)
        assert error.startswith("fompi: ") and error.count("\n") == 1 and why in error


def test_help_names_every_operation():
    text, _ = run("plan", "--help")
    words = text.replace(",", " ").split()
    assert set(fompi.ops.OPERATIONS) <= set(words)
    assert "for example: python -m fompi plan" in text


@pytest.mark.parametrize("command", ["plan", "simulate", "plan --json"])
def test_a_reader_that_stops_early_is_no_error(command):
    name, *flags = command.split()
    arguments = [sys.executable, "-m", "fompi", name, "all_gather", "64x4", "--ranks", "100", *flags]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


# ----------------------------------------------------------------------------------------------------- under mpirun


def test_info_of_three_ranks(mpirun):
    """Printed once; tests/local has the rest."""
    done = mpirun(3, "-m", "fompi", "info", "--json")
    assert done.returncode == 0, done.output
    facts = json.loads(done.stdout)
    assert [row["rank"] for row in facts["ranks"]] == [0, 1, 2] and facts["warning"] is None
    assert facts["versions"]["fompi"] == fompi.__version__
    text = mpirun(2, "-m", "fompi", "info").stdout
    assert text.startswith("fompi ") and text.count("launcher") == 1


@pytest.mark.timeout(100)
def test_calibrate(mpirun, tmp_path):
    """What it writes is a machine that the other commands take."""
    done = mpirun(2, "-m", "fompi", "calibrate", tmp_path / "machine.json", seconds=90)
    assert done.returncode == 0, done.output
    assert "kernels" in done.stdout and f"written to {tmp_path / 'machine.json'} in" in done.stdout
    text, _ = run("explain", *GATHER.split(), "--machine", tmp_path / "machine.json")
    assert "best: " in text


def test_calibrate_needs_others(mpirun, tmp_path):
    done = mpirun(1, "-m", "fompi", "calibrate", tmp_path / "machine.json", seconds=30)
    assert done.returncode == 2 and "one rank has no links to measure" in done.output, done.output
    assert not (tmp_path / "machine.json").exists()


def test_calibrate_looks_at_its_file_first(mpirun):
    """All ranks hear that it cannot be written, before a minute is spent; it is said once."""
    done = mpirun(2, "-m", "fompi", "calibrate", "/no/such/folder/machine.json", seconds=30)
    assert done.returncode == 2 and "kernels" not in done.stdout and "Traceback" not in done.output
    assert done.output.count("No such file or directory: '/no/such/folder/machine.json'") == 1
