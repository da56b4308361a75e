"""The command line prints what the functions return. Anything impossible is one line on stderr and exit status 2."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from commands import PROGRAM, ROOT, run_here
from plan_texts import programs_from_json

import fompi
from fompi.base.layout import Partial, Replicate, Shard, Spec
from fompi.base.tables import Table
from fompi.cli.calibrate import described_instead
from fompi.cli.main import COMMANDS, main
from fompi.cli.output import DEFAULT_COLUMNS, Progress, show
from fompi.ops.operations import OPERATIONS
from fompi.plans.plan import Plan

SCRIPT = Path(sys.executable).with_name("fompi")


def run(*arguments, status=0, machine="", program=()):
    """Standard output, then standard error, of a command that ends with `status`: in this process, or of `program`."""
    variables = {"FOMPI_MACHINE": machine}
    if program:
        command = [*map(str, program), *map(str, arguments)]
        environ = {**os.environ, **variables}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environ)
        ended, out, err = done.returncode, done.stdout, done.stderr
    else:
        ended, out, err = run_here(*arguments, variables=variables)
    assert ended == status, err
    assert "Traceback" not in err
    return out, err


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
    """The grid is str(plan). The JSON is plan.to_json(), and the same plan can be made from it."""
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
    """The table is str(trace), of the best plan if no schedule is named. The file is the trace with all its lanes."""
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
    """The table is str(explanation). `plan --machine` takes the winner."""
    specs = Spec((512, 64), "float32", Shard(0)), Spec((64, 256), "float32", Shard(1))
    found = fompi.explain("all_gather_matmul", *specs, ranks=4, machine="laptop")
    picture = tmp_path / "best.svg"
    text, _ = run("explain", *GATHER.split(), "--machine", "laptop", "--timeline", "--plot", picture)
    assert text == f"{found}\n{found.timeline()}\n" and picture.read_text() == found.plot()
    assert run("plan", *GATHER.split(), "--machine", "laptop") == (f"{found.plan}\n", "")
    text, _ = run("explain", *GATHER.split(), "--top", 1, machine="laptop")
    assert text == f"{found.text(1)}\n"


WRONG = {
    "plan all_gather_matmul 512x64 --ranks 4": "all_gather_matmul takes x, w; got 1 tensor",
    "plan all_gather_matmul 512x64 64 --ranks 4": "w needs the shape (64, n), not (64,)",
    "plan all_gather_matmul 512x64 63x256 --ranks 4": "w needs the shape (64, n)",
    "plan all_gather_matmul 512xa 64x256 --ranks 4": "'512xa' is not a shape like 4096x1024",
    "plan all_gather_matmul 512x-4 64x256 --ranks 4": "'512x-4': each size must be an integer >= 0",
    "plan all_gather 64x4 --ranks 4 --schedule rign": "no schedule 'rign' for all_gather (did you mean ring?); choose ",
    "plan all_gather 64x4 --ranks 4 --schedule ring(slices=0)": "slices are given beside it, --slices 4 or slices=4",
    "plan all_gather 64x4 --ranks 4 --machine gigabti": "no machine 'gigabti' (did you mean gigabit?)",
    "plan all_gather 64x4 --ranks 4 --wire int9": "wire='int9' (did you mean int8?)",
    "explain all_gather 64x4 --ranks 4 --schedule rign": "rign is no candidate here (did you mean ring?)",
    "layout --ranks 8 --model lama-8b": "no model 'lama-8b' (did you mean llama-8b?)",
    "layout --ranks 8 --recompute sellective": "recompute='sellective' (did you mean selective?)",
    "balance --machine gigabit": "gigabit does not say how many ranks it has",
    "balance --machine laptops --task decod": "task='decod' (did you mean decode?); choose decode, prefill, train",
    "balance --machine laptops --plot shares.pdf": "shares.pdf: a picture is SVG",
    "try 64x64 65x64": "a shape is M,K,N",
    "plan all_gather 64x4 --ranks 0": "ranks=0 must be an integer from 1 to",
    "plan all_gather 64x4 --ranks -2": "ranks=-2",
    "plan all_gather 64x4 --ranks 4 --schedule hierachical(2)": "(did you mean hierarchical(2)?)",
    "plan all_gather 64x4 --ranks 4 --schedule hierarchical(0)": "it is hierarchical(RANKS), with more than 1 and",
    "plan all_gather 64x4 --ranks 4 --schedule ring(3)": "'ring(3)' for all_gather: slices are given beside it",
    "plan all_reduce 64 --ranks 4 --order canonicl": "order='canonicl' (did you mean canonical(8)?) must be one of",
    "plan all_reduce 64 --ranks 4 --wire fp8": "wire='fp8' (did you mean fp8_e4m3?)",
    "plan all_gather 64x4 --ranks 4 --schedule hierarchical(3)": "4 ranks cannot be divided into groups of 3; choose ",
    f"plan all_gather 64x4 --ranks 4 --schedule hierarchical({'9' * 5000})": "; choose auto, ",
    "plan all_gather_matmul 64x8 8x4 --ranks 2 --dtype bool": "bool cannot be multiplied",
    f"explain {GATHER} --top 0": "--top 0: show one candidate at least",
    f"explain {GATHER} --plot picture.pdf": "picture.pdf: a picture is SVG",
    "plan all_to_all 64x4 --ranks 4 --schedule ring": "no schedule 'ring' for all_to_all; choose auto, unfused",
    "plan all_reduce 64 --ranks 4 --dtype bfloat16 --schedule sliced": "do not sum bfloat16 in float32",
    "plan all_reduce 64 --ranks 4 --dtype bool": "bool cannot be summed",
    f"plan {GATHER} --dtype float31": "unknown dtype 'float31' (did you mean float32?); known: float64",
    f"plan {GATHER} --slices 0": "slices=0 must be an integer >= 1",
    f"plan {GATHER} --slices 1,x": "--slices takes a number, or sizes in proportion, for example 1,2,4, not '1,x'",
    f"plan {GATHER} --window 0": "window=0 must be an integer >= 1",
    f"explain {GATHER} --machine nowhere": "no machine 'nowhere': no such file, and the presets are gigabit",
    f"plan {GATHER} --machine nowhere": "no machine 'nowhere': no such file, and the presets are gigabit",
    f"simulate {GATHER} --machine nowhere": "no machine 'nowhere': no such file, and the presets are gigabit",
    "layout --ranks 8 --model gpt9": "no model 'gpt9'; choose",
    "layout --islands 0": "islands=0 must be an integer from 1 to",
    "layout --islands 2 --seconds 0": "seconds=0.0 must be a number of at least 1e-9",
    "layout --islands 2 --seconds 1 --picture period.pdf": "period.pdf: a picture is SVG",
    "layout --ranks 8 --machine h100-ndr --model llama-405b": "Take more ranks, shorter sequences or fewer of them",
    f"simulate {GATHER} --save /no/such/folder/trace.json": "No such file or directory",
    "try 64,64": "a shape is M,K,N, for example 4096,4096,4096, not '64,64'",
    "try 0,8,8": "'0,8,8': each size must be an integer >= 1",
    "try 8,-1,8": "'8,-1,8': each size must be an integer >= 1",
    "try 8,8,8 --op ring": "unrecognized arguments: --op ring (`",
    "bench --device software --like 64": "a shape is M,K,N",
}
MISSPELT = {
    "paln": "invalid choice: 'paln'",
    "--json": "the following arguments are required: COMMAND",
    "plan all_gathr 64x4 --ranks 4": "invalid choice: 'all_gathr'",
    "plan all_gather 64x4": "the following arguments are required: --ranks",
    "plan all_gather 64x4 --ranks four": "invalid int value: 'four'",
    "bench overhead --rounds 0": "--rounds and --ranks are 1 or more",
    "bench --like 64,64,64": "`try M,K,N` is for the host",
    "bench": " bench: name a suite (fused, ",
    "bench everything": "invalid choice: 'everything'",
    "try": "the following arguments are required: M,K,N",
    "try 64,64,64 --ranks 1": "--ranks 1: give 2 or more, one rank has no messages to hide",
    "try 64,64,64 --ranks 99999": "--ranks 99999: more than ",
    "layout": "the following arguments are required: --ranks",
    "layout --ranks 4 --between 1gbit": "--between, --seconds and --picture are for --islands",
    "layout --islands 4 --between 50mbt": "--between: '50mbt' is not a rate: write it as 50mbit,80ms",
    "layout --islands 4 --between 50mbit,80ms,1%": "'50mbit,80ms,1%' is not a rate: write it as 50mbit,80ms",
    "calibrate --limit 0": "--limit 0: give a number of seconds above 0",
    "trace nowhere.json": "nowhere.json: No such file or directory",
    "trace README.md": "README.md is no report of a job: FOMPI_REPORT=run.json writes one",
    "info --yaml": "unrecognized arguments: --yaml",
    "plan all_gather 64x4 --ranks 4 --scheduel ring": "--scheduel ring: did you mean --schedule?",
}


def test_a_machine_of_the_environment_that_is_not_there():
    for command in ("plan", "simulate", "explain"):
        _, error = run(command, *GATHER.split(), status=2, machine="/nowhere.json")
        assert error.startswith("fompi: FOMPI_MACHINE: no machine '/nowhere.json'") and error.count("\n") == 1


@pytest.mark.parametrize("arguments", WRONG)
def test_an_error_is_one_line(arguments):
    _, error = run(*arguments.split(), status=2)
    assert error.startswith(("fompi: ", "python -m fompi ")) and error.count("\n") == 1 and WRONG[arguments] in error


@pytest.mark.parametrize("arguments", MISSPELT)
def test_an_error_of_the_arguments_is_one_line(arguments):
    _, error = run(*arguments.split(), status=2)
    assert error.startswith("python -m fompi") and error.count("\n") == 1, error
    assert MISSPELT[arguments] in error and "--help` lists the options)" in error


def test_both_forms_of_a_shape():
    two, one = "all_gather_matmul 64x32 32x16 --ranks 2", "all_gather_matmul 64,32,16 --ranks 2"
    assert run("plan", *two.split()) == run("plan", *one.split())


def test_the_best_and_the_fastest():
    """A wire: fewer roundings may be better than a little less time, and it says so."""
    text, _ = run("explain", "all_reduce", "40960x4096", "--ranks", 8, "--wire", "int8")
    best = text.splitlines()[1]
    assert re.search(
        r"best: direct, .*; bidirectional, 16 slices takes [\d.]+ ms, but rounds a term up to 8 times$", best
    )


def test_shares_of_unequal_machines(tmp_path):
    picture = tmp_path / "shares.svg"
    found = fompi.balance("laptops", "llama-1b")
    text, _ = run("balance", "--machine", "laptops", "--plot", picture)
    assert text == f"{found}\n" and picture.read_text() == found.plot()
    values = json.loads(run("balance", "--machine", "laptops", "--json")[0])
    assert values["counts"]["heads"] == [*found.counts["heads"]] and values["best"]["seconds"] == found.best.seconds
    assert [each["way"] for each in values["ways"]] == ["tensor", "layers"]


def test_a_layout_on_a_machine_without_memory():
    text, _ = run("layout", "--ranks", 8, "--top", 1)
    _, heads, _, remark = text.splitlines()
    assert heads.split()[9] == "days" and "warning: gigabit does not say how much memory a rank has" in remark


def test_a_file_that_holds_no_machine(tmp_path):
    for text, why in (("{", "not JSON"), ("[]", "must be an object"), ('{"name": "x"}', "latency")):
        (tmp_path / "machine.json").write_text(text)
        _, error = run("simulate", *GATHER.split(), "--machine", tmp_path / "machine.json", status=2)
        assert error.startswith("fompi: ") and error.count("\n") == 1 and why in error


def test_help_names_every_operation():
    text, _ = run("plan", "--help")
    words = text.replace(",", " ").split()
    assert set(OPERATIONS) <= set(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example(command):
    """The example is a command of this program, on one line."""
    text, _ = run(command, "--help", program=PROGRAM)
    last = text.splitlines()[-1]
    assert re.match(rf"for example: (mpirun -n \d )?python -m fompi {command}\b", last), last
    assert command != "plan" or run(*last.split()[5:])[0].startswith("all_gather_matmul(")


def test_help_names_every_command():
    text, _ = run("--help")
    assert all(re.search(rf"^ +{command}\b", text, re.MULTILINE) for command in COMMANDS)
    assert text.splitlines()[-1] == "for example: python -m fompi try 1024,1024,1024 --ranks 4"


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"fompi {fompi.__version__}\n"


@pytest.mark.parametrize("command", ["plan", "simulate", "plan --json"])
def test_a_reader_that_stops_early_is_no_error(command):
    name, *flags = command.split()
    arguments = [sys.executable, "-m", "fompi", name, "all_gather", "64x4", "--ranks", "100", *flags]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


# ------------------------------------------------------------------------------------------- the program and its parts


def test_the_console_script_is_the_same_program():
    assert run("plan", *GATHER.split(), program=[SCRIPT]) == run("plan", *GATHER.split(), program=PROGRAM)
    _, error = run("paln", status=2, program=[SCRIPT])
    assert error.startswith("fompi: argument COMMAND: invalid choice: 'paln': did you mean plan?")
    assert run("plan", "--help", program=[SCRIPT])[0].splitlines()[-1].startswith("for example: fompi plan ")


def test_without_a_command():
    """`info` in ten lines, then the next command, which exists."""
    for program, name in (((SCRIPT,), "fompi"), (PROGRAM, "python -m fompi")):
        text, error = run(program=program)
        facts, *_, following = text.split("\n\n")
        lines = facts.splitlines()
        assert len(lines) == 10 and lines[0] == f"fompi      {fompi.__version__}, Python {sys.version.split()[0]}"
        assert {"MPI", "ranks", "cores", "progress"} <= {line.split()[0] for line in lines} and error == ""
        assert re.match(rf"next: {name} try \d+,\d+,\d+ --ranks \d    # ", following)


IMPORTED = """
import sys
from fompi.cli.main import main
status = main(sys.argv[1:])
print(*sorted(name for name in sys.modules if name.startswith(("fompi.bench", "fompi.cli", "mpi4py"))), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_only_the_module_of_the_command_is_imported(command):
    _, loaded = run(command, *GATHER.split(), program=(sys.executable, "-c", IMPORTED))
    others = {"fompi.cli.info", "fompi.cli.calibrate", "fompi.bench", "fompi.bench.trial", "mpi4py"}
    assert f"fompi.cli.{command}" in loaded.split() and not others & set(loaded.split())


# ---------------------------------------------------------------------------------------------------------------- JSON


def test_simulate_as_json():
    trace = fompi.simulate(PLANS["broadcast 3x3 --ranks 1"](machine="laptop"), fompi.Machine.load("laptop"))
    values = json.loads(run("simulate", "broadcast", "3x3", "--ranks", 1, "--machine", "laptop", "--json")[0])
    assert (values["kind"], values["title"], values["seconds"]) == (trace.kind, trace.title, trace.seconds)
    values = json.loads(run("simulate", *GATHER.split(), "--json")[0])
    assert [row["rank"] for row in values["ranks"]] == [0, 1, 2, 3]
    for row in values["ranks"]:
        seconds = row["seconds"]
        assert seconds["exposed"] == pytest.approx(seconds["wall"] - seconds["compute"]) and 0 <= row["overlap"] <= 1


def test_explain_as_json():
    specs = Spec((512, 64), "float32", Shard(0)), Spec((64, 256), "float32", Shard(1))
    found = fompi.explain("all_gather_matmul", *specs, ranks=4, machine="laptop")
    values = json.loads(run("explain", *GATHER.split(), "--machine", "laptop", "--json")[0])
    assert values["best"] == str(found.winner.candidate) == values["candidates"][0]["candidate"]
    assert [row["seconds"] for row in values["candidates"]] == [one.seconds for one in found.judged]
    assert values["lower_bound"]["seconds"] == found.lower_bound.seconds and values["gain"] > 1
    one = json.loads(run("explain", *GATHER.split(), "--machine", "laptop", "--json", "--top", 1)[0])
    assert one["candidates"] == values["candidates"][:1]


# -------------------------------------------------------------------------------------------------------- on a terminal


def on_a_terminal(*command, environ=None):
    """What a command prints on a terminal: standard output and standard error together."""
    main, terminal = pty.openpty()
    with open(main, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, stdout=terminal, stderr=terminal, env={**os.environ, **(environ or {})}
        )
        os.close(terminal)
        printed = b""
        while True:
            try:
                some = screen.read(4096)
            except OSError:  # the last process has closed the terminal
                break
            if not some:
                break
            printed += some
        assert process.wait(timeout=60) == 0, printed
    return printed.decode().replace("\r\n", "\n")


WITHOUT_RICH = """
import sys
sys.modules["rich"] = None  # an import of it fails now
from fompi.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
DRAWN = "─" * 10
"""Part of the line that rich draws below the head of a table."""


@pytest.mark.parametrize("arguments", [f"explain {GATHER} --machine laptop", "balance --machine laptops", "info"])
def test_tables_are_drawn_by_rich_on_a_terminal(arguments):
    """Without rich, and in a pipe, they are plain text. Both hold the same words."""
    drawn = on_a_terminal(sys.executable, "-m", "fompi", *arguments.split())
    plain = on_a_terminal(sys.executable, "-c", WITHOUT_RICH, *arguments.split())
    piped, _ = run(*arguments.split(), program=PROGRAM)
    assert DRAWN in drawn and "\x1b[1m" in drawn
    assert DRAWN not in plain + piped and "\x1b" not in plain + piped
    if arguments != "info":  # the process and its measurement differ
        assert plain == piped


def test_a_table_as_text(capsys):
    table = Table(("what", "ms"), [("one", "1.5"), ("twenty one", "10")], right=("ms",))
    assert str(table) == "what         ms\none         1.5\ntwenty one   10"
    show("head", table)
    assert capsys.readouterr().out == f"head\n\n{table}\n"


def test_progress_is_shown_by_rank_0(capsys, monkeypatch):
    """On a terminal: one line on standard error that the next step replaces. It is empty in the end."""
    with Progress.of_rank(0, "work") as lines:
        assert [*lines.each(["a", "b" * 100], str.upper)] == ["a", "b" * 100]
    assert capsys.readouterr().err == f"work, 0 s: 1 of 2, A\nwork, 0 s: 2 of 2, {'B' * 100}\n", "no terminal"
    monkeypatch.setattr("fompi.cli.output.terminal_columns", lambda stream: 40)
    with Progress.of_rank(1, "work") as silent:
        silent.step("nothing")
    with Progress.of_rank(0, "work") as progress:
        assert [*progress.each(["a", "b" * 100], str.upper)] == ["a", "b" * 100]
    shown = capsys.readouterr()
    first, second, last = shown.err.split("\r\x1b[K")[1:]
    assert first == "work, 0 s: 1 of 2, A" and second.startswith("work, 0 s: 2 of 2, BB") and last == ""
    assert len(second) == 39 and shown.out == ""
    with Progress() as silent:
        assert [*silent.each([1, 2])] == [1, 2]
    assert capsys.readouterr().err == ""


LOOK = """
import sys
from fompi.cli.output import terminal_columns
if "0" in (__import__("os").environ.get("PMI_RANK"), __import__("os").environ.get("OMPI_COMM_WORLD_RANK")):
    sys.stdout.write(f"columns {terminal_columns(1)} {terminal_columns(2)}\\n")
"""


def test_a_rank_finds_the_terminal_of_its_launcher(mpirun):
    """Ranks write to their launcher: into pipes, or to a terminal that the launcher has made."""
    launched = [Path(sys.executable).with_name("mpirun"), "-n", "2", sys.executable, "-c", LOOK]
    assert f"columns {DEFAULT_COLUMNS} {DEFAULT_COLUMNS}\n" in on_a_terminal(*launched)
    assert "columns None None\n" in mpirun(2, "-c", LOOK).stdout


# ----------------------------------------------------------------------------------------------------- under mpirun


def test_info_of_three_ranks(mpirun):
    """It is printed once. tests/local has the rest."""
    done = mpirun(3, "-m", "fompi", "info", "--json")
    assert done.returncode == 0, done.output
    facts = json.loads(done.stdout)
    assert [row["rank"] for row in facts["ranks"]] == [0, 1, 2] and facts["warning"] is None
    assert facts["versions"]["fompi"] == fompi.__version__
    text = mpirun(2, "-m", "fompi", "info").stdout
    assert text.startswith("fompi ") and text.count("launcher") == 1


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        ("plan all_gather 64x4 --ranks 2 --verify", "verified: 2 ranks", 0),
        ("plan all_gather 64x4 --ranks 0", "fompi: ranks=0 must be an integer", 2),
        ("calibrate --nope", "python -m fompi calibrate: unrecognized arguments: --nope", 2),
    ],
)
def test_what_all_ranks_would_say_rank_0_says(mpirun, arguments, words, status):
    done = mpirun(3, "-m", "fompi", *arguments.split())
    assert done.returncode == status and done.output.count(words) == 1, done.output


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_knows_by_its_variables_whether_it_speaks(rank, monkeypatch, capsys):
    """All ranks end with the same status. Rank 0 speaks before the others end with an error."""
    ended = []
    monkeypatch.setattr("fompi.cli.main.sleep", ended.append)
    for name, value in (("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2"), ("PMI_RANK", rank)):
        monkeypatch.setenv(name, value)
    for arguments, status in (("--version", 0), ("plan", 2), ("plan --nope", 2), ("try 8,8,8 --rounds 0", 2)):
        with pytest.raises(SystemExit) as end:
            main(arguments.split())
        assert end.value.code == status
    assert main(["plan", "all_gather", "64x4", "--ranks", "2"]) == 0
    assert main(["plan", "all_gather", "64x4", "--ranks", "0"]) == 2
    shown = capsys.readouterr()
    assert bool(shown.out) == bool(shown.err) == (rank == "0") and len(ended) == (0 if rank == "0" else 4)


def test_no_command_on_two_ranks(mpirun):
    text = mpirun(2, "-m", "fompi").stdout
    assert text.count("ranks      2 ranks on 1 host") == 1 and text.count("next: ") == 1


SHORT = """
import sys
from fompi.cli.main import main
from fompi.tuning import calibrate, links
from fompi.tuning.verdict import Verdict

calibrate.judge = lambda *measured: Verdict()  # the machine of the tests may be busy
calibrate.PRODUCTS = calibrate.PRODUCTS[-4:]
for module in (calibrate, links):
    module.ROUNDS, module.SIZES = 2, [1 << 10, 1 << 14, 1 << 18]
sys.exit(main(["calibrate", *sys.argv[1:]]))
"""


@pytest.mark.timeout(100)
def test_calibrate(mpirun, tmp_path):
    """It writes a machine that the other commands accept. Few rounds and sizes keep the test short."""
    done = mpirun(2, "-c", SHORT, tmp_path / "machine.json", seconds=90)
    assert done.returncode == 0, done.output
    verdict, written = done.stdout.splitlines()[-2:]
    assert verdict == "verdict: plausible: nothing disturbed the measurement"
    assert written.startswith(f"written to {tmp_path / 'machine.json'} in ")
    steps = [line for line in done.stderr.splitlines() if line.startswith("calibrate, ")]
    assert len(steps) > 8 and steps[0] == "calibrate, 0 s: kernels" and "kernels" not in done.stdout.splitlines()[0]
    text, _ = run("explain", *GATHER.split(), "--machine", tmp_path / "machine.json")
    assert "best: " in text


CALIBRATED = """
import sys
from fompi.cli.main import main
from fompi.model.machine import Machine
from fompi.tuning.verdict import Verdict
import fompi.tuning.calibrate as module

def quick(comm, say, limit, device):
    say("kernels")
    ruins = ["others used 2.0 of 2 cores"] if "busy.json" in sys.argv[1] else []
    return Machine.load("laptop"), Verdict(tuple(ruins))

module.calibrate_and_judge = quick
sys.exit(main(["calibrate", *sys.argv[1:]]))
"""


def test_calibrate_as_json(mpirun, tmp_path):
    """One JSON document, the same as in the file. On a terminal its steps are the progress line."""
    file = tmp_path / "machine.json"
    done = mpirun(2, "-c", CALIBRATED, file, "--json")
    laptop = fompi.Machine.load("laptop")
    assert done.returncode == 0 and fompi.Machine.from_json(done.stdout) == fompi.Machine.load(file) == laptop
    assert done.stderr.splitlines()[0] == "calibrate, 0 s: kernels" and "verdict: plausible" in done.stderr
    file.unlink()
    launched = [Path(sys.executable).with_name("mpirun"), "-n", "2", sys.executable, "-c", CALIBRATED, file]
    assert on_a_terminal(*launched, "--json").count("calibrate, 0 s: kernels") == 1


def test_calibrate_while_others_use_the_cores(mpirun, tmp_path):
    """The verdict says so, the exit status is 1, and no file is written, unless it is demanded."""
    file = tmp_path / "busy.json"
    done = mpirun(2, "-c", CALIBRATED, file)
    assert done.returncode == 1 and not file.exists(), done.output
    assert "verdict: disturbed beyond use: others used 2.0 of 2 cores. Measure again" in done.stdout
    assert f"{file} is not written (--force writes it)" in done.stdout
    done = mpirun(2, "-c", CALIBRATED, file, "--force")
    assert done.returncode == 1 and file.exists() and f"written to {file} in " in done.stdout


@pytest.mark.parametrize(("text", "what"), [("machine", "describes 'another'"), ("[1]", "holds no machine")])
def test_calibrate_spares_the_file_of_another_machine(mpirun, tmp_path, text, what):
    """Also any other file. `--force` overwrites it."""
    file = tmp_path / "machine.json"
    file.write_text(text)
    if text == "machine":
        replace(fompi.Machine.load("laptop"), name="another").save(file)
    before = file.read_text()
    done = mpirun(2, "-c", CALIBRATED, file)
    assert done.returncode == 2 and file.read_text() == before and "kernels" not in done.output, done.output
    assert done.output.count(f"{file} {what}") == 1 and "name another file, or add --force" in done.output
    done = mpirun(2, "-c", CALIBRATED, file, "--force")
    assert done.returncode == 0 and fompi.Machine.load(file) == fompi.Machine.load("laptop")


def test_which_machine_a_file_describes(tmp_path):
    """The same name, ranks and hosts: it is this machine, measured before."""
    file = tmp_path / "machine.json"
    assert described_instead(file, "a, 4 ranks", "4 ranks on 1 host") is None
    file.touch()
    assert described_instead(file, "a, 4 ranks", "4 ranks on 1 host") is None
    source = "measured 2026-01-01T00:00:00+00:00: 4 ranks on 1 host, MPICH 5.0, fompi 0.1.0, float32"
    replace(fompi.Machine.load("laptop"), name="a, 4 ranks", source=source).save(file)
    assert described_instead(file, "a, 4 ranks", "4 ranks on 1 host") is None
    for name, where in (("b, 4 ranks", "4 ranks on 1 host"), ("a, 4 ranks", "4 ranks on 2 hosts")):
        assert described_instead(file, name, where) == f"describes 'a, 4 ranks' ({source})"


@pytest.mark.timeout(60)
def test_calibrate_ends_at_its_limit(mpirun, tmp_path):
    """On all ranks, with one line that names the step."""
    done = mpirun(2, "-m", "fompi", "calibrate", tmp_path / "machine.json", "--limit", "0.5", seconds=50)
    assert done.returncode == 2 and not done.left_behind and not (tmp_path / "machine.json").exists(), done.output
    assert (
        done.output.count("fompi: calibrate: not done after 0.5 s, in the step ") == 1
        and "Traceback" not in done.output
    )


def test_calibrate_needs_others(mpirun, tmp_path):
    done = mpirun(1, "-m", "fompi", "calibrate", tmp_path / "machine.json", seconds=30)
    assert done.returncode == 2 and "one rank has no links to measure" in done.output, done.output
    assert not (tmp_path / "machine.json").exists()


def test_calibrate_checks_its_file_first(mpirun):
    """All ranks get the error before a minute is spent. It is printed once."""
    done = mpirun(2, "-m", "fompi", "calibrate", "/no/such/folder/machine.json", seconds=30)
    assert done.returncode == 2 and "kernels" not in done.stdout and "Traceback" not in done.output
    assert done.output.count("No such file or directory: '/no/such/folder/machine.json'") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [("fompi sim", "simulate"), ("fompi plan all_to", "all_to_all_matmul"), ("fompi slurm --sb", "--sbatch")],
)
def test_completion(line, words, tmp_path):
    """The shell asks by variables (argcomplete)."""
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    answer = tmp_path / "answer"
    environ = {**os.environ, **variables, "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run([SCRIPT], env=environ, timeout=60, check=True)
    assert words in answer.read_text().replace("\013", " ").split()


def test_schedules_of_a_file(tmp_path):
    """plan and explain take schedules of one's own. What is wrong with the file is one line."""
    plain, mine = ("all_gather", "4096x64", "--ranks", "4"), tmp_path / "mine.py"
    mine.write_text(
        "import fompi\nfrom fompi.plans.plan import Compute, Recv, Send\n"
        "if __name__ == '__main__':\n    raise SystemExit('not here')\n"
        "@fompi.schedule('mine', 'all_gather')\ndef mine(problem, work):\n"
        "    for peer in range(work.size):\n"
        "        shard = work['y'][peer * work.parts : (peer + 1) * work.parts]\n"
        "        if peer == work.rank:\n            yield Compute('copy', (work['x'][:],), (shard,))\n"
        "        else:\n            yield Recv(peer, shard)\n            yield Send(peer, work['x'][:])\n"
    )
    text, error = run("plan", *plain, "--load", mine, "--schedule", "mine", "--verify", program=PROGRAM)
    assert " by mine: " in text and error.startswith("verified: ")
    text, _ = run("explain", *plain, "--load", mine, "--schedule", "mine,direct", program=PROGRAM)
    assert "\nmine, " in text and "\nring" not in text
    mine.write_text("x = 1\ny = x / 0\n")
    _, error = run("plan", *plain, "--load", mine, status=2)
    assert error == f"fompi: --load {mine}, line 2: ZeroDivisionError: division by zero\n"
    _, error = run("plan", *plain, "--load", tmp_path / "none.py", status=2)
    assert error.startswith(f"fompi: --load {tmp_path / 'none.py'}: No such file")
