"""A cluster of hosts on one machine, each with a shaped link of its own, for one MPI job:

    python -m fompi.lab run --hosts 4 --rate 1gbit -- python program.py
    python -m fompi.lab run --groups 2x2 --rate 1gbit --between 50mbit,80ms,0.1% -- python program.py

       h0       h1       h2       h3        a host: a network namespace, a name and a /dev/shm of its own
       |eth0    |eth0    |eth0    |eth0     every link is shaped in both directions
    port0    port1    port2    port3
       +--------+---lab--+--------+         the switch: a bridge, in a network namespace where mpirun runs

mpirun reaches its daemons over separate links (eth1). Hosts cannot reach each other through these. So a cut link cuts
messages, and the job can still be ended.

Before the job starts, the links are measured with plain TCP and with MPI. The job starts only if both reach the shaped
rate and neither exceeds it, and if a round trip takes what was asked for. With `--trust-slow`, as in `make lab`, links
that are too slow are a warning. Everything exists in anonymous namespaces below one process. So no name can collide
with another one, and the kernel removes everything when that process ends, whatever ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from cluster.cores import HostCores
from cluster.hosts import LAB, Cluster
from cluster.launcher import Mpi
from cluster.links import Fault, measure, probe
from cluster.namespaces import Interrupted, enclose, end_job, exit_status, log, search_path
from cluster.values import CONGESTION, Change, Refused, lab_of, planned_change


def work(
    cluster: Cluster, launched: Sequence[str], environment: dict[str, str], planned: list[tuple[float, Change]]
) -> int:
    """Run the job. Change links at the planned times, and on lines that arrive in the FIFO. Returns its exit status."""
    control = LAB / "control"
    os.mkfifo(control)
    fifo = os.open(control, os.O_RDWR | os.O_NONBLOCK)  # open for writing too, so that it has no end of file
    start = time.monotonic()
    planned = sorted(planned, key=lambda item: item[0])
    unread = ""
    variables = {"NETLAB_CONTROL": str(control), **cluster.lab.variables(len(os.sched_getaffinity(0)))}
    # A new session: Ctrl-C reaches only this process, which passes it on once.
    job = subprocess.Popen(launched, env={**environment, **variables}, start_new_session=True)
    try:
        while job.poll() is None:
            lines = []
            if select.select([fifo], [], [], 0.02)[0]:
                *lines, unread = (unread + os.read(fifo, 4096).decode(errors="replace")).split("\n")
            seconds = time.monotonic() - start
            changes = [change for due, change in planned if due <= seconds]
            planned = planned[len(changes) :]
            for line in lines:
                try:
                    changes.append(Change.parse(line, cluster.lab))
                except Refused as refused:
                    log(str(refused))
            for change in changes:
                cluster.apply(change)
                log(f"after {seconds:.2f} s: {change}")
    except Interrupted as interrupted:
        end_job(job, interrupted.number)
        return 128 + interrupted.number
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


def run(options: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise Refused("hosts are network namespaces of Linux: run this in a virtual machine or a container with Linux")
    lab = lab_of(options)
    planned = [planned_change(text, lab) for text in options.at]
    for name in ("ip", "tc", "nsenter", *(["taskset"] if options.pin else [])):
        if not shutil.which(name, path=search_path()):
            raise Refused(f"there is no {name}: install iproute2 and util-linux")
    if not shutil.which(options.command[0]):
        raise Refused(
            f"there is no program {options.command[0]}: write the command after --, as in `-- python program.py`"
        )
    mpi = Mpi.beside(options.command, options.mpi)
    environment = {**os.environ, **mpi.variables(crowded=lab.ranks > len(os.sched_getaffinity(0)))}

    def starts(fault: Fault) -> bool:
        return bool(options.trust or (options.trust_slow and fault.is_slow))

    cores = HostCores(lab.names) if lab.cores else None

    def inside() -> int:
        cluster = Cluster(lab, cores)
        measure(cluster, mpi, options.command, environment, starts)
        return work(cluster, [*mpi.launch(lab.ranks, lab.slots()), *options.command], environment, planned)

    try:
        return enclose(inside)
    finally:
        if cores:
            cores.remove()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="netlab", description="A cluster of hosts on one machine, for one MPI job.")
    commands = parser.add_subparsers(dest="what", required=True)
    run_parser = commands.add_parser("run", help="make the cluster, measure it, run a job on it")
    run_parser.add_argument("--hosts", type=int, help="the number of hosts (4)")
    run_parser.add_argument("--rate", default="1gbit", help="the rate of every host's link (1gbit)")
    run_parser.add_argument("--rates", help="a rate for each host: 1gbit,1gbit,250mbit,1gbit")
    run_parser.add_argument("--cores", help="a share of a core for each host: 1,0.5,0.25,1 (no limit)")
    run_parser.add_argument("--groups", help="2x4: two groups of four hosts, joined by a slow link")
    run_parser.add_argument(
        "--between",
        help="100mbit, or 50mbit,80ms,0.1%%: the rate of the link from each group to the others, the milliseconds of a "
        "round trip (there and back, as ping counts), and the share of the packets that are lost on each way",
    )
    run_parser.add_argument(
        "--latency", help="5ms, or 5ms,0.1%%: a round trip between two hosts, and the loss; between groups it is added"
    )
    run_parser.add_argument("--ranks", type=int, help="the number of ranks, in blocks over the hosts (one each)")
    run_parser.add_argument("--mpi", choices=("mpich", "openmpi"), help="refuse any other MPI")
    run_parser.add_argument(
        "--pin", action=argparse.BooleanOptionalAction, default=True, help="pin rank i to core i, modulo cores"
    )
    run_parser.add_argument(
        "--size", help="the size of the messages that measure (what a link carries in 67 ms, 8MB at most)"
    )
    run_parser.add_argument(
        "--at",
        action="append",
        default=[],
        help="'2.5 h1 100mbit', '2.5 h1 cut', '2.5 between 20mbit,200ms': change a link, 2.5 s after the start; "
        "'2.5 h1 0.2cores': the cores of a host",
    )
    run_parser.add_argument("--capacity", help="what this machine can carry, all links together (2.45gbit per core)")
    run_parser.add_argument(
        "--burst", type=int, help="bytes that a link sends at once after silence (what it carries in 1 ms)"
    )
    run_parser.add_argument(
        "--congestion",
        help=f"the congestion control of the hosts' TCP ({', else '.join(CONGESTION)}): any that the kernel has",
    )
    run_parser.add_argument("--trust", action="store_true", help="start the job even if the links are not as requested")
    run_parser.add_argument(
        "--trust-slow", action="store_true", help="the same, with a warning, if the links are slower than requested"
    )
    run_parser.add_argument("command", nargs="+", help="-- python program.py ...")
    probe_parser = commands.add_parser("probe", help="(internal: one rank of the measurement with MPI)")
    probe_parser.add_argument("sizes", type=json.loads)
    options = parser.parse_args(arguments)
    return exit_status(lambda: probe(options.sizes) if options.what == "probe" else run(options))
