"""The cluster on one machine: its links have the requested rates, it refuses other links, and nothing is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import command as tool
from cluster import namespaces, relay
from cluster.cores import V1, V2
from cluster.hosts import LAB
from cluster.launcher import Mpi
from cluster.links import LinkSeconds, fault, table, trip_fault
from cluster.relay import carry
from cluster.values import Change, Cores, Distance, Lab, Rate, Refused, link_of

MEASURE = """
import os, socket, sys, time
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
buffer = bytearray(20_000_000)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def wait(request, seconds=20.0):
    end = time.perf_counter() + seconds
    while not request.Test() and time.perf_counter() < end:
        time.sleep(1e-4)
    return request == MPI.REQUEST_NULL

def mbit(source, dest, nbytes):
    "The rate of a message from source to dest that is answered, with frame headers. Only source returns it."
    world.Barrier()
    time.sleep(0.3)
    start = time.perf_counter()
    if rank == source:
        answer = world.Irecv([bytearray(1), 1, MPI.BYTE], dest)
        assert wait(world.Isend([buffer, nbytes, MPI.BYTE], dest)) and wait(answer)
        return nbytes * 8 / 1e6 / (time.perf_counter() - start) * 1514 / 1448
    if rank == dest:
        assert wait(world.Irecv([buffer, nbytes, MPI.BYTE], source))
        world.Send([bytearray(1), 1, MPI.BYTE], source)

def show(source, dest, nbytes):
    mbit(source, dest, 10)
    reached = [mbit(source, dest, nbytes) for _ in range(8)]  # others may use the cores too
    if rank == source:
        say("RATE", source, dest, round(max(reached), 1))
"""


def rates(finished):
    """(source, dest) -> Mbit/s: the last rate that the job printed for each pair."""
    printed = re.findall(r"^RATE (\d+) (\d+) ([\d.]+)$", finished.stdout, re.MULTILINE)
    return {(int(source), int(dest)): float(rate) for source, dest, rate in printed}


def near(rate):
    """Equal, within the noise of a busy machine."""
    return pytest.approx(rate, rel=0.08)


# ------------------------------------------------------------------------------------------------------- real clusters


@pytest.mark.one_mpi
@pytest.mark.parametrize("options", [(), ("--congestion=reno",)], ids=["default", "chosen"])
def test_the_hosts_have_a_congestion_control_of_their_own(netlab, options):
    code = "import os; os.write(1, open('/proc/sys/net/ipv4/tcp_congestion_control').read().encode())"
    finished = netlab("--trust", "--hosts=2", "--rate=100mbit", *options, code=code)
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    name = "cubic" if "cubic" in allowed and not options else "reno"
    assert finished.stdout.split() == [name, name] and f"TCP {name}" in finished.stderr, finished.output


@pytest.mark.one_mpi
@pytest.mark.skipif(not os.access("/dev/cpu_dma_latency", os.W_OK), reason="cores cannot be kept awake here")
def test_cores_stay_awake_while_the_hosts_exist(netlab):
    code = "import os; os.write(1, os.read(os.open('/dev/cpu_dma_latency', os.O_RDONLY), 4).hex().encode() + b'\\n')"
    finished = netlab("--trust", "--hosts=2", "--rate=100mbit", code=code)
    assert finished.stdout.split() == ["00000000"] * 2, finished.output
    assert not finished.left_behind, "the request ends with the process that holds the file open"


@pytest.mark.one_mpi
@pytest.mark.parametrize(("name", "why"), [("none", " (No such file or directory)"), ("", "")])
def test_congestion_control_that_the_kernel_lacks(netlab, name, why):
    finished = netlab("--hosts=2", "--rate=100mbit", f"--congestion={name}", code="")
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1, finished.output
    assert f"cannot use '{name}'{why}: give --congestion one of" in finished.stderr


@pytest.mark.measures
def test_unequal_links_places_and_the_exit_status(netlab):
    finished = netlab(
        *("--trust", "--rates=400mbit,400mbit,100mbit", "--ranks=4"),
        code=MEASURE
        + """
say("PLACE", rank, socket.gethostname(), socket.gethostbyname(socket.gethostname()), *os.sched_getaffinity(0))
show(0, 1, 4_000_000)
show(1, 2, 1_000_000)
show(2, 3, 4_000_000)
world.Barrier()
sys.exit(7 if rank == 0 else 0)
""",
    )
    assert finished.returncode == 7, finished.output
    cores = sorted(os.sched_getaffinity(0))
    places = sorted(re.findall(r"^PLACE (.*)$", finished.stdout, re.MULTILINE))
    hosts = (0, 1, 2, 2)  # in blocks; the last host has two
    assert places == [
        f"{rank} h{host} 10.77.0.{host + 1} {cores[rank % len(cores)]}" for rank, host in enumerate(hosts)
    ]
    reached = rates(finished)
    assert reached[0, 1] == near(400) and reached[1, 2] == near(100), finished.output
    assert reached[2, 3] > 500, "two ranks of one host need no link"
    assert "h1 -> h2" in finished.stderr and "netlab" not in finished.stdout
    assert not finished.left_behind


@pytest.mark.measures
@pytest.mark.one_mpi
def test_groups_with_a_slow_link_between(netlab):
    finished = netlab(
        *("--trust", "--groups=2x2", "--rate=400mbit", "--between=50mbit"),
        code=MEASURE + "show(0, 1, 4_000_000); show(1, 2, 500_000); show(3, 2, 4_000_000); show(3, 0, 500_000)",
    )
    assert finished.returncode == 0, finished.output
    assert rates(finished) == {(0, 1): near(400), (1, 2): near(50), (3, 2): near(400), (3, 0): near(50)}


@pytest.mark.measures
@pytest.mark.one_mpi
def test_links_change_while_a_job_runs(netlab):
    finished = netlab(
        *("--trust", "--hosts=2", "--rate=400mbit", "--at=0 h0 200mbit"),
        code=MEASURE
        + """
def control(*lines):
    world.Barrier()
    if rank == 0:
        with open(os.environ["NETLAB_CONTROL"], "w") as fifo:
            print(*lines, sep="\\n", file=fifo)
    time.sleep(0.3)
    world.Barrier()

show(0, 1, 2_000_000)
control("h9 cut", "h1 50mbit")
show(1, 0, 500_000)
control("h1 250mbit")
world.Barrier()
if rank == 0:
    with open(os.environ["NETLAB_CONTROL"], "w") as fifo:
        print("h1 cut", file=fifo)
    time.sleep(0.3)
    request = world.Isend([buffer, 4_000_000, MPI.BYTE], 1)
    say("CUT", wait(request, 0.5))
    with open(os.environ["NETLAB_CONTROL"], "w") as fifo:
        print("h1 restore", file=fifo)
    say("RESTORED", wait(request))
else:
    wait(world.Irecv([buffer, 4_000_000, MPI.BYTE], 0))
""",
    )
    assert finished.returncode == 0, finished.output
    assert rates(finished) == {(0, 1): near(200), (1, 0): near(50)}
    assert "CUT False" in finished.stdout and "RESTORED True" in finished.stdout
    assert "netlab: 'h9 cut' is not a change of a link" in finished.stderr
    changes = re.findall(r"^netlab: after [\d.]+ s: (.*)$", finished.stderr, re.MULTILINE)
    assert changes == ["h0 200mbit", "h1 50mbit", "h1 250mbit", "h1 cut", "h1 restore"]


SPIN = """
import os, time
from mpi4py import MPI

world = MPI.COMM_WORLD
for part in range(2):
    world.Barrier()
    begun, used = time.monotonic(), time.process_time()
    while time.monotonic() - begun < 1:
        pass
    share = (time.process_time() - used) / (time.monotonic() - begun)
    os.write(1, f"CORES {world.rank} {part} {share:.3f}\\n".encode())
    world.Barrier()
    if world.rank == 0 and part == 0:
        with open(os.environ["NETLAB_CONTROL"], "w") as fifo:
            print("h1 0.2cores", file=fifo)
        time.sleep(0.5)
"""


@pytest.mark.measures
@pytest.mark.skipif(os.geteuid() != 0, reason="quotas need root")
def test_hosts_with_unequal_cores(netlab):
    """A quota is measured, kept, and changed while the job runs. Its control groups go with the hosts."""
    before = control_groups()
    finished = netlab("--trust", "--hosts=2", "--rate=100mbit", "--cores=0.4,0.1", code=SPIN)
    assert finished.returncode == 0 and not finished.left_behind, finished.output
    shares = {(int(r), int(p)): float(s) for r, p, s in re.findall(r"^CORES (\d) (\d) (.*)$", finished.stdout, re.M)}
    assert shares[0, 0] <= 0.44 and shares[1, 0] <= 0.13 < shares[1, 1] <= 0.23, finished.output
    assert re.search(r"^h1 +0\.10 +0\.\d\d", finished.stderr, re.MULTILINE) and "s: h1 0.2cores" in finished.stderr
    assert control_groups() <= before


def control_groups():
    return {path for home in (V1, V2) for path in home.glob("netlab-*")}


@pytest.mark.one_mpi
def test_the_quota_of_a_host():
    assert [Cores.parse(text).quota for text in ("1", "0.5", "0.25cores", "0.02", "2")] == [
        (10_000, 10_000), (5_000, 10_000), (2_500, 10_000), (1_000, 50_000), (20_000, 10_000),
    ]  # fmt: skip
    lab = Lab((Rate.parse("1gbit"),) * 2, cores=(Cores(1.0), Cores(0.5)))
    assert str(Change.parse("h1 0.25cores", lab)) == "h1 0.25cores"


FAR = (
    MEASURE
    + """
if rank:
    listener = socket.create_server(("", 5001))
world.Barrier()
stream = listener.accept()[0] if rank else socket.create_connection(("h1", 5001))
stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
stream.settimeout(20)

def control(line):
    with open(os.environ["NETLAB_CONTROL"], "w") as fifo:
        print(line, file=fifo)
    time.sleep(0.3)

def trip():
    start = time.perf_counter()
    stream.sendall(b"?")
    assert stream.recv(1) == b"!"
    return (time.perf_counter() - start) * 1e3

if rank:
    while stream.recv(1):
        stream.sendall(b"!")
else:
    say("TRIP", min(trip() for _ in range(5)))
    control("between 20mbit,100ms")
    say("TRIP", min(trip() for _ in range(5)))
    control("between cut")
    stream.sendall(b"?")
    stream.settimeout(1)
    try:
        say("CUT", stream.recv(1))
    except TimeoutError:
        say("CUT", "silent")
    stream.settimeout(20)
    control("between restore")
    say("RESTORED", stream.recv(1))
    stream.close()
"""
)


@pytest.mark.measures
@pytest.mark.one_mpi
def test_groups_at_a_distance(netlab):
    """A round trip takes what was asked for, also after a change. A cut is silent, and no stream is reset."""
    finished = netlab(*("--trust", "--groups=2x1", "--rate=100mbit", "--size=100kB", "--between=50mbit,40ms"), code=FAR)
    assert finished.returncode == 0 and not finished.left_behind, finished.output
    trips = [float(trip) for trip in re.findall(r"^TRIP (.*)$", finished.stdout, re.MULTILINE)]
    assert len(trips) == 2 and 40 <= trips[0] < 50 and 100 <= trips[1] < 110, finished.output
    assert "CUT silent" in finished.stdout and "RESTORED b'!'" in finished.stdout
    assert re.search(r"^h1 -> h0 +40\.0 +4\d\.\d \(1\d\d%\)$", finished.stderr, re.MULTILINE), finished.output
    assert re.search(r"after [\d.]+ s: between 20mbit,100ms$", finished.stderr, re.MULTILINE)


@pytest.mark.measures
@pytest.mark.one_mpi
def test_a_deep_bucket_is_refused(netlab):
    finished = netlab("--hosts=2", "--rate=400mbit", "--burst=1000000", code="print('ran')")
    assert finished.returncode == 3 and "ran" not in finished.stdout, finished.output
    assert re.search(r"^netlab: tcp moves .* its bucket is too deep", finished.stderr, re.MULTILINE), finished.output
    trusted = netlab("--hosts=2", "--rate=400mbit", "--burst=1000000", "--trust", code="print('ran')")
    assert trusted.returncode == 0 and trusted.stdout.count("ran") == 2 and "netlab: warning: tcp" in trusted.stderr
    slow_only = netlab("--hosts=2", "--rate=400mbit", "--burst=1000000", "--trust-slow", code="print('ran')")
    assert slow_only.returncode == 3 and "ran" not in slow_only.stdout, "only slow links are trusted"


@pytest.fixture
def site(tmp_path):
    """site("shell code for mpirun") -> a python that has this mpirun beside it."""
    real = Path(sys.executable).parent

    def make(code):
        for name, text in (("python", f'exec {real}/python "$@"'), ("mpirun", code)):
            (tmp_path / name).write_text(
                f'#!/bin/sh\ncase "$1" in --version) exec {real}/{name} "$@" ;; esac\n{text}\n'
            )
            (tmp_path / name).chmod(0o755)
        return tmp_path / "python"

    return make


@pytest.mark.measures
def test_links_with_the_requested_rates_are_accepted(netlab):
    """Without --trust. It may take several attempts, because others may use the cores."""
    for _ in range(5):
        finished = netlab("--hosts=2", "--rate=100mbit", "--size=4MB", code="print('ran')")
        if finished.returncode == 0:
            break
    assert finished.returncode == 0 and finished.stdout.count("ran") == 2, finished.output


@pytest.mark.measures
def test_an_mpi_that_uses_shared_memory_is_refused(netlab, site):
    """This mpirun ignores the hosts. All ranks are on one host, and no message uses a link."""
    here = (
        'for word; do shift; [ "$word" = h0:1,h1:1 ] && word=h0:2; set -- "$@" "$word"; done\n'
        f'exec {Path(sys.executable).parent}/mpirun "$@"'
    )
    finished = netlab("--hosts=2", "--rate=400mbit", code="print('ran')", python=site(here))
    assert finished.returncode == 3 and "ran" not in finished.stdout, finished.output
    assert re.search(r"^netlab: (mpich|openmpi) moves .* bypasses the links", finished.stderr, re.MULTILINE)


@pytest.mark.measures
def test_an_mpi_that_does_not_start_is_refused(netlab, site):
    finished = netlab("--hosts=2", "--rate=400mbit", code="print('ran')", python=site("echo no licence; exit 1"))
    assert finished.returncode == 3 and "ran" not in finished.stdout, finished.output
    assert "cannot be started on the hosts" in finished.stderr and "    no licence" in finished.stderr


@pytest.mark.measures
@pytest.mark.one_mpi
def test_without_being_root(netlab):
    """The same cluster in a user namespace, for a user who may not make other namespaces."""
    drop = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin") if os.geteuid() == 0 else ()
    possible = subprocess.run([*drop, "unshare", "--user", "--map-root-user", "true"], capture_output=True, text=True)
    if possible.returncode:
        pytest.skip(f"this kernel makes no user namespaces: {possible.stderr.strip()}")
    finished = netlab("--trust", "--hosts=2", "--rate=400mbit", before=drop, code=MEASURE + "show(0, 1, 4_000_000)")
    assert finished.returncode == 0 and rates(finished) == {(0, 1): near(400)}, finished.output


STAYS = """
import signal, sys, time
from pathlib import Path
from mpi4py import MPI

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    MPI.COMM_WORLD.Barrier()
    print("up", flush=True)
    time.sleep(60)
finally:
    Path(f"saved-{MPI.COMM_WORLD.rank}").touch()
"""


@pytest.mark.parametrize("at_a_terminal", [False, True], ids=["", "terminal"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_is_left(kernel, tmp_path, ending, at_a_terminal):
    """However it ends, there is no process, no interface, no mount and no file of the launcher left.

    Unless it is killed, ranks may end by themselves. At a terminal all processes of a job get the signal.
    """
    script, mark = tmp_path / "script.py", f"NETLAB_TEST={uuid.uuid4()}"
    script.write_text(STAYS)
    before = surroundings()
    name, value = mark.split("=")
    netlab = (
        sys.executable,
        Path(tool.__file__).parents[1] / "netlab.py",
        "run",
        "--trust",
        "--hosts=2",
        "--rate=100mbit",
        "--latency=2ms",
    )
    process = subprocess.Popen(
        [*netlab, "--", sys.executable, script],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout.readline().startswith(b"up")
        alive = marked(mark)
        assert len(alive) > 9  # netlab, its first process, two hosts, the relay, mpirun, its daemons, the ranks
        files = {path for pid in alive for path in open_files(pid)} - {str(script)}
        (os.killpg if at_a_terminal else os.kill)(process.pid, ending)
        assert process.wait(20) == (-ending if ending == signal.SIGKILL else 128 + ending)
    finally:
        process.kill()
    deadline = time.monotonic() + 2
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked(mark)
    assert surroundings() == before
    assert len(list(tmp_path.glob("saved-*"))) == (0 if ending == signal.SIGKILL else 2)
    assert not [
        path for path in files if path.startswith(("/tmp/hydra", "/tmp/prte", "/dev/shm/")) and Path(path).exists()
    ]


def marked(mark):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def open_files(pid):
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(link) for link in folder.glob("*") if link.is_symlink()]


def surroundings():
    interfaces = sorted(os.listdir("/sys/class/net"))
    return (
        interfaces,
        Path("/proc/self/mounts").read_text(),
        LAB.exists(),
        os.listdir("/run/netns") if Path("/run/netns").exists() else [],
    )


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rate 3furlong", "'3furlong' is not a rate"),
        ("--rate 1kbit", "cannot be shaped faithfully: take 1mbit to"),
        ("--rate 90gbit", "cannot be shaped faithfully"),
        ("--rate 1gbit --capacity 3gbit", "4 Gbit/s of all hosts together are more than this machine can carry"),
        ("--groups 2x2", "--between 100mbit"),
        ("--groups two", "write it as 2x4"),
        ("--groups 2x2 --hosts 5 --between 10mbit", "makes 4 hosts, not 5"),
        ("--between 10mbit", "give --groups"),
        ("--rates 10mbit,20mbit --hosts 3", "3 hosts but 2 rates"),
        ("--hosts 1", "take 2 to 250"),
        ("--hosts 0", "take 2 to 250"),
        ("--ranks 3", "leave some of 4 hosts without a rank"),
        ("--size 8", "write it as 8MB"),
        ("--at soon", "write it as '2.5 h1 100mbit'"),
        ("--at nan_h1_cut", "write it as '2.5 h1 100mbit'"),
        ("--at inf_h1_cut", "write it as '2.5 h1 100mbit'"),
        ("--at -1_h1_cut", "write it as '2.5 h1 100mbit'"),
        ("--at 1_h0_30gbit --capacity 2gbit", "30.3 Gbit/s of all hosts together are more than this machine can carry"),
        ("--at 1_h4_cut", "is not a change of a link"),
        ("--at 1_h3_fast", "'fast' is not a rate"),
        ("--at 1_between_cut", "with LINK of h0, h1, h2, h3"),
        ("--at 1_h1_200ms", "this link has no latency that could change: start with --latency 0ms"),
        ("--at 1_h1_80ms,20mbit --latency 5ms", "'80ms,20mbit' is not a rate"),
        ("--groups 2x2 --between 9mbit --at 1_between_1%", "start with --between 9mbit,0ms"),
        ("--groups 2x2 --between 80ms", "--groups needs the rate"),
        ("--between 80ms", "give --groups"),
        ("--latency 2s", "'2s' is not a rate"),
        ("--latency 9mbit,5ms", "write it as 5ms or 5ms,0.1%, and the rate as --rate 9mbit"),
        ("--latency 2000ms", "at most 1000ms"),
        ("--latency 5ms,60%", "at most 50%"),
        ("--hosts 4 --cores 1,0.5", "4 hosts but 2 numbers of cores"),
        ("--cores 1,0.5,half,1", "'half' is no number of cores"),
        ("--cores 1,0,1,1", "'0' is no number of cores: write it as 0.5, from 0.01 on"),
        ("--at 1_h1_0.5cores", "only a host has cores that could change: start with --cores 1,1"),
        ("--groups 2x2 --between 9mbit --cores 1,1,1,1 --at 1_between_1cores", "only a host has cores"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(options, words, capsys):
    arguments = [word.replace("_", " ") for word in options.split()]
    assert tool.main(["run", "--rate=100mbit", *arguments, "--", sys.executable]) == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1 and printed.startswith("netlab: ")


@pytest.mark.one_mpi
def test_a_missing_tool_or_program(capsys, monkeypatch):
    assert tool.main(["run", "--rate=100mbit", "--", "no-such-program"]) == 2
    monkeypatch.setattr(tool, "search_path", lambda: "/nowhere")
    assert tool.main(["run", "--rate=100mbit", "--", sys.executable]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "no program no-such-program" in first and "there is no ip: install iproute2" in second


@pytest.mark.one_mpi
def test_a_kernel_that_forbids(capsys, monkeypatch):
    def forbid(name, *_):
        raise PermissionError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(namespaces, "libc", forbid)
    assert tool.main(["run", "--rate=100mbit", "--", sys.executable]) == 2
    assert (
        "does not allow network namespaces (unshare: Operation not permitted): run as root" in capsys.readouterr().err
    )


@pytest.mark.one_mpi
def test_a_kernel_without_resources(capsys):
    def fails():
        raise OSError(28, "unshare: No space left on device")

    assert namespaces.exit_status(fails) == 3
    assert capsys.readouterr().err == (
        "netlab: this machine cannot continue: [Errno 28] unshare: No space left on device\n"
    )


@pytest.mark.one_mpi
def test_another_operating_system(capsys, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tool.main(["run", "--", sys.executable]) == 2
    assert "namespaces of Linux" in capsys.readouterr().err


def test_the_wrong_mpi_and_no_mpi(tmp_path, monkeypatch):
    own = Mpi.beside([sys.executable], None).name
    other = {"mpich": "openmpi", "openmpi": "mpich"}[own]
    with pytest.raises(Refused, match=f"belongs to {own}: for {other} call the python"):
        Mpi.beside([sys.executable], other)
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="there is no mpirun beside"):
        Mpi.beside(["python"], None)
    assert shutil.which("mpirun") is None


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.one_mpi
def test_rates_read_and_print():
    assert [str(Rate.parse(text)) for text in ("1gbit", "2500Mbit", "1500kbit", "0.25gbit")] == [
        *("1gbit", "2.5gbit", "1.5mbit", "250mbit"),
    ]
    assert Rate.parse("1gbit").goodput == pytest.approx(119.55e6, rel=1e-4)


@pytest.mark.one_mpi
def test_a_lab_as_values():
    fast, slow = Rate.parse("1gbit"), Rate.parse("100mbit")
    lab = Lab((fast,) * 4, groups=2, between=slow, ranks=10)
    assert [lab.group(host) for host in range(4)] == [0, 0, 1, 1]
    assert [lab.expected(host) for host in range(4)] == [fast, slow, fast, slow]
    assert lab.slots() == "h0:2,h1:3,h2:2,h3:3"
    assert lab.message(0) == 8_000_000 and lab.message(1) == pytest.approx(800_000, rel=0.01)
    assert str(Change.parse("between 50mbit", lab)) == "between 50mbit"
    assert lab.variables(cores=4) == {
        "NETLAB_RATES": ",".join(["1000000000"] * 4),
        "NETLAB_PAYLOAD": ",".join(["119550859"] * 4) + ";11955086",
        "NETLAB_CORES_PER_RANK": "0.4",
    }
    assert Lab((fast, slow)).expected(0) == Lab((fast, slow)).expected(1) == slow


@pytest.mark.one_mpi
def test_distances_as_values():
    assert link_of("50mbit,80ms,0.1%") == (Rate.parse("50mbit"), Distance(0.08, pytest.approx(0.001)))
    assert link_of("1gbit")[1] is None and link_of("0.5%") == (None, Distance(None, 0.005))
    lab = Lab((Rate.parse("1gbit"),) * 4, 2, Rate.parse("50mbit"), near=Distance(0.005), far=Distance(0.08, 0.1))
    assert [lab.round_trip(host) for host in range(4)] == pytest.approx([0.005, 0.085, 0.005, 0.085])
    for line in ("between 20mbit,200ms", "between 1%", "h1 0ms,2.5%", "h1 cut", "h1 10mbit"):
        assert str(Change.parse(line, lab)) == line
    assert trip_fault("h1 -> h2", 0.08, 0.0805) is trip_fault("h1 -> h2", 0.005, 0.0055) is None
    assert not trip_fault("h1 -> h2", 0.08, 0.04).is_slow
    late = trip_fault("h1 -> h2", 0.08, 0.1)
    assert late.is_slow and "takes 100.0 ms where 80 were requested (h1 -> h2): end other" in late.line(starts=False)


def carried(frames, latency, loss):
    """The frames that a relay lets out of a link, those that it lets in, and the seconds of the first one out."""
    (inner, host), (outer, switch) = (socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(2))
    for end in (inner, outer):
        end.setblocking(False)
    child = os.fork()
    if not child:
        carry([(inner.fileno(), outer.fileno())], memoryview(struct.pack("dd", latency / 2, loss)).cast("d"))
    try:
        start = time.monotonic()
        host.sendall(b"first")
        assert switch.recv(9) == b"first"
        seconds = time.monotonic() - start
        out, into = [], []
        for frame in frames:
            host.sendall(frame)
            switch.sendall(frame)
            into.append(host.recv(9))
        switch.settimeout(latency + 0.5)
        with suppress(TimeoutError):
            while True:
                out.append(switch.recv(9))
        return out, into, seconds
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for end in (inner, host, outer, switch):
            end.close()


@pytest.mark.one_mpi
def test_a_relay_delays_and_loses_the_same_frames_in_every_run():
    frames = [str(number).encode() for number in range(200)]
    out, into, seconds = carried(frames, 0.1, 0.1)
    assert into == frames and seconds >= 0.05
    assert out == sorted(out, key=int) and 170 < len(out) < 190
    assert carried(frames, 0.0, 0.1)[0] == out


@pytest.mark.one_mpi
def test_a_kernel_without_tap_devices(monkeypatch):
    monkeypatch.setattr(relay, "TUN", "/nowhere/tun")
    with pytest.raises(Refused, match=r"need /nowhere/tun \(No such file or directory\): load the module tun"):
        relay.tap("tap0")


@pytest.mark.one_mpi
def test_a_measurement_is_judged():
    lab = Lab((Rate.parse("1gbit"),) * 2)
    right = lab.message(0) / lab.expected(0).goodput
    good = LinkSeconds((right, right / 1.01), (right, right * 1.03))
    assert fault(lab, "tcp", good) is None
    assert "119.6   119.6 (100%)" in table(lab, {"tcp": good})
    for name, times, words in (
        ("tcp", LinkSeconds((right, right / 1.05), (right, right)), "a larger --size"),
        ("mpich", LinkSeconds((right, right / 20), (right, right)), "bypasses the links"),
    ):
        found = fault(lab, name, times)
        assert words in found.line(starts=False) and not found.is_slow
    slow = LinkSeconds((right, right), (right, right * 1.2))
    found = fault(lab, "tcp", slow)
    assert found.is_slow and "(all at once): end other programs" in found.line(starts=False)
    assert found.line(starts=True) == (
        "warning: tcp moves 99.6 MB/s where the links carry 119.6 (all at once): other programs use this machine, or "
        "it is too weak. The job starts all the same. Do not record its times"
    )
    assert slow.best(good) == good.best(slow) == LinkSeconds(good.alone, good.together)


DROP = """
import os
os.environ["FOMPI_TIMEOUT"] = "10"
import numpy as np
import fompi

world = fompi.Communicator()
plan = fompi.plan("all_gather", fompi.Spec((8 << 20, 1), "uint8", fompi.Shard(0)), ranks=world.size, schedule="direct")
step = fompi.bind(plan, comm=world, x=np.zeros((8 << 20) // world.size, np.uint8).reshape(-1, 1))
for i in range(9):
    step.start()
    if i in (2, 4, 6) and world.rank == 0:
        with open(os.environ["NETLAB_CONTROL"], "w") as fifo:
            print("h1", "1gbit" if i == 4 else "333mbit", file=fifo)
    step.wait()
"""


@pytest.mark.one_mpi
def test_a_rate_that_drops_under_load(netlab):
    """A superpacket that waits in the old bucket does not block the new, smaller bucket."""
    finished = netlab("--trust", "--hosts=4", "--rate=1gbit", code=DROP)
    assert finished.returncode == 0 and not finished.left_behind, finished.output
    assert finished.output.count("h1 333mbit") == 2
