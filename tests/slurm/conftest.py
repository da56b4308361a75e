"""A real Slurm of two nodes on this machine, for all tests of this folder."""

from __future__ import annotations

import os
import subprocess

import job
import pytest
from slurm_cluster import HERE, INSTALL, PROGRAM, Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    prefix = folder / "cluster"
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", job.MARK))}
    up = subprocess.run([HERE / "up.sh", prefix, "2", "16"], env=clean, capture_output=True, text=True, timeout=60)
    if up.returncode == 4:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, f"{up.stderr}\n(needs {INSTALL})"
    # A process of its own takes the cluster down when its input ends: also if this process is killed.
    words = folder / "down.txt"
    with words.open("w") as output:
        command = ["sh", "-c", 'cat >/dev/null; exec "$0" "$1"', HERE / "down.sh", prefix]
        keeper = subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, stderr=output, start_new_session=True)
    try:
        yield Cluster(f"{prefix}/slurm.conf", folder, program)
    finally:
        keeper.communicate(timeout=60)
        assert keeper.returncode == 0 and not prefix.exists(), words.read_text()


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    """After every test: no job, no process of one, and no shared memory on any node."""
    before = cluster.shared_memory()
    yield
    cluster.until_idle()
    cluster.until_gone()
    assert not cluster.shared_memory() - before
