"""The imports between rooms, as the source files have them."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fompi
from fompi.base.doors import DOORS, Doors, closed

HOUSE = Path(fompi.__file__).resolve().parent

PURE = ("base", "plans", "schedules", "traces", "model", "planner")
"""The pure rooms need only Python: no MPI and no arrays."""

RUNTIME = ("tensors", "native", "backends", "mpi", "engine", "members", "runtime")
"""The rooms that carry out plans. They do not know how plans are written or chosen."""

FRONT = ("ops", "tuning", "parallel", "torch", "jax", "hosts", "cli", "lab", "bench", "__init__", "__main__")
"""The rooms that may import all others. `fompi/__init__.py` has the public names."""

ROOMS = (*PURE, *RUNTIME, *FRONT)
"""All rooms in order. A file may import from its own room and from the rooms before it."""

NOT_FOR_RUNTIME = {"schedules", "planner"}

FOREIGN = {
    "mpi4py": {"mpi/transport.py"},
    "torch": {"torch"},
    "jax": {"jax"},
    "matplotlib": set(),
    "rich": {"cli/output.py"},
    "numba": set(),
    "cupy": {"backends/cuda"},
    "triton": {"backends/cuda/counters/triton.py"},
    "ml_dtypes": set(),
    "scipy": {"planner/shares.py"},
}
"""The files and folders that may import a package from outside."""


def files():
    return sorted(HOUSE.rglob("*.py"))


def module_of(path):
    """The module of a file: fompi.schedules.ring for fompi/schedules/ring.py, fompi.schedules for its __init__.py."""
    parts = path.relative_to(HOUSE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module):
    return [*module.split("."), "__init__"][1]


MODULES = {module_of(path) for path in files()}


@cache
def imports(path):
    """The modules that a file imports, also in functions, and for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = [] if not node.level else list(path.relative_to(HOUSE.parent).parts[: -node.level])
            source = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else source for name in names)
    return found


def named(path):
    """The modules that a file imports by their names."""
    return {*re.findall(r'import_module\("(fompi\.[\w.]+)"', path.read_text())}


def rooms_imported(path):
    return {room_of(name) for name in imports(path) if name.split(".")[0] == "fompi"}


def test_every_arrow_goes_up_the_list_of_rooms():
    for path in files():
        room, seen = room_of(module_of(path)), rooms_imported(path)
        assert room in ROOMS, f"{path} is in no known room"
        before = {*ROOMS[: ROOMS.index(room) + 1]}
        if room in FRONT:
            before.add("__init__")  # these rooms may use the public names
        assert seen <= before, path
        assert room not in RUNTIME or not seen & NOT_FOR_RUNTIME, path


@pytest.mark.parametrize("room", [room for room in ROOMS if (HOUSE / room).is_dir()], ids="fompi.{}".format)
def test_every_room_says_what_it_is_for(room):
    """The `__init__.py` of a room is a docstring. `jax` and `members` import their names, the others theirs later."""
    body = ast.parse((HOUSE / room / "__init__.py").read_text()).body
    assert ast.get_docstring(ast.Module(body, [])), room
    assert len(body) == {"jax": 6, "members": 5, "mpi": 4, "parallel": 4, "torch": 8}.get(room, 1)


def test_every_file_imports_only_what_it_may():
    for path in files():
        room, place = room_of(module_of(path)), path.relative_to(HOUSE)
        outside = {name.split(".")[0] for name in imports(path)} - {"fompi"}
        for name, allowed in FOREIGN.items():
            here = {str(place), *map(str, place.parents)}
            assert name not in outside or here & allowed, f"{name} is imported in {place}"
        if room in PURE:
            outside -= {"scipy"}  # where a mixed-integer program is solved
            if str(place) in ("traces/record.py", "model/replay.py", "planner/advice.py"):
                outside -= {"numpy"}  # for the times of a million calls
            assert outside <= sys.stdlib_module_names, f"{place}: a pure room imports only Python's standard library"


def no_circle(graph):
    """Fail if there is a way back. `graph`: what each file needs."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_no_import_cycles():
    """Imports inside functions count, those for type checkers, and those of modules by their names.

    `fompi/__init__.py` fills doors with what it names: a door is how a file calls one that must not be imported.
    """
    graph = {}
    for path in files():
        here = module_of(path)
        seen = {name for name in imports(path) if name.split(".")[0] == "fompi"}
        seen |= named(path) if here != "fompi" else set()
        graph[here] = seen - {here}
    no_circle(graph)


def test_no_circle_of_files_in_c():
    """A file in C needs those whose headers it includes. It calls no function of another one but by its header."""
    folder, graph, places = HOUSE / "native", {}, {}
    for path in sorted(folder.glob("*.h")):
        declared = re.findall(r"^\w[\w *]*?\b(\w+)\([^{}]*?\);", path.read_text(), re.MULTILINE)
        places |= dict.fromkeys(declared, path.stem)
    assert {"kernel_run", "wire_run", "half_run", "chain_run", "xla_handler"} <= {*places}
    for path in sorted(folder.glob("*.c")):
        text = path.read_text()
        graph[path.stem] = {*re.findall(r'#include "(\w+)\.h"', text)} - {path.stem}
        called = {places[word] for word in re.findall(r"\b(\w+)\(", text) if word in places}
        assert called <= graph[path.stem] | {path.stem}
        for name in (name for name, place in places.items() if place == path.stem):
            assert re.search(rf"^\w[\w *]*\b{name}\([^;]*?\{{", text, re.MULTILINE), f"{name} is not in {path.name}"
    no_circle(graph)


def test_imports_are_found(tmp_path):
    """Those in functions, those for type checkers, and those of modules by their names."""
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import fompi.plans.plan as p\n"
        "from fompi import verify, Spec\n"
        "if TYPE_CHECKING:\n    from fompi.engine.engine import Engine\n"
        "def f():\n    from fompi.planner import choose\n    import mpi4py.MPI\n"
        '    import_module("fompi.traces.timeline")\n'
    )
    at_run = {"typing", "fompi.plans.plan", "fompi", "fompi.planner.choose", "mpi4py.MPI"}
    assert imports(path) == at_run | {"fompi.engine.engine"} and named(path) == {"fompi.traces.timeline"}
    assert rooms_imported(path) == {"plans", "engine", "planner", "__init__"}


def test_every_door_is_filled_and_listed():
    """`fompi.base.doors` has all of them; the design lists them. No room imports another one by a string."""
    page = (HOUSE.parent / "docs" / "inside" / "design.md").read_text()
    listed = re.findall(r"^\| (`.+?`) \| `", page.partition("| door |")[2].partition("\n\n")[0], re.MULTILINE)
    names = [name for cell in listed for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(field.name for field in fields(Doors))
    assert [name for name in names if getattr(DOORS, name) is closed and name != "traced"] == []


def files_of(room):
    """The modules of a room, its files of C and its folders."""
    paths = [path for path in (HOUSE / room).iterdir() if not path.name.startswith("__")]
    modules = {path.stem for path in paths if path.suffix == ".py"}
    return modules | {path.name for path in paths if path.suffix == ".c" or path.is_dir()}


def listed_files():
    """room -> the files that the design lists: a line is names, two spaces, what the room is for."""
    page = (HOUSE.parent / "docs" / "inside" / "design.md").read_text()
    found, room = {}, ""
    for line in page.partition("\nfompi/\n")[2].partition("```")[0].splitlines():
        if start := re.match(r"  (\w+)/ ", line):
            room = start[1]
        if line.startswith("  "):  # not the line between the pure rooms and the others
            names = re.split(r"\s{2,}", line.removeprefix(f"  {room}/").strip())[0]
            found.setdefault(room, []).extend(re.findall(r"[\w.]+", names))
    return found


LISTED = [room for room in ROOMS if (HOUSE / room).is_dir()]


@pytest.mark.parametrize("room", LISTED, ids="fompi.{}".format)
def test_the_design_lists_the_files_of_a_room(room):
    assert sorted(listed_files()[room]) == sorted(files_of(room))


def test_modules_named_by_strings_follow_the_arrows():
    """What is heavy is imported by its name, late. It is in the same room."""
    for path in files():
        if path.parent != HOUSE:
            assert {room_of(name) for name in named(path)} <= {room_of(module_of(path)), "__init__"}, path
