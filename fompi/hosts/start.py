"""What starts a job on hosts that were looked at: hostfile, variables, machine file, the command of mpirun. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fompi.base.errors import LaunchError
from fompi.hosts.networks import ROUTED, SharedNetwork, Way, megabits
from fompi.model.machine import PRESETS, Level, Machine

CLOCK_SECONDS = 1.0
"""Wall clocks that differ by more are a remark: make and TLS certificates notice it. MPI and fompi do not."""

PASSED_ON = ("FOMPI_", "OMP_", "OPENBLAS_", "MKL_", "NUMBA_", "PYTHON", "JAX_", "TORCH", "XLA_", "GLOO_", "NCCL_",
             "CUDA_", "FI_", "UCX_", "HF_", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")  # fmt: skip
"""Variables that begin with these are those of this machine in every rank. MPICH passes all of them, Open MPI none."""


# -------------------------------------------------------------------------------------------------------------- hosts


def hosts_of(words: Sequence[str], hostfile: str = "") -> dict[str, int]:
    """The number of ranks of each host: of words `h0`, `h0:4`, and of a hostfile with such lines or `h0 slots=4`.

    Raises LaunchError for a line that is none of these.
    """
    found: dict[str, int] = {}
    lines = [line.partition("#")[0].strip() for line in hostfile.splitlines()]
    for word in (*words, *filter(None, lines)):
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?::|\s+slots=|\s*$)(\d*)(?:\s+max[-_]slots=\d+)?", word)
        if not match or match[2] == "0":
            user = "; write `User` for it into ~/.ssh/config" if "@" in word else ""
            raise LaunchError(f"{word!r} is no host: write h0, or h0:4 for four ranks{user}")
        if match[1] in found:
            raise LaunchError(
                f"{match[1]} is named twice: write {match[1]}:{found[match[1]] + int(match[2] or 1)} once"
            )
        found[match[1]] = int(match[2] or 1)
    return found


def problems(facts: Mapping[str, Mapping[str, Any]], here: Mapping[str, Any], folder: str) -> Iterator[str]:
    """Why the job cannot run on these hosts as it would here: a line each, with the remedy."""
    python, environment = here["executable"], here["executable"].rpartition("/bin/")[0]
    called: dict[str, str] = {}
    for host, there in facts.items():
        if (other := called.setdefault(there["name"], host)) != host:
            yield (
                f"{host}: it calls itself {there['name']}, as {other} does, and MPI would take them for one machine: "
                f"there type `sudo hostnamectl set-hostname {host}`"
            )
        if there["executable"] != python:
            yield (
                f"{host}: no {python} there, only {there['executable']} ({there['python']}): make the same environment "
                f"in {environment}, or copy this one: `rsync -a {environment}/ {host}:{environment}/`"
            )
            continue
        if there["python"].rpartition(".")[0] != here["python"].rpartition(".")[0]:
            yield f"{host}: Python {there['python']}, and {here['python']} here: make {environment} anew there"
            continue
        missing = False
        for name, version in here["versions"].items():
            other = there["versions"][name]
            if other != version:
                missing = missing or not other
                has = f"{name} {other}" if other else f"no {name}"
                yield f"{host}: {has}, and {version} here: there type `{python} -m pip install {name}=={version}`"
        if there["mpi"] != here["mpi"] and not missing:
            yield f"{host}: MPI is {there['mpi']}, and {here['mpi']} here: install the same one"
        elif not there["mpirun"] and not missing:
            yield f"{host}: the mpirun of this environment is not there: install the same MPI"
        for each in there["full"]:
            yield f"{host}: {each}: no file can be written there: type `ssh {host} df -h {each.partition(':')[0]}`"
        if not there["folder"]:
            yield f"{host}: no folder {folder} there: copy it with --sync, or share it"
        else:
            for name, digest in here["files"].items():
                if digest and there["files"].get(name) != digest:
                    what = "is another one" if there["files"].get(name) else "is not there"
                    yield f"{host}: {name} {what}: copy the folder with --sync"


def clock_remarks(clocks: Mapping[str, float]) -> Iterator[str]:
    """`clocks`: by how many seconds the wall clock of each host is ahead of this machine's."""
    for host, ahead in clocks.items():
        if abs(ahead) > CLOCK_SECONDS:
            yield (
                f"{host}: its clock is {abs(ahead):.3g} s {'ahead' if ahead > 0 else 'behind'}: there type "
                "`sudo timedatectl set-ntp true`"
            )


# ------------------------------------------------------------------------------------------------------------ the job


def hostfile_of(hosts: Mapping[str, int], mpi: str) -> str:
    """The hostfile, in the notation of the MPI library."""
    return "".join(
        f"{host}:{slots}\n" if mpi == "mpich" else f"{host} slots={slots}\n" for host, slots in hosts.items()
    )


def mpi_of(version: str) -> str:
    """ "mpich" or "openmpi", by the first line of the library's version. Raises LaunchError for another library."""
    for word, name in (("Open MPI", "openmpi"), ("MPICH", "mpich")):
        if word in version:
            return name
    raise LaunchError(f"`fompi up` starts MPICH and Open MPI, not {version!r}: use the launcher of that library")


def variables(mpi: str, network: SharedNetwork | None) -> dict[str, str]:
    """Variables that lead messages over this network. A value that differs between hosts: see `of_host`."""
    if network is None:
        return {}
    names = ",".join(network.names)
    if mpi == "mpich":
        return {"FI_TCP_IFACE": names, "UCX_NET_DEVICES": names, "GLOO_SOCKET_IFNAME": names}
    include = names if network.subnet == ROUTED else network.subnet
    return {"OMPI_MCA_btl_tcp_if_include": include, "UCX_NET_DEVICES": names, "GLOO_SOCKET_IFNAME": names}


def of_host(network: SharedNetwork, given: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """The words before the program where the interfaces of the hosts have different names: each rank takes its own.

    `names`: what each host calls itself.
    """
    named = [name for name, value in given.items() if value == ",".join(network.names)]
    cases = " ".join(
        f"{shlex.quote(names[host])}) {' '.join(f'export {name}={end.name};' for name in named)};"
        for host, end in network.ends.items()
    )
    return ["sh", "-c", f'case "$(uname -n)" in {cases} esac; exec "$@"', "sh"]


@dataclass(frozen=True)
class JobOnHosts:
    """A job: what it runs, where, over which network, and how ssh is called."""

    mpi: str  # "mpich", "openmpi"
    mpirun: str
    hosts: Mapping[str, int]
    hostfile: str
    program: tuple[str, ...]
    folder: str
    network: SharedNetwork | None = None
    ssh: str = ""  # a program, if it is not `ssh`
    own_interface: str = ""  # of this machine in the network, if it is one of the hosts


def launch(job: JobOnHosts, given: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """The command of mpirun. `given` are the variables of the network, `environment` is that of this process."""
    ranks = str(sum(job.hosts.values()))
    if job.mpi == "mpich":
        words = [job.mpirun, "-launcher", "ssh", *(["-launcher-exec", job.ssh] if job.ssh else [])]
        words += ["-iface", job.own_interface] if job.own_interface else []
        return [*words, "-f", job.hostfile, "-n", ranks, "-wdir", job.folder, *job.program]
    words = [job.mpirun, "--hostfile", job.hostfile, "-n", ranks, "--wdir", job.folder]
    words += ["--map-by", "slot:oversubscribe", "--bind-to", "none"]
    settings = {"plm_ssh_no_tree_spawn": "1", **({"plm_ssh_agent": job.ssh} if job.ssh else {})}
    if job.network is not None and job.own_interface and job.network.subnet != ROUTED:
        settings["prte_if_include"] = job.network.subnet
    words += [word for name, value in settings.items() for word in ("--prtemca", name, value)]
    passed = sorted({*given, *(name for name in environment if name.startswith(PASSED_ON))})
    return [*words, *(word for name in passed for word in ("-x", name)), *job.program]


def machine_of(hosts: Mapping[str, int], way: Way | None, kernels: Mapping[str, Sequence[float]]) -> Machine:
    """A machine of what was measured: the slowest way between hosts, the slowest kernels of a rank.

    `kernels`: operations and bytes per second of a rank of each host. What was not measured (messages within
    a host, the overhead of a kernel) is that of the preset `laptop`. `fompi calibrate` measures all of it.
    """
    base = PRESETS["laptop"]
    ranks = max(hosts.values())
    rates = [each for each in kernels.values() if all(each)]
    flops = min([each[0] for each in rates] or [base.flops_rate])
    memory = min([each[1] for each in rates] or [base.memory_rate])
    inner, levels = base.innermost, []
    if way is not None and ranks > 1:
        levels = [Level(ranks, way.latency, way.rate, shared=True)]
    elif way is not None:
        inner = Level(1, way.latency, way.rate)
    return Machine(
        "fompi-up",
        inner.latency,
        inner.bandwidth,
        flops,
        memory,
        base.overhead,
        f"fompi up {' '.join(f'{host}:{slots}' for host, slots in hosts.items())}"
        + ("" if way is None else f": {megabits(way.rate)} Mbit/s and {1e6 * way.latency:.0f} us by TCP")
        + "; messages within a host and overheads as in the preset laptop",
        levels=tuple(levels),
    )
