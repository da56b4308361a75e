"""A cluster of shaped hosts on this machine. Its tests are skipped only if the kernel cannot make one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import job
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NETLAB = ROOT / "tools" / "netlab.py"

# What the cluster needs of the kernel.
KERNEL = """
import sys
from cluster.namespaces import enclose, exit_status, tool

def make():
    tool("ip", "link", "add", "bridge0", "type", "bridge")
    tool("ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    tool("tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", "1gbit", "burst", "125000", "latency", "100ms")
    return 0

sys.exit(exit_status(lambda: enclose(make)))
"""


@pytest.fixture(scope="session")
def kernel():
    """The kernel makes namespaces, bridges and shaped links."""
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    if re.search("not permitted|not supported|Unknown device type|qdisc kind is unknown|No space left", done.stderr):
        pytest.skip(f"this kernel makes no shaped links: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def netlab(kernel, tmp_path):
    """netlab("--hosts", 2, code="...") -> job.Finished of that program on the hosts, under this Python's MPI."""

    def run(*options, code, python=sys.executable, before=(), seconds=50):
        script = tmp_path / "script.py"
        script.write_text(code)
        command = [*before, sys.executable, NETLAB, "run", *options, "--", python, script]
        return job.run(list(map(str, command)), seconds, cwd=tmp_path)

    return run
