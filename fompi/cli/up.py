"""`fompi up h0 h1 -- python train.py`: look at machines over ssh, choose their network, start the job.

    hosts = look(request, say)         # agents over ssh, in parallel; HostError with a line for each host
    found = measure(hosts, say)        # each pair of hosts over each network that they share
    job, given = prepare(...)          # hostfile, machine file, variables

Nothing is sent anywhere but to these hosts. No key is made, stored or printed. Nothing is installed on a host.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import time
from typing import Any, TypeVar

from fompi.base.errors import LaunchError
from fompi.base.tables import Table
from fompi.cli.output import Progress, UsageError, show, show_json
from fompi.hosts import agent, networks, start
from fompi.hosts.networks import COLUMNS, NetworkInterface, NoWay, SharedNetwork, Way
from fompi.hosts.remote import HostError, Remote, is_here
from fompi.mpi import environment

T = TypeVar("T")
Say = Callable[[str], object]

EXAMPLE = "{} up h0 h1 -- python train.py"

MEASURING_SECONDS, MOST_SECONDS, GRACE_SECONDS = 8.0, 0.3, 8.0
"""The time for all measurements of networks, the most for one direction of a pair, and what a pair may take longer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="as ssh knows it; HOST:4 for four ranks there (1)")
    parser.add_argument("--hostfile", metavar="FILE", help="more hosts, one in a line: h0, h0:4, or h0 slots=4")
    parser.add_argument("--check", action="store_true", help="only look: start nothing")
    parser.add_argument(
        "--sync", nargs="?", const=".", metavar="FOLDER", help="copy a folder (.) there first, by rsync"
    )
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="another ssh: 'ssh -p 2222 -i key'")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON; starts nothing")


@dataclass(frozen=True)
class HostsRequest:
    """What the user asks for."""

    hosts: Mapping[str, int]  # ranks of each
    program: tuple[str, ...]
    ssh: tuple[str, ...] = ("ssh",)
    sync: str | None = None
    folder: str = field(default_factory=os.getcwd)

    def way_to(self, host: str) -> tuple[str, ...]:
        return () if is_here(host) else self.ssh


@dataclass
class LookedAt:
    """The hosts as they are: their agents, facts, clocks and interfaces, and what was measured between them."""

    request: HostsRequest
    here: Mapping[str, Any]  # facts of this machine
    agents: Mapping[str, Remote]
    facts: Mapping[str, Mapping[str, Any]]
    clocks: Mapping[str, float]  # seconds ahead of this machine's
    shared: tuple[SharedNetwork, ...] = ()
    kernels: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def interfaces(self) -> dict[str, tuple[NetworkInterface, ...]]:
        return {host: networks.interfaces_of(facts) for host, facts in self.facts.items()}

    @property
    def reached(self) -> dict[str, str]:
        """The address of each host to which ssh goes, and that of this machine, from which it comes."""
        ends = [facts["ssh"] for facts in self.facts.values() if facts["ssh"]]
        return {host: (facts["ssh"] or [*ends, ["", ""]][0][::-1])[1] for host, facts in self.facts.items()}

    @property
    def best(self) -> SharedNetwork | None:
        return networks.choose(self.shared)


def run(options: argparse.Namespace) -> int:
    """Look at the hosts, print what was found, and start the job, which takes the place of this process."""
    try:
        text = "" if options.hostfile is None else Path(options.hostfile).read_text()
        hosts = start.hosts_of(options.hosts, text)
    except OSError as error:
        raise UsageError(f"--hostfile {options.hostfile}: {error.strerror}") from None
    except LaunchError as error:
        raise UsageError(str(error)) from None
    if not hosts:
        raise UsageError("name the hosts: up h0 h1 -- python train.py")
    if not (options.program or options.check or options.json):
        raise UsageError("what is to run? write it after --, as in `-- python train.py`, or only look: --check")
    request = HostsRequest(hosts, tuple(options.program), tuple(shlex.split(options.ssh)), options.sync)
    return up(request, starts=not (options.check or options.json), as_json=options.json)


def up(request: HostsRequest, starts: bool = True, as_json: bool = False, is_quiet: bool = False) -> int:
    """Look at the hosts, and start the program there. `is_quiet`: standard output is the program's alone."""
    with ExitStack() as closing, Progress.of_rank(0, "up") as progress:
        found = look(request, closing, progress.step)
        measure(found, progress.step)
        best = found.best
        if best is None and len(request.hosts) > 1:
            raise HostError("\n".join(unconnected(found)))
        way = None if best is None else best.slowest
        machine = start.machine_of(request.hosts, way, found.kernels)
        if as_json:
            show_json(values(found))
            return 0
        progress.erase()
        if not is_quiet:
            show(*blocks(found))
        if not starts:
            return 0
        progress.step("writing the hostfile and the machine file")
        job, given = prepare(found, machine.to_json())
    for name, value in given.items():
        os.environ[name] = value
    command = start.launch(job, given, os.environ)
    if not is_quiet:
        print(
            f"\n{' '.join(f'{name}={value}' for name, value in given.items())} \\\n{shlex.join(command)}\n", flush=True
        )
    os.execv(command[0], command)  # from here on this process is mpirun


# ------------------------------------------------------------------------------------------------------------ looking


def together(agents: Mapping[str, Remote], call: Callable[[Remote], T]) -> dict[str, T]:
    """What `call` returns for each host, all at once. Raises one HostError with the lines of all that fail."""
    with ThreadPoolExecutor(len(agents) or 1) as pool:
        futures = {host: pool.submit(call, remote) for host, remote in agents.items()}
    failed = [error for future in futures.values() if (error := future.exception()) is not None]
    if others := [error for error in failed if not isinstance(error, LaunchError)]:
        raise others[0]
    if failed:
        raise HostError("\n".join(map(str, failed)))
    return {host: future.result() for host, future in futures.items()}


def look(request: HostsRequest, closing: ExitStack, say: Say) -> LookedAt:
    """Reach all hosts and compare them with this machine. Raises HostError: a line for each thing that is wrong."""
    say(f"reaching {', '.join(request.hosts)}")
    mpirun = str(Path(sys.executable).parent / "mpirun")
    mpirun = mpirun if os.path.exists(mpirun) else shutil.which("mpirun") or ""
    ask: dict[str, Any] = {"program": mpirun, "folder": request.folder, "files": files_of(request)}
    agents = {host: closing.enter_context(Remote(host, request.way_to(host))) for host in request.hosts}
    clocks = together(agents, clock_of)
    if request.sync is not None:
        say(f"copying {request.sync}")
        others = {host: each for host, each in agents.items() if request.way_to(host)}
        together(others, lambda remote: sync(request, remote.host))
    say("comparing versions, folders and files")
    here = agent.facts(**ask)
    if not mpirun:
        raise LaunchError("there is no mpirun beside this Python, nor on PATH: pip install mpich")
    facts = together(agents, lambda remote: remote.answer("facts", **ask))
    wrong = [*start.problems(facts, {**here, "mpirun": mpirun}, request.folder)]
    if here["mpi"].startswith("error"):
        wrong.insert(0, f"mpi4py cannot load MPI here: {here['mpi']}")
    if wrong:
        raise HostError("\n".join(wrong))
    return LookedAt(request, {**here, "mpirun": mpirun}, agents, facts, clocks)


def files_of(request: HostsRequest) -> list[str]:
    """The words of the program that are files below its folder: they must be the same on all hosts."""
    names = [os.path.join(request.folder, word) for word in request.program if not word.startswith("-")]
    paths = [Path(name).resolve() for name in names if os.path.isfile(name)]  # also of a word too long for a path
    root = Path(request.folder).resolve()
    return [str(path.relative_to(root)) for path in paths if path.is_relative_to(root)]


def clock_of(remote: Remote) -> float:
    """By how many seconds its wall clock is ahead. The shortest of some questions is the most exact."""
    readings = []
    for _ in range(4):
        begun = time()
        there = remote.answer("clock")
        ended = time()
        readings.append((ended - begun, there - (begun + ended) / 2))
    return min(readings)[1]


def sync(request: HostsRequest, host: str) -> None:
    """Copy the folder to the same place on a host. Nothing is deleted there."""
    folder = Path(request.sync or ".").resolve()
    if folder in (Path("/"), Path.home()):
        raise HostError(f"--sync {folder}: this is too much: name the folder of the program")
    if not folder.is_dir():
        raise HostError(f"--sync {folder}: there is no such folder")
    if shutil.which("rsync") is None:
        raise HostError("there is no rsync here: type `sudo apt install rsync`")
    way = shlex.join([*request.ssh, "-o", "BatchMode=yes"])
    there = f"{host}:{folder}/"
    made = f"mkdir -p {shlex.quote(str(folder))} && rsync"
    command = [
        "rsync",
        "--archive",
        "--compress",
        "--protect-args",
        "--rsync-path",
        made,
        "-e",
        way,
        f"{folder}/",
        there,
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[0]
        remedy = (
            f"on {host} type `sudo apt install rsync`" if "not found" in done.stderr else f"try `{shlex.join(command)}`"
        )
        raise HostError(f"{host}: rsync fails ({last}): {remedy}")


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(found: LookedAt, say: Say) -> None:
    """Measure the kernels of all hosts, and each pair of hosts over each network that they share."""
    agents = found.agents
    threads = os.environ.get("OMP_NUM_THREADS", "")  # those of the ranks
    say("products and copies")
    found.kernels = together(
        agents, lambda remote: remote.answer("kernels", ranks=found.request.hosts[remote.host], threads=threads)
    )
    found.shared = networks.shared(found.interfaces, found.reached)
    turns = [(network, pairs) for pairs in networks.rounds(list(agents)) for network in found.shared]
    seconds = min(MOST_SECONDS, MEASURING_SECONDS / max(1, len(turns)) / 3)
    measured: dict[str, dict[tuple[str, str], Way | NoWay]] = {network.subnet: {} for network in found.shared}
    for network, pairs in turns:
        say(f"{network}: {', '.join(f'{a} and {b}' for a, b in pairs)}")
        with ThreadPoolExecutor(max(1, len(pairs))) as pool:
            ways = pool.map(lambda pair, network=network: way_between(found, network, pair, seconds), pairs)
            measured[network.subnet] |= dict(zip(pairs, ways, strict=True))
    found.shared = tuple(replace(network, ways=measured[network.subnet]) for network in found.shared)


def way_between(found: LookedAt, network: SharedNetwork, pair: tuple[str, str], seconds: float) -> Way | NoWay:
    """The way from the first host to the second one. MPI connects from either side, so both must be able to."""
    there = _way(found, network, pair, seconds)
    back = _way(found, network, (pair[1], pair[0]), 0.0) if isinstance(there, Way) else there
    return back if isinstance(back, NoWay) else there


def _way(found: LookedAt, network: SharedNetwork, pair: tuple[str, str], seconds: float) -> Way | NoWay:
    a, b = pair
    token, most = secrets.token_hex(16), seconds + GRACE_SECONDS
    address = network.ends[b].address
    try:
        port = found.agents[b].answer("listen", address=address, token=token, seconds=most)
        asked = {"address": address, "port": port, "source": network.ends[a].address, "token": token}
        return Way(**found.agents[a].ask("connect", seconds=seconds, **asked).result(timeout=most))
    except TimeoutError:
        return NoWay(a, b, "dropped")
    except HostError as error:
        return NoWay(a, b, str(error).partition(": ")[2])


def unconnected(found: LookedAt) -> Iterator[str]:
    """Why no network joins all hosts."""
    if not found.shared:
        ours = {host: [each for each in all if each.address] for host, all in found.interfaces.items()}
        listed = "; ".join(f"{host}: {', '.join(f'{i.name} {i.address}' for i in each)}" for host, each in ours.items())
        yield f"no network joins {', '.join(ours)} ({listed}): give them IPv4 addresses of one network"
    lines = [line for network in found.shared for line in networks.obstacles(network)]
    yield from {line.partition(":")[0]: line for line in lines}.values()  # one for each host


# ------------------------------------------------------------------------------------------------------------ the job


def prepare(found: LookedAt, machine: str) -> tuple[start.JobOnHosts, dict[str, str]]:
    """Write the files of the job on all hosts. Returns the job, and the variables that it needs."""
    request, best = found.request, found.best
    mpi = start.mpi_of(found.here["mpi"])
    cache, name = environment.cache_folder(), "-".join(request.hosts)[:100]  # jobs on other hosts have other files
    folder = Path("/tmp", f"fompi-up-{os.getuid()}-{name}") if cache is None else cache.absolute() / "up" / name
    hostfile, ssh = folder / "hosts", folder / "ssh"
    agent.write(str(hostfile), start.hostfile_of(request.hosts, mpi))
    wrapped = list(request.ssh) != ["ssh"]
    if wrapped:
        agent.write(str(ssh), f'#!/bin/sh\nexec {shlex.join(request.ssh)} "$@"\n', 0o755)
    given = {name: value for name, value in start.variables(mpi, best).items() if name not in os.environ}
    program = list(request.program)
    program[0] = shutil.which(program[0]) or program[0]  # mpirun's daemons have another PATH
    if best is not None and len(best.names) > 1:
        program = [*start.of_host(best, given, {host: each["name"] for host, each in found.facts.items()}), *program]
    if best is not None and "FOMPI_MACHINE" not in os.environ:
        path = str(folder / "machine.json")
        together(found.agents, lambda remote: remote.answer("write", path=path, text=machine))
        agent.write(path, machine)
        given["FOMPI_MACHINE"] = path
    own = next((host for host in request.hosts if is_here(host)), None)
    return start.JobOnHosts(
        mpi,
        found.here["mpirun"],
        request.hosts,
        str(hostfile),
        tuple(program),
        request.folder,
        best,
        str(ssh) if wrapped else "",
        "" if best is None or own is None else best.ends[own].name,
    ), given


def blocks(found: LookedAt) -> list[Table | str]:
    """What the user sees: the hosts, the ways between them, and what to know."""
    gib = 1 << 30
    rows, all_cards = [], found.interfaces
    for host, each in found.facts.items():
        rate, ahead = f"{found.kernels[host][0] / 1e9:.0f}", f"{1e3 * found.clocks[host]:+.0f}"
        cards = ", ".join(
            f"{card} {card.address or ('no address' if card.is_up else 'down')}" for card in all_cards[host]
        )
        rows.append([host, found.request.hosts[host], each["cores"], f"{each['memory'] / gib:.1f}", rate, ahead, cards])
    versions = ", ".join(f"{name} {version}" for name, version in found.here["versions"].items())
    columns = ["host", "ranks", "cores", "free GiB", "GFLOP/s", "clock ms", "interfaces"]
    parts: list[Table | str] = [
        Table(columns, rows, right=columns[1:6]),
        f"everywhere: Python {found.here['python']}, {versions}, {found.here['mpi']}",
    ]
    best = found.best
    if found.shared:
        parts.append(Table(COLUMNS, networks.rows(found.shared, best), right=COLUMNS[4:7]))
    return [*parts, "\n".join(remarks(found)) or "nothing is wrong here"]


def remarks(found: LookedAt) -> list[str]:
    said = [*start.clock_remarks(found.clocks)]
    if found.best is not None:
        named = {host: address for host, address in found.reached.items() if found.facts[host]["ssh"]}
        said += networks.remarks(found.shared, found.best, found.interfaces, named)
    return said


def values(found: LookedAt) -> dict[str, Any]:
    """What was found, as values that JSON can hold."""
    best = found.best
    return {
        "hosts": {
            host: {
                **facts,
                "ranks": found.request.hosts[host],
                "clock": found.clocks[host],
                "kernels": found.kernels[host],
            }
            for host, facts in found.facts.items()
        },
        "networks": [
            {
                "subnet": network.subnet,
                "interfaces": {host: asdict(end) for host, end in network.ends.items()},
                "is_best": network is best,
                "ways": [
                    {"hosts": pair, **(way._asdict() if isinstance(way, Way) else {"why_not": way.why})}
                    for pair, way in network.ways.items()
                ],
            }
            for network in found.shared
        ],
        "variables": start.variables(start.mpi_of(found.here["mpi"]), best),
        "remarks": remarks(found),
    }
