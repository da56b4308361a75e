"""Programs of torch.distributed that do not import fompi."""

import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.version import Version

import fompi

ROOT = Path(fompi.__file__).resolve().parent.parent

PLAIN = """
import sys
import torch
import torch.distributed as dist

assert "fompi" in dist.Backend.backend_list and "mpi4py" not in sys.modules
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"  # the default stays
dist.init_process_group("fompi")
x = torch.ones(2)
dist.all_reduce(x)
assert dist.get_world_size() == 1 and x.sum() == 2
"""


@pytest.mark.timeout(110)  # one import of torch
def test_torch_finds_the_backend_by_itself(tmp_path):
    """The entry point of pyproject.toml, as an installed package has it. It loads no MPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    lines = [f"{name} = {place}" for name, place in project["entry-points"]["torch.backends"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", PLAIN], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


UNEDITED = textwrap.dedent("""
    import os
    import sys
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="tcp://nowhere:1", rank=rank, world_size=size)
    half = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    x = torch.full((1000,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.all_reduce(x, group=half)
    assert x.sum() == 1000 and os.environ["LOCAL_RANK"] == str(rank)
    print(f"{dist.get_backend()} {dist.get_backend(half)} {sys.argv[1:]}\\n", end="")
    dist.destroy_process_group()
""")


def test_a_program_that_names_another_backend(mpirun, tmp_path):
    """python -m fompi.torch train.py: its groups run on fompi, and a report follows."""
    (tmp_path / "train.py").write_text(UNEDITED)
    done = mpirun(2, "-m", "fompi.torch", tmp_path / "train.py", "--epochs", "3", seconds=50)
    assert done.returncode == 0 and not done.left_behind, done.output
    assert done.stdout.count("fompi fompi ['--epochs', '3']") == 2, done.output
    assert "fompi report: 2 ranks" in done.output and "\nwhat would help: " in done.output


def test_a_program_that_is_not_there(mpirun):
    """Rank 0 says so, once. All ranks end with the status 2."""
    done = mpirun(2, "-m", "fompi.torch", "nowhere.py", seconds=50)
    assert done.returncode and done.output.count("fompi: there is no program nowhere.py") == 1, done.output
    assert "Traceback" not in done.output


def test_an_uncaught_exception_is_printed(mpirun):
    """torch collects what the hooks before its own print, and would print it after they return."""
    program = "import torch.distributed as dist; dist.init_process_group('fompi'); raise ValueError('lost')"
    done = mpirun(1, "-c", program, seconds=50)
    assert done.returncode != 0 and done.output.count("ValueError: lost") == 1, done.output


def test_the_private_names_of_this_torch():
    """One line says what a new version of torch has changed."""
    import torch

    from fompi.torch import private

    version = ".".join(map(str, Version(torch.__version__).release[:2]))
    assert private.missing() == [] and version in private.CHECKED, (version, private.missing())


SHARDED = textwrap.dedent("""
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("fompi")
    assert "torch.distributed.fsdp" not in sys.modules  # its import takes seconds
    from torch.distributed.fsdp import fully_shard
    import fompi.torch

    x, kinds = torch.randn(4, 8), []
    for choose in (lambda net: net, lambda net: fompi.torch.overlap(net, False)):
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for layer in net:
            fully_shard(layer)
        net = choose(fully_shard(net))
        net(x).sum().backward()
        kinds += [type(net[0]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm).__name__]
    print(f"{kinds}\\n", end="")
    dist.destroy_process_group()
""")


@pytest.mark.timeout(60)
def test_fsdp2_overlaps_by_default(mpirun, tmp_path):
    """Also where its import comes after the group."""
    (tmp_path / "train.py").write_text(SHARDED)
    done = mpirun(2, tmp_path / "train.py", seconds=50)
    assert done.returncode == 0 and done.stdout.count("['Unwaited', 'DefaultAllGather']") == 2, done.output


@pytest.mark.parametrize(("plugins", "is_cpu", "backend"), [
    ("fompi", True, "fompi"), ("other,fompi", True, "fompi"), ("fompi", False, "own"), ("other", True, "own"),
    ("", True, "own"), (None, True, "own"),
])  # fmt: skip
def test_the_plug_in_of_vllm(monkeypatch, plugins, is_cpu, backend):
    """vLLM calls the entry point. It makes its groups by `dist_backend` of its platform."""

    class Platform:
        dist_backend = "own"

        def is_cpu(self):
            return is_cpu

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=Platform()))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    (plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "fompi"]
    plugin.load()()
    assert Platform.dist_backend == Platform().dist_backend == backend


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_hook_gives_back_by_parameter_and_place(dtype):
    """Whatever the buckets are, what was sent of a parameter and what it has lost are together what was given."""
    import torch

    from fompi.torch.comm_hook import give_back

    known, comm, kind = (
        torch.utils.weak.WeakTensorKeyDictionary(),
        SimpleNamespace(size=3, rank=1),
        getattr(torch, dtype),
    )
    lengths, random = {"a": 70, "b": 5, "c": 200, "d": 64}, torch.Generator().manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.zeros(n, dtype=kind)) for name, n in lengths.items()}
    given, sent = ({name: torch.zeros(n) for name, n in lengths.items()} for _ in range(2))

    def lost(name):
        loss = known[parameters[name]]
        return torch.from_numpy(loss.feedback.lost[loss.part].copy())

    def run(names, used, is_summed=True):
        for name in used:  # as autograd does
            factors = 10.0 ** (ord(name) - ord("b")) * torch.randn(lengths[name], generator=random)
            parameters[name].grad = None
            (parameters[name] * factors.to(kind)).sum().backward()
        parts = {
            name: parameters[name].grad if name in used else torch.zeros(lengths[name], dtype=kind) for name in names
        }
        flat = torch.cat([*parts.values()])
        of_names = [parameters[name] for name in names]
        keep = give_back(known, "int4", comm, SimpleNamespace(buffer=lambda: flat, parameters=lambda: of_names))
        if is_summed:
            keep(None)
            for name, x in zip(names, flat.split([lengths[name] for name in names]), strict=True):
                if name in used:
                    given[name] += parts[name].float()
                    sent[name] += x.float() - lost(name)
                else:
                    assert not x.any()

    for names, used in (
        ("abcd", "abcd"),
        ("cb", "cb"),
        ("da", "da"),
        ("cb", "c"),
        ("ad", "d"),
        ("a", ""),
        ("dcba", "dc"),
    ):
        before = {name: lost(name) for name in names if parameters[name] in known}
        run(names, used, is_summed=False)
        assert all(torch.equal(lost(name), before[name]) for name in before), "a sum that fails changes nothing"
        run(names, used)
        assert all(torch.equal(lost(name), before[name]) for name in before if name not in used)
        for name in lengths:
            within = (1e-6 if dtype == "float32" else 0.02) * given[name].abs().max()
            assert (given[name] - sent[name] - lost(name)).abs().max() <= within, (names, name)
    assert all(lost(name).any() for name in "acd")
    parameters.clear()
    assert not len(known), "it keeps no parameter alive"
