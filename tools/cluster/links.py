"""Measures what the links carry, with plain TCP and with MPI, and compares it with the requested rates."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.hosts import SUBNET, Cluster
from cluster.launcher import Mpi, python_of
from cluster.namespaces import NEWNET, end_job, exit_with, libc, log
from cluster.tcp import TcpRing, listen
from cluster.values import REFUSED, Change, Lab, Refused

SCRIPT = Path(__file__).resolve().parents[1] / "netlab.py"
PORT = 5077  # of the TCP measurement; a new host has only free ports
IDLE_SECONDS = 0.3  # silence before a message, so that the token buckets are full
TOO_FAST, TOO_SLOW = 1.03, 0.93  # the allowed range of measured / requested rate
ATTEMPTS = 3  # a measurement that is too slow is repeated this often at most
PINGS = 5  # the fastest one counts
TOO_NEAR, TOO_FAR = 0.98, 1.1  # the allowed range of measured / requested round trip
PING_SECONDS = 0.5e-3  # what processes may add to a round trip
SPIN_SECONDS = 0.5  # a process computes so long to measure the cores of its host
TOO_MANY, TOO_FEW, CORE_NOISE = 1.05, 0.9, 0.02  # the allowed range of measured / requested cores; and what is added
TOGETHER = "all at once"  # the row of the table in which all hosts send


@dataclass(frozen=True)
class LinkSeconds:
    """Seconds of one message from every host to the next: one after the other, and all at once."""

    alone: tuple[float, ...]
    together: tuple[float, ...]

    def best(self, other: LinkSeconds | None) -> LinkSeconds:
        if other is None:
            return self
        return LinkSeconds(tuple(map(min, self.alone, other.alone)), min(self.together, other.together, key=max))


def take_turns(rank: int, sizes: Sequence[int], ring: Any) -> tuple[float, float]:
    """One rank's part. After a pause a message goes round. After another pause all ranks send at once.

    `ring` is a `TcpRing` or an `MpiRing`.
    """
    ring.exchange(1000)  # the first message of a connection also sets the connection up
    time.sleep(IDLE_SECONDS)
    if rank:
        ring.receive(sizes[rank - 1])
    alone = ring.send(sizes[rank])
    if not rank:
        ring.receive(sizes[-1])
    if rank:
        ring.receive(1)
    ring.send(1)
    if not rank:
        ring.receive(1)
    time.sleep(IDLE_SECONDS)
    return alone, ring.exchange(min(sizes))


def deadline(lab: Lab) -> float:
    """The seconds after which a measurement counts as failed."""
    return 10 + 4 * sum(lab.message(host) / lab.expected(host).goodput for host in range(len(lab.rates)))


def measure_tcp(cluster: Cluster) -> LinkSeconds:
    """Measure with plain TCP, from a process in the network namespace of each host."""
    sizes = [cluster.lab.message(host) for host in range(len(cluster.pids))]
    answers = on_hosts(cluster, lambda host, ring: take_turns(host, sizes, ring), deadline(cluster.lab))
    alone, together = zip(*answers, strict=True)
    return LinkSeconds(alone, together)


def ping(rank: int, ring: Any) -> float:
    """One rank's part: a byte goes round several times. Returns the seconds of the fastest answer of the next rank."""
    fastest = float("inf")
    for _ in range(PINGS):
        if rank:
            ring.receive(1)
        fastest = min(fastest, ring.send(1))
        if not rank:
            ring.receive(1)
    return fastest


def on_hosts(cluster: Cluster, turn: Callable[[int, Any], Any], seconds: float) -> list[Any]:
    """[turn(host, TcpRing) for each host], each in a process of the host's network namespace."""
    addresses = [(f"{SUBNET}.{host + 1}", PORT) for host in range(len(cluster.pids))]

    def body(host: int) -> Any:
        with open(f"/proc/{cluster.pids[host]}/ns/net") as space:
            libc("setns", space.fileno(), NEWNET)
        try:
            with TcpRing(host, addresses, listen(*addresses[host]), seconds) as ring:
                return turn(host, ring)
        except OSError as error:
            log(f"h{host}: {error}")

    answers = forked(range(len(cluster.pids)), body)
    if None in answers:
        raise Refused("plain TCP does not pass between the hosts: see the lines above", REFUSED)
    return answers


def forked(hosts: Sequence[int], body: Callable[[int], Any]) -> list[Any]:
    """[body(host) for each host], each in a process of its own, on its core. None: it has failed."""
    cores, pipes = sorted(os.sched_getaffinity(0)), []
    for host in hosts:
        reading, writing = os.pipe()
        if not os.fork():

            def child(host: int = host, writing: int = writing) -> int:
                os.sched_setaffinity(0, {cores[host % len(cores)]})
                os.write(writing, json.dumps(body(host)).encode())
                return 0

            exit_with(child)
        os.close(writing)
        pipes.append(reading)
    answers = []
    for reading in pipes:
        with open(reading) as pipe:
            answers.append(json.loads(pipe.read() or "null"))
    return answers


def measure_mpi(cluster: Cluster, mpi: Mpi, command: Sequence[str], environment: dict[str, str]) -> LinkSeconds:
    """Measure with MPI: a small job with one rank per host, launched like the real job."""
    lab = cluster.lab
    hosts = len(lab.rates)
    sizes = [lab.message(host) for host in range(hosts)]
    slots = ",".join(f"{name}:1" for name in lab.names)
    program = [python_of(command), str(SCRIPT), "probe", json.dumps(sizes)]
    seconds = 20 + deadline(lab)
    launched = [*mpi.launch(hosts, slots), *program]
    job = subprocess.Popen(
        launched, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output = job.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        output = f"{end_job(job, signal.SIGTERM)}no end within {seconds:.0f} s"
    result = re.search(r'^\{"alone".*\}$', output, re.MULTILINE)
    if job.returncode or not result:
        last = "\n".join(f"    {line}" for line in output.strip().splitlines()[-20:])
        raise Refused(
            f"{mpi.name} cannot be started on the hosts: is mpi4py installed, and built for {mpi.mpirun}? "
            f"Its output:\n{last}",
            REFUSED,
        )
    return LinkSeconds(**{name: tuple(values) for name, values in json.loads(result[0]).items()})


def probe(sizes: Sequence[int]) -> int:
    """One rank of the small job that measures."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != len(sizes):
        print(f"{world.size} ranks instead of {len(sizes)}: this mpi4py does not belong to this mpirun")
        return 1
    times = world.gather(take_turns(world.rank, sizes, MpiRing(MPI, max(sizes))))
    if times is not None:
        alone, together = zip(*times, strict=True)
        print(json.dumps({"alone": alone, "together": together}), flush=True)
    return 0


class MpiRing:
    """Waits by polling with sleeps: the ranks share the cores with the network."""

    def __init__(self, mpi: Any, most: int) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        rank, size = self._world.rank, self._world.size
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._outgoing, self._incoming = bytearray(most), bytearray(most)

    def _await(self, *requests: Any) -> None:
        while not self._mpi.Request.Testall(requests):
            time.sleep(50e-6)

    def send(self, nbytes: int) -> float:
        start = time.perf_counter()
        answer = self._world.Irecv([bytearray(1), 1, self._mpi.BYTE], self._next, 1)
        self._await(self._world.Isend([self._outgoing, nbytes, self._mpi.BYTE], self._next), answer)
        return time.perf_counter() - start

    def receive(self, nbytes: int) -> None:
        self._await(self._world.Irecv([self._incoming, nbytes, self._mpi.BYTE], self._previous))
        self._await(self._world.Isend([bytearray(1), 1, self._mpi.BYTE], self._previous, 1))

    def exchange(self, nbytes: int) -> float:
        start = time.perf_counter()
        incoming = self._world.Irecv([self._incoming, nbytes, self._mpi.BYTE], self._previous)
        self._await(incoming, self._world.Isend([self._outgoing, nbytes, self._mpi.BYTE], self._next))
        return time.perf_counter() - start


def shares(lab: Lab, times: LinkSeconds) -> Iterator[tuple[str, float, float]]:
    """The rows of the table: the link, the goodput that it allows, and the share that was reached."""
    hosts = range(len(lab.rates))
    for host in hosts:
        rate = lab.expected(host).goodput
        yield lab.way(host), rate, lab.message(host) / times.alone[host] / rate
    slowest = min(lab.expected(host).goodput for host in hosts)
    size = min(map(lab.message, hosts))
    yield TOGETHER, slowest, size / max(times.together) / slowest


def table(lab: Lab, measured: dict[str, LinkSeconds]) -> str:
    sizes = {f"{lab.message(host) / 1e6:g}" for host in range(len(lab.rates))}
    heading = f"{'/'.join(sorted(sizes, key=float))} MB after {IDLE_SECONDS} s, TCP {lab.congestion}; MB/s"
    lines = [f"{heading:<40}{'shaped':>8}" + "".join(f"{name:>16}" for name in measured)]
    for cells in zip(*(shares(lab, times) for times in measured.values()), strict=True):
        way, rate, _ = cells[0]
        columns = (f"{share * rate / 1e6:>8.1f} ({share:>4.0%})" for _, _, share in cells)
        lines.append(f"{way:<40}{rate / 1e6:>8.1f}" + "".join(columns))
    return "\n".join(lines)


def too_slow(lab: Lab, way: str, share: float) -> bool:
    """True if a link is too slow. All at once over unequal links is not judged.

    The queue before a slow link also delays the answers to others.
    """
    unequal = len({lab.expected(host) for host in range(len(lab.rates))}) > 1
    return share < TOO_SLOW and not (way == TOGETHER and unequal)


@dataclass(frozen=True)
class Fault:
    """What the links do instead of what was asked for: `reached` the figures, `remedy` cause and remedy."""

    reached: str
    remedy: str
    is_slow: bool = False

    def line(self, starts: bool) -> str:
        """What is printed. `starts`: the job starts all the same."""
        if not starts:
            return f"{self.reached}: {self.remedy}"
        why = "other programs use this machine, or it is too weak. " if self.is_slow else ""
        return f"warning: {self.reached}: {why}The job starts all the same. Do not record its times"


def fault(lab: Lab, name: str, times: LinkSeconds) -> Fault | None:
    """The fault if a measurement misses the requested rates. None if all is well."""
    for way, rate, share in shares(lab, times):
        if share <= TOO_FAST and not too_slow(lab, way, share):
            continue
        reached = f"{name} moves {share * rate / 1e6:.1f} MB/s where the links carry {rate / 1e6:.1f} ({way})"
        if share <= TOO_FAST:
            return Fault(reached, "end other programs on this machine, lower --rate, or use --trust", is_slow=True)
        if name == "tcp":
            return Fault(reached, "its bucket is too deep for so short a message: take a larger --size")
        return Fault(reached, "it bypasses the links, perhaps by shared memory; it must use TCP over eth0")
    return None


def measure_trips(cluster: Cluster) -> Fault | None:
    """Print the seconds of a round trip over each link with a latency. Returns the fault if one is not as requested."""
    lab = cluster.lab
    requested = [lab.round_trip(host) for host in range(len(cluster.pids))]
    if not any(requested):
        return None
    measured = on_hosts(cluster, ping, 10 + 4 * PINGS * sum(requested))
    lines, found = [f"{f'round trip, fastest of {PINGS}; ms':<40}{'asked':>8}{'tcp':>16}"], None
    for host, (asked, seconds) in enumerate(zip(requested, measured, strict=True)):
        if asked:
            lines.append(f"{lab.way(host):<40}{asked * 1e3:>8.1f}{seconds * 1e3:>8.1f} ({seconds / asked:>4.0%})")
            found = found or trip_fault(lab.way(host), asked, seconds)
    log("\n".join(lines))
    return found


def trip_fault(way: str, requested: float, measured: float) -> Fault | None:
    """The fault if these seconds of a round trip are not those that were requested."""
    if TOO_NEAR * requested <= measured <= TOO_FAR * requested + PING_SECONDS:
        return None
    reached = f"a round trip takes {measured * 1e3:.1f} ms where {requested * 1e3:g} were requested ({way})"
    return Fault(reached, "end other programs on this machine, or use --trust", is_slow=measured > requested)


def spin(cluster: Cluster, hosts: Sequence[int]) -> list[float]:
    """The share of a core that a process on each of these hosts gets, all at once."""

    def body(host: int) -> float:
        assert cluster.cores
        cluster.cores.gate(cluster.lab.names[host]).write_text("0")
        begun, used = time.monotonic(), time.process_time()
        while (seconds := time.monotonic() - begun) < SPIN_SECONDS:
            pass
        return (time.process_time() - used) / seconds

    return [share or 0.0 for share in forked(hosts, body)]


def measure_cores(cluster: Cluster) -> Fault | None:
    """Give the hosts their cores, and print what a process gets of them. Returns the fault if that is not as requested.

    All at once is not judged: this machine may have fewer cores than the hosts together.
    """
    lab, found = cluster.lab, None
    for name, cores in zip(lab.names, lab.cores, strict=False):
        cluster.apply(Change(name, cores))
    if not lab.cores:
        return None
    lines = [f"{f'cores, one process for {SPIN_SECONDS} s':<40}{'asked':>8}{'alone':>16}{TOGETHER:>16}"]
    for host, together in enumerate(spin(cluster, range(len(lab.cores)))):
        asked, alone = min(1.0, lab.cores[host].share), 0.0
        for _ in range(ATTEMPTS):
            alone = max(alone, *spin(cluster, [host]))
            if alone >= TOO_FEW * asked - CORE_NOISE:
                break
        lines.append(f"{lab.names[host]:<40}{asked:>8.2f}{alone:>8.2f} ({alone / asked:>4.0%}){together:>16.2f}")
        if not TOO_FEW * asked - CORE_NOISE <= alone <= TOO_MANY * asked + CORE_NOISE:
            reached = f"{lab.names[host]} has {alone:.2f} cores where {asked:g} were requested"
            found = found or Fault(reached, "end other programs on this machine, or use --trust", is_slow=alone < asked)
    log("\n".join(lines))
    return found


def measure(
    cluster: Cluster,
    mpi: Mpi,
    command: Sequence[str],
    environment: dict[str, str],
    starts: Callable[[Fault], bool],
) -> None:
    """Print what the links carry. Raises Refused if that is not the requested rate, and not `starts(fault)`.

    A measurement that is too slow is repeated, because other load may be the cause. The fastest attempt counts, so that
    a link that is too fast is always found.
    """
    methods: dict[str, Callable[[], LinkSeconds]] = {
        "tcp": lambda: measure_tcp(cluster),
        mpi.name: lambda: measure_mpi(cluster, mpi, command, environment),
    }
    measured: dict[str, LinkSeconds] = {}
    for name, method in methods.items():
        for _ in range(ATTEMPTS):
            measured[name] = method().best(measured.get(name))
            if not any(too_slow(cluster.lab, way, share) for way, _, share in shares(cluster.lab, measured[name])):
                break
    log(table(cluster.lab, measured))
    found = [fault(cluster.lab, name, times) for name, times in measured.items()]
    cluster.move_apart()
    found += [measure_trips(cluster), measure_cores(cluster)]
    faults = [each for each in found if each is not None]
    for each in faults:
        log(each.line(starts(each)))
    if not all(map(starts, faults)):
        raise Refused("the hosts are not as requested: the job was not started", REFUSED)
