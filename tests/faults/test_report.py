"""FOMPI_REPORT: the report is printed once after a clean end. After any other end there is no report and no delay.

On both MPIs: how the report is gathered while MPI ends. What it says is the same on each.
"""

from __future__ import annotations

import json
import re

import pytest

from fompi.cli.main import main

WORK = """
for _ in range(4):
    fompi.all_gather_matmul(np.ones((64, 32)), np.ones((32, 16)))
    fompi.all_reduce(np.ones(100))
"""


@pytest.fixture
def reporting(launch, monkeypatch, tmp_path):
    """`launch` with FOMPI_REPORT set to `to`."""

    def run(ranks, code, to="1", **options):
        monkeypatch.setenv("FOMPI_REPORT", to)
        return launch(ranks, code, world=False, **options)

    return run


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.one_mpi), 3])
def test_the_report_is_printed_once(reporting, ranks):
    ended = reporting(ranks, WORK)
    finished = ended.finished
    assert finished.returncode == 0 and not finished.left_behind and ended.tracebacks == 0, ended.output
    assert finished.stdout == "" and finished.stderr.count("fompi report: ") == 1
    head, total, verdict, *lines = finished.stderr.splitlines()
    assert f"{ranks} ranks" in head and "progress: " in head and "missing: " not in finished.stderr
    assert total.startswith("total: 8 calls, ") and verdict.startswith("verdict: ")
    columns, *lines = lines[-3:]
    assert columns.split()[:4] == ["calls", "total", "ms", "p50"]
    names = []
    for line in lines:
        calls, *figures = line[:69].split()
        assert calls == "4" and float(figures[1]) > 0 and len([*map(float, figures)]) == 6
        names.append(line[69:].strip())
    assert {name.partition(" by ")[0] for name in names} == {
        "all_gather_matmul(float64 x[64, 32], w[32, 16])",
        "all_reduce(float64 x[100])",
    }
    assert all(name.endswith(" on world") for name in names)
    if ranks == 1:
        assert "rank 1" not in finished.stderr


@pytest.mark.one_mpi
def test_the_full_report_has_a_line_for_each_rank(reporting):
    ranks = 3
    finished = reporting(ranks, WORK, to="full").finished
    assert finished.returncode == 0 and finished.stderr.count("fompi report: ") == 1, finished.output
    _, _, blocks = finished.stderr.partition("\n\n")
    for block, title in zip(blocks.split("\n\n")[:2], ("all_gather_matmul(", "all_reduce("), strict=True):
        lines = block.splitlines()
        assert lines[0].startswith(title) and lines[0].endswith("4 calls")
        assert [line.split()[0] for line in lines[2 : 2 + ranks]] == [str(rank) for rank in range(ranks)]
        for line in lines[2 : 2 + ranks]:
            p50, p99, *rest = map(float, line.split()[1:])
            assert 0 < p50 <= p99 and len(rest) == 7


ON_DEVICE = """
import time
device = fompi.Device("software", seed=fompi.Communicator().rank)
x, w = device.array(np.ones((64, 32), "f4")), device.array(np.ones((32, 16), "f4"))
for k in range(4):
    if fompi.Communicator().rank == 0:
        time.sleep(0.05)  # the other rank waits for its message
    fompi.all_gather_matmul(x, w)
    fompi.mark_step()
"""


@pytest.mark.one_mpi
def test_how_long_the_host_waited_for_messages_of_devices(reporting, tmp_path):
    finished = reporting(2, ON_DEVICE).finished
    words = r"^the host waited for messages: (\S+) ms in all, (\S+) ms for each of 3 steps, on rank 1$"
    found = re.search(words, finished.stderr, re.MULTILINE)
    assert finished.returncode == 0 and found, finished.output
    assert 100 < float(found[1]) < 10_000 and float(found[2]) == pytest.approx(float(found[1]) / 3, rel=0.01)


STEPS = """
from fompi.parallel.data import DataParallel
from fompi.parallel.optimizers import SGD
data, other = (DataParallel({"w": np.ones(64)}, optimizer=SGD(0.1), comm=fompi.Communicator()) for _ in range(2))
for _ in range(5):
    fompi.all_gather_matmul(np.ones((64, 32)), np.ones((32, 16)))
    for each in data, other:
        each.ready("w", np.ones(64))
        each.step()
    MARK
data.close()
other.close()
"""


@pytest.mark.one_mpi
@pytest.mark.parametrize(("mark", "said"), [("", ""), ("fompi.mark_step(tokens=128, flops=1e6)", " tokens/s, ")])
def test_steps(reporting, mark, said):
    """Those that the program marks, or else the updates of one of its optimizers."""
    finished = reporting(2, STEPS.replace("MARK", mark)).finished
    assert finished.returncode == 0, finished.output
    steps, inside = finished.stderr.splitlines()[2:4]
    assert steps.startswith("steps: 4, ") and said in steps and " GFLOP/s a rank" in steps
    assert inside.startswith("a step has ") and "world/sum " in inside


@pytest.mark.one_mpi
def test_steps_of_optimizers_of_torch(reporting):
    """A program of torch's own classes, which calls nothing of fompi."""
    code = """
import torch, torch.distributed as dist
dist.init_process_group("fompi")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    net(torch.ones(3, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
    finished = reporting(2, code).finished
    assert finished.returncode == 0, finished.output
    assert any(line.startswith("steps: 4, ") for line in finished.stderr.splitlines()), finished.stderr


@pytest.mark.one_mpi
def test_a_trace_of_the_job(reporting, tmp_path, monkeypatch, capsys):
    """The file has the newest calls of all ranks. `fompi trace` makes of it what Perfetto opens, and a picture."""
    path = tmp_path / "run.json"
    finished = reporting(2, WORK, to=str(path)).finished
    assert finished.returncode == 0, finished.output
    monkeypatch.delenv("FOMPI_REPORT")
    assert main(["trace", str(path), "--picture", str(tmp_path / "run.svg")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fompi report: 2 ranks") and "measured: the newest calls of 2 ranks, " in printed
    entries = json.loads((tmp_path / "run.trace.json").read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == {0, 1} and sum(entry["ph"] == "X" for entry in entries) > 16
    assert (tmp_path / "run.svg").read_text().startswith("<svg")


@pytest.mark.one_mpi
def test_only_one_rank_has_fompi_report(launch):
    """A launcher may not forward the environment. This is an error at the start, instead of a wait at the end."""
    code = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    os.environ["FOMPI_REPORT"] = "1"
fompi.all_reduce(np.ones(3))
"""
    ended = launch(2, code, world=False)
    assert ended.finished.returncode != 0 and not ended.finished.timed_out, ended.output
    assert "with FOMPI_REPORT" in ended.output and "MismatchError" in ended.output


@pytest.mark.one_mpi
def test_a_closed_communicator_is_in_the_report(reporting, tmp_path):
    """Its baselines were measured when it was closed. The report goes to the file, and nothing to stderr."""
    code = """
with fompi.Communicator(name="inner") as inner:
    fompi.all_gather(np.ones((50, 2)), comm=inner)
"""
    ended = reporting(2, code, to=str(tmp_path / "report.json"))
    ended.assert_clean()
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["size"] == 2 and [rank["rank"] for rank in written["ranks"]] == [0, 1]
    for rank in written["ranks"]:
        (operation,) = rank["operations"]
        assert (
            operation["communicator"] == "inner"
            and operation["messages_alone"] > 0
            and operation["compute_alone"] is not None
        )


@pytest.mark.one_mpi
def test_an_overlap_that_did_not_happen(reporting):
    """Rank 1 is later than its messages take. Rank 0 prints one warning that says for which rank it waits."""
    code = """
from fompi import Shard, Spec

def matmul(reads, writes):
    time.sleep(0.003)

rank = fompi.Communicator.of(None).rank
x, w = Spec((3 << 20, 8), "float32", Shard(0)), Spec((8, 2), "float32", Shard(1))
plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=2, schedule="direct")
tensors = {"x": np.ones((3 << 19, 8), np.float32), "w": np.ones((8, 1), np.float32)}
step = fompi.bind(plan, kernels={"matmul": matmul}, **tensors)
for _ in range(9):
    fompi.all_reduce(np.ones(1))
    time.sleep(0.012 * rank)
    step()
step.compute_seconds()
"""
    for _ in range(3):  # a busy machine may hold up both ranks, and the first rank to see it prints the warning
        ended = reporting(2, code)
        assert ended.finished.returncode == 0 and ended.tracebacks == 0, ended.output
        warnings = [line for line in ended.finished.stderr.splitlines() if "OverlapWarning: " in line]
        assert len(warnings) <= 1, ended.output
        warning = "".join(warnings)
        if " on rank 0: " in warning:
            break
    assert "all_gather_matmul by direct: " in warning and " on rank 0: " in warning, ended.output
    assert "ms for full[1] from rank 1" in warning and ". Progress: " in warning, ended.output


@pytest.mark.one_mpi
def test_no_report_after_a_failure(reporting):
    """The report does not delay the end of the job."""
    ended = reporting(3, WORK + """
if fompi.Communicator.of(None).rank == 1:
    event()
    raise RuntimeError("the original error")
fompi.all_reduce(np.ones(100))
""")  # fmt: skip
    ended.assert_failed("RuntimeError: the original error")
    assert "fompi report" not in ended.output


def test_a_rank_that_leaves_by_os_exit(reporting):
    """The other ranks end as they would without a report, or say which rank is missing."""
    ended = reporting(2, WORK + """
if fompi.Communicator.of(None).rank == 1:
    os._exit(0)
""", timeout=3)  # fmt: skip
    assert not ended.finished.timed_out and not ended.finished.left_behind, ended.output


def test_mpi_that_the_program_has_finalized(reporting):
    """The report cannot be gathered any more, so rank 0 reports only its own part."""
    ended = reporting(2, WORK + """
from mpi4py import MPI
MPI.Finalize()
""")  # fmt: skip
    assert ended.finished.returncode == 0 and ended.tracebacks == 0, ended.output
