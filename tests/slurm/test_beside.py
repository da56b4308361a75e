"""Several jobs on one node, several Slurms on one machine, and a Slurm that is interrupted."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import HERE, MPIS, PLUGINS, Cluster

MEETING = """
import os, sys, time
from pathlib import Path
import numpy as np
import fompi

mine, others = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
with fompi.Communicator() as comm:
    if comm.rank == 0:
        mine.touch()
        while not all(other.exists() for other in others):
            time.sleep(0.05)
    for call in range(200):
        total = fompi.all_reduce(np.full(100_000, comm.rank + 1.0), comm=comm)
        assert (total == comm.size * (comm.size + 1) / 2).all()
    print(f"{mine.name}: {comm.rank} of {comm.size} on {os.uname().nodename}", flush=True)
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_jobs_on_one_node(cluster, mpi):
    """Two steps of one job, and another job. They compute at the same time, and each gets its own sums."""
    folder = cluster.folder / f"meeting-{mpi}"
    folder.mkdir()
    program, names = folder / cluster.program.name, ["first", "second", "third"]
    program.write_text(MEETING)
    lines = {
        name: f"srun -K -n{size} --exact --mpi={PLUGINS[mpi]} python {program} "
        + " ".join(str(folder / each) for each in (name, *names))
        for name, size in zip(names, (2, 3, 2), strict=True)
    }
    both = f"#!/bin/bash\n{lines['first']} &\n{lines['second']} &\nwait\n"
    cluster.submit(mpi, both, folder / "both.out", "-N1", "-n5", "-w", "n1")
    cluster.submit(mpi, f"#!/bin/bash\n{lines['third']}\n", folder / "other.out", "-N1", "-n2", "-w", "n1")
    cluster.until_idle(40)
    text = (folder / "both.out").read_text() + (folder / "other.out").read_text()
    for name, size in zip(names, (2, 3, 2), strict=True):
        assert text.count(f"{name}: ") == text.count(f"of {size} on n1\n") // (2 if size == 2 else 1) == size, text


def down(prefix: Path) -> None:
    done = subprocess.run([HERE / "down.sh", prefix], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 3), done.stderr  # 3: processes of jobs were left, and are ended


def assert_gone(prefix: Path, conf: str) -> None:
    """No process, no open port, no mount and no file is left of this Slurm."""
    assert not prefix.exists()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(folder / name).read_bytes() for name in ("cmdline", "environ", "mountinfo")]
        except OSError:  # it has ended, or belongs to somebody else
            continue
        assert not any(f"{prefix}/".encode() in text for text in texts), texts[0]
    for port in map(int, re.findall(r"Port=(\d+)", conf)):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), port


INTERRUPTED = """
import subprocess, sys, time
prefix, here, program = sys.argv[1:]
subprocess.run([f"{here}/up.sh", prefix, "1", "4"], check=True)
subprocess.Popen(["srun", "-n2", "--mpi=pmi2", "python", program, "run", "100000"])
time.sleep(100)
"""


def test_a_second_slurm_whose_user_is_killed(cluster, tmp_path):
    """Both work. The second is taken down, with the job that runs in it, and the first goes on."""
    prefix = tmp_path / "second"
    second = Cluster(f"{prefix}/slurm.conf", tmp_path, cluster.program)
    command = [sys.executable, "-c", INTERRUPTED, str(prefix), str(HERE), str(cluster.program)]
    with (tmp_path / "output").open("w") as output:
        user = subprocess.Popen(command, stdout=output, env=second.variables("mpich"))
    try:
        second.wait_for(tmp_path / "output", lambda text: text.count("of 2 on n1") == 2, 40)
        done = cluster.srun("mpich", "python", cluster.program, "run", 3)
        assert done.returncode == 0 and done.stdout.count("of 4 on") == done.stdout.count("bye") == 4, done.output
        conf = Path(second.conf).read_text()
    finally:
        user.kill()
        user.wait()
        down(prefix)
    assert_gone(prefix, conf)
    cluster.until_gone()
    done = cluster.run("mpich", "srun", "-N2", "hostname")
    assert done.returncode == 0 and sorted(done.stdout.split()) == ["n1", "n2"], done.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("lines", [0, 2])
def test_up_is_interrupted(cluster, tmp_path, number, lines):
    """It takes itself down. After SIGKILL, down.sh does. `lines` daemons have been started and noted."""
    prefix = tmp_path / "interrupted"
    clean = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    command, quiet = [HERE / "up.sh", prefix, "2"], subprocess.DEVNULL
    up = subprocess.Popen(command, env=clean, stdout=quiet, stderr=subprocess.PIPE, start_new_session=True)
    try:
        wait_for_lines(prefix / "pids", lines)
        conf = (prefix / "slurm.conf").read_text() if lines else ""
        if number == signal.SIGINT:  # as from a terminal
            os.killpg(up.pid, number)
        else:
            up.send_signal(number)
        _, stderr = up.communicate(timeout=30)
        # bash forgets an INT that ends a command of its own. Then the cluster is up, and is taken down below.
        assert up.returncode or number == signal.SIGINT, stderr
        assert number == signal.SIGKILL or not up.returncode or not prefix.exists()
    finally:
        if prefix.exists():
            time.sleep(0.5)  # a daemon may be starting
            down(prefix)
    assert_gone(prefix, conf)


def wait_for_lines(file: Path, count: int) -> None:
    end = time.monotonic() + 20
    while not file.exists() or len(file.read_text().splitlines()) < count:
        assert time.monotonic() < end
        time.sleep(0.002)
