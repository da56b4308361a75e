"""`fompi up` on two hosts with a real sshd and two networks, the slow one first in name (tests/lab/ssh_hosts.py)."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import job
import pytest

HOSTS = Path(__file__).with_name("ssh_hosts.py")

SENDS = """
import socket
from pathlib import Path
import numpy, fompi
def sent():
    counts = Path("/sys/class/net").glob("e*/statistics/tx_bytes")
    return {path.parent.parent.name: int(path.read_text()) for path in counts}
comm = fompi.Communicator()
before = sent()
fompi.all_reduce(numpy.ones(1 << 20, numpy.float32), comm=comm)
comm.barrier()
moved = {name: (nbytes - before[name]) >> 20 for name, nbytes in sent().items()}
line = f"| {socket.gethostname()} {comm.rank} of {comm.size} sent MiB {sorted(moved.items())}"
print(line, flush=True)
"""


@pytest.fixture
def up(kernel, tmp_path):
    """up(fault, *words) -> job.Finished of `fompi up` on h0, with what is wrong with h1."""
    missing = [name for name in ("/usr/sbin/sshd", "ssh", "rsync", "iptables") if shutil.which(name) is None]
    assert not missing, f"apt-get install openssh-server openssh-client rsync iptables: {missing} are missing"
    assert os.getuid() == 0, "an sshd in a namespace needs root"
    folder = tmp_path / "hosts"
    folder.mkdir()

    def run(fault, *words, command="up", before=(), program=(), variables=None, cwd=tmp_path):
        # Both hosts are this machine: without these messages go through its memory, not over a network.
        environment = {
            **os.environ,
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        environment |= {"OMP_NUM_THREADS": "1", **(variables or {})}
        environment["PYTHONPATH"] = str(HOSTS.parents[2] / "tools")
        ssh = ("--ssh", f"ssh -F {folder}/config")
        line = [sys.executable, HOSTS, folder, fault, *before, sys.executable, "-m", "fompi", command, *words, *ssh]
        return job.run([*map(str, [*line, *program])], 55, cwd=cwd, env=environment)

    return run


def is_clean(done):
    """Nothing is left of the check on any host."""
    return "left: []" in done.output


@pytest.mark.parametrize("fault", ["none", "names"])
def test_the_job_runs_over_the_fast_network(up, tmp_path, fault):
    (tmp_path / "program.py").write_text(SENDS)
    done = up(fault, "h0", "h1", program=("--", "python", "program.py"))
    assert done.returncode == 0, done.output
    name = "enp3s0" if fault == "names" else "eth1"
    for host, fast in (("h0 0", "eth1"), ("h1 1", name)):
        assert f"| {host} of 2 sent MiB {sorted({'eth0': 0, fast: 4}.items())}" in done.output, done.output
    assert "h1 is reached by its name over eth0: 3" in done.output  # 38 Mbit/s
    assert is_clean(done)
    assert json.loads((tmp_path / "cache/fompi/up/h0-h1/machine.json").read_text())["name"] == "fompi-up"


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("down", "fompi: h1: no "),  # way to it, or answer
        ("key", "fompi: h1: it takes no key of yours: type `ssh-copy-id h1`"),
        ("unknown", "fompi: h1: its key is unknown here, or has changed"),
        ("python", f"fompi: h1: no {sys.executable} there, only "),
        ("mpi4py", "fompi: h1: no mpi4py, and "),
        ("disk", "No space left on device: no file can be written there"),
        ("drops", "fompi: h1: packets from h0 to 10.82.0.2 (eth1) are dropped: a firewall?"),
        ("refuses", "fompi: h1: 10.82.0.2 (eth1) refuses connections from h0: a firewall?"),
    ],
)
def test_what_is_wrong_is_one_line(up, fault, line):
    done = up(fault, "h0", "h1", "--check")
    assert done.returncode == 2, done.output
    said = [each for each in done.output.splitlines() if each and not each.startswith(("up, ", "after "))]
    assert len(said) == 1 and line in said[0], done.output
    assert is_clean(done)


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("clock", "h1: its clock is 100 s ahead"),
        ("drops_fast", "h1: packets from h0 to 10.82.0.2 (eth1) are dropped"),
        ("one_way", "h0: packets from h1 to 10.82.0.1 (eth1) are dropped"),
    ],
)
def test_what_does_not_stop_the_job_is_a_remark(up, fault, line):
    done = up(fault, "h0", "h1", "--check")
    assert done.returncode == 0 and line in done.output, done.output
    used = [each.split()[2] for each in done.output.splitlines() if each.endswith("<- the job uses it")]
    assert used == ["eth1" if fault == "clock" else "eth0"]
    assert is_clean(done)


@pytest.mark.one_mpi
def test_a_killed_check_leaves_nothing(up):
    done = up("none", "h0", "h1", "--check", before=("timeout", "-s", "KILL", "1.5"))
    assert done.returncode and is_clean(done), done.output


@pytest.mark.one_mpi
def test_a_folder_is_copied_first(up, tmp_path):
    code = tmp_path / "the code"
    code.mkdir()
    (code / "program.py").write_text("import os, sys\nprint('|', sorted(os.listdir()), sys.argv[1:], flush=True)")
    program = ("--", "python", "program.py", "two words", "it's")
    done = up("empty", "h0", "h1", cwd=code, program=program)
    assert done.returncode == 2 and "h1: program.py is not there: copy the folder with --sync" in done.output, (
        done.output
    )
    (code / "data").write_text("1")
    shutil.rmtree(tmp_path / "hosts")
    (tmp_path / "hosts").mkdir()
    done = up("empty", "h0", "h1", "--sync", cwd=code, program=program)
    assert done.returncode == 0 and done.output.count(f"| ['data', 'program.py'] {[*program[3:]]}") == 2, done.output
    assert is_clean(done)


@pytest.mark.one_mpi
def test_the_doctor_looks_at_hosts_first(up):
    done = up("none", "--hosts", "h0", "h1", "--seconds", "1", command="doctor")
    assert "ranks      1 on h0, 1 on h1" in done.output and "<- the job uses it" in done.output, done.output
