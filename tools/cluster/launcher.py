"""The launchers of the two MPIs, and how they reach the hosts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import CONTROL, LAB, SUBNET
from cluster.values import Refused


@dataclass(frozen=True)
class Mpi:
    """An MPI library and its launcher."""

    name: str  # "mpich", "openmpi"
    mpirun: str

    @classmethod
    def beside(cls, command: Sequence[str], wanted: str | None) -> Mpi:
        """The MPI whose mpirun lies next to the Python of the command, otherwise the first one in PATH."""
        own = Path(python_of(command)).parent / "mpirun"
        mpirun = str(own) if own.exists() else shutil.which("mpirun")
        if not mpirun:
            raise Refused(f"there is no mpirun beside {own.parent}/python, nor on PATH: pip install mpich")
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
        names = {"HYDRA": "mpich", "Open MPI": "openmpi"}
        name = next((name for word, name in names.items() if word in version), None)
        if name is None:
            raise Refused(f"{mpirun} is neither MPICH's nor Open MPI's: call the python of an environment with one")
        if wanted not in (None, name):
            raise Refused(f"{mpirun} belongs to {name}: for {wanted} call the python of an environment with it")
        return cls(name, mpirun)

    def launch(self, ranks: int, slots: str) -> list[str]:
        agent, rank = str(LAB / "agent"), str(LAB / "rank")
        if self.name == "mpich":
            reach = ["-launcher", "ssh", "-launcher-exec", agent, "-iface", "control", "-hosts", slots]
        else:
            reach = ["--host", slots, "--map-by", "slot:oversubscribe", "--bind-to", "none"]
            settings = {
                "plm_ssh_agent": agent,
                "plm_ssh_no_tree_spawn": "1",
                "prte_if_include": f"{CONTROL}.0/24",
            }
            reach += [word for name, value in settings.items() for word in ("--prtemca", name, value)]
        return [self.mpirun, *reach, "-n", str(ranks), rank]

    def variables(self, crowded: bool) -> dict[str, str]:
        """Environment variables: messages between hosts use TCP over eth0, ranks of one host share its /dev/shm.

        `crowded`: ranks share cores, so a rank that waits must yield its core. With a core per rank it must not: a
        thread that polls during a kernel would give the core back before it has polled.
        """
        common = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "UCX_NET_DEVICES": "eth0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TMPDIR": str(LAB),  # for the launcher; the ranks get their own value back
        }
        if self.name == "mpich":
            return {**common, "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
        return {
            **common,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": str(int(crowded)),
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,sm,self",
            "OMPI_MCA_btl_tcp_if_include": f"{SUBNET}.0/24",
        }


def python_of(command: Sequence[str]) -> str:
    """The Python that a job calls. The measurement with MPI uses it too."""
    first = Path(command[0]).name.startswith("python") and shutil.which(command[0])
    return first or shutil.which("python") or sys.executable
