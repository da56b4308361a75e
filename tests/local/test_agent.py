"""The agent of `fompi up` on this machine: as a process of its own, and over a stand-in for ssh."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from contextlib import suppress

import pytest

from fompi.hosts import agent
from fompi.hosts.networks import Way, interfaces_of
from fompi.hosts.remote import HostError, Remote, is_here

TOKEN = "0123456789abcdef"


@pytest.fixture
def remote():
    with Remote("localhost", ()) as found:
        yield found
    assert found.process.returncode == 0


@pytest.fixture
def ssh(tmp_path):
    """ssh(text) -> the command of a program that stands in for ssh: its last word is what the host runs."""

    def make(text):
        program = tmp_path / "ssh"
        program.write_text(f"#!/bin/sh\nfor last; do :; done\n{text}\n")
        program.chmod(0o755)
        return (str(program),)

    return make


def test_facts(remote, tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    facts = remote.answer("facts", program=sys.executable, folder=str(tmp_path), files=["train.py", "other.py"])
    assert facts["python"] == platform.python_version() and facts["executable"] == sys.executable
    assert facts["name"] == socket.gethostname() and facts["cores"] == len(os.sched_getaffinity(0))
    assert "MPI" in facts["mpi"] and facts["mpirun"] and facts["folder"] and facts["full"] == []
    assert facts["files"]["train.py"].endswith(" 8") and facts["files"]["other.py"] == ""
    assert all(each.name for each in interfaces_of(facts))
    assert abs(remote.answer("clock") - time.time()) < 5


def test_kernels(remote):
    whole, copied = remote.answer("kernels", ranks=1, threads="1")
    assert whole > 1e8 and copied > 1e7


def test_a_way_is_measured_over_one_connection(remote):
    port = remote.answer("listen", address="127.0.0.1", token=TOKEN, seconds=5.0)
    ask = {"address": "127.0.0.1", "port": port, "source": "127.0.0.1", "token": TOKEN, "seconds": 0.02}
    way = Way(**remote.answer("connect", **ask))
    assert way.latency > 0 and way.rate > 1e6
    with pytest.raises(HostError, match="localhost: refused"):  # it listens for one connection
        remote.answer("connect", **ask)


def test_a_stranger_is_not_answered(remote):
    port = remote.answer("listen", address="127.0.0.1", token=TOKEN, seconds=5.0)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(b"x" * len(TOKEN) + agent.HEADER.pack(agent.SEND, 0))
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_an_error_names_the_host(remote):
    with pytest.raises(HostError, match=r"localhost: .*unexpected keyword"):
        remote.answer("clock", zone="utc")


def test_a_host_that_greets_is_understood(ssh):
    with Remote("h1", ssh('echo "Welcome to h1"; exec sh -c "$last"')) as greeting:
        assert greeting.answer("facts")["executable"] == sys.executable


def test_another_python_answers_where_this_one_is_missing(ssh):
    with Remote("h1", ssh('exec sh -c "$last"'), python="/no/such/python") as other:
        assert other.answer("facts")["executable"] != "/no/such/python"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'echo "h1: Permission denied (publickey)." >&2; exit 255',
            "h1: it takes no key of yours: type `ssh-copy-id h1`",
        ),
        ("exit 1", r"h1: ssh ended: try `ssh h1"),
        ('PATH=/nowhere; eval "$last"', "h1: it has no python3"),
    ],
)
def test_a_host_that_cannot_be_reached_is_one_line(ssh, text, line):
    with Remote("h1", ssh(text), python="/no/such/python") as missing, pytest.raises(HostError, match=line):
        missing.answer("facts")


def test_the_agent_ends_with_its_connection(ssh):
    found = Remote("h1", ssh('exec sh -c "$last"'))
    found.answer("clock")
    assert found.process.stdin is not None
    found.process.stdin.close()
    assert found.process.wait(10) == 0
    with pytest.raises(HostError, match="h1: ssh ended"):
        found.answer("clock")
    found.close()


def test_this_machine_has_a_name():
    assert is_here("localhost") and is_here(socket.gethostname()) and is_here("127.0.0.1")
    assert not is_here("192.0.2.77") and not is_here("no-such-host.invalid")
