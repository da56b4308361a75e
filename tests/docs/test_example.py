"""The examples, started as a user starts them: they print what they show, and the main job learns and compares."""

from __future__ import annotations

import ast
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import job
import pytest
from tiny_model import CONFIG, OTHERS, TOKENS, write

FOLDER = Path(__file__).resolve().parents[2] / "examples"
MAIN_JOB = FOLDER / "tp_mlp.py"
THREE_AXES = FOLDER / "transformer_3d.py"
ULYSSES, WHOLE_STEP = FOLDER / "ulysses_attention.py", FOLDER / "whole_step.py"
SAME_BITS = FOLDER / "same_bits.py"
GENERATE = FOLDER / "generate.py"
WITH_KILLS = [FOLDER / "islands.py", FOLDER / "torchft_ddp.py"]
"""`test_torchft.py` and `test_islands.py` of tests/faults run them: several processes, some of which are killed."""
ONE_IDEA = sorted({*FOLDER.glob("*.py")} - {MAIN_JOB, THREE_AXES, GENERATE, *WITH_KILLS, FOLDER / "harness.py"})

# ------------------------------------------------------------------------------------------- one idea in each


RUN_ALL = "import runpy, sys; [runpy.run_path(path, run_name='__main__') for path in sys.argv[1:]]"
"""Several examples in one job: a framework takes seconds to load."""


def ranks_of(example):
    """The number of ranks in the command that an example shows; 0: it needs no mpirun."""
    found = re.search(rf"^    (?:mpirun -n (\d+) )?python examples/{example.name}$", example.read_text(), re.MULTILINE)
    assert found, f"{example.name} does not show how it is started"
    return int(found[1] or 0)


def shown(example):
    """The comment at the end of an example, as the text that it prints."""
    _, title, comment = example.read_text().rpartition("\n# Output")
    assert title, f"{example.name} does not show what it prints"
    return "".join(re.sub("^# ?", "", line) + "\n" for line in comment.splitlines()[1:])


def masked(text):
    """The text with # for each time, and without the widths of columns."""
    return re.sub(r"\d+\.\d+%?", "#", unpadded(re.sub(" +", " ", text)))


def unpadded(text):
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.mark.timeout(140)
@pytest.mark.parametrize("ranks", sorted({ranks_of(example) for example in ONE_IDEA}))
def test_examples_print_what_they_show(mpirun, tmp_path, ranks):
    """In an empty folder, in the order of their names. Times are compared where they are predicted."""
    examples = [example for example in ONE_IDEA if ranks_of(example) == ranks]
    command = ["-c", RUN_ALL, *map(str, examples)]
    start = {"cwd": tmp_path}
    done = mpirun(ranks, *command, seconds=120, **start) if ranks else job.run([sys.executable, *command], 60, **start)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    compared = masked if ranks else unpadded
    assert compared(done.stdout) == compared("".join(map(shown, examples))), done.output


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("ranks", "layer"), [(1, "jax_layer"), (3, "torch_layer")])
def test_examples_run_on_other_numbers_of_ranks(mpirun, tmp_path, ranks, layer):
    """The schedule prints the same on any number of ranks."""
    names = ["all_gather_matmul", "bind_and_trace", "own_schedule", layer]
    done = mpirun(ranks, "-c", RUN_ALL, *(FOLDER / f"{name}.py" for name in names), seconds=90, cwd=tmp_path)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    assert done.stdout.count(": True") == 3 and "False" not in done.stdout, done.stdout
    assert shown(FOLDER / "own_schedule.py") in done.stdout, done.stdout


ALL = [*ONE_IDEA, MAIN_JOB, THREE_AXES, GENERATE, *WITH_KILLS]


@pytest.mark.parametrize("example", ALL, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_its_idea_first(example):
    text = example.read_text()
    assert text.count("\n") <= {
        MAIN_JOB: 150,
        THREE_AXES: 80,
        ULYSSES: 80,
        WHOLE_STEP: 150,
        GENERATE: 570,
        SAME_BITS: 65,
        FOLDER / "torchft_ddp.py": 70,
        FOLDER / "islands.py": 75,
    }.get(example, 60)
    assert ast.get_docstring(ast.parse(text)).splitlines()[0].endswith(".")
    inside = re.search(r"^(from|import) fompi\.(?!plans\.plan\b|torch\.torchft\b)", text, re.MULTILINE)
    assert not inside, "take names from fompi itself"


def test_there_are_examples_of_one_idea():
    names = "all_gather_matmul bind_and_trace dlpack_exchange jax_layer own_schedule plan_and_simulate torch_layer"
    assert {example.stem for example in ONE_IDEA} >= set(names.split())


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("ranks", "steps"), [(8, 2), (3, 8)])
def test_three_axes(mpirun, tmp_path, ranks, steps):
    """The losses of a single process, a picture, and what was hidden on each axis. It learns within 8 steps.

    Three ranks have different numbers of rows.
    """
    picture = tmp_path / "made" / "loss.png"
    done = mpirun(ranks, THREE_AXES, "--steps", str(steps), "--plot", picture, seconds=140)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    first, *lines = done.stdout.splitlines()
    assert picture.read_bytes().startswith(b"\x89PNG")
    begin, end = map(float, re.fullmatch(rf"loss (\d\.\d+) .{{{steps}}} (\d\.\d+)", first).groups())
    assert 5 < begin < 6 and (steps < 8 or end < 5)
    assert re.fullmatch(rf"the first {steps} losses are those of a single process within \S+: True", lines[0])
    if ranks == 8:
        assert [masked(line) for line in lines[1:]] == [masked(line) for line in shown(THREE_AXES).splitlines()[2:]]


ASKED = "--ids", "1,5,7,9,11,2,3", "--tokens", "12"


@pytest.mark.timeout(120)
def test_generate_by_torchrun(tmp_path):
    write(tmp_path)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = job.run([*run, *map(str, (GENERATE, tmp_path, *ASKED))], 100, env={"OMP_NUM_THREADS": "1"})
    are_the_tokens(done)


def are_the_tokens(done):
    assert done.returncode == 0 and not done.left_behind and f"tokens: {TOKENS}\n" in done.stdout, done.output
    assert re.search(r"^prefill: \d+ tokens/s, decode: [\d.]+ tokens/s", done.stdout, re.MULTILINE), done.output


EACH = """
import runpy, sys
program, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [program, *line.split()]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code
"""


SHARES_OF_3 = (
    "--shares heads=12,0,12/columns=24,76,0/vocabulary=0,1,100 --rebalance 5",  # 24 heads
    "--shares layers=1,0,1 --temperature 0",
)
SHARES_OF_4 = ("--shares auto", "--shares heads=0,2,3,1/columns=0,1,98,1", "--rebalance 3", "--shares layers=0,0,2,0")


@pytest.mark.timeout(240)
def test_generate(mpirun, tmp_path):
    """The tokens of one process, on any number of ranks: heads, columns and vocabulary do not divide. Samples, too.

    So with shares: some ranks have nothing, layers are dealt, and shares change. Twelve runs in three jobs: torch takes
    seconds to load.
    """
    write(tmp_path)
    write(tmp_path / "more", num_attention_heads=24, num_key_value_heads=8, head_dim=2)
    line, more = (" ".join((str(folder), *ASKED)) for folder in (tmp_path, tmp_path / "more"))
    lines = [line, f"{line} --temperature 0.8", more]
    found = [set(), set(), set()]
    for ranks, shares in ((1, []), (3, SHARES_OF_3), (4, SHARES_OF_4)):
        asked = [*lines, *(f"{more if '24' in each else line} {each}" for each in shares)]
        done = mpirun(ranks, "-c", EACH, GENERATE, *asked, seconds=90)
        are_the_tokens(done)
        printed = re.findall(r"^tokens: (.*)$", done.stdout, re.MULTILINE)
        for of, tokens in zip([0, 1, 2, *(2 if "24" in each else 0 for each in shares)], printed, strict=True):
            found[of].add(tokens)
    assert [*map(len, found)] == [1, 1, 1] and TOKENS in found[0], found


@pytest.mark.timeout(60)
def test_generate_reads_what_changes_the_tokens(tmp_path):
    """In one process: torch takes seconds to load."""
    folders = [tmp_path / str(number) for number in range(len(OTHERS))]
    for folder, (changes, _) in zip(folders, OTHERS, strict=True):
        write(folder, **changes)
    lines = [" ".join((str(folder), *ASKED)) for folder in folders]
    done = job.run([sys.executable, "-c", EACH, str(GENERATE), *lines], 50)
    printed = re.findall(r"^tokens: (.*)$", done.stdout, re.MULTILINE)
    assert printed == [tokens for _, tokens in OTHERS], done.output


REFUSED_KEYS = {
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7},
    "sliding_window": 4,
    "quantization_config": {"bits": 4},
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu",
    "attention_bias": True,
    "tie_word_embeddings": True,
    "model_type": "gemma",
    "a_key_of_tomorrow": True,
    "is_causal": False,  # off is not what is usual
    "logit_scale": 0,
    "clip_qkv": 1.0,
    "output_multiplier": 2.0,
    "rms_norm_eps": "1e-6",
    "rope_theta": 0,
    "mlp_bias": "false",
    "use_sliding_window": True,
    "layer_types": ["full_attention", "chunked_attention"],
}
REFUSED_OPTIONS = {
    "--ids 1,5,700": "tokens are from 0 to 100",
    "--ids a,b": "--ids 'a,b': give the numbers of tokens",
    "--ids 1 --temperature -1": "--temperature and --seed 0 or more",
    "--ids 1 --temperature nan": "--temperature and --seed 0 or more",
    "--ids 1 --temperature inf": "--temperature and --seed 0 or more",
    "--ids 1 --tokens 0": "--tokens must be 1 or more",
    "--prompt hi": "tokenizer",
    "--ids 1 --shares heads=5,2": "shares=[5, 2] of heads add up to 7, but there are 6",
    "--ids 1 --shares columns=1,2,3": "are 3 numbers of columns, but there are 2 ranks",
    "--ids 1 --shares heads=-1,7": "--shares 'heads=-1,7': give auto",
    "--ids 1 --rebalance 0": "--rebalance must be 1 or more",
    "": "give --prompt or --ids",
}
ALL_REFUSED = """
import json, pathlib, runpy, sys
program, folder, cases, config = sys.argv[1], pathlib.Path(sys.argv[2]), *map(json.loads, sys.argv[3:])
for key, value, words in cases:
    (folder / "config.json").write_text(json.dumps({**config, key: value} if key else config))
    sys.argv = [program, str(folder), *words.split()]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        assert end.code == 2
"""


NOT_FINITE = """
import pathlib, runpy, sys
program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def run(*words):
    sys.argv = [program, str(folder), "--ids", "1,2", "--tokens", "9", *words]
    runpy.run_path(program, run_name="__main__")
for temperature in ("1e300", "1e308"):
    try:
        run("--temperature", temperature)
    except SystemExit as end:
        assert end.code == 0
file = folder / "model.safetensors"
file.write_bytes(file.read_bytes()[:-4] + bytes.fromhex("0000c07f"))
run()
"""


@pytest.mark.timeout(60)
def test_generate_at_the_largest_numbers(tmp_path):
    """A large temperature has samples as any other one. A weight that is NaN makes no text."""
    write(tmp_path)
    done = job.run([sys.executable, "-c", NOT_FINITE, GENERATE, tmp_path], 50)
    first, second = [line for line in done.stdout.splitlines() if line.startswith("tokens: ")]
    assert first == second and done.returncode == 2, done.output
    assert done.stderr.startswith("generate.py: a logit is not finite") and "Traceback" not in done.output, done.output


@pytest.mark.timeout(100)
def test_generate_refuses_in_one_line(mpirun, tmp_path):
    """Keys that are not read, by name, and options; one line of the first rank for each."""
    write(tmp_path)
    cases = [(key, value, "--ids 1") for key, value in REFUSED_KEYS.items()]
    cases += [("", None, words) for words in REFUSED_OPTIONS]
    done = mpirun(2, "-c", ALL_REFUSED, GENERATE, tmp_path, json.dumps(cases), json.dumps(CONFIG), seconds=90)
    lines = [line for line in done.stderr.splitlines() if line.startswith("generate.py: ")]
    assert len(lines) == len(cases) and "Traceback" not in done.output, done.output
    for wanted, line in zip([*REFUSED_KEYS, *REFUSED_OPTIONS.values()], lines, strict=True):
        assert wanted.replace("rope_parameters", "rope_scaling (rope_parameters)") in line


# ------------------------------------------------------------------------------------------------ the main job

WIDE = "--width 128 --learning-rate 0.2 --slices 2 --timelines"
"""Random features in, codes out, and a picture of both kinds of step. Its path follows."""


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (8, ""),  # as `make run` does
        (3, "--epochs 5 --batch 119"),
        (1, f"--epochs 5 {WIDE}"),
        (2, "--epochs 5 --device software"),
        (2, f"--epochs 5 --framework jax {WIDE}"),
        (2, f"--epochs 5 --batch 119 --hidden 255 --framework torch {WIDE}"),  # shards of different sizes
    ],
)
def test_the_main_job(mpirun, tmp_path, ranks, options):
    """All is read off its output, which rank 0 alone writes."""
    picture = tmp_path / "made" / "steps.svg"
    words = [*options.split(), *([picture] if "--timelines" in options else [])]
    done = mpirun(ranks, MAIN_JOB, *words, seconds=90)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    lines = done.stdout.splitlines()
    framework = next((name for name in ("jax", "torch") if name in options), "numpy")
    batch, hidden = 119 if "--batch" in options else 120, 255 if "--hidden" in options else 256
    features, outputs = (128, 128) if "--width" in options else (64, 10)
    shapes = f"x[{batch}, {features}] w1[{features}, {hidden}] w2[{hidden}, {outputs}]"
    assert lines[0] == f"1438 images, {ranks} ranks, {framework}: {shapes}"

    does_learn(lines, epochs=5 if options else 15)
    does_follow_a_single_process(done.stdout)
    is_table_right(done.stdout)
    assert ("share the memory" in done.stdout) == (ranks > 1)
    if "--timelines" in options:
        assert f"The step in the middle of each kind: {picture}" in lines
        is_picture_right(picture, ranks)


def does_learn(lines, epochs):
    """The loss falls, and the accuracy at the end is that of a good run."""
    found = [re.fullmatch(r"epoch +(\d+)  loss (\d\.\d+)  test accuracy (\d+\.\d)%", line) for line in lines]
    figures = [(int(m[1]), float(m[2]), float(m[3])) for m in found if m]
    assert [number for number, _, _ in figures] == list(range(1, epochs + 1))
    assert figures[-1][1] < figures[0][1] / 5
    assert float(re.fullmatch(r"test accuracy (\d+\.\d)%", lines[-1])[1]) == figures[-1][2] >= 95


def does_follow_a_single_process(text):
    (found,) = re.findall(r"first gradients within (\S+), (\d+) losses within (\S+)$", text, re.MULTILINE)
    assert float(found[0]) <= 1e-5 and int(found[1]) == 50 and float(found[2]) <= 1e-3


def is_table_right(text):
    """Both kinds of step, and what follows from what was measured."""
    rows = re.findall(r"^  (with overlap|without)((?: +\d+\.\d){6})$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["with overlap", "without"], text
    for _, figures in rows:
        step, p99, compute, messages, exposed, hidden = map(float, figures.split())
        assert 0 < step <= p99 and compute > 0
        assert exposed == pytest.approx(max(0, step - compute), abs=0.11)
        assert hidden == pytest.approx(max(0, messages - exposed), abs=0.11)
    assert re.search(r"^  ratio \d+\.\d\d \(above 1: overlap is faster\)$", text, re.MULTILINE)


def is_picture_right(picture, ranks):
    words = [text.text for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    titles = [word.split(":")[0] for word in words if word.endswith(" ms")]
    assert titles == ["with overlap", "without"]
    assert sum(word.startswith("rank ") for word in words) == 2 * ranks


def test_a_run_that_learns_too_little_says_so(mpirun):
    """The exit status is 1, and the last line is still there. After fewer epochs than usual it is 0."""
    for epochs, status, words in (
        (15, 1, "below the 95% that the default settings reach. The exit status is 1."),
        (1, 0, "below the 95% of 15 epochs, as may be after fewer."),
    ):
        done = mpirun(1, MAIN_JOB, "--epochs", str(epochs), "--batch", "1400", "--hidden", "8")
        assert done.returncode == status and not done.left_behind, done.output
        assert words in done.stdout
        assert "test accuracy" in done.stdout.splitlines()[-1]


def test_a_batch_of_more_images_than_there_are(mpirun):
    done = mpirun(1, MAIN_JOB, "--batch", "2000")
    assert done.returncode != 0 and "--batch is 1 to 1438" in done.output and "Traceback" not in done.output


def test_an_unknown_framework(mpirun):
    """One message of argparse from each rank, no traceback, a status that is not 0."""
    done = mpirun(2, MAIN_JOB, "--framework", "tensorflow")
    assert done.returncode != 0 and not done.left_behind
    assert "invalid choice: 'tensorflow'" in done.output and "Traceback" not in done.output
