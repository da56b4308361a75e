"""Jobs under Slurm: each is one job, a wrong launch is refused, all ranks end, and `fompi slurm` prints what works."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace

import pytest
from slurm_cluster import ENVIRONMENTS, MPIS, ROOT

from fompi.cli.slurm import JobRequest, SlurmFacts, script

EXAMPLE = JobRequest(
    ("examples/tp_mlp.py",), nodes=2, ranks_per_node=4, cpus_per_rank=4, time="00:10:00"
)  # what examples/slurm runs


@pytest.mark.parametrize("mpi", MPIS)
def test_info_tells_that_it_is_one_job(cluster, mpi):
    done = cluster.srun(mpi, "python", "-m", "fompi", "info", "--expect", "4")
    assert done.returncode == 0, done.output
    assert re.search(r"^ +3  n2 ", done.stdout, re.MULTILINE) and "launcher   srun (4 processes)" in done.stdout


def test_the_doctor_on_two_nodes(cluster):
    """It measures links between the nodes, and ends in findings with remedies. A busy machine may be one."""
    done = cluster.srun("mpich", "python", "-m", "fompi", "doctor", "--seconds", "8")
    assert done.returncode in (0, 1) and "between hosts" in done.stdout, done.output
    assert re.search(r"^(error|warning|note): .*\n    \S", done.stdout, re.MULTILINE) or "nothing" in done.stdout, (
        done.output
    )


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("options", [("-N2", "--ntasks-per-node=2"), ("-N2", "-n3"), ("-N1", "-n1")], ids=str)
def test_a_program(cluster, mpi, options):
    """It needs neither a home folder nor one for temporary files."""
    places = "HOME=/dev/null/home", "TMPDIR=/dev/null/temporary"  # below a file: root cannot write there, either
    done = cluster.srun(mpi, "env", *places, "python", cluster.program, "run", 5, options=options)
    assert done.returncode == 0, done.output
    size = 4 if "--ntasks-per-node=2" in options else int(options[1][2:])
    assert done.stdout.count("hello") == done.stdout.count(f"of {size} on") == done.stdout.count("bye") == size


@pytest.mark.parametrize(
    ("mpi", "plugin", "fix"),
    [("mpich", "none", "--mpi=pmi2"), ("mpich", "pmix", "--mpi=pmi2"), ("openmpi", "pmi2", "--mpi=pmix")],
)
def test_a_wrong_plugin_is_refused(cluster, mpi, plugin, fix):
    """The program would compute four wrong results. One rank says what to write instead, once for the job."""
    begun = time.monotonic()
    # Without this srun ends the other ranks when the first has ended, and a killed rank of Open MPI leaves its segment.
    options = "-N2", "--ntasks-per-node=2", "--kill-on-bad-exit=0"
    done = cluster.srun(mpi, "python", cluster.program, "run", 5, plugin=plugin, options=options)
    assert done.returncode not in (0, None) and not done.timed_out and "bye" not in done.stdout, done.output
    assert done.stderr.count("LaunchError: ") == 1 and fix in done.stderr, done.output
    assert time.monotonic() - begun < 40
    done = cluster.srun(mpi, "python", "-m", "fompi", "info", plugin=plugin, options=options)
    assert done.returncode and fix in done.output, done.output


def test_torchrun_is_refused(cluster):
    """It starts two processes in each rank. With Open MPI both would be that rank, if MPI carried the messages."""
    mpi = "openmpi"
    torchrun, options = ("env", "FOMPI_CARRIER=mpi", "torchrun", "--nproc-per-node=2"), ("-N2", "-n2")
    done = cluster.srun(mpi, *torchrun, cluster.program, "run", 5, options=options)
    assert done.returncode not in (0, None) and not done.timed_out and "hello" not in done.stdout, done.output
    assert f"starts no MPI: write `{ENVIRONMENTS[mpi]}/bin/mpirun -n 2 python -m fompi.torch ...`" in done.stderr


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("what", ["raise", "kill"])
def test_a_rank_fails(cluster, mpi, what):
    begun = time.monotonic()
    done = cluster.srun(mpi, "python", cluster.program, what, 3000)
    assert done.returncode not in (0, None) and not done.timed_out, done.output
    assert time.monotonic() - begun < 40 and "bye" not in done.stdout
    if what == "raise":
        assert "fompi: rank 3 of 4 on n2 ends by an error" in done.stderr and "ValueError: had enough" in done.stderr
    else:
        assert re.search(r"tasks? .*3: Killed", done.stderr), done.output


def test_a_child_of_a_rank(cluster):
    """MPICH would abort: its connection to the launcher is closed in the child."""
    code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'fompi', 'info']))"
    done = cluster.srun("mpich", "python", "-c", code, options=("-n1",))
    assert "env -u PMI_FD" in done.output and "PMIU_write" not in done.output, done.output


@pytest.mark.parametrize("mpi", MPIS)
def test_mpirun_inside_an_allocation(cluster, mpi):
    line = f"mpirun -n 4 python {cluster.program} run 5"
    text = cluster.batch(mpi, f"#!/bin/bash\n{line}\n", "-N2", "--ntasks-per-node=2")
    assert text.count("of 4 on") == text.count("bye") == 4, text


def test_a_job_array(cluster):
    line = f"srun -K --mpi=pmi2 python {cluster.program} run 3"
    cluster.submit("mpich", f"#!/bin/bash\n{line}\n", cluster.folder / "array-%a", "--array=0-1", "-n2")
    cluster.until_idle(40)
    for index in range(2):
        assert (cluster.folder / f"array-{index}").read_text().count("of 2 on") == 2


@pytest.mark.timeout(150)
@pytest.mark.parametrize("mpi", MPIS)
def test_the_example(cluster, mpi):
    """The job scripts, with fewer steps: the main example on ranks of two nodes, as mpirun runs it on one.

    Four ranks with one thread each. Eight with four each would wait for two cores, not for each other.
    """
    text = (ROOT / "examples" / "slurm" / f"{mpi}.sbatch").read_text()
    assert text.endswith("python examples/tp_mlp.py\n") and "--expect 8\n" in text
    fewer = text.replace("--expect 8", "--expect 4").replace("_NUM_THREADS=4", "_NUM_THREADS=1")
    script = cluster.folder / f"{mpi}.sbatch"
    options = "--epochs", 3, "--batch", 180
    script.write_text(" ".join(map(str, (fewer.rstrip(), *options))) + "\n")
    text = cluster.batch(mpi, script, f"--chdir={ROOT}", "--ntasks-per-node=2", seconds=140)
    accuracy = re.search(r"^test accuracy ([\d.]+)%$", text, re.MULTILINE)
    assert accuracy and float(accuracy[1]) > 90, text
    assert text.count(" n2 ") >= 2
    epochs = re.findall(r"^epoch.*$", text, re.MULTILINE)
    assert len(epochs) == 3
    if mpi == MPIS[0]:
        here = cluster.run(mpi, "mpirun", "-n", 4, "python", ROOT / "examples" / "tp_mlp.py", *options, seconds=60)
        assert epochs == re.findall(r"^epoch.*$", here.stdout, re.MULTILINE), here.output


def test_slurm_accepts_every_script(cluster):
    """`sbatch --test-only`. The shell accepts them, too."""
    jobs = [
        replace(EXAMPLE, resume=resume, array=array, mpi=mpi, **place)
        for (resume, array, mpi), place in zip(
            itertools.product((False, True), ("", "0-3%2"), ("auto", "pmi2", "pmix")),
            itertools.cycle(
                [{}, {"venv": ".venv"}, {"conda": "fompi"}, {"container": "a b.sif"}, {"modules": ("mpich/4", "gcc")}]
            ),
        )
    ]
    for number, (each, library) in enumerate(itertools.product(jobs, ("MPICH", "Open MPI"))):
        file = cluster.folder / f"printed-{number}.sbatch"
        file.write_text(script(SlurmFacts(library, is_wheel=bool(number % 2)), each))
        done = cluster.run("mpich", "sbatch", "--test-only", file)
        assert done.returncode == 0, done.output
        assert cluster.run("mpich", "bash", "-n", file).returncode == 0


@pytest.mark.parametrize("mpi", MPIS)
def test_the_printed_script_runs(cluster, mpi):
    """As a user gets it, on the machine where it is printed. MPICH would end by a variable that is left over there."""
    left_over = ["--export=ALL,PMIX_NAMESPACE=left.over"] if mpi == "mpich" else []
    options = ["--nodes", 2, "--ranks-per-node", 2, "--venv", ENVIRONMENTS[mpi]]
    printed = cluster.run(mpi, "fompi", "slurm", *options, "--", cluster.program, "run", 3)
    assert printed.returncode == 0 and "--expect 4" in printed.stdout, printed.output
    text = cluster.batch(mpi, printed.stdout, *left_over)
    assert text.count("of 4 on") == text.count("bye") == 4, text


STOPS = """
import os, sys, time
import fompi

stop, comm = fompi.Stop(), fompi.Communicator()
print(f"run {os.environ.get('SLURM_RESTART_COUNT', '0')}, rank {comm.rank}", flush=True)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    for step in range(10000):
        if stop.agreed(comm):
            print(f"rank {comm.rank} stops in step {step}", flush=True)
            break
        time.sleep(0.01)
"""


@pytest.mark.timeout(100)
def test_an_agreed_stop_and_a_second_run(cluster):
    """All ranks stop in the same step, and the job is started again."""
    program = cluster.folder / "stops.py"
    program.write_text(STOPS)
    facts, asked = (
        SlurmFacts("MPICH", is_wheel=True),
        JobRequest((str(program),), nodes=2, ranks_per_node=2, resume=True),
    )
    output = cluster.folder / "stops.out"
    number = cluster.submit("mpich", script(facts, asked), output)
    cluster.wait_for(output, lambda text: text.count("run 0") == 4)
    cluster.run("mpich", "scancel", "--signal=USR1", number)
    text = cluster.wait_for(output, lambda text: text.count("stops") == 4)
    assert len(set(re.findall(r"stops in step (\d+)", text))) == 1

    # Slurm holds a requeued job back for two minutes, and refuses a start in the second of the first run's end.
    time.sleep(3)

    def again(text: str) -> bool:
        cluster.run("mpich", "scontrol", "update", f"JobId={number}", "StartTime=now")
        return text.count("run 1") == 4

    cluster.wait_for(output, again, 40)
