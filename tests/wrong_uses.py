"""Sixty wrong uses, each with the words that help. `test_wrong_uses.py` runs them as a user would.

A use is a program, started on some ranks, or a command line. fompi answers with one sentence, once per job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MPICH, OPENMPI = "mpich", "openmpi"

PRELUDE = """\
import os, sys, time
import numpy as np
import fompi
S, R = fompi.Spec, fompi.Shard(0)

def interrupt():  # Ctrl-C: SIGINT for the launcher, which is the outermost of its processes
    pid = last = os.getppid()
    while any(word in open(f"/proc/{pid}/comm").read() for word in ("mpi", "pmi", "prte")):
        last, pid = pid, int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    os.kill(last, 2)

"""


@dataclass(frozen=True)
class Use:
    """A program (`code`), or the words of a command line that begins with `python -m`, on two ranks or without any."""

    name: str
    words: tuple[str, ...]  # what the answer must contain
    code: str = ""
    command: tuple[str, ...] = ()
    launcher: str = "mpirun"
    env: dict[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = (MPICH,)  # where it is tried

    @property
    def is_one_call(self) -> bool:
        """It raises an error on all ranks, and the program could go on. What uses do at the end of a job, BOTH show."""
        special = self.command or self.env or self.launcher != "mpirun" or self.libraries != (MPICH,)
        by_python = "AttributeError" in self.words  # it suggests a name where it prints the error
        return not special and not by_python and "interrupt" not in self.code


def use(
    name: str, code: str, *words: str, launcher: str = "mpirun", libraries: tuple[str, ...] = (MPICH,), **env: str
) -> Use:
    return Use(name, words, code, (), launcher, env, libraries)


def cli(command: str, *words: str, launcher: str = "", **env: str) -> Use:
    return Use(command, words, "", tuple(command.split()), launcher, env)


BOTH = (MPICH, OPENMPI)
TORCH = "import torch\nfrom fompi.parallel.data import SGD\n"
COMM = "comm = fompi.Communicator()\n"
USES = (
    # ------------------------------------------------------------------------------------------ shapes, dtypes, arrays
    use(
        "inner dimension",
        "fompi.all_gather_matmul(np.ones((4, 3)), np.ones((5, 2)))",
        "ShapeError",
        "3 columns",
        "(5, 2)",
    ),
    use("a list", "fompi.all_reduce([1, 2, 3])", "TensorError", "np.asarray(x)"),
    use("a number", "fompi.all_reduce(3.0)", "TensorError"),
    use("objects", "fompi.all_reduce(np.array([None]))", "DtypeError", "object"),
    use("two dtypes", "fompi.all_gather_matmul(np.ones((4, 3)), np.ones((3, 2), 'f'))", "float64", "float32"),
    use("mean of integers", "fompi.all_reduce(np.ones(3, int), op='mean')", "DtypeError", "mean", "int64"),
    use("an op that is none", "fompi.all_reduce(np.ones(3), op='avg')", "'avg'", "mean"),
    use("out of another shape", "fompi.all_reduce(np.ones(3), out=np.ones(4))", "ShapeError", "(3,)", "(4,)"),
    use("out of another dtype", "fompi.all_reduce(np.ones(3), out=np.ones(3, 'f'))", "float32", "float64"),
    use(
        "read-only out",
        "y = np.ones(3)\ny.flags.writeable = False\nfompi.all_reduce(np.ones(3), out=y)",
        "TensorError",
        "read-only",
    ),
    use("root that is none", "fompi.broadcast(np.ones(3), root=9)", "root=9", "0 to 1"),
    use("a vector of rows", "fompi.all_gather_matmul(np.ones(3), np.ones((3, 2)))", "ShapeError", "(3,)"),
    use(
        "a bias of another length", "fompi.all_gather_matmul(np.ones((2, 3)), np.ones((3, 2)), bias=np.ones(5))", "bias"
    ),
    # ------------------------------------------------------------------------------------------------- names and words
    use("schedule", "fompi.all_reduce(np.ones(3), schedule='rings')", "'rings'", "ring"),
    use("keyword", "fompi.all_reduce(np.ones(3), schedul='ring')", "ArgumentError", "'schedule'"),
    use("operation", "fompi.allreduce(np.ones(3))", "AttributeError", "all_reduce"),
    use("planned operation", "fompi.plan('all_gather_matmull', ranks=2)", "all_gather_matmul"),
    use("effort", "fompi.all_reduce(np.ones(3), effort='high')", "effort", "'high'"),
    use("wire", "fompi.all_reduce(np.ones(3, np.float32), wire='int3')", "wire", "'int3'", "int8"),
    use("machine", "fompi.Machine.load('gigabyte')", "gigabit"),
    # --------------------------------------------------------------------------------------------------- communicators
    use("a communicator in words", "fompi.all_reduce(np.ones(3), comm='world')", "comm=", "'world'"),
    use(
        "closed communicator",
        COMM + "comm.close()\nfompi.all_reduce(np.ones(3), comm=comm)",
        "StateError",
        "closed",
    ),
    use("color", COMM + "comm.split('left')", "color", "'left'"),
    use("mesh of other ranks", "fompi.Mesh(dp=2, tp=3)", "2 x 3", "number of ranks"),
    use("axis of a mesh", "fompi.Mesh(dp=2)['tp']", "'tp'", "dp"),
    use(
        "after finalize",
        COMM + "from mpi4py import MPI\nMPI.Finalize()\nfompi.all_reduce(np.ones(3), comm=comm)",
        "StateError",
        "Finalize",
        libraries=BOTH,
    ),
    use("send to a rank that is none", COMM + "fompi.send(np.ones(3), 7, comm=comm)", "7", "0 to 1"),
    # ------------------------------------------------------------------------------------------- ranks that differ
    use(
        "operations",
        COMM + "fompi.all_reduce(np.ones(2)) if comm.rank else fompi.all_gather(np.ones(2))",
        "MismatchError",
        "all_reduce",
        "all_gather",
    ),
    use("shapes", COMM + "fompi.all_reduce(np.ones(2 + comm.rank))", "MismatchError", "(2,)", "(3,)"),
    use("dtypes", COMM + "fompi.all_reduce(np.ones(2, 'fd'[comm.rank]))", "MismatchError", "float32", "float64"),
    use(
        "schedules",
        COMM + "fompi.all_reduce(np.ones(2), schedule=['ring', 'direct'][comm.rank])",
        "MismatchError",
        "ring",
        "direct",
    ),
    use(
        "a rank that ends",
        COMM + "if comm.rank: fompi.all_reduce(np.ones(2))",
        "PeerError",
        "rank 0 has ended",
        libraries=BOTH,
    ),
    use(
        "a rank that does not come",
        COMM + "time.sleep(20) if comm.rank else fompi.all_reduce(np.ones(2), comm=comm)",
        "WaitTimeout",
        "rank 1",
        FOMPI_TIMEOUT="1",
        libraries=BOTH,
    ),
    use(
        "a rank that raises",
        COMM + "if comm.rank:\n    raise ValueError('no data')\ncomm.barrier()",
        "ValueError: no data",
        libraries=BOTH,
    ),
    use(
        "a rank that is killed",
        COMM + "if comm.rank: os.kill(os.getpid(), 9)\ncomm.barrier()",
        "signal 9",
        libraries=BOTH,
    ),
    use("Ctrl-C", COMM + "if comm.rank:\n    interrupt()\ntime.sleep(20)", "interrupted"),
    use(
        "a refusal on one rank",
        COMM + "fompi.all_reduce(np.ones(2) if comm.rank else 'x')",
        "TensorError",
    ),
    # ------------------------------------------------------------------------------------------------------ plans
    use(
        "plan for other ranks",
        "p = fompi.plan('all_gather', S((6, 2), 'float32', R), ranks=3)\nfompi.bind(p, x=np.ones((2, 2), 'f'))",
        "3 ranks",
        "2",
    ),
    use(
        "bind without an operand", "p = fompi.plan('all_gather', S((6, 2), 'float32', R), ranks=2)\nfompi.bind(p)", "x"
    ),
    use(
        "bind another shape",
        "p = fompi.plan('all_gather', S((6, 2), 'float32', R), ranks=2)\nfompi.bind(p, x=np.ones((4, 2), 'f'))",
        "(4, 2)",
        "(3, 2)",
    ),
    use("a part that is none", "p = fompi.all_gather.start(np.ones((2, 2)))\np.part(17)", "17"),
    use(
        "a plan that deadlocks",
        """
from fompi.plans.plan import Compute, Recv, Send
@fompi.schedule("mine", "all_gather")
def mine(problem, work):
    yield Recv((work.rank + 1) % work.size, work["y"][0:1])
fompi.all_gather(np.ones((2, 2)), schedule="mine")
""",
        "PlanError",
        "rank",
    ),
    # ------------------------------------------------------------------------------------------------ strategies
    use(
        "features",
        "from fompi.parallel import tensor\ntensor.column_parallel_linear(np.ones((4, 3)), np.ones((5, 2)))",
        "(4, 3)",
        "(5, 2)",
    ),
    use("experts", "from fompi.parallel import expert\nexpert.route(np.ones((4, 8)), np.ones((8, 3)), k=5)", "5", "3"),
    use(
        "k by its place",
        "from fompi.parallel import expert\nexpert.route(np.ones((4, 8)), np.ones((8, 3)), 5)",
        "route() takes 2 positional arguments but 3 were given",
    ),
    use(
        "an order of stages",
        "from fompi.parallel import pipeline\npipeline.actions('1f2b', ranks=2, microbatches=4)",
        "1f2b",
        "1f1b",
    ),
    use(
        "zero",
        TORCH + "fompi.torch.ZeroDataParallel(torch.nn.Linear(2, 2), zero=7, optimizer=SGD(0.1))",
        "zero",
        "7",
    ),
    use(
        "different models",
        TORCH + COMM + "fompi.torch.DistributedDataParallel(torch.nn.Linear(2 + comm.rank, 2), comm)",
        "MismatchError",
    ),
    # ------------------------------------------------------------------------------------------------ frameworks
    use("torch is not there", "sys.modules['torch'] = None\nfompi.torch.nn", "pip install torch", launcher=""),
    use("jax is not there", "sys.modules['jax'] = None\nfompi.jax.all_reduce", "pip install jax", launcher=""),
    use("jit", "import jax\njax.jit(fompi.all_reduce)(np.ones(3))", "fompi.jax.<operation>"),
    use("torch: meta", "import torch\nfompi.all_reduce(torch.ones(3, device='meta'))", "meta"),
    # --------------------------------------------------------------------------------------------------- variables
    use("timeout", COMM, "LaunchError", "FOMPI_TIMEOUT=abc", FOMPI_TIMEOUT="abc"),
    use("progress", COMM, "FOMPI_PROGRESS=fast", "helper", FOMPI_PROGRESS="fast"),
    use("report", COMM, "FOMPI_REPORT", FOMPI_REPORT="/nowhere/report.json"),
    use("FOMPI_MACHINE", "fompi.all_reduce(np.ones(3))", "gigabyte", "gigabit", FOMPI_MACHINE="gigabyte"),
    use("FOMPI_DEVICE", "fompi.all_reduce(np.ones(3))", "FOMPI_DEVICE", FOMPI_DEVICE="gpu"),
    # ---------------------------------------------------------------------------------------------- launchers
    use("no libmpi", COMM, "LaunchError", "pip install mpi4py mpich", launcher="", MPI4PY_LIBMPI="/nowhere/libmpi.so"),
    use("another launcher", COMM, "LaunchError", "use the mpirun of", launcher="the other mpirun", libraries=BOTH),
    use(
        "torchrun after mpi4py",
        "from mpi4py import MPI\n" + COMM,
        "LaunchError",
        "fompi.Communicator()",
        launcher="torchrun",
    ),
    use(
        "torchrun with Open MPI",
        COMM,
        "LaunchError",
        "mpirun",
        launcher="torchrun",
        libraries=(OPENMPI,),
        FOMPI_CARRIER="mpi",
    ),
    # ------------------------------------------------------------------------------------------------ command line
    cli("fompi frobnicate", "frobnicate", "try"),
    cli("fompi try 1024x1024", "1024x1024", "M,K,N"),
    cli("fompi try 64,64,64 --ranks 0", "ranks", "0"),
    cli("fompi plan all_gather_matmul 4x4 --ranks 2", "x", "w"),
    cli("fompi plan all_gathr 4x4 --ranks 2", "all_gather"),
    cli("fompi plan all_gather 4x4 --ranks 2 --schedule rings", "ring"),
    cli("fompi explain all_gather 4y4 --ranks 2", "4y4"),
    cli("fompi simulate all_gather 64x4 --ranks 2 --machine /nowhere.json", "/nowhere.json"),
    cli("fompi calibrate", "mpirun"),
    cli("fompi bench overheads", "overhead"),
    cli("fompi slurm --nodes x -- a.py", "x"),
    cli("fompi layout --model llama-9b --ranks 8", "llama"),
    cli("fompi.torch nothing.py", "nothing.py", launcher="mpirun"),
    cli("fompi.mpi nothing.py", "nothing.py", launcher="mpirun"),
)
