"""A cluster of hosts on one machine, each with a shaped link of its own, for one MPI job:

    python tools/netlab.py run --hosts 4 --rate 1gbit -- python program.py
    python tools/netlab.py run --groups 2x2 --rate 1gbit --between 100mbit -- python program.py

       h0       h1       h2       h3        a host: a network namespace, a name and a /dev/shm of its own
       |eth0    |eth0    |eth0    |eth0     every link is shaped in both directions
    port0    port1    port2    port3
       +--------+---lab--+--------+         the switch: a bridge, in a network namespace where mpirun runs

mpirun speaks to its daemons over links of their own (eth1), through which no host reaches another: a cut link cuts
messages, not the means to end the job.

Before the job, the links are measured by plain TCP and by MPI itself; the job starts only where both reach the shaped
rate, and neither exceeds it. Everything lives in anonymous namespaces below one process: nothing has a name that
could collide with another, and the kernel takes all of it down with that process, however it ends.
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

from cluster.hosts import LAB, Cluster
from cluster.launcher import Mpi
from cluster.links import measure, probe
from cluster.namespaces import Interrupted, enclose, end, say, search_path, speak
from cluster.values import CONGESTION, Change, Refused, asked, planned_change


def work(
    cluster: Cluster, launched: Sequence[str], environment: dict[str, str], planned: list[tuple[float, Change]]
) -> int:
    """Run the job, and change links when it is time or when a line comes through the FIFO; the job's exit status."""
    control = LAB / "control"
    os.mkfifo(control)
    fifo = os.open(control, os.O_RDWR | os.O_NONBLOCK)  # for writing too: so it never comes to an end
    start = time.monotonic()
    planned = sorted(planned, key=lambda item: item[0])
    unread = ""
    told = {"NETLAB_CONTROL": str(control), **cluster.lab.told(len(os.sched_getaffinity(0)))}
    job = subprocess.Popen(launched, env={**environment, **told}, start_new_session=True)  # we pass Ctrl-C on, once
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
                    say(str(refused))
            for change in changes:
                cluster.apply(change)
                say(f"after {seconds:.2f} s: {change}")
    except Interrupted as interrupted:
        end(job, interrupted.number)
        return 128 + interrupted.number
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


def run(options: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise Refused("hosts are network namespaces of Linux: run this in a virtual machine or a container of it")
    lab = asked(options)
    planned = [planned_change(text, lab) for text in options.at]
    for name in ("ip", "tc", "nsenter", *(["taskset"] if options.pin else [])):
        if not shutil.which(name, path=search_path()):
            raise Refused(f"there is no {name}: install iproute2 and util-linux")
    if not shutil.which(options.command[0]):
        raise Refused(f"there is no program {options.command[0]}: it follows --, as in `-- python program.py`")
    mpi = Mpi.beside(options.command, options.mpi)
    environment = {**os.environ, **mpi.variables(crowded=lab.ranks > len(os.sched_getaffinity(0)))}

    def inside() -> int:
        cluster = Cluster(lab)
        measure(cluster, mpi, options.command, environment, options.trust)
        return work(cluster, [*mpi.launch(lab.ranks, lab.slots()), *options.command], environment, planned)

    return enclose(inside)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="netlab", description="A cluster of hosts on one machine, for one MPI job.")
    commands = parser.add_subparsers(dest="what", required=True)
    its = commands.add_parser("run", help="make the cluster, measure it, run a job on it")
    its.add_argument("--hosts", type=int, help="how many (4)")
    its.add_argument("--rate", default="1gbit", help="of every host's link (1gbit)")
    its.add_argument("--rates", help="one for each host: 1gbit,1gbit,250mbit,1gbit")
    its.add_argument("--groups", help="2x4: two groups of four hosts, joined by a slow link")
    its.add_argument("--between", help="rate of the link that each group has to the others")
    its.add_argument("--ranks", type=int, help="of the job, block by block over the hosts (one each)")
    its.add_argument("--mpi", choices=("mpich", "openmpi"), help="refuse another one than this")
    its.add_argument(
        "--pin", action=argparse.BooleanOptionalAction, default=True, help="rank i to core i, modulo cores"
    )
    its.add_argument("--size", help="of the messages that measure: 8MB (what a link carries in 67 ms, 8 MB at most)")
    its.add_argument("--at", action="append", default=[], help="'2.5 h1 100mbit': a change, seconds after the start")
    its.add_argument("--capacity", help="of this machine, all links together (2.45gbit for each core)")
    its.add_argument(
        "--burst", type=int, help="bytes that a link sends at once after silence (what it carries in 1 ms)"
    )
    its.add_argument(
        "--congestion",
        help=f"control of the hosts' TCP ({', else '.join(CONGESTION)}): bbr ... as the kernel has",
    )
    its.add_argument("--trust", action="store_true", help="go on whatever the measurement says")
    its.add_argument("command", nargs="+", help="-- python program.py ...")
    small = commands.add_parser("probe", help="(a rank of the measurement by MPI)")
    small.add_argument("sizes", type=json.loads)
    options = parser.parse_args(arguments)
    return speak(lambda: probe(options.sizes) if options.what == "probe" else run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
