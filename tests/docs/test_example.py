"""The main job, as a user starts it: it learns, it follows a single process, and it says what overlap gained."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

EXAMPLE = "examples/tp_mlp.py"


def is_table_right(text):
    """Of the comparison: both kinds of step, and what follows from what was measured."""
    rows = re.findall(r"^  (with overlap|without)((?: +\d+\.\d){6})$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["with overlap", "without"], text
    for _, figures in rows:
        step, p99, compute, messages, exposed, hidden = map(float, figures.split())
        assert 0 < step <= p99 and compute > 0
        assert exposed == pytest.approx(max(0, step - compute), abs=0.11)
        assert hidden == pytest.approx(max(0, messages - exposed), abs=0.11)


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("ranks", "framework"), [*((n, "numpy") for n in (1, 2, 3, 4, 8)), (2, "torch"), (2, "jax"), (3, "torch")]
)
def test_the_main_job(mpirun, ranks, framework):
    """Accuracy, deviations and the comparison are read off its output, which rank 0 alone writes."""
    options = [] if framework == "numpy" else ["--framework", framework]
    done = mpirun(ranks, EXAMPLE, *options, seconds=160)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    lines = done.stdout.splitlines()
    assert f"{ranks} ranks, {framework}:" in lines[0]

    epochs = [re.fullmatch(r"epoch +(\d+)  loss (\d\.\d+)  test accuracy (\d+\.\d)%", line) for line in lines]
    epochs = [(int(m[1]), float(m[2]), float(m[3])) for m in epochs if m]
    assert [number for number, _, _ in epochs] == list(range(1, len(epochs) + 1)) and len(epochs) >= 10
    assert epochs[-1][1] < epochs[0][1] / 5
    assert float(re.fullmatch(r"test accuracy (\d+\.\d)%", lines[-1])[1]) == epochs[-1][2] >= 95

    (follows,) = [line for line in lines if line.startswith("against a single process")]
    found = re.search(r"first gradients within (\S+), (\d+) losses within (\S+)$", follows)
    assert float(found[1]) <= 1e-5 and int(found[2]) == 50 and float(found[3]) <= 1e-3

    is_table_right(done.stdout)
    assert any(re.match(r"  ratio \d+\.\d\d \(above 1: overlap is faster\)", line) for line in lines)
    assert any("share the memory" in line for line in lines) == (ranks > 1)


@pytest.mark.parametrize(("ranks", "framework"), [(1, "numpy"), (2, "numpy"), (3, "numpy"), (2, "torch"), (2, "jax")])
def test_a_wide_model_and_its_picture(mpirun, tmp_path, ranks, framework):
    """Random features in, codes out: it learns, it follows a single process, and both kinds of step are drawn."""
    picture = tmp_path / "made" / "steps.svg"
    options = f"--framework {framework} --width 128 --batch 256 --epochs 12 --learning-rate 0.2 --slices 2 --timelines"
    done = mpirun(ranks, EXAMPLE, *options.split(), str(picture), seconds=50)
    assert done.returncode == 0 and not done.timed_out and not done.left_behind, done.output
    assert "x[256, 128] w1[128, 256] w2[256, 128]" in done.stdout
    found = re.search(r"first gradients within (\S+), (\d+) losses within (\S+)$", done.stdout, re.MULTILINE)
    assert float(found[1]) <= 1e-5 and int(found[2]) == 50 and float(found[3]) <= 1e-3

    is_table_right(done.stdout)
    assert ("share the memory" in done.stdout) == (ranks > 1)

    words = [text.text for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    titles = [word.split(":")[0] for word in words if word.endswith(" ms")]
    assert titles == ["with overlap", "without"]
    assert sum(word.startswith("rank ") for word in words) == 2 * ranks


def test_a_batch_of_more_images_than_there_are(mpirun):
    done = mpirun(1, EXAMPLE, "--batch", "2000")
    assert done.returncode != 0 and "--batch is 1 to 1438" in done.output and "Traceback" not in done.output


def test_an_unknown_framework(mpirun):
    """One message of argparse from each rank, no traceback, a status that is not 0."""
    done = mpirun(2, EXAMPLE, "--framework", "tensorflow")
    assert done.returncode != 0 and not done.left_behind
    assert "invalid choice: 'tensorflow'" in done.output and "Traceback" not in done.output
