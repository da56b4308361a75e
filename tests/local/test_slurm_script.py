"""`fompi slurm` as a function: facts and options in, a job script out. tests/slurm runs the scripts."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fompi.base.errors import LaunchError
from fompi.cli.slurm import JobRequest, SlurmFacts, _indices, _time, script
from fompi.mpi.launcher import PLUGINS

ROOT = Path(__file__).resolve().parents[2]
ASKED = "fompi slurm --nodes 2 --ranks-per-node 4 --cpus-per-rank 4 --time 00:10:00 -- examples/tp_mlp.py"
EXAMPLE = JobRequest(("examples/tp_mlp.py",), nodes=2, ranks_per_node=4, cpus_per_rank=4, time="00:10:00")


@pytest.mark.parametrize(("library", "name"), [("MPICH", "mpich"), ("Open MPI", "openmpi")])
def test_the_examples_are_its_output(library, name):
    assert (ROOT / f"examples/slurm/{name}.sbatch").read_text() == script(SlurmFacts(library), EXAMPLE, ASKED)


@pytest.mark.parametrize("library", PLUGINS)
def test_it_names_the_plugin_of_the_library(library):
    assert f"srun --mpi={PLUGINS[library]} python -m fompi info --expect 8" in script(SlurmFacts(library), EXAMPLE)


@pytest.mark.parametrize(
    ("facts", "plugin", "lines"),
    [
        (SlurmFacts("MPICH"), "pmi2", ("deprecates PMI-2.", "export MPIR_CVAR_PMI_VERSION=1")),
        (SlurmFacts("MPICH", plugins=("pmix", "pmi2")), "pmi2", ("export MPIR_CVAR_PMI_VERSION=1",)),
        (SlurmFacts("MPICH", has_pmix=True), "pmix", ("plug-in pmix speaks.", "export MPIR_CVAR_PMI_VERSION=x")),
        (SlurmFacts("MPICH", plugins=("pmi2",), has_pmix=True), "pmi2", ("export MPIR_CVAR_PMI_VERSION=1",)),
        (SlurmFacts("Open MPI"), "pmix", ("# Open MPI uses PMIx, which Slurm's plug-in pmix speaks.",)),
    ],
    ids=str,
)
def test_it_says_by_what_the_ranks_find_each_other(facts, plugin, lines):
    """PMI-1 for MPICH, by the plug-in that has its name from PMI-2. PMIx where the library is linked to it."""
    text = script(facts, EXAMPLE)
    assert f"\nsrun --mpi={plugin} python examples/tp_mlp.py\n" in text
    assert all(f"{line}\n" in text for line in lines)
    assert text.count("MPIR_CVAR_PMI_VERSION") == (facts.library == "MPICH")


@pytest.mark.parametrize(("library", "known"), [("Open MPI", "pmi2"), ("MPICH", "pmix")])
def test_plugins_that_slurm_lacks(library, known):
    facts = SlurmFacts(library, plugins=(known, "none"))
    text = script(facts, EXAMPLE)
    assert "mpirun -n 8 --bind-to none python examples/tp_mlp.py" in text and "srun --mpi" not in text
    assert "PMI" not in text
    lacks = PLUGINS[library]
    with pytest.raises(LaunchError, match=f"no --mpi={lacks}; it has {known}, none"):
        script(facts, replace(EXAMPLE, mpi=lacks))
    assert "srun --mpi=cray_shasta" in script(SlurmFacts("Cray MPICH", plugins=("none",)), EXAMPLE)


def test_options():
    job = replace(
        EXAMPLE, gpus_per_node=4, array="0-3", resume=True, modules=("mpich/4", "a b"), container="an image.sif",
        program=("./run me", "--x", "1"),
    )  # fmt: skip
    text = script(SlurmFacts("MPICH", is_wheel=True), job)
    for line in (
        "#SBATCH --gpus-per-node=4", "#SBATCH --array=0-3", "#SBATCH --signal=USR1@120", "#SBATCH --requeue",
        "#SBATCH --output=%x-%A_%a.out", "module load 'a b'", "export MPIR_CVAR_CH4_NETMOD=ofi",
        "srun --mpi=pmi2 apptainer exec --nv 'an image.sif' './run me' --x 1 || status=$?",
    ):  # fmt: skip
        assert line in text.splitlines(), line


def test_options_of_the_site():
    job = replace(EXAMPLE, sbatch=("partition=gpu", "exclusive", "--hint=nomultithread"))
    lines = script(SlurmFacts("MPICH"), job).splitlines()
    for option in ("partition=gpu", "exclusive", "hint=nomultithread"):
        assert f"#SBATCH --{option}" in lines, lines


def test_resume_with_mpirun():
    """Slurm signals the daemons of mpirun, which would end. So only the script gets the signal, and passes it on."""
    text = script(SlurmFacts("Open MPI", plugins=("pmi2",)), replace(EXAMPLE, resume=True))
    assert "#SBATCH --signal=B:USR1@120" in text and "trap 'kill -USR1 $!' USR1" in text
    assert "mpirun -n 8 --bind-to none python examples/tp_mlp.py &" in text.splitlines()
    assert "#SBATCH --signal=USR1@120" in script(SlurmFacts("Open MPI"), replace(EXAMPLE, resume=True))


ENDS = {"again": 'touch "$FOMPI_AGAIN"', "fails": "exit 3", "ends": "true"}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("plugins", [("pmix",), ("pmi2",)], ids=["srun", "mpirun"])
def test_what_a_script_does_with_the_end_of_the_program(plugins, end, tmp_path):
    """Run with programs in place of Slurm and MPI. The signal reaches mpirun once, and the script goes on waiting."""
    job = JobRequest(("true",), nodes=1, ranks_per_node=1, resume=True)
    (tmp_path / "script").write_text(script(SlurmFacts("Open MPI", plugins=plugins), job))
    signalled = plugins == ("pmi2",)
    program = (
        "#!/bin/bash\n"
        "[[ $* == *info* ]] && exit\n"
        + ("trap 'echo signalled' USR1; sleep 0.3; kill -USR1 $PPID; sleep 0.5\n" if signalled else "")
        + ENDS[end]
    )
    for name, text in (("srun", program), ("mpirun", program), ("scontrol", '#!/bin/bash\necho "$@"')):
        (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / name).chmod(0o755)
    # `set -u`: nothing that Slurm may leave unset is read, like SLURM_CPUS_PER_TASK.
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", tmp_path / "script"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == (3 if end == "fails" else 0), done.stderr
    assert done.stdout.count("signalled") == signalled
    assert ("requeue 7" in done.stdout) == (end == "again")
    assert not (tmp_path / ".again-7").exists() and done.stderr == ""


@pytest.mark.parametrize("text", ["30", "30:00", "01:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_times_of_slurm(text):
    assert _time(text) == text


@pytest.mark.parametrize("text", ["0", "0-9", "1,3,7", "0-99:3", "0-9%2", "1,4-6%1"])
def test_indices_of_slurm(text):
    assert _indices(text) == text


def test_times_and_indices_that_slurm_would_refuse():
    for read, texts in ((_time, ("", "3x", "1:2:3:4", "1h")), (_indices, ("x", "0-9%", "1,,2", "-3"))):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError, match="of Slurm: "):
                read(text)


def test_the_command():
    """It prints the script and nothing else, also where no Slurm is installed."""
    command = [sys.executable, "-m", "fompi", "slurm", "--nodes", "2"]
    done = subprocess.run([*command, "--", "train.py", "--epochs", "9"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash\n"), done.stderr
    assert "there is no train.py here" in done.stderr
    assert done.stdout.rstrip().endswith("python train.py --epochs 9")
    for wrong, words in (([], "which program?"), (["--nodes", "0", "--", "x.py"], "'0' is not an integer >= 1")):
        refused = subprocess.run([*command, *wrong], capture_output=True, text=True, timeout=50)
        assert refused.returncode == 2 and words in refused.stderr
