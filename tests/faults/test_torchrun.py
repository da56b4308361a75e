"""torchrun starts the ranks: MPI connects them with MPICH, UCX with Open MPI and where no mpi4py is installed."""

from __future__ import annotations

import os
import sys
import textwrap

import job
import pytest

PROGRAM = textwrap.dedent("""
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("fompi")
    x = torch.ones(4)
    dist.all_reduce(x)
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == 1 and attempt == "0":
        raise ValueError("had enough")
    dist.barrier()
    os.write(1, f"rank {rank} of {dist.get_world_size()}: {x.tolist()}, attempt {attempt}\\n".encode())
    dist.destroy_process_group()
""")


HIDDEN = """
import sys

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mpi4py":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hider())
"""


@pytest.mark.parametrize("has_mpi4py", [True, pytest.param(False, marks=pytest.mark.one_mpi)])
@pytest.mark.timeout(150)
def test_torchrun(tmp_path, has_mpi4py, monkeypatch):
    """A rank fails, and torchrun starts all of them again."""
    (tmp_path / "train.py").write_text(PROGRAM)
    if not has_mpi4py:
        (tmp_path / "sitecustomize.py").write_text(HIDDEN)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--standalone")
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "train.py")]
    done = job.run(command, 120, env={"FOMPI_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert not done.timed_out and not done.left_behind, done.output
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 2: [2.0, 2.0, 2.0, 2.0], attempt 1" for rank in (0, 1)], done.output
    assert done.returncode == 0 and done.stderr.count("ValueError: had enough") == 1
