"""Two hosts that ssh reaches, on this machine: python tests/lab/ssh_hosts.py FOLDER FAULT COMMAND ...

       h0 --- eth0, 40 Mbit/s, 10.81.0.1 --- eth0 --- h1       the names lead over the slow network
          --- eth1, 400 Mbit/s, 10.82.0.1 -- eth1 ---

The command runs on h0. A real sshd with keys of its own answers on h1. FAULT is what is wrong with h1, or "none".
The last line says which agents and connections are left when the command has ended. FOLDER is this program's own.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cluster.namespaces import (
    MS_BIND,
    MS_PRIVATE,
    MS_REC,
    NEWNET,
    NEWNS,
    NEWUTS,
    enclose,
    exit_status,
    libc,
    mount,
    tool,
)

SLOW, FAST = "10.81.0", "10.82.0"
FIREWALLS = {"drops": "DROP", "refuses": "REJECT --reject-with tcp-reset", "drops_fast": "DROP"}


def start_host(name: str) -> int:
    """A process with a network, a name and mounts of its own. It waits."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        libc("unshare", NEWNS | NEWNET | NEWUTS)
        socket.sethostname(name)
        mount("sysfs", "/sys", "sysfs")  # with the network interfaces of this host
        os.write(writing, b"!")
        while True:
            signal.pause()
    os.close(writing)
    os.read(reading, 1)
    return child


def on(host: int, *command: str, **options: object) -> subprocess.Popen[bytes]:
    go = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
    words = ["nsenter", f"--target={host}", "--net", "--uts", "--mount", "--", *go, *command]
    return subprocess.Popen(words, **options)  # type: ignore[call-overload, no-any-return]


def call_on(host: int, *command: str) -> None:
    assert on(host, *command).wait() == 0, command


def lay(hosts: list[int], fault: str) -> None:
    """The two networks."""
    for number, (subnet, rate) in enumerate(((SLOW, "40mbit"), (FAST, "400mbit"))):
        names = [f"eth{number}", "enp3s0" if fault == "names" and number else f"eth{number}"]
        tool("ip", "link", "add", names[0], "type", "veth", "peer", f"far{number}")
        for end, (device, name) in enumerate(((names[0], names[0]), (f"far{number}", names[1]))):
            tool("ip", "link", "set", device, "netns", str(hosts[end]), "name", name)
            up = f"link set lo up\nlink set {name} up\naddress add {subnet}.{end + 1}/24 dev {name}"
            tool("ip", "-batch", "-", text=up, pid=hosts[end])
            shape = f"tbf rate {rate} burst {'16kb' if number == 0 else '125kb'} latency 100ms"
            tool("tc", "qdisc", "add", "dev", name, "root", *shape.split(), pid=hosts[end])


def write_keys(folder: Path, fault: str) -> None:
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "keys").write_text("" if fault == "key" else (folder / "user.pub").read_text())
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text("" if fault == "unknown" else f"h1,{SLOW}.2,{FAST}.2 {key}")
    (folder / "config").write_text(
        f"Host *\nIdentityFile {folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nUser root\n"
        "GlobalKnownHostsFile none\nLogLevel ERROR\n"
    )
    variables = {"TMPDIR": str(folder / "full")} if fault == "disk" else {}
    variables |= {"PYTHONPATH": str(folder)} if fault == "clock" else {}
    (folder / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 100\n")
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/keys\nStrictModes no\nUsePAM no\nPidFile none\n"
        + "".join(f"SetEnv {name}={value}\n" for name, value in variables.items())
    )


def break_host(host: int, fault: str, folder: Path) -> None:
    """Do to h1 what is to be wrong with it."""
    environment = Path(sys.prefix)
    packages = [*environment.glob("lib/python*/site-packages/mpi4py*")]
    if fault == "down":
        call_on(host, "ip", "link", "set", "eth0", "down")
    elif fault in FIREWALLS:
        devices = ["eth1"] if fault == "drops_fast" else ["eth0", "eth1"]
        for device in devices:
            rule = f"iptables -A INPUT -i {device} -p tcp --syn ! --dport 22 -j {FIREWALLS[fault]}"
            call_on(host, *shlex.split(rule))
    elif fault == "python":
        call_on(host, "mount", "-t", "tmpfs", "tmpfs", str(environment / "bin"))
    elif fault == "mpi4py":
        for package in packages:
            if package.is_dir():
                call_on(host, "mount", "-t", "tmpfs", "tmpfs", str(package))
    elif fault == "empty":
        call_on(host, "mount", "-t", "tmpfs", "tmpfs", os.getcwd())
    elif fault == "disk":
        (folder / "full").mkdir()
        call_on(host, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder / "full"))


def left() -> list[str]:
    """The agents, the ranks, and the connections of sshd that still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(word in words for word in ("sys.stdin.readline", "hydra", "prted", "sshd: root", "notty")):
            found.append(words.strip()[:90])
    return found


def inside(folder: Path, fault: str, command: list[str]) -> int:
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{SLOW}.1 h0\n{SLOW}.2 h1\n")
    mount(str(folder / "hosts"), "/etc/hosts", flags=MS_BIND)
    hosts = [start_host("h0"), start_host("h1")]
    lay(hosts, fault)
    write_keys(folder, fault)
    break_host(hosts[1], fault, folder)
    script = "mkdir -p /run/sshd; mount -t tmpfs -o mode=755 tmpfs /run/sshd; exec /usr/sbin/sshd -D -e -f "
    script += f"{folder}/sshd_config"
    daemon = on(hosts[1], "sh", "-c", script, stderr=(folder / "sshd.log").open("wb"))
    deadline = time.monotonic() + 10
    while "listening" not in (folder / "sshd.log").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    if fault == "one_way":  # to h0
        rule = "iptables -A INPUT -i eth1 -p tcp --syn ! --dport 22 -j DROP"
        call_on(hosts[0], *shlex.split(rule))
    begun = time.monotonic()
    job = on(hosts[0], *command)
    status = job.wait()
    seconds = time.monotonic() - begun
    while left() and time.monotonic() < begun + seconds + 3:
        time.sleep(0.05)
    print(f"\nafter {seconds:.1f} s, left: {left()}", flush=True)
    daemon.kill()
    return status


if __name__ == "__main__":
    place, what = Path(sys.argv[1]), sys.argv[2]
    sys.exit(exit_status(lambda: enclose(lambda: inside(place, what, sys.argv[3:]))))
