"""Records of programs that run, replayed afterwards: of torch's DistributedDataParallel and of mpi4py by FOMPI_RECORD,

and of torch on gloo, which never sees fompi, by torch.profiler.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import traces

from fompi.cli.main import main
from fompi.model.replay import Graph
from fompi.planner.advice import advise
from fompi.runtime.recorder import MOST_KINDS, Recorder
from fompi.traces.record import MOST_CALLS, STEP, load

DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("fompi")
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.03)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""

MPI4PY = """
from time import sleep
import numpy as np
from mpi4py import MPI
import fompi

comm, small, large = MPI.COMM_WORLD, np.ones(8), np.ones(1 << 20)
y, z = np.empty_like(small), np.empty_like(large)
for step in range(4):
    sleep(0.05 * comm.rank)                  # rank 1 is late
    comm.Allreduce(small, y)                 # by the MPI library
    request = comm.Iallreduce(large, z)      # by fompi
    request.Wait()
    fompi.send(small, 1) if comm.rank == 0 else fompi.recv(0)
    fompi.mark_step()
"""


GLOO = """
import os, sys
import torch
import torch.distributed as dist

folder, child = sys.argv[1], os.fork()
rank = int(child == 0)
dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.03)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
with torch.profiler.profile(record_shapes=True, schedule=schedule) as profiler:
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        profiler.step()
profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
dist.destroy_process_group()
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


def test_gradients_of_torch_on_gloo(tmp_path, capsys):
    """torch.profiler with record_shapes=True writes a trace of each rank."""
    words = [sys.executable, "-c", GLOO, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert traces.main([str(tmp_path), str(tmp_path / "run")]) == 0
    graph = Graph.of(load(tmp_path / "run"))
    sums = {kind.nbytes for kind in graph.kinds if kind.moves == "all_reduce"}
    assert sums and sum(sums) <= 4 * 4 * 65 * 64 and all(kind.group == (0, 1) for kind in graph.kinds)
    assert len(graph.measured.steps) == 3 and graph.run().step == pytest.approx(graph.measured.step, rel=0.3)
    assert main(["advise", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("3 steps of 2 of 2 ranks: measured ")


@pytest.fixture
def recorded(mpirun, tmp_path):
    """Runs a program on two ranks with FOMPI_RECORD, and returns its record."""

    def run(program, *module, is_killed=False):
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        words = [f"import os; os.environ['FOMPI_RECORD'] = {str(tmp_path / 'run')!r}"]
        words += [f"import runpy, sys; sys.argv = ['x', {str(tmp_path / 'program.py')!r}]"]
        words += (
            [f"runpy.run_module({module[0]!r}, run_name='__main__')"] if module else ["runpy.run_path(sys.argv[1])"]
        )
        done = mpirun(2, "-c", "; ".join(words), seconds=50)
        assert (done.returncode == 0) != is_killed, done.output
        return load(tmp_path / "run")

    return run


KILLED = """
import os, signal
import numpy as np
import fompi

for step in range(6):
    fompi.all_reduce(np.ones(8))
    fompi.mark_step()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_program_that_is_killed_leaves_the_record_of_its_first_steps(recorded, tmp_path, capsys):
    ranks = recorded(KILLED, is_killed=True)
    assert [int((rank.calls["kind"] == STEP).sum()) for rank in ranks] == [4, 4]
    assert not main(["replay", str(tmp_path / "run")]) and "steps of 2 of 2 ranks" in capsys.readouterr().out


def test_gradients_of_torch(recorded, tmp_path, capsys):
    """The step of an optimizer ends a step. Nobody was seen to wait for a bucket: C++ code does."""
    ranks = recorded(DDP)
    graph = Graph.of(ranks)
    assert [rank.rank for rank in ranks] == [0, 1] and len(graph.measured.steps) == 5
    sums = [kind for kind in graph.kinds if kind.moves == "all_reduce" and kind.dtype == "float32"]
    assert sums and all(kind.group == (0, 1) and kind.nbytes > 0 for kind in sums)
    assert graph.run().step == pytest.approx(graph.measured.step, rel=0.1)
    assert main(["replay", str(tmp_path / "run")]) == 0 and main(["advise", str(tmp_path / "run")]) == 0
    assert "5 steps of 2 of 2 ranks" in capsys.readouterr().out


def test_a_program_of_mpi4py(recorded):
    ranks = recorded(MPI4PY, "fompi.mpi")
    graph = Graph.of(ranks)
    names = {kind.operation: kind for kind in graph.kinds}
    assert {"Allreduce", "all_reduce", "send", "recv"} <= names.keys()
    assert names["all_reduce"].shapes == "float64 x[1048576]" and names["Allreduce"].nbytes == 64
    assert len(graph.measured.steps) == 3 and graph.run().step == pytest.approx(graph.measured.step, rel=0.04)
    first, second = (rank.calls[rank.calls["kind"] != STEP] for rank in ranks)
    late = first["late"][first["kind"] == ranks[0].kinds.index(names["all_reduce"])]
    assert set(late) <= {-1, 0, 1} and len(first) == len(second) == 12
    assert not np.isnan(first["wait"]).any()  # the program waited for all of them
    best = advise(graph, [rank.host for rank in ranks])[0]
    assert best.is_fault and best.what == "rank 1 at the median speed"


def test_a_record_is_bounded(tmp_path):
    """Calls with other sizes each time share kinds in the end, and the oldest calls go."""
    recorder = Recorder(str(tmp_path))
    comm = SimpleNamespace(name="world", number=0, link=SimpleNamespace(world_ranks=[0]))
    for n in range(MOST_CALLS + 5):
        recorder.note_library(comm, "Bcast", "broadcast", [SimpleNamespace(nbytes=n)], float(n))
    recorder.mark(recorder.updates[7])
    recorder.finish()
    (rank,) = load(tmp_path)
    assert len(rank.calls) == MOST_CALLS and len(rank.kinds) <= MOST_KINDS + 20
    assert rank.calls["number"][0] == 7 and rank.calls["kind"][-1] == STEP
