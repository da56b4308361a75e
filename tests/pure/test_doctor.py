"""The findings of `fompi doctor`, on made-up values: each one for a fault, and none for a healthy job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fompi.cli.doctor import links_of
from fompi.cli.findings import BETWEEN, WITHIN, Facts, Finding, HostFacts, Products, findings, wall_ahead
from fompi.model.machine import Level
from fompi.traces.clocks import Clock

GIGABIT = 1e9 / 8
VERSIONS = {"fompi": "1.0", "python": "3.11.7", "numpy": "2.4.0", "MPI": "MPICH 5.0.2"}
HOSTS = ("n1", "n1", "n2", "n2")
INFO = {
    "versions": {**VERSIONS, "cupy": "13"},
    "mpi": {
        "library": "MPICH",
        "thread_provided": "multiple",
        "gpu_aware": True,
        "gpu_aware_source": "FOMPI_GPU_AWARE=1",
    },
    "mpi_error": None,
    "warning": None,
    "environment": None,
    "notes": [],
    "threads": None,
    "cores_per_rank": 4.0,
    "ranks": [{"rank": rank, "host": host, "device": "cpu"} for rank, host in enumerate(HOSTS)],
    "progress": {"mode": "helper", "unaided": {"share": 0.1}},
}
PLACES = [
    HostFacts(host, VERSIONS, 8 << 30, "/tmp", 8 << 30, "", {"ib0": 100 * GIGABIT, "eth0": GIGABIT}, 5.0)
    for host in HOSTS
]
LEVEL = Level(1, 2e-6, 1e10, curve=((1024, 3e-6),))
PAIRS = {(a, b): (80 if HOSTS[a] != HOSTS[b] else 300) * GIGABIT for a in range(4) for b in range(a + 1, 4)}
HEALTHY = Facts(
    INFO,
    PLACES,
    pairs=PAIRS,
    levels=[(WITHIN, LEVEL), (BETWEEN, LEVEL)],
    moved=0.95,
    clocks={rank: Clock(0.0, 0.0, 1e-6, 1e-5) for rank in (1, 2, 3)},
    products={host: Products(1e-3, 1.1e-3, 4.0) for host in ("n1", "n2")},
    others=(0.1, 16),
)


def with_info(**values):
    return replace(HEALTHY, info={**INFO, **values})


def with_place(rank, **values):
    places = [*PLACES]
    places[rank] = replace(places[rank], **values)
    return replace(HEALTHY, places=places)


def with_mpi(**values):
    return with_info(mpi={**INFO["mpi"], **values})


def with_pairs(**gigabits):
    """with_pairs(_02=1): the pair of ranks 0 and 2 moves 1 Gbit/s."""
    return replace(HEALTHY, pairs={**PAIRS, **{(int(p[1]), int(p[2])): g * GIGABIT for p, g in gigabits.items()}})


def with_products(alone, together, threads):
    return replace(HEALTHY, products={"n1": Products(alone, together, threads)})


def with_devices(*devices):
    return [{"rank": rank, "host": "n1", "device": device} for rank, device in enumerate(devices)]


def test_a_healthy_job_has_no_findings():
    assert findings(HEALTHY) == []


FAULTS = {
    "a wrong launch": (
        with_info(warning="srun started 4 processes, but MPI has 1 rank: use `srun --mpi=pmi2`"),
        "error",
        "srun started 4 processes, but MPI has 1 rank",
        "use `srun --mpi=pmi2`",
    ),
    "no MPI": (
        with_info(mpi_error="there is no MPI (not found): install one", mpi=None, progress=None),
        "error",
        "there is no MPI (not found)",
        "install one",
    ),
    "no communicator": (
        replace(
            with_info(environment="FOMPI_PROGRESS=x: give one of auto"), failure="FOMPI_PROGRESS=x: give one of auto"
        ),
        "error",
        "FOMPI_PROGRESS=x",
        "give one of auto",
    ),
    "a misspelt variable": (
        with_info(environment="FOMPI_TIMOUT is no variable of fompi: FOMPI_TIMEOUT is one"),
        "warning",
        "FOMPI_TIMOUT is no variable",
        "FOMPI_TIMEOUT is one",
    ),
    "a note of info": (
        with_info(notes=["2 ranks share cuda:0 (1a2b3c4d) on n1: start one rank per GPU"]),
        "warning",
        "2 ranks share cuda:0 (1a2b3c4d) on n1",
        "start one rank per GPU",
    ),
    "threads that slowed nothing down": (
        with_info(threads="BLAS may start 9 threads: set OMP_NUM_THREADS=1"),
        "warning",
        "BLAS may start 9 threads",
        "set OMP_NUM_THREADS=1",
    ),
    "threads that slow ranks down": (
        replace(
            with_info(threads="BLAS may start 9 threads: set OMP_NUM_THREADS=1"),
            products={"n1": Products(1e-3, 3e-3, 1.0)},
        ),
        "warning",
        "3.0 times as long while all 2 ranks compute: BLAS starts more threads than a rank has cores (4)",
        "set OMP_NUM_THREADS=4",
    ),
    "others that slow ranks down": (
        replace(HEALTHY, others=(4.0, 16), products={"n1": Products(1e-3, 3e-3, 1.0)}),
        "warning",
        "others used 4.0 of 16 cores",
        "--exclusive",
    ),
    "threads that were not measured": (
        replace(with_info(threads="BLAS may start 9 threads: set OMP_NUM_THREADS=1"), products={}),
        "warning",
        "BLAS may start 9 threads",
        "set OMP_NUM_THREADS=1",
    ),
    "one rank": (with_info(ranks=INFO["ranks"][:1]), "note", "one rank has no links", "mpirun -n 4"),
    "no time": (replace(HEALTHY, undone=["pairs of ranks"]), "warning", "pairs of ranks", "--seconds"),
    "another fompi": (
        with_place(2, versions={**VERSIONS, "fompi": "0.9"}),
        "error",
        "different versions of fompi: 1.0 on rank 0, 0.9 on rank 2",
        "(n1 and n2)",
    ),
    "another NumPy": (
        with_place(3, versions={**VERSIONS, "numpy": "1.26"}),
        "warning",
        "different versions of numpy: 2.4.0 on rank 0, 1.26 on rank 3",
        "one environment on all hosts",
    ),
    "no /dev/shm": (with_place(2, shm=None), "warning", "n2 has no /dev/shm", "mount it"),
    "little /dev/shm": (
        with_place(0, shm=100 << 20),
        "warning",
        "/dev/shm of n1 has 100 MiB free for 2 ranks",
        "mpich_shm",
    ),
    "a full /dev/shm": (with_place(0, shm=1 << 20), "error", "/dev/shm of n1 has 1 MiB free", "remove files"),
    "no TMPDIR": (with_place(0, temporary_free=None), "error", "/tmp cannot be written on n1", "set TMPDIR"),
    "a full TMPDIR": (with_place(2, temporary_free=1 << 20), "warning", "/tmp of n2 has 1 MiB free", "set TMPDIR"),
    "no cache": (
        with_place(2, cache="/home/me: Read-only file system"),
        "warning",
        "not kept on n2: /home/me: Read-only file system",
        "set FOMPI_CACHE",
    ),
    "the wrong network": (
        with_pairs(_02=1, _03=0.9, _12=1, _13=0.9),
        "warning",
        "moves 1 Gbit/s, but ib0 carries 100 Gbit/s. It is as fast as eth0.",
        "UCX_NET_DEVICES",
    ),
    "half of the link": (
        with_pairs(_02=30, _03=30, _12=30, _13=30),
        "warning",
        "moves 30 Gbit/s, but ib0 carries 100 Gbit/s.",
        "MPI module",
    ),
    "a slow pair": (
        with_pairs(_02=20),
        "warning",
        "between ranks 0 and 2 (n1 and n2) is slow: 20 Gbit/s",
        "measure again",
    ),
    "a slow rank": (with_pairs(_03=20, _13=20), "warning", "every link of rank 3 on n2 is slow: 20", "--exclude=n2"),
    "slow messages": (
        replace(HEALTHY, levels=[(BETWEEN, LEVEL._replace(latency=0.005))]),
        "warning",
        "a short message takes 5 ms between hosts",
        "--exclusive",
    ),
    "one thread in MPI": (
        with_mpi(thread_provided="serialized"),
        "warning",
        "allows threads only at the level serialized",
        "MPI_THREAD_MULTIPLE",
    ),
    "no helper": (
        with_info(progress={"mode": "poll", "unaided": {"share": 0.1}}),
        "warning",
        "FOMPI_PROGRESS=poll",
        "unset",
    ),
    "a library that does not help": (
        with_info(progress={"mode": "library", "unaided": {"share": None}}),
        "warning",
        "MPICH moves 0% by itself",
        "unset",
    ),
    "messages that wait for kernels": (
        replace(with_info(cores_per_rank=1.0), moved=0.1),
        "warning",
        "only 10% of a message moves",
        "two cores",
    ),
    "messages that wait although there are cores": (
        replace(HEALTHY, moved=0.1),
        "warning",
        "only 10% of a message moves",
        "bound to these cores?",
    ),
    "a wrong wall clock": (
        with_place(2, wall=65.0),
        "warning",
        "the wall clock of n2 is 60 s ahead of that of n1",
        "chrony",
    ),
    "a late wall clock": (
        with_place(2, wall=-55.0),
        "warning",
        "the wall clock of n2 is 60 s behind that of n1",
        "chrony",
    ),
    "an uncertain clock": (
        replace(HEALTHY, clocks={1: Clock(0.0, 0.0, 0.0, 0.005)}),
        "note",
        "rank 1 on n1 is known to 5 ms only",
        "idle",
    ),
    "a clock that drifts": (
        replace(HEALTHY, clocks={3: Clock(0.0, 0.0, 5e-4, 1e-5)}),
        "note",
        "n2 drifts by 500 us per second",
        "read_clocks",
    ),
    "too many threads": (
        with_products(1e-3, 5e-3, 8.0),
        "warning",
        "on n1 a product takes 5.0 times as long while all 2 ranks compute: BLAS starts more threads",
        "set OMP_NUM_THREADS=4",
    ),
    "shared hyper-threads": (
        with_products(1e-3, 2e-3, 4.0),
        "warning",
        "2.0 times as long while all 2 ranks compute, although",
        "nomultithread",
    ),
    "others": (replace(HEALTHY, others=(4.0, 16)), "warning", "others used 4.0 of 16 cores", "--exclusive"),
    "a rank without a GPU": (
        with_info(ranks=with_devices("cuda:0 X", "cuda:1 X", "cpu", "cuda:0 X")),
        "warning",
        "rank 2 on n1 has no GPU, but rank 0 has one",
        "--gpus-per-node",
    ),
    "no CuPy": (
        with_info(versions={**VERSIONS, "cupy": None}, ranks=with_devices(*["cuda:0 X"] * 4)),
        "note",
        "CuPy is not installed",
        "cuda13",
    ),
    "an MPI without CUDA": (
        replace(
            with_mpi(gpu_aware=False), info={**with_mpi(gpu_aware=False).info, "ranks": with_devices(*["cuda:0 X"] * 4)}
        ),
        "note",
        "MPICH does not take GPU memory",
        "FOMPI_GPU_AWARE=1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_the_only_finding_and_names_its_remedy(fault):
    facts, severity, what, remedy = FAULTS[fault]
    (finding,) = findings(facts)
    assert finding.severity == severity
    assert what in finding.what and remedy in finding.remedy, finding


def test_the_worst_comes_first():
    facts = replace(with_place(0, temporary_free=None), others=(4.0, 16), clocks={1: Clock(0.0, 0.0, 0.0, 0.005)})
    assert [finding.severity for finding in findings(facts)] == ["error", "warning", "note"]
    assert str(Finding("note", "something", "do that")) == "note: something\n    do that"


def test_ranks_that_share_cores_are_slow_for_a_known_reason():
    """A rank may have no core while the other computes, or while a message arrives. `info` has a note on it."""
    facts = with_products(1e-3, 2e-3, 1.0)
    crowded = {**INFO, "cores_per_rank": 0.5}
    slow_within = {**PAIRS, (0, 1): 0.1 * GIGABIT, (2, 3): 300 * GIGABIT}
    assert not findings(replace(facts, info=crowded, pairs=slow_within))
    (note,) = findings(replace(facts, info=crowded, moved=0.1))
    assert note.severity == "note" and "with 0.5 cores per rank" in note.what


def test_wall_clocks_are_compared_at_the_same_moment():
    """The clocks of measurements begin at different times: rank 0's shows 10 s more, and its wall clock 3 s less."""
    zero, other = HostFacts("n1", wall=100.0), HostFacts("n2", wall=113.0)
    assert wall_ahead(zero, other, Clock(0.0, 10.0, 0.0, 1e-6)) == 3.0


def test_a_place_is_unpacked_as_it_was_packed():
    assert HostFacts.unpack(PLACES[0].pack()) == PLACES[0]
    many = replace(PLACES[0], links={f"card{i}": 1.0 for i in range(1000)})
    assert len(many.pack()) == len(PLACES[0].pack())
    assert len(HostFacts.unpack(many.pack()).links) == 32


def test_links_of_a_host(tmp_path):
    """Cards that are up and have a device, and active ports. A virtual device claims a rate that it does not have."""
    files = {
        "net/eth0/speed": "25000", "net/eth0/operstate": "up", "net/eth0/device/x": "",
        "net/eth1/speed": "100000", "net/eth1/operstate": "down", "net/eth1/device/x": "",
        "net/eth2/speed": "-1", "net/eth2/operstate": "up", "net/eth2/device/x": "",
        "net/veth7/speed": "10000", "net/veth7/operstate": "up",
        "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)", "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X SDR)", "infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "infiniband/old/ports/1/rate": "2.5 Gb/sec (1X SDR)", "infiniband/old/ports/1/state": "4: ACTIVE",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert links_of(tmp_path) == {"eth0": 25 * GIGABIT, "mlx5_0": 200 * GIGABIT, "old": 2.5 * GIGABIT}
    assert links_of(tmp_path / "nothing") == {}
