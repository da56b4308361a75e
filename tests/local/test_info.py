"""`python -m fompi info`: the text for made-up facts, and real runs in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fompi.cli.info import _counters, _paths, blocks
from fompi.cli.processes import (
    Process,
    binding,
    cores_per_rank,
    crowding_notes,
    gpu_notes,
    gpu_of,
    rank_rows,
)

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
RUN = [sys.executable, "-c", "import sys; from fompi.cli.main import main; sys.exit(main(['info', *sys.argv[1:]]))"]
OF_LAUNCHERS = (
    "SLURM_", "PALS_", "PBS_", "LSB_", "FLUX_", "NSLOTS", "PMI_", "PMIX_", "MPI_LOCAL", "OMPI_COMM_", "HYD",
    "TORCHELASTIC_", "LOCAL_RANK",
)  # fmt: skip
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
INSTALL = "on a laptop `pip install mpi4py mpich`; on a cluster load the site's MPI module"

FACTS = {
    "versions": {"fompi": "1.0", "python": "3.11.7", "numpy": "2.4.0", "mpi4py": "4.1.2", "cupy": None},
    "mpi": {
        "library": "MPICH",
        "version": "5.0.2",
        "standard": "5.0",
        "description": "MPICH Version: 5.0.2\nMPICH Device: ch4",
        "path": "/env/lib/libmpi.so.12",
        "other_libraries": ["/other/lib/libmpi.so.40"],
        "networks": [],
        "mpirun": "/env/bin/mpirun",
        "thread_requested": "multiple",
        "thread_provided": "serialized",
        "gpu_aware": True,
        "gpu_aware_source": "FOMPI_GPU_AWARE=1",
        "tag_upper_bound": 536870911,
    },
    "mpi_error": None,
    "launcher": {"launcher": "hydra", "size": 3, "rank": 0, "local_rank": 0, "local_size": 2},
    "rank": 0,
    "ranks": [
        {"rank": 0, "host": "a", "local_rank": 0, "pid": 9, "cores": "0-1", "device": "cuda:0 NVIDIA H200"},
        {"rank": 1, "host": "a", "local_rank": 1, "pid": 10, "cores": "0-1", "device": "cuda:1 NVIDIA H200"},
        {"rank": 2, "host": "node-2", "local_rank": 0, "pid": 12345, "cores": "0,64-127", "device": "cpu"},
    ],
    "cores_per_rank": 2 / 3,
    "binding": {"a": "shared cores", "node-2": "own cores"},
    "gpus_per_rank": [0, 2],
    "progress": {
        "mode": "poll",
        "source": "FOMPI_PROGRESS=auto",
        "seconds_between_polls": None,
        "worker": False,
        "unaided": {"nbytes": 4 << 20, "seconds": 0.0341, "share": 0.034, "skipped": None},
    },
    "notes": ["3 ranks share 2 cores on a: a rank that waits takes time from one that computes", "one more"],
    "warning": "cause: fix",
}

SKIPPED = {"nbytes": 0, "seconds": 0.0, "share": None, "skipped": "there is one rank"}

WITH_MPI = """\
fompi      1.0
python     3.11.7
numpy      2.4.0
mpi4py     4.1.2
cupy       not installed

MPI        MPICH 5.0.2 (standard 5.0)
library    /env/lib/libmpi.so.12
not used   /other/lib/libmpi.so.40: loaded, but mpi4py calls the library above
threads    serialized (multiple requested)
GPU-aware  yes (FOMPI_GPU_AWARE=1)
tags       up to 536870911
launcher   hydra (3 processes)
ranks      2 on a, 1 on node-2
cores      0.6667 per rank, shared cores on a; own cores on node-2
GPUs       each rank sees 0 or 2
progress   poll (FOMPI_PROGRESS=auto)
by itself  3% of 4096 KiB (34.1 ms) move while all ranks stay out of MPI

rank  host    local rank    pid  cores     device
   0  a                0      9  0-1       cuda:0 NVIDIA H200
   1  a                1     10  0-1       cuda:1 NVIDIA H200
   2  node-2           0  12345  0,64-127  cpu

note: 3 ranks share 2 cores on a: a rank that waits takes time from one that computes

note: one more

warning: cause: fix"""

WITHOUT_MPI = """\
fompi      1.0
python     3.11.7

MPI        none
launcher   none
ranks      1 on a
cores      2 per rank, unbound

rank  host  local rank  pid  cores  device
   0  a              0    9  0-1    cpu

MPI: there is none: get one"""


def text(facts):
    return "\n\n".join(map(str, blocks(facts)))


def test_text_with_mpi():
    assert text(FACTS) == WITH_MPI


def test_text_without_mpi():
    facts = {
        "versions": {"fompi": "1.0", "python": "3.11.7"},
        "mpi": None,
        "mpi_error": "there is none: get one",
        "launcher": {"launcher": "none", "size": None, "rank": None, "local_rank": None, "local_size": None},
        "rank": 0,
        "ranks": [{"rank": 0, "host": "a", "local_rank": 0, "pid": 9, "cores": "0-1", "device": "cpu"}],
        "cores_per_rank": 2.0,
        "binding": {"a": "unbound"},
        "gpus_per_rank": [0],
        "progress": None,
        "notes": [],
        "warning": None,
    }
    assert text(facts) == WITHOUT_MPI


@pytest.mark.parametrize(
    ("progress", "lines"),
    [
        (
            {
                "mode": "helper",
                "source": "FOMPI_PROGRESS=auto",
                "seconds_between_polls": [1e-3, 4e-3],
                "worker": True,
                "unaided": SKIPPED,
            },
            [
                "progress   helper (FOMPI_PROGRESS=auto), a poll every 1 to 4 ms, another thread for products",
                "by itself  not measured: there is one rank",
            ],
        ),
        (
            {
                "mode": None,
                "source": "give one of ...",
                "seconds_between_polls": None,
                "worker": False,
                "unaided": SKIPPED,
            },
            ["progress   none (give one of ...)", "by itself  not measured: there is one rank"],
        ),
    ],
)
def test_text_of_progress(progress, lines):
    shown = text({**FACTS, "progress": progress}).splitlines()
    assert [line for line in shown if line.startswith(("progress", "by itself"))] == lines


@pytest.mark.parametrize(
    "process",
    [
        Process(1, "host", "cpu", frozenset({0})),
        Process(2**22, "h" * 255, "cuda:7 Gerät", frozenset({0, 1, 7, 8, 9, 4095}), "ab" * 16, 8, 4096, 0.5),
        Process(1, "", "", frozenset()),
    ],
)
def test_a_record_is_unpacked_as_it_was_packed(process):
    assert Process.unpack(process.pack()) == process
    assert len(process.pack()) == len(Process(1, "", "", frozenset()).pack())


def test_a_long_host_name_is_cut():
    long = Process(1, "h" * 300, "cpu", frozenset({3, 5000}))
    assert Process.unpack(long.pack()) == Process(1, "h" * 256, "cpu", frozenset({3}))


def processes(*hosts_and_cores):
    return [Process(10 + i, host, "cpu", frozenset(cores)) for i, (host, cores) in enumerate(hosts_and_cores)]


def test_local_ranks_count_per_host_and_cores_print_as_runs():
    rows = rank_rows(processes(("a", [0, 1, 2, 9]), ("b", [5]), ("a", [3, 1]), ("b", []), ("a", range(128))))
    assert [row["rank"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["host"] for row in rows] == ["a", "b", "a", "b", "a"]
    assert [row["local_rank"] for row in rows] == [0, 0, 1, 1, 2]
    assert [row["cores"] for row in rows] == ["0-2,9", "5", "1,3", "", "0-127"]


SLOW = "a rank that waits takes time from one that computes"


def test_cores_per_rank_of_the_most_crowded_host():
    pinned = processes(("a", [0]), ("a", [1]), ("a", [2]))
    assert cores_per_rank(pinned) == 1.0 and not [*crowding_notes(pinned)]
    free = processes(("a", range(4)), ("b", range(8)), ("b", range(8)))
    assert cores_per_rank(free) == 4.0 and not [*crowding_notes(free)]
    crowded = processes(("a", range(4)), ("b", [6]), ("b", [6]))
    assert cores_per_rank(crowded) == 0.5
    assert [*crowding_notes(crowded)] == [f"2 ranks share 1 core on b: {SLOW}. Start fewer ranks"]


def test_cores_of_the_job_where_ranks_are_not_bound():
    """A process that is alone in its MPI job, and one whose site binds nothing, only know them from the launcher."""
    alone = [replace(process, share=0.25) for process in processes(("a", range(2)))]
    assert cores_per_rank(alone) == 0.25
    assert [*crowding_notes(alone)] == [f"a rank has 0.25 cores on a, as the launcher says: {SLOW}"]
    unbound = [replace(process, share=1.0) for process in processes(("a", range(64)), ("a", range(64)))]
    assert cores_per_rank(unbound) == 1.0 and not [*crowding_notes(unbound)]


@pytest.mark.parametrize(
    ("masks", "host_cores", "word", "note"),
    [
        ([[0], [1]], 4, "own cores", None),
        ([[0, 1], [2, 3]], 4, "own cores", None),
        ([[0]], 4, "own cores", None),
        ([range(4)], 4, "unbound", None),
        ([range(4), range(4)], 4, "unbound", None),
        ([range(4), range(4)], 64, "unbound", None),  # the job has four cores of the host, and binds no rank
        ([range(2)] * 4, 2, "unbound", f"4 ranks share 2 cores on a: {SLOW}. Start fewer ranks"),
        (
            [[0], [0]],
            8,
            "shared cores",
            f"2 ranks share 1 core on a: {SLOW}. a has 7 more: ask for more cores per rank, or bind no ranks",
        ),
        (
            [[0, 1], [2, 3], [1, 2]],
            8,
            "shared cores",
            "ranks 0 and 2 are bound to the same cores on a: give each rank its own "
            "(`srun --cpu-bind=cores`, `mpirun --bind-to core`)",
        ),
    ],
)
def test_binding(masks, host_cores, word, note):
    ranks = [replace(process, host_cores=host_cores) for process in processes(*(("a", mask) for mask in masks))]
    assert binding(ranks) == {"a": word}
    assert [*crowding_notes(ranks)] == ([] if note is None else [note])


def with_gpus(*hosts_and_gpus):
    """Processes on hosts, each with the number of its GPU on the host and how many it sees."""
    return [
        Process(10, host, f"cuda:{gpu % seen} X", frozenset({rank}), f"{host}{gpu}".encode().hex().zfill(32), seen)
        for rank, (host, gpu, seen) in enumerate(hosts_and_gpus)
    ]


def test_gpus_that_ranks_share_or_hide():
    assert not [*gpu_notes(with_gpus(("a", 0, 2), ("a", 1, 2), ("b", 0, 2)))]
    (shared,) = gpu_notes(with_gpus(("a", 0, 2), ("a", 0, 2), ("a", 1, 2), ("b", 0, 1)))
    assert shared == "2 ranks share cuda:0 (00006130) on a: start one rank per GPU"
    (hidden,) = gpu_notes(with_gpus(*(("a", gpu, 1) for gpu in range(4))))
    assert hidden.startswith("each rank on a sees only its own GPU: --gpus-per-task hides the GPUs of the neighbours")
    (one_for_all,) = gpu_notes(with_gpus(*[("a", 0, 1)] * 4))
    assert one_for_all.startswith("4 ranks share cuda:0")
    assert not [*gpu_notes(processes(("a", [0]), ("a", [1])))]
    assert [row["gpu"] for row in rank_rows(with_gpus(("a", 0, 1), ("a", 1, 1)))] == ["00006130", "00006131"]


class Driver:
    """A driver with some GPUs, in place of libcuda. Every call returns 0, or an error."""

    def __init__(self, gpus, error=0, second_version=True):
        self.gpus, self.error = gpus, error
        if second_version:
            self.cuDeviceGetUuid_v2 = self.cuDeviceGetUuid

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, count):
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, length, device):
        name.value = b"Fake"
        return 0

    def cuDeviceGetUuid(self, uuid, device):
        uuid.raw = bytes([0] * 14 + [0xAB, device.value])
        return 0


def test_the_gpu_of_a_local_rank():
    for driver in (Driver(2), Driver(2, second_version=False)):
        assert [gpu_of(rank, driver) for rank in range(3)] == [
            (f"cuda:{rank % 2} Fake", f"{'0' * 28}ab0{rank % 2}", 2) for rank in range(3)
        ]
    assert gpu_of(0, None) == gpu_of(0, Driver(0)) == gpu_of(0, Driver(2, error=100)) == ("cpu", "", 0)


def run(command, status=0, **environ):
    """Run `info` as if from a new shell: without the variables of a launcher that started the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    clean = {name: value for name, value in clean.items() if not name.startswith("FOMPI_")}
    folders = (environ.pop("stub", None), str(ROOT), clean.get("PYTHONPATH"))
    env = clean | OPENMPI | {"PYTHONPATH": os.pathsep.join(filter(None, folders))} | environ
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.fixture
def stub(tmp_path):
    """Makes a folder with an mpi4py that fails at import. It is put first on the path."""

    def write(at_import="", at_import_of_mpi=""):
        package = tmp_path / "mpi4py"
        package.mkdir()
        rc = "class rc: initialize, finalize = True, None\n"
        (package / "__init__.py").write_text(at_import or rc)
        (package / "MPI.py").write_text(at_import_of_mpi)
        return str(tmp_path)

    return write


def test_one_rank():
    facts = json.loads(run([*RUN, "--json"]))
    assert facts["mpi"]["library"] in ("MPICH", "Open MPI", "Intel MPI")
    assert facts["mpi"]["thread_requested"] == "multiple"
    assert facts["mpi"]["tag_upper_bound"] >= 32767
    assert facts["mpi"]["gpu_aware"] in (True, False)
    assert facts["launcher"]["launcher"] == "none"
    assert facts["mpi_error"] is None and facts["warning"] is None
    assert len(facts["ranks"]) == 1


def test_the_text_of_one_rank_begins_with_versions():
    lines = run(RUN).splitlines()
    assert lines[0].startswith("fompi ")
    assert f"python     {sys.version.split()[0]}" in lines


WITHOUT_C = "import sys; sys.modules['fompi.native._native'] = None; sys.stderr = sys.stdout; import fompi"


def test_there_is_no_part_in_c():
    """As after an installation without a compiler. An import says so with FOMPI_DEBUG=1, once in a job."""
    why = "fompi was installed without a C compiler: install one, then fompi again\n"
    started = [sys.executable, "-c", WITHOUT_C]
    second = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert run(started) == run(started, FOMPI_DEBUG="1", **second) == ""
    assert run(started, FOMPI_DEBUG="1") == f"fompi: calls run in Python: {why}"
    info = [sys.executable, "-c", f"{WITHOUT_C}; from fompi.cli.main import main; main(['info'])"]
    assert f"\nengine     Python: {why}" in run(info)


OTHER_MPI = """
#include <string.h>
#define FUNCTION(name) int name(void) { return 7; } int P##name(void) { return 7; }
FUNCTION(MPI_Isend) FUNCTION(MPI_Issend) FUNCTION(MPI_Irecv) FUNCTION(MPI_Test) FUNCTION(MPI_Testsome)
int MPI_Get_library_version(char *text, int *length) { strcpy(text, "Other MPI"); *length = 9; return 0; }
int PMPI_Get_library_version(char *text, int *length) { return MPI_Get_library_version(text, length); }
"""

LOADS_BOTH = """
import ctypes, json, sys
path, mode, when = sys.argv[1], getattr(ctypes, sys.argv[2]), sys.argv[3]
if when == "before":
    ctypes.CDLL(path, mode)
from fompi.mpi import transport
MPI = transport.load_mpi()
if when == "after":
    ctypes.CDLL(path, mode)
from fompi.engine.native import FUNCTIONS, _address
other = [ctypes.cast(ctypes.CDLL(path)[name], ctypes.c_void_p).value for name in FUNCTIONS]
found = [_address(name, transport.functions()) for name in FUNCTIONS]
calls_other = MPI.Get_library_version().startswith("Other MPI")
print(json.dumps([calls_other, transport.library().path, transport.other_libraries(), found == other, None in found]))
if not calls_other:
    from fompi.cli.main import main
    main(["info"])
"""


@pytest.mark.parametrize(
    ("mode", "when", "is_other"),
    [("RTLD_LOCAL", "before", False), ("RTLD_GLOBAL", "after", False), ("RTLD_GLOBAL", "before", True)],
)
def test_two_mpi_libraries_in_one_process(tmp_path, mode, when, is_other):
    """Both are named. fompi calls the one that mpi4py calls: what the linker gives it, as with LD_PRELOAD."""
    (tmp_path / "other.c").write_text(OTHER_MPI)
    path = str(tmp_path / "libmpi_other.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, tmp_path / "other.c"], check=True)
    first, _, text = run([sys.executable, "-c", LOADS_BOTH, path, mode, when]).partition("\n")
    calls_other, library, others, found_other, is_missing = json.loads(first)
    assert calls_other is found_other is is_other and (library == path) is is_other and not is_missing
    assert (path in others) is not is_other and len(others) == 1
    assert is_other or f"\nlibrary    {library}\nnot used   {path}: loaded, but mpi4py calls" in text


@pytest.mark.parametrize(("choice", "aware"), [("0", False), ("1", True), ("maybe", None)])
def test_the_variable_about_gpu_memory_wins_and_is_reported(choice, aware):
    mpi = json.loads(run([*RUN, "--json"], FOMPI_GPU_AWARE=choice))["mpi"]
    assert mpi["gpu_aware"] is aware
    assert mpi["gpu_aware_source"].startswith(f"FOMPI_GPU_AWARE={choice}")


@pytest.mark.parametrize(
    ("choice", "mode", "seconds"),
    [("auto", "helper", True), ("library", "library", True), ("poll", "poll", False), ("spin", None, False)],
)
def test_how_messages_progress(choice, mode, seconds):
    progress = json.loads(run([*RUN, "--json"], FOMPI_PROGRESS=choice))["progress"]
    assert progress["mode"] == mode and (progress["seconds_between_polls"] is not None) is seconds
    assert progress["source"].startswith(f"FOMPI_PROGRESS={choice}")
    assert progress["unaided"]["share"] is None and progress["unaided"]["skipped"] == "there is one rank"


def test_three_ranks_print_one_table():
    output = run([str(MPIRUN), "-n", "3", *RUN, "--json"])
    facts = json.loads(output)
    native = facts["progress"]["unaided"]
    assert native["skipped"] or (0 <= native["share"] <= 1 and native["seconds"] > 0), native
    assert [row["rank"] for row in facts["ranks"]] == [0, 1, 2]
    assert [row["local_rank"] for row in facts["ranks"]] == [0, 1, 2]
    assert len({row["pid"] for row in facts["ranks"]}) == 3
    assert facts["launcher"]["size"] == 3 and facts["launcher"]["local_size"] == 3
    assert facts["launcher"]["launcher"] in ("hydra", "intel", "openmpi")
    assert facts["warning"] is None


def test_variables_that_are_misspelt_or_have_bad_values_are_shown():
    output = run(RUN, FOMPI_TIMOUT="3", FOMPI_REPORT="maybe")
    (line,) = [line for line in output.splitlines() if line.startswith("environment: ")]
    assert "FOMPI_REPORT=maybe: give 0, 1, short, full, or a .json file" in line and "FOMPI_TIMEOUT is one" in line


def test_singletons_print_once_and_warn():
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    output = run(RUN, 1, **torchrun, RANK="0")
    assert "torchrun started 4 processes, but MPI has 1 rank" in output.splitlines()[-1]
    assert "/mpirun" in output.splitlines()[-1]
    assert run(RUN, **torchrun, RANK="1") == ""


def test_the_mpirun_of_another_library():
    """MPICH with a PMIx launcher would end the process. Open MPI with Hydra becomes N jobs of one rank."""
    library = json.loads(run([*RUN, "--json"]))["mpi"]["library"]
    if library == "MPICH":
        foreign = {"PMIX_NAMESPACE": "prterun-1@1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
        line = "the mpirun of Open MPI cannot start MPICH this way: use the mpirun of MPICH, "
    else:
        foreign = {"PMI_SIZE": "4", "PMI_RANK": "0", "MPI_LOCALNRANKS": "4"}
        line = "the mpirun of MPICH started 4 processes, but MPI has 1 rank, because Python loaded Open MPI: "
    facts = json.loads(run([*RUN, "--json"], 1, **foreign))
    assert (facts["mpi_error"] or facts["warning"]).startswith(line)
    assert len(facts["ranks"]) == 1


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ({"at_import": "raise ImportError(\"No module named 'mpi4py'\")"}, "No module named 'mpi4py'"),
        (
            {"at_import_of_mpi": "raise RuntimeError('cannot load MPI library\\nlibmpi.so: not found')"},
            "cannot load MPI library",
        ),
        (
            {"at_import_of_mpi": "raise ImportError('libmpi.so.40: cannot open shared object file')"},
            "libmpi.so.40: cannot open shared object file",
        ),
    ],
)
def test_no_mpi(stub, failure, cause):
    folder = stub(**failure)
    facts = json.loads(run([*RUN, "--json"], stub=folder))
    assert facts["mpi"] is None and len(facts["ranks"]) == 1
    assert facts["mpi_error"].startswith(f"there is no MPI ({cause}): {INSTALL}")
    assert f"MPI: there is no MPI ({cause})" in run(RUN, stub=folder).splitlines()[-1]


def test_three_processes_without_mpi_print_once(stub):
    folder = stub(at_import_of_mpi="raise RuntimeError('cannot load MPI library')")
    facts = json.loads(run([str(MPIRUN), "-n", "3", *RUN, "--json"], 1, stub=folder))
    assert facts["mpi"] is None and facts["launcher"]["size"] == 3


def test_a_batch_job_in_which_nothing_was_started(tmp_path):
    """It is a note, not an error: perhaps one rank is what the user wants."""
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn2\n")
    output = run(RUN, PBS_NODEFILE=str(nodes))
    assert output.splitlines()[-1] == (
        "note: you are inside a PBS job, but python was not started by mpirun, so it is one rank: "
        "`mpirun -n 4 python ...` starts 4 ranks"
    )


def test_processes_that_are_jobs_of_one_rank_share_the_cores():
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "64"}
    facts = json.loads(run([*RUN, "--json"], 1, **torchrun, RANK="0", OMP_NUM_THREADS="128", OPENBLAS_NUM_THREADS=""))
    assert facts["cores_per_rank"] == len(os.sched_getaffinity(0)) / 64
    assert "(OMP_NUM_THREADS=128 is set)" in facts["threads"]


def test_the_expected_number_of_ranks():
    """A job script ends here instead of computing N wrong results."""
    assert "fompi" in run([*RUN, "--expect", "1"])
    assert "fompi" in run([*RUN, "--expect", "8"], 1)


def test_whether_products_are_announced(monkeypatch):
    cpu, gpu = (Process(1, "here", device, frozenset({0})) for device in ("cpu", "cuda:0 H100"))
    monkeypatch.delenv("FOMPI_COUNTERS", raising=False)
    monkeypatch.setattr("fompi.cli.info._version", lambda names: "3.4" if "triton" in names else None)
    assert _counters([cpu]) is None and "measured to be faster (FOMPI_COUNTERS=auto, Triton 3.4)" in _counters([gpu])
    monkeypatch.setenv("FOMPI_COUNTERS", "1")
    monkeypatch.setattr("fompi.cli.info._version", lambda names: None)
    assert "wherever it can (FOMPI_COUNTERS=1, Triton is not installed)" in _counters([cpu])


def test_the_paths_of_messages_between_devices(monkeypatch):
    mpi, cpu = {"gpu_aware": True}, Process(1, "here", "cpu", frozenset({0}))
    for name in ("FOMPI_DEVICE", "FOMPI_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert _paths([cpu], mpi) is None and _paths([cpu], None) is None
    monkeypatch.setenv("FOMPI_DEVICE", "software")
    assert _paths([cpu], mpi) == "between devices of a host by ipc, of two hosts by direct (FOMPI_PATH=auto)"
    monkeypatch.setenv("FOMPI_PATH", "staged")
    assert _paths([cpu], mpi) == "between devices of a host by staged, of two hosts by staged (FOMPI_PATH=staged)"
