"""A real Slurm of two nodes on this machine, for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from slurm_cluster import HERE, INSTALL, PROGRAM, Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    prefix = folder / "cluster"
    clean = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    up = subprocess.run([HERE / "up.sh", prefix, "2", "16"], env=clean, capture_output=True, text=True, timeout=60)
    if up.returncode == 4:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, f"{up.stderr}\n(needs {INSTALL})"
    try:
        yield Cluster(f"{prefix}/slurm.conf", folder, program)
    finally:
        down = subprocess.run([HERE / "down.sh", prefix], env=clean, capture_output=True, text=True, timeout=60)
        assert down.returncode == 0 and not prefix.exists(), down.stderr


@pytest.fixture(autouse=True)
def nothing_is_left(cluster):
    """After every test: no job, no process of one."""
    yield
    cluster.until_idle()
    end = time.monotonic() + 5
    while cluster.processes() and time.monotonic() < end:
        time.sleep(0.1)
    assert not cluster.processes()
