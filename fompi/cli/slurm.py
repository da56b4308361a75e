"""`fompi slurm`: print a complete job script for Slurm, each line with its reason. It submits nothing.

`script` is pure: the facts of the machine and the options of the user in, the text out. `look` collects the facts.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fompi.base.errors import LaunchError
from fompi.cli.output import UsageError
from fompi.mpi.launcher import PLUGINS

EXAMPLE = "{} slurm --nodes 2 --ranks-per-node 4 --cpus-per-rank 4 -- train.py --epochs 9 > train.sbatch"

PROTOCOLS = {
    ("MPICH", "pmi2"): (
        "# Slurm's plug-in pmi2 speaks PMI-1 and PMI-2. MPICH uses PMI-1 there: MPICH 5 deprecates PMI-2.",
        "export MPIR_CVAR_PMI_VERSION=1",
    ),
    ("MPICH", "pmix"): (
        "# This MPICH uses PMIx, which Slurm's plug-in pmix speaks.",
        "export MPIR_CVAR_PMI_VERSION=x",
    ),
    ("Open MPI", "pmix"): ("# Open MPI uses PMIx, which Slurm's plug-in pmix speaks.",),
}
"""How the ranks of a library find each other under a plug-in: lines of the script. Without these MPICH guesses."""

MPIRUNS = ("MPICH", "Open MPI")
"""The libraries whose own mpirun starts the ranks if Slurm lacks their plug-in."""

LOOK_SECONDS = 10


@dataclass(frozen=True)
class SlurmFacts:
    """The MPI library, whether it is a wheel, and the plug-ins of srun. None: there is no Slurm here.

    `has_pmix` is True for an MPICH that is linked to PMIx. That of a wheel is not.
    """

    library: str
    is_wheel: bool = False
    plugins: tuple[str, ...] | None = None
    has_pmix: bool = False


@dataclass(frozen=True)
class JobRequest:
    """What the user asks for. Empty and 0: nothing."""

    program: tuple[str, ...]
    nodes: int = 1
    ranks_per_node: int = 4
    cpus_per_rank: int = 2
    gpus_per_node: int = 0
    time: str = "01:00:00"
    mpi: str = "auto"
    array: str = ""
    resume: bool = False
    sbatch: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    venv: str = ""
    conda: str = ""
    container: str = ""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        names = [Path(word).stem for word in self.program if word.endswith(".py")] or [Path(self.program[0]).name]
        return re.sub(r"[^\w.-]", "_", names[0]) or "fompi"


def script(facts: SlurmFacts, job: JobRequest, command: str = "fompi slurm") -> str:
    """The job script. `command` is how it was asked for."""
    plugin = _plugin(facts, job)
    start = f"srun --mpi={plugin}" if plugin else f"mpirun -n {job.ranks} --bind-to none"
    python = f"{_inside(job)}python"
    program = shlex.join(job.program)
    if job.program[0].endswith(".py"):
        program = f"python {program}"
    parts = [
        _head(facts, job, command, plugin),
        _environment(facts, job),
        _variables(facts, job, plugin),
        f"# This must be one job of {job.ranks} ranks. A wrong --mpi would make it {job.ranks} jobs of one rank.\n"
        f"{start} {python} -m fompi info --expect {job.ranks}",
        _run(job, plugin, f"{start} {_inside(job)}{program}"),
    ]
    return "\n\n".join(parts) + "\n"


def _head(facts: SlurmFacts, job: JobRequest, command: str, plugin: str) -> str:
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus_per_rank,
        "time": job.time,
        "output": "%x-%A_%a.out" if job.array else "%x-%j.out",
    }
    lines = [
        "#!/bin/bash",
        f"# {job.ranks} ranks with {facts.library}. Submit it with sbatch, in the folder of the program. Written by:",
        f"#   {command}",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
    ]
    if job.gpus_per_node:
        lines += [
            "# The ranks of a node see all its GPUs. With --gpus-per-task CUDA IPC between them fails.",
            f"#SBATCH --gpus-per-node={job.gpus_per_node}",
        ]
    if job.array:
        lines += [f"#SBATCH --array={job.array}"]
    lines += [f"#SBATCH --{option.removeprefix('--')}" for option in job.sbatch]
    if job.resume:
        lines += [
            "# Two minutes before the time limit the ranks get SIGUSR1, for fompi.Stop. The next run appends.",
            f"#SBATCH --signal={'' if plugin else 'B:'}USR1@120",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
        ]
    return "\n".join([*lines, "", "set -euo pipefail"])


def _environment(facts: SlurmFacts, job: JobRequest) -> str:
    lines = [f"module load {shlex.quote(name)}" for name in job.modules]
    if job.container:
        lines = [
            "# The packages are in the image. Its MPI library must be of the same family as that of the site.",
            *lines,
        ]
        return "\n".join(lines)
    if job.venv:
        lines += [f"source {shlex.quote(job.venv.rstrip('/') + '/bin/activate')}"]
    if job.conda:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(job.conda)}"]
    if lines:
        return "\n".join(["# The MPI library and the packages.", *lines])
    module = "openmpi" if facts.library == "Open MPI" else "mpich"
    return (
        f"# Load the MPI of the site here, for example `module load {module}`. Then activate the environment:\n"
        "#   source .venv/bin/activate     (without the extras mpich and openmpi, which would hide the MPI above)"
    )


def _variables(facts: SlurmFacts, job: JobRequest, plugin: str) -> str:
    lines = [
        "# BLAS and Numba start one thread for each core of a rank.",
        f"export OMP_NUM_THREADS={job.cpus_per_rank} OPENBLAS_NUM_THREADS={job.cpus_per_rank}",
        "# srun does not inherit --cpus-per-task.",
        f"export SRUN_CPUS_PER_TASK={job.cpus_per_rank}",
        "# A rank that is killed ends the job. Otherwise the other ranks would wait for it.",
        "export SLURM_KILL_BAD_EXIT=1",
        *PROTOCOLS.get((facts.library, plugin), ()),
    ]
    if facts.library == "Intel MPI":
        lines += [
            "# Intel MPI finds Slurm's PMI by this path.",
            "export I_MPI_PMI_LIBRARY=${I_MPI_PMI_LIBRARY:-/usr/lib64/libpmi2.so}",
        ]
    if facts.library == "MPICH" and facts.is_wheel:
        lines += [
            "# The addresses of UCX do not fit into the lines of Slurm's PMI (mpich issue 6924).",
            "export MPIR_CVAR_CH4_NETMOD=ofi",
        ]
    return "\n".join(lines)


def _plugin(facts: SlurmFacts, job: JobRequest) -> str:
    """The plug-in of srun for the library. Empty if Slurm lacks it, and the library's own mpirun starts the ranks."""
    known = facts.plugins
    if job.mpi != "auto":
        if known is not None and job.mpi not in known:
            raise LaunchError(f"this Slurm has no --mpi={job.mpi}; it has {', '.join(known)}")
        return job.mpi
    usual = PLUGINS.get(facts.library, "pmi2")
    for plugin in ("pmix", usual) if facts.has_pmix else (usual,):
        if known is None or plugin in known:
            return plugin
    return "" if facts.library in MPIRUNS else usual


def _inside(job: JobRequest) -> str:
    gpus = "--nv " if job.gpus_per_node else ""  # the driver of the host
    return f"apptainer exec {gpus}{shlex.quote(job.container)} " if job.container else ""


def _run(job: JobRequest, plugin: str, command: str) -> str:
    if not job.resume:
        return command
    if not plugin:  # the signal of Slurm would end its daemons
        running = [
            "# mpirun passes the signal on to the ranks. `wait` ends when a signal arrives.",
            f"{command} &",
            "trap 'kill -USR1 $!' USR1",
            "status=0",
            "wait $! || status=$?",
            "while kill -0 $! 2>/dev/null; do",
            "    status=0",
            "    wait $! || status=$?",
            "done",
        ]
    else:
        running = ["status=0", f"{command} || status=$?"]
    return "\n".join(
        [
            "# fompi.Stop makes this file after all ranks have agreed to stop. Then Slurm starts the job again.",
            'export FOMPI_AGAIN="$PWD/.again-$SLURM_JOB_ID"',
            'rm -f "$FOMPI_AGAIN"',
            *running,
            'if [ -e "$FOMPI_AGAIN" ]; then',
            '    rm -f "$FOMPI_AGAIN"',
            '    exec scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $status",
        ]
    )


# ------------------------------------------------------------------------------------------------- the command


def look() -> SlurmFacts:
    """The MPI library that Python loads, and the plug-ins of srun if there is Slurm here."""
    from fompi.mpi import transport

    library = transport.library()
    is_wheel = (
        library.path is not None and Path(library.path).is_relative_to(sys.prefix) and sys.prefix != sys.base_prefix
    )
    has_pmix = library.name == "MPICH" and hasattr(transport.functions(), "PMIx_Init")
    return SlurmFacts(library.name, is_wheel, _plugins(), has_pmix)


def _plugins() -> tuple[str, ...] | None:
    if shutil.which("srun") is None:
        return None
    try:
        listed = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=LOOK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = re.findall(r"^(?:srun: )?\s*(\w+)$", listed.stdout + listed.stderr, re.MULTILINE)
    return tuple(dict.fromkeys(names)) if listed.returncode == 0 and names else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=_count, default=1, metavar="N")
    add("--ranks-per-node", type=_count, default=4, metavar="R")
    add("--cpus-per-rank", type=_count, default=2, metavar="C", help="with two or more, messages move beside kernels")
    add("--gpus-per-node", type=partial(_count, least=0), default=0, metavar="G")
    add("--time", type=_time, default="01:00:00", metavar="T", help="the time limit: minutes, 01:00:00 or 2-12:00:00")
    add(
        "--sbatch", type=_word, action="append", default=[], metavar="O",
        help="any option of sbatch, without its dashes: partition=gpu, account=a, mem=64G, exclusive; may be repeated",
    )  # fmt: skip
    add("--mpi", choices=["auto", "pmi2", "pmix", "cray_shasta"], default="auto", help="the plug-in of srun")
    add("--array", type=_indices, default="", metavar="A", help="the indices of a job array: 0-9%%2")
    add("--resume", action="store_true", help="stop before the time limit (fompi.Stop), and start again")
    add("--module", action="append", default=[], metavar="M", help="a module to load; may be repeated")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--venv", default="", metavar="V", help="a virtual environment")
    where.add_argument("--conda", default="", metavar="E", help="a conda environment")
    where.add_argument("--container", default="", metavar="IMG", help="an image for apptainer")
    add("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="a Python file, or a command")


def _count(text: str, least: int = 1) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
    return number


def _word(text: str) -> str:
    if re.search(r"\s", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not one word")
    return text


def _time(text: str) -> str:
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d?){0,2}|infinite|unlimited", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of Slurm: 30 (minutes), 01:00:00, 2-12:00:00")
    return text


def _indices(text: str) -> str:
    one = r"\d+(-\d+(:\d+)?)?"
    if text and not re.fullmatch(rf"{one}(,{one})*(%\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} are not indices of Slurm: 0-9, 1,3,7, 0-99:3, 0-9%2")
    return text


def run(options: argparse.Namespace) -> int:
    """Print the script. What Slurm lacks is said on standard error."""
    program = tuple(options.program[1:] if options.program[:1] == ["--"] else options.program)
    if not program:
        raise UsageError("which program? for example: fompi slurm --nodes 2 -- train.py")
    same = {name: value for name, value in vars(options).items() if name in JobRequest.__dataclass_fields__}
    job = JobRequest(**{**same, "program": program, "modules": tuple(options.module), "sbatch": tuple(options.sbatch)})
    if program[0].endswith(".py") and not job.container and not Path(program[0]).exists():
        print(
            f"fompi: there is no {program[0]} here; the job will look for it in the folder of sbatch", file=sys.stderr
        )
    facts = look()
    text = script(facts, job, shlex.join(["fompi", *sys.argv[1:]]))
    if facts.plugins is not None and (plugin := _plugin(facts, job)) not in facts.plugins:
        lacks = f"this Slurm has no --mpi={plugin or PLUGINS[facts.library]} for {facts.library}"
        instead = "" if plugin else ": the script starts the ranks by mpirun"
        print(f"fompi: {lacks}; it has {', '.join(facts.plugins)}{instead}", file=sys.stderr)
    print(text, end="")
    return 0
