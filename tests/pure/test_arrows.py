"""The arrows of the design: who may import whom, read off the source files; and what `import fompi` loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fompi

HOUSE = Path(fompi.__file__).resolve().parent

PURE = {
    "errors": set(),
    "layout": {"errors"},
    "checks": {"layout", "errors"},
    "machine": {"checks", "layout", "errors"},
    "exact": set(),
    "version": set(),
    "fit": {"machine", "checks"},
    "trace": {"errors"},
    "clocks": {"errors"},
    "drift": {"errors"},
    "timeline": {"trace"},
    "plan": {"layout", "errors"},
    "needs": {"plan"},
    "proof": {"plan", "needs", "trace", "layout", "errors"},
    "kernels": {"plan", "layout", "errors"},
    "problems": {"plan", "kernels", "layout", "errors"},
    "schedules": {"plan", "problems", "kernels", "layout", "errors"},
    "verify": {"plan", "needs", "problems", "kernels", "layout", "errors"},
    "rotation": {"plan", "needs", "kernels", "machine", "trace", "layout"},
    "simulate": {"plan", "needs", "kernels", "machine", "trace", "layout", "rotation", "errors"},
    "twin": {"simulate", "plan", "machine", "layout"},
    "bound": {"problems", "machine", "layout", "errors"},
    "candidates": {"exact", "bound", "schedules", "problems", "plan", "machine", "layout", "errors"},
    "estimate": {"candidates", "bound", "schedules", "problems", "plan", "machine", "layout", "errors"},
    "explain": {
        "candidates",
        "estimate",
        "bound",
        "schedules",
        "verify",
        "simulate",
        "problems",
        "plan",
        "proof",
        "machine",
        "trace",
        "timeline",
        "layout",
        "errors",
    },
    "steps": {"explain", "bound", "problems", "machine", "layout", "errors"},
    "choose": {"schedules", "candidates", "explain", "simulate", "problems", "plan", "machine", "layout", "errors"},
}
"""The rooms above the line, and all that each may import."""

WORLD = {
    "backends", "launch", "transport", "link", "engine", "channel", "progress", "agreement", "faults", "communicator",
    "arena", "dlpack", "arguments", "compiled", "run", "executor", "alone", "alignment", "report",
}  # fmt: skip
"""The rooms below the line: they carry plans out, and know nothing of how plans are made or proven."""

FRONT = {
    "__init__",
    "__main__",
    "call",
    "ops",
    "duals",
    "info",
    "picture",
    "bench",
    "torch",
    "jax",
    "parallel",
    "speeds",
    "calibrate",
    "effort",
    "adaptive",
}
"""What sees both."""

FOREIGN = {
    "mpi4py": {"transport.py"},
    "torch": {"torch", "bench/gloo.py"},
    "jax": {"jax", "bench/xla.py"},
    "mpi4jax": {"bench/xla.py"},
    "matplotlib": {"bench/table.py", "picture.py"},
    "numba": {"backends/numba.py"},
    "cupy": {"backends/cupy.py"},
    "ml_dtypes": set(),
}
"""Which file, or room, may import what is not ours."""


def files():
    return sorted(HOUSE.rglob("*.py"))


def module_of(path):
    """fompi.schedules.ring for fompi/schedules/ring.py; fompi.schedules for its __init__.py."""
    parts = path.relative_to(HOUSE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    return [*module.split("."), "__init__"][1]


MODULES = {module_of(path) for path in files()}


def imports(path, everywhere=True):
    """The modules that a file imports: all of them, or those that are imported when it is."""
    found = set()

    def read(node):
        for child in ast.iter_child_nodes(node):
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if later and not everywhere:
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = [] if not child.level else list(path.relative_to(HOUSE.parent).parts[: -child.level])
                source = ".".join([*package, *([child.module] if child.module else [])])
                names = [f"{source}.{alias.name}" for alias in child.names]
                found.update(name if name in MODULES else source for name in names)
            read(child)

    read(ast.parse(path.read_text()))
    return found


def rooms_imported(path):
    return {room_of(name) for name in imports(path) if name.split(".")[0] == "fompi"}


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_every_file_keeps_to_its_arrows(path):
    room, seen = room_of(module_of(path)), rooms_imported(path)
    assert room in {*PURE, *WORLD, *FRONT}, "a new room: say in this test where it belongs"
    if room in PURE:
        assert seen - {room} <= PURE[room]
    elif room in WORLD:
        assert not seen & {"schedules", "choose", "explain", "verify"}, "the lower half takes plans as they come"
        assert not seen & FRONT, "the lower half does not know the front"


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_every_file_imports_only_what_it_may(path):
    room, place = room_of(module_of(path)), str(path.relative_to(HOUSE))
    outside = {name.split(".")[0] for name in imports(path)} - {"fompi"}
    for name, allowed in FOREIGN.items():
        assert name not in outside or {room, place} & allowed, f"{name} is imported in {place}"
    if room in PURE:
        assert outside <= sys.stdlib_module_names, "the pure half needs nothing but Python"


def test_no_cycles():
    """Among the imports that happen when a module is loaded."""
    graph = {module_of(path): {m for m in imports(path, False) if m.split(".")[0] == "fompi"} for path in files()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


PLANNING = """
import sys
import fompi
from fompi import Replicate, Shard, Spec

plan = fompi.plan(fompi.all_gather_matmul, Spec((64, 8), "bfloat16", Shard(0)), Spec((8, 12), "bfloat16", Shard(1)),
                  ranks=4, schedule="ring", slices=2)
fompi.verify(plan)
assert len(str(plan).splitlines()) > 10
print(fompi.simulate(plan, fompi.Machine.load("laptop")))
foreign = {"mpi4py", "torch", "jax", "jaxlib", "cupy", "numba", "ml_dtypes", "scipy", "tqdm", "matplotlib"}
loaded = foreign & {name.partition(".")[0] for name in sys.modules}
assert not loaded, loaded
"""


def test_planning_loads_no_mpi_and_no_framework():
    """`import fompi`, plan, print, verify, simulate: in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PLANNING], cwd=HOUSE.parent, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("predicted: all_gather_matmul")


def test_the_test_sees_what_it_should(tmp_path):
    """Imports in functions count for the arrows, not for cycles; those for type checkers neither."""
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import fompi.plan as p\n"
        "from fompi import verify, Spec\n"
        "if TYPE_CHECKING:\n    from fompi.engine import Engine\n"
        "def f():\n    from fompi.choose import choose\n    import mpi4py.MPI\n"
    )
    at_load = {"typing", "fompi.plan", "fompi.verify", "fompi"}
    assert imports(path, everywhere=False) == at_load
    assert imports(path) == at_load | {"fompi.engine", "fompi.choose", "mpi4py.MPI"}
    assert rooms_imported(path) == {"plan", "verify", "engine", "choose", "__init__"}
