"""Processes that a program starts itself, and that know an address, a file or a store, their rank and their number."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import textwrap

import job
import pytest

PROGRAM = textwrap.dedent("""
    import os, signal, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def work(rank, size, backend, method, port, ending):
        if method == "env":
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(size))
            dist.init_process_group(backend)
        elif method == "store":
            store = dist.TCPStore("127.0.0.1", int(port), size, rank == 0)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        elif method == "beside":
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        else:
            url = f"tcp://127.0.0.1:{port}" if method == "tcp" else f"file://{os.getcwd()}/meeting"
            dist.init_process_group(backend, url, rank=rank, world_size=size)
        group = dist.new_group(backend=backend) if method == "beside" else None
        x = torch.full((4,), rank + 1.0)
        dist.all_reduce(x, group=group)
        pair = dist.new_group([0, size - 1], backend=backend)
        y = torch.tensor([rank])
        if rank in (0, size - 1):
            dist.all_reduce(y, group=pair)
        import fompi
        local = fompi.mpi.launcher.detect()
        words = f"rank {rank} of {size}: {x.tolist()} {y.item()} {dist.get_backend(group)} {local.local_rank}"
        os.write(1, f"{words}/{local.local_size}\\n".encode())
        if rank == 1 and ending == "raise":
            raise ValueError("had enough")
        if rank == 1 and ending == "exit":
            sys.exit("had enough")
        if rank == 1 and ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier(group=group)
        if ending == "destroy":
            dist.destroy_process_group()

    if __name__ == "__main__":
        size, how, *words = sys.argv[1:]
        mp.start_processes(work, (int(size), *words), nprocs=int(size), start_method=how)
        os.write(1, b"all have ended\\n")
""")

WAYS = (
    (2, "spawn", "fompi", "tcp", "destroy"),
    (3, "fork", "fompi", "tcp", ""),
    (2, "forkserver", "fompi", "file", ""),
    (2, "fork", "fompi", "store", ""),
    (2, "fork", "fompi", "env", "destroy"),
    (2, "fork", "fompi", "beside", "destroy"),
    (2, "spawn", "gloo", "tcp", "destroy"),  # python -m fompi.torch
)


def free_port():
    """A port that the system gives to nobody by itself: a connection of another test may have any of those."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port


def run(folder, size, how, backend, method, ending, seconds=50.0):
    (folder / "serve.py").write_text(PROGRAM)
    through = ["-m", "fompi.torch"] if backend != "fompi" else []
    words = [str(size), how, backend, method, str(free_port()), ending]
    variables = {"FOMPI_TIMEOUT": "30", "OMP_NUM_THREADS": "1", "FOMPI_REPORT": "0"}
    return job.run([sys.executable, *through, str(folder / "serve.py"), *words], seconds, env=variables, cwd=folder)


@pytest.mark.one_mpi
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way)))
def test_a_start(tmp_path, way):
    size = way[0]
    done = run(tmp_path, *way)
    assert not done.timed_out and not done.left_behind and done.returncode == 0, done.output
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    total = [float(size * (size + 1) // 2)] * 4
    assert lines == [
        f"rank {r} of {size}: {total} {r if 0 < r < size - 1 else size - 1} fompi {r}/{size}" for r in range(size)
    ], done.output
    assert "all have ended" in done.stdout and "Error" not in done.stderr, done.output


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("how", "ending", "words"),
    [
        ("spawn", "raise", "ValueError: had enough"),
        ("fork", "exit", "had enough\n"),
        ("fork", "kill", "signal SIGKILL"),
    ],
)
def test_a_process_fails(tmp_path, how, ending, words):
    """The program that has started it learns why, and ends the others: nothing is left."""
    done = run(tmp_path, 2, how, "fompi", "tcp", ending)
    assert not done.timed_out and not done.left_behind and done.returncode, done.output
    assert words in done.stderr, done.output
    assert how == "spawn" or done.seconds < 25, done.output  # far below FOMPI_TIMEOUT; each spawned child imports torch


ALONE = """
import sys
from datetime import timedelta
import torch.distributed as dist

if sys.argv[1] == "early":
    from mpi4py import MPI
rank, seconds = (2, 60) if sys.argv[1] == "wrong" else (0, 4)
timeout = timedelta(seconds=seconds)
dist.init_process_group("fompi", f"file://{sys.argv[2]}", rank=rank, world_size=2, timeout=timeout)
"""


@pytest.mark.parametrize("why", ["late", *(pytest.param(why, marks=pytest.mark.one_mpi) for why in ("early", "wrong"))])
def test_a_process_does_not_come(tmp_path, why):
    """Or MPI has started before, or Open MPI cannot start so: a sentence that says what to do."""
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, str(tmp_path / "alone.py"), why, str(tmp_path / "meeting")]
    variables = {"FOMPI_TIMEOUT": "", "OMP_NUM_THREADS": "1", "FOMPI_CARRIER": "mpi"}
    done = job.run(command, 50, env=variables, cwd=tmp_path)
    is_openmpi = "Open MPI" in done.stderr
    words = {
        "late": "Open MPI starts under its own launcher only" if is_openmpi else "waited 4 s for rank 1 to start MPI",
        "wrong": "there is no rank 2 of 2: ranks are 0 to 1",
        "early": "MPI has started before, alone. Call init_process_group before anything that starts MPI",
    }
    assert not done.timed_out and not done.left_behind and done.returncode, done.output
    assert words[why] in done.stderr, done.output
