"""`fompi info`: where a program of fompi would run, on one screen, fit for a bug report.

`brief` is the same in ten lines. It is what `fompi` prints without a subcommand.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from fompi.base.errors import LaunchError, LayoutError
from fompi.base.tables import Table
from fompi.base.version import __version__
from fompi.cli.output import show, show_json
from fompi.cli.processes import (
    Process,
    binding,
    cores_per_rank,
    counted,
    crowding_notes,
    gpu_notes,
    rank_rows,
    this_process,
)
from fompi.mpi import environment, launcher, paths

EXAMPLE = "mpirun -n 4 {} info"

_REMARKS = {
    "note": "notes",
    "threads": "threads",
    "environment": "environment",
    "warning": "warning",
    "MPI": "mpi_error",
}
"""What is printed below the table: its heading, and its name among the facts, which is a text or a list of texts."""

MOST_HOSTS = 4
"""With more hosts than this, they are counted instead of named."""

_YES_NO = {True: "yes", False: "no", None: "unknown"}


# ----------------------------------------------------------------------------------------------------------- the facts

_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "numba": ("numba",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"),
    "torch": ("torch",),
    "jax": ("jax",),
}
"""The distributions that may install a package, by the package's name."""


def collect() -> dict[str, Any]:
    """The facts, as values that JSON can hold. Collective with MPI. Only "rank" and "launcher" differ between ranks.

    No package is imported to find its version. The driver of a GPU is asked without making a context. Missing MPI is
    no error: "mpi" is None and "mpi_error" says why.
    """
    launched = launcher.detect()
    rank, processes = 0, [this_process(launched.local_rank or 0)]
    mpi, mpi_error, warning, progress, engine = None, None, None, None, None
    try:
        from fompi.engine import native
        from fompi.mpi import transport

        rank, size = transport.world()
        mpi = _mpi_facts()
        warning = launcher.warning(launched, size, mpi["library"], mpi["mpirun"])
        processes = [Process.unpack(record) for record in transport.gather_records(processes[0].pack())]
        progress, engine = _progress_facts(), str(native.engine())
    except LaunchError as error:
        mpi_error = str(error)
    versions = {name: _version(distributions) for name, distributions in _PACKAGES.items()}
    kill = launcher.kill_note(launched, mpi["library"]) if mpi is not None and len(processes) > 1 else None
    notes = [launcher.batch_note(), kill, *crowding_notes(processes), *gpu_notes(processes)]
    return {
        "versions": {"fompi": __version__, "python": platform.python_version(), **versions},
        "mpi": mpi,
        "mpi_error": mpi_error,
        "launcher": {**asdict(launched), "plugin": launcher.plugin()},
        "rank": rank,
        "ranks": rank_rows(processes),
        "cores_per_rank": cores_per_rank(processes),
        "binding": binding(processes),
        "gpus_per_rank": sorted({process.gpus for process in processes}),
        "notes": [note for note in notes if note is not None],
        "threads": launcher.thread_note(),
        "progress": progress,
        "engine": engine,
        "paths": _paths(processes, mpi),
        "counters": _counters(processes),
        "warning": warning,
        "environment": "; ".join(environment.sentences()) or None,
    }


def _paths(processes: Sequence[Process], mpi: dict[str, Any] | None) -> str | None:
    """How messages between devices move. None if no rank has a device, and no variable asks for one."""
    asked = environment.value("FOMPI_DEVICE") != "auto" or environment.value("FOMPI_PATH") != "auto"
    if mpi is None or not (asked or any(process.device != "cpu" for process in processes)):
        return None
    wanted, aware = environment.value("FOMPI_PATH"), bool(mpi["gpu_aware"])
    within, between = (paths.choose(wanted, same_host, aware) for same_host in (True, False))
    return f"between devices of a host by {within}, of two hosts by {between} (FOMPI_PATH={wanted})"


def _counters(processes: Sequence[Process]) -> str | None:
    """Whether one kernel computes and announces several products. None if nobody asks for it, and no rank has a GPU."""
    choice = environment.value("FOMPI_COUNTERS")
    if not (environment.is_set("FOMPI_COUNTERS") or any(process.device != "cpu" for process in processes)):
        return None
    version = _version(("triton", "pytorch-triton"))
    triton = f"Triton {version}" if version else "Triton is not installed"
    when = {"0": "never", "1": "wherever it can", "auto": "where it was measured to be faster"}[choice]
    return f"one kernel announces several products of a bound plan {when} (FOMPI_COUNTERS={choice}, {triton})"


def _mpi_facts() -> dict[str, Any]:
    from fompi.mpi import transport, ucx

    library = transport.library()
    requested, provided = transport.thread_levels()
    try:
        environment.check("FOMPI_GPU_AWARE")
        gpu = transport.gpu_awareness(environment.value("FOMPI_GPU_AWARE"))
        gpu_aware, gpu_source = gpu.aware, gpu.source
    except LaunchError as error:  # the value is none of auto, 0, 1
        gpu_aware, gpu_source = None, str(error)
    return {
        "library": library.name,
        "version": library.version,
        "standard": library.standard,
        "description": library.description,
        "path": library.path,
        "other_libraries": transport.other_libraries(),
        "networks": [] if library.standard else ucx.networks(),
        "mpirun": library.mpirun,
        "thread_requested": requested,
        "thread_provided": provided,
        "gpu_aware": gpu_aware,
        "gpu_aware_source": gpu_source,
        "tag_upper_bound": transport.tag_upper_bound(),
    }


def _progress_facts() -> dict[str, Any]:
    """What moves messages while a rank computes, and how much the MPI library moves without help. Collective."""
    from fompi.engine import communicator, progress
    from fompi.mpi import link

    source = f"FOMPI_PROGRESS={environment.value('FOMPI_PROGRESS')}"
    mode: str | None
    try:
        environment.check("FOMPI_PROGRESS")
        mode = communicator.progress_mode(communicator.machine_of_environment())
    except (LaunchError, LayoutError) as error:
        mode, source = None, str(error)
    pause = progress.pause_between_polls(mode, launcher.cores_per_rank()) if mode in progress.HELPED else None
    unaided = progress.measure_unaided(link.Link(link.mpi_communicator(None)))
    return {
        "mode": mode,
        "source": source,
        "seconds_between_polls": pause,
        "worker": pause is not None and progress.has_spare(launcher.cores_per_rank()),
        "unaided": unaided._asdict(),
    }


def _version(distributions: Sequence[str]) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


# ------------------------------------------------------------------------------------------------------------ as text


def blocks(facts: dict[str, Any]) -> list[Table | str]:
    """What `info` prints: versions, MPI, one row per rank, and what to correct."""
    launched = facts["launcher"]
    processes = "" if launched["size"] is None else f" ({launched['size']} processes)"
    lines = [(name, version or "not installed") for name, version in facts["versions"].items()]
    lines += [("", ""), *_mpi_lines(facts["mpi"])]
    plugin = f", --mpi={launched['plugin']}" if launched.get("plugin") else ""
    lines += [("launcher", launched["launcher"] + processes + plugin)]
    lines += [("ranks", _ranks_of_hosts([row["host"] for row in facts["ranks"]]))]
    lines += [("cores", f"{facts['cores_per_rank']:.4g} per rank, {_of_hosts(facts['binding'])}")]
    if facts.get("paths"):
        lines += [("messages", facts["paths"])]
    if facts.get("counters"):
        lines += [("products", facts["counters"])]
    if any(facts["gpus_per_rank"]):
        lines += [("GPUs", f"each rank sees {' or '.join(map(str, facts['gpus_per_rank']))}")]
    lines += _progress_lines(facts["progress"])
    if facts.get("engine"):
        lines += [("engine", facts["engine"])]
    return [_keys_and_values(lines), _rank_table(facts["ranks"]), *remarks(facts)]


def remarks(facts: dict[str, Any]) -> list[str]:
    """What to correct, one sentence each, with its heading: "threads: BLAS may start ..."."""
    lines = []
    for heading, name in _REMARKS.items():
        found = facts.get(name) or []
        lines += [f"{heading}: {each}" for each in ([found] if isinstance(found, str) else found)]
    return lines


def brief_blocks(facts: dict[str, Any], program: str) -> list[str]:
    """What `fompi` prints without a subcommand: ten lines, what to correct, and the next command to try."""
    versions, ranks = facts["versions"], facts["ranks"]
    mpi = dict(_mpi_lines(facts["mpi"]))
    packages = {name: version for name, version in versions.items() if name not in ("fompi", "python")}
    hosts = len({row["host"] for row in ranks})
    devices = ", ".join(dict.fromkeys(row["device"] for row in ranks))
    progress = dict(_progress_lines(facts["progress"])).get("progress", "none")
    lines = [
        ("fompi", f"{versions['fompi']}, Python {versions['python']}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
        ("missing", ", ".join(name for name, version in packages.items() if not version) or "nothing"),
        ("MPI", mpi["MPI"]),
        ("library", mpi.get("library", "none")),
        ("launcher", facts["launcher"]["launcher"]),
        ("ranks", f"{counted(len(ranks), 'rank')} on {counted(hosts, 'host')}"),
        ("cores", f"{facts['cores_per_rank']:.4g} per rank"),
        ("device", devices),
        ("progress", progress),
    ]
    if facts["mpi"] is None:
        command, what = "plan all_gather_matmul 512x64 64x256 --ranks 4 --schedule ring", "a plan needs no MPI"
    else:
        count = 4 if facts["cores_per_rank"] * len(ranks) >= 4 else 2
        command, what = f"try 1024,1024,1024 --ranks {count}", "what overlap gains here for a shape of your own"
    return [_keys_and_values(lines), *remarks(facts), f"next: {program} {command}    # {what}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--expect", type=int, metavar="N", help="exit with status 1 unless this is one job of N ranks")


def run(options: argparse.Namespace) -> int:
    """Print the facts once. Who prints them exits with 1 if the launcher does not fit, or --expect another number.

    The others exit with 0, so that a launcher does not end the one that prints.
    """
    facts = collect()
    if not prints(facts):
        return 0
    if options.json:
        show_json(facts)
    else:
        show(*blocks(facts))
    size = len(facts["ranks"])
    if options.expect not in (None, size):
        print(f"fompi: expected one job of {options.expect} ranks, this one has {size}", file=sys.stderr)
        return 1
    unfit = facts["warning"] or (facts["mpi_error"] and facts["launcher"]["launcher"] != "none")
    return 1 if unfit else 0


def brief(program: str) -> int:
    """Print the facts in short, once. `program` is how the command line was called."""
    facts = collect()
    if prints(facts):
        show(*brief_blocks(facts, program))
    return 0


def prints(facts: dict[str, Any]) -> bool:
    """True on rank 0. If the launcher started N jobs of one rank each: true for the process that it calls rank 0."""
    is_single = len(facts["ranks"]) == 1
    return facts["rank"] == 0 and not (is_single and facts["launcher"]["rank"])


def _ranks_of_hosts(hosts: Sequence[str]) -> str:
    """How many ranks each host has: "4 on n1, 3 on n2", "8 on each of 100 hosts"."""
    counts = Counter(hosts)
    if len(counts) > MOST_HOSTS:
        of_count = Counter(counts.values())
        return ", ".join(f"{count} on each of {counted(many, 'host')}" for count, many in of_count.items())
    return ", ".join(f"{count} on {host}" for host, count in counts.items())


def _of_hosts(words: Mapping[str, str]) -> str:
    """One word if it is the same on all hosts, else the hosts of each word."""
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    hosts_of: dict[str, list[str]] = {}
    for host, word in words.items():
        hosts_of.setdefault(word, []).append(host)
    return "; ".join(f"{word} on {_several(hosts)}" for word, hosts in hosts_of.items())


def _several(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= MOST_HOSTS else f"{', '.join(hosts[:MOST_HOSTS])}, ..."


def _progress_lines(progress: dict[str, Any] | None) -> list[tuple[str, str]]:
    if progress is None:
        return []
    from fompi.engine.progress import Pause

    pause, unaided = progress["seconds_between_polls"], progress["unaided"]
    helper = "" if pause is None else f", a poll every {Pause(*pause)}"
    helper += ", another thread for products" if progress["worker"] else ""
    if unaided["share"] is None:
        share = f"not measured: {unaided['skipped']}"
    else:
        share = f"{unaided['share']:.0%} of {unaided['nbytes'] >> 10} KiB ({1e3 * unaided['seconds']:.3g} ms)"
        share += " move while all ranks stay out of MPI"
    return [("progress", f"{progress['mode'] or 'none'} ({progress['source']}){helper}"), ("by itself", share)]


def _mpi_lines(mpi: dict[str, Any] | None) -> list[tuple[str, str]]:
    if mpi is None:
        return [("MPI", "none")]
    return [
        ("MPI", f"{mpi['library']} {mpi['version']} (standard {mpi['standard']})")
        if mpi["standard"]
        else ("carrier", f"{mpi['library']} {mpi['version']}, no MPI"),
        ("library", mpi["path"] or "at an unknown path"),
        *(("networks", network) for network in [", ".join(mpi["networks"])] if network),
        *(("not used", f"{path}: loaded, but mpi4py calls the library above") for path in mpi["other_libraries"]),
        ("threads", f"{mpi['thread_provided']} ({mpi['thread_requested']} requested)"),
        ("GPU-aware", f"{_YES_NO[mpi['gpu_aware']]} ({mpi['gpu_aware_source']})"),
        ("tags", f"up to {mpi['tag_upper_bound']}"),
    ]


def _keys_and_values(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{key:<10} {value}".rstrip() for key, value in lines)


def _rank_table(rows: Sequence[dict[str, Any]]) -> Table:
    names = {key: key.replace("_", " ") for key in rows[0]}
    cells = [[str(value) for value in row.values()] for row in rows]
    return Table([*names.values()], cells, right=[name for key, name in names.items() if isinstance(rows[0][key], int)])
