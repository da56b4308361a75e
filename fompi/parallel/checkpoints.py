"""Checkpoints that no rank has to hold: `fompi.save` and `fompi.load`.

A rank says which boxes of which arrays it has. Saving, the ranks tell each other, and each writes its share of what
several have. Loading is the same resharding with files in the place of ranks: each rank reads what its boxes need.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread
from time import perf_counter
from typing import Any
from zlib import crc32

import numpy as np

from fompi.backends.numbers import place
from fompi.base.doors import DOORS
from fompi.base.errors import LayoutError, MismatchError, ShapeError, StateError, TensorError
from fompi.base.log import log
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.ops.operations import all_gather
from fompi.parallel.arrays import Array, borrow_any, call, lent, memory
from fompi.parallel.buckets import MOST_NAMED, detached
from fompi.parallel.opened import open_checkpoint
from fompi.parallel.reshard import Startable, views
from fompi.parallel.section import in_section
from fompi.parallel.stored import BLOCK, INDEX, VALUES, Checkpoint, Part, Stored, flattened, header_bytes
from fompi.plans.boxes import Box, Boxes, common, run, whole
from fompi.plans.plan import format_nbytes
from fompi.plans.resharding import cells, dealt
from fompi.tensors import dlpack

SAMPLED = 1 << 18
"""Of tensors that are the same on all ranks, this many elements are compared, from their begin to their end."""


class Held:
    """What this rank has of a named array: `boxes`, and an array of each in `views`.

    Without boxes the tensor is the whole array, the same on all ranks; with `of_first` that of the first rank that has
    it.
    """

    def __init__(
        self,
        tensor: Any,
        shape: Sequence[int] | None = None,
        boxes: Sequence[Box] = (),
        arrays: Sequence[Array] | None = None,
        of_first: bool = False,
    ):
        self.tensor, self.of_first = tensor, of_first
        self.borrowed = borrow_any(detached(tensor), "a tensor of the state")
        array = self.borrowed.array
        if place(array) is not None:
            raise TensorError("checkpoints are of tensors on the host: copy those of a device")
        self.is_new = arrays is None and not array.flags.writeable
        self.is_alike = shape is None and not of_first
        self.shape = tuple(array.shape if shape is None else shape)
        self.boxes = tuple(boxes) if shape is not None else (whole(array.shape),)
        self.array: Array = array.copy() if self.is_new else array
        if arrays is None and [box.shape for box in self.boxes] != [array.shape]:
            self.array = np.asarray(self.array, order="C")  # boxes lie in it one behind the other
        self.views = views(self.array, self.boxes) if arrays is None else arrays

    def words(self) -> dict[str, Any]:
        """What other ranks must know of it."""
        form: dict[str, Any] = {"dtype": self.borrowed.dtype, "shape": self.shape, "sum": None}
        if self.is_alike:  # a sample: a step waits for it
            sample = self.array.reshape(-1)[:: 1 + self.array.size // SAMPLED]
            form["sum"] = crc32(np.ascontiguousarray(sample).view(np.uint8).data)
        return {"form": form, "boxes": self.boxes, "of_first": self.of_first}

    def loaded(self) -> Any:
        """The tensor with what was written to `views`."""
        if not self.is_new and self.array is not self.borrowed.array:
            self.borrowed.array[...] = self.array
        dlpack.mark_written(self.tensor)
        return lent(self.array, self.borrowed) if self.is_new else self.tensor


@dataclass
class Entry:
    """The value `of[key]`, which `load` puts there."""

    of: dict[str, Any]
    key: str


Placed = Sequence[tuple[Box, Box]]
"""Boxes in a part of an array, and which boxes of the whole array they are."""


def within(array: Array, shape: Sequence[int], elements: slice, placed: Placed) -> tuple[list[Box], list[Array]]:
    """The boxes of a whole array, and an array of each, that are in some elements of a flattened part of it.

    `shape` and `placed` are those of the part. `array` has these elements.
    """
    boxes, arrays = list[Box](), list[Array]()
    runs = [*run(tuple(shape), elements.start, elements.stop)]
    for here, view in zip(runs, views(array, runs), strict=True):
        for local, its in placed:
            if (both := common(here, local)) is not None:
                steps = zip(its.offset, both.offset, local.offset, strict=True)
                boxes.append(Box(tuple(a + b - c for a, b, c in steps), both.shape))
                arrays.append(view[here.slices(both)])
    return boxes, arrays


def held_in(state: Any, rank: int) -> Iterator[tuple[str, Any]]:
    """The arrays of a state, as Held, and its other values, by names that are joined with dots."""

    def read(name: str, state: Any) -> Any:
        if hasattr(state, "checkpoint_parts"):
            return state.checkpoint_parts()
        if hasattr(state, "state_dict"):
            return DOORS.parts_of_torch(state)
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Boxes):
            (x, boxes), shape = state, tuple(state[0].shape)
            if rank >= boxes.size or shape != boxes.arrays[rank]:
                raise ShapeError(f"{name!r} has the shape {shape}, which its boxes do not give to rank {rank}")
            return Held(x, boxes.shape, boxes.of[rank])
        return state if isinstance(state, (*VALUES, Held, Entry, Mapping, list, tuple)) else Held(state)

    return flattened(state, read=read)


def _read_state(what: str, state: Any, comm: Communicator, error: Exception | None) -> Any:
    """(the arrays, the values) of this rank. All ranks go on with the same words of `what`, or all raise."""
    arrays, values = dict[str, Held](), dict[str, Any]()
    try:
        for name, value in held_in(state, comm.rank) if error is None else ():
            (arrays if isinstance(value, Held) else values)[name] = value
    except Exception as refusal:
        error = refusal
    agree(comm, what, error)
    return arrays, values


# ------------------------------------------------------------------------------------------------------------- save


@partial(Startable, copies="none")
@in_section("save")
def save(directory: Any, state: Any, *, step: int | None = None, comm: Any = None, copies: str = "now") -> Saving:
    """Write what the ranks have to a directory: each its own part, and what several have once.

        fompi.save("run", {"model": model, "x": (x, Boxes.over((n, k), Shard(0), comm.size)), "epoch": 3}, step=100)
        saving = fompi.save.start(...)                              # a copy; saving.wait() before the next one
        saving = fompi.save.start(..., copies="later")              # no copy yet; forward, backward
        saving.copied()                                             # now it is there: the optimizer may step

    `state` is a nested mapping. Its values are modules of torch and `fompi.torch`, `DataParallel`s, pairs of a tensor
    and its `Boxes`, tensors that are the same on all ranks, and values of JSON. Ranks may have different names. What is
    there stays whole until all ranks have written all bytes; then one rename puts the new checkpoint in its place.

    `copies` of `start`: "now": the state may change when it returns. "later": a thread copies; do not write to the
    state before `saving.copied()` has returned, which is not collective. "none": then `copied()` waits for the file of
    this rank, as `save(...)` itself does. The memory of copies, up to 1 GiB, is kept for later ones.

    Collective. Raises LayoutError where ranks contradict each other or nobody has some elements, and StateError if a
    rank cannot write, on all ranks.
    """
    group, error = Communicator.of(comm), None
    if copies not in ("now", "later", "none"):
        error = LayoutError(f"save: {copies=} must be 'now', 'later' or 'none'")
    arrays, values = _read_state(f"save, {os.fspath(directory)!r}, {step=}", state, group, error)
    words = {name: each.words() for name, each in arrays.items()}
    values = {name: each.of[each.key] if isinstance(each, Entry) else each for name, each in values.items()}
    tables = told({"arrays": words, "values": values, "id": token_hex(8)}, group)
    made = Checkpoint(Path(directory), id=tables[0]["id"], step=step, ranks=group.size)
    for rank, table in enumerate(tables):
        for name, value in table["values"].items():
            if json.dumps(known := made.values.setdefault(name, value)) != json.dumps(value):
                raise LayoutError(f"save: {name!r} is {value!r} on rank {rank}, but {known!r} on another rank")
    parts = {}
    for key, (name, box) in _shares(made, tables)[group.rank].items():
        held = arrays[name]
        number = next(i for i, each in enumerate(held.boxes) if common(each, box) == box)
        parts[key] = held.views[number][held.boxes[number].slices(box)]
    return Saving(made, parts, group, copies)


def told(table: Any, comm: Communicator) -> list[Any]:
    """The tables of all ranks."""
    mine = np.frombuffer(json.dumps(table).encode(), np.uint8)
    lengths = call(all_gather, np.array([len(mine)]), dtype="int64", comm=comm).tolist()
    text, at = call(all_gather, mine, dtype="uint8", comm=comm).tobytes(), 0
    return [json.loads(text[at : (at := at + n)]) for n in lengths]


def _shares(made: Checkpoint, tables: Sequence[Any]) -> Mapping[int, dict[str, tuple[str, Box]]]:
    """Enter the arrays of all ranks in `made`. Returns what each rank writes: key in its file -> (name, box).

    Raises LayoutError where ranks contradict each other. All of them see the same.
    """
    wanted = defaultdict[tuple[int, ...], list[Any]](list)
    for name in dict.fromkeys(name for table in tables for name in table["arrays"]):
        found = {rank: table["arrays"][name] for rank, table in enumerate(tables) if name in table["arrays"]}
        (first, each), *others = found.items()
        for other, its in others:
            if its["form"] != each["form"]:
                what = next(what for what in its["form"] if its["form"][what] != each["form"][what])
                raise LayoutError(
                    f"save: {name!r} on rank {other} has not the {what.replace('sum', 'bits')} of rank {first}: where "
                    "ranks have parts, pair the tensor with its Boxes; values of their own need names of their own"
                )
        shape, none = tuple(each["form"]["shape"]), {"boxes": ()}
        of = (found.get(rank, none)["boxes"] for rank in range(len(tables)))
        boxes = Boxes(shape, tuple(tuple(Box(tuple(offset), tuple(n)) for offset, n in listed) for listed in of))
        made.arrays[name] = Stored(each["form"]["dtype"], shape, [])
        for part, owners in cells(whole(shape), boxes):
            if not owners:
                raise LayoutError(f"save: no rank has the elements {part} of {name!r}, a hole")
            wanted[owners[:1] if each["of_first"] else owners].append((name, part))
    files = defaultdict[int, dict[str, tuple[str, Box]]](dict)
    for owner, name, box in dealt(wanted):
        files[owner][f"{name}#{len(files[owner])}"] = name, box
    for owner, keys in sorted(files.items()):
        forms = {key: (made.arrays[name].dtype, box.shape) for key, (name, box) in keys.items()}
        for (name, box), begin in zip(keys.values(), header_bytes(forms, made.id)[1], strict=False):
            made.arrays[name].parts.append(Part(file_of(made, owner), begin, box))
    return files


def file_of(made: Checkpoint, rank: int) -> str:
    return f"{made.id}-{rank}.safetensors"


class Saving:
    """A checkpoint on its way to the disk. `wait()` ends it; until then the old one is the one that counts."""

    def __init__(self, made: Checkpoint, parts: dict[str, Array], comm: Communicator, copies: str):
        self._made, self._comm, self._begun = made, comm, perf_counter()
        self._path = made.directory / file_of(made, comm.rank)
        self._error: Exception | None = None
        self._written: tuple[int, list[int]] = 0, []
        self._copied = Event()
        if copies == "now":
            parts = self._copy(parts)
        self._writer: Thread | None = Thread(target=self._write, args=[parts, copies], name="fompi save", daemon=True)
        self._writer.start()

    def _copy(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        made = {key: memory(self._comm, part.shape, part.dtype, part) for key, part in parts.items()}
        for key, part in parts.items():
            made[key][...] = part
        self._copied.set()
        return made

    def _write(self, parts: Mapping[str, Array], copies: str) -> None:
        """In a thread: the file of this rank."""
        try:
            if copies == "later":
                parts = self._copy(parts)
            forms = {key: (self._made.arrays[key.rpartition("#")[0]].dtype, part.shape) for key, part in parts.items()}
            self._made.directory.mkdir(parents=True, exist_ok=True)
            self._written = write_file(self._path, header_bytes(forms, self._made.id)[0], parts.values())
        except Exception as error:
            self._error = _unwritten(self._comm.rank, self._path, error)
        finally:
            self._copied.set()

    def copied(self) -> None:
        """The state of this rank may change from now on. Not collective. Errors come from `wait()`."""
        self._copied.wait()

    @in_section("save")
    def wait(self) -> None:
        """All ranks have written, and the new checkpoint is there. Or all raise, and the old one is. Collective."""
        if self._writer is None:
            raise StateError("this save has been waited for")
        writer, self._writer, made, writing = self._writer, None, self._made, True
        try:
            while writing:  # a file may take longer than an agreement may
                writer.join(min(60.0, self._comm.engine.timeout / 4))
                writes = int(writer.is_alive())  # before its error is read: that is the last word then
                writing = any(agree(self._comm, "save: the files of all ranks", self._error, writes))
            made.sums = {file_of(made, r): tuple(each) for r, each in enumerate(told(self._written, self._comm))}
            agree(self._comm, "save: the rename", finish(made) if self._comm.rank == 0 else None)
        except (StateError, MismatchError):  # a rank refuses; if one is lost instead, there may have been the rename
            self._path.unlink(missing_ok=True)
            raise
        seconds = perf_counter() - self._begun
        log.info("save: %s in %s in %.1f s", format_nbytes(made.nbytes), made.directory, seconds)


def _unwritten(rank: int, path: Path, error: Exception) -> StateError:
    why = getattr(error, "strerror", None) or error
    return StateError(f"rank {rank} cannot write {path}: {why}. The old checkpoint stays")


def write_file(path: Path, head: bytes, arrays: Iterable[Array]) -> tuple[int, list[int]]:
    """Write a file, and await that the disk has it. Returns its bytes and the sums of its blocks."""
    nbytes, sums, handed = 0, list[int](), 8 * BLOCK
    with path.open("wb") as file:
        for piece in chain([np.frombuffer(head, np.uint8)], arrays):
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            while data:
                now = data[: BLOCK - nbytes % BLOCK]
                if nbytes % BLOCK == 0:
                    sums.append(0)
                sums[-1] = crc32(now, sums[-1])
                nbytes += file.write(now)
                data = data[len(now) :]
                if nbytes % handed == 0:  # the disk writes it while the next sums are made, and fsync finds little
                    os.posix_fadvise(file.fileno(), nbytes - handed, handed, os.POSIX_FADV_DONTNEED)
        file.flush()
        os.fsync(file.fileno())
    return nbytes, sums


def finish(made: Checkpoint) -> Exception | None:
    """The new index takes the place of the old one: from then on it is the checkpoint. A thread removes old files."""
    folder = made.directory
    beside = folder / f"{made.id}.json"
    if unseen := [file for file in made.sums if not (folder / file).exists()]:
        return StateError(f"rank 0 does not see {folder / unseen[0]}: all ranks must write to one directory")
    try:
        write_file(beside, made.text().encode(), ())
        os.replace(beside, folder / INDEX)
    except OSError as error:
        beside.unlink(missing_ok=True)
        return _unwritten(0, folder / INDEX, error)
    with suppress(OSError):  # the checkpoint is there, whatever happens now
        opened = os.open(folder, os.O_RDONLY)
        os.fsync(opened)  # the disk has the rename before old files go
        os.close(opened)
        of_saves = (*folder.glob("????????????????-*.safetensors"), *folder.glob("????????????????.json"))
        old = [path for path in of_saves if path.name not in made.sums]
        Thread(target=_remove, args=[old], name="fompi remove").start()  # a disk takes its time: no step waits for it
    return None


def _remove(files: Iterable[Path]) -> None:
    with suppress(OSError):
        for each in files:
            each.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- load


@in_section("load")
def load(directory: Any, state: Any, *, comm: Any = None) -> dict[str, Any]:
    """Read what `state` needs into it, from a checkpoint of any number of ranks, of the Hugging Face hub or of torch.

        values = fompi.load("run", {"model": model, "x": (x, boxes), "epoch": 0})
        epoch = values["epoch"]

    `directory` is one of `fompi.save`, a folder of the hub, a directory of torch.distributed.checkpoint, or a file of
    `torch.save`: nothing that a pickle names is imported or called, and objects that are no tensors, mappings, lists or
    values of JSON are left out.
    `state` is as for `fompi.save`. Tensors are written in place; those that cannot be, as of JAX, are new in the
    result, a flat mapping: "model.layer.weight" -> the tensor, or the value. Each rank reads only what its boxes need,
    and tests the sums of that before anything is written. Other names of the checkpoint are left out. Collective.
    Raises LayoutError on all ranks for a checkpoint that is not whole or lacks something, and ShapeError or LayoutError
    for shapes and dtypes that differ; nothing is loaded then.
    """
    group, begun, found, error = Communicator.of(comm), perf_counter(), Checkpoint(Path()), None
    try:
        found = open_checkpoint(directory)
    except Exception as refusal:
        error = refusal
    arrays, values = _read_state(f"load, checkpoint {found.id}, step {found.step}", state, group, error)
    reads: list[tuple[Array, Array]] = []
    try:
        found.know([*arrays, *values])
        reads = list(reads_of(found, arrays, values))
    except Exception as refusal:
        error = refusal
    agree(group, "load: the files", error)
    for here, there in reads:
        here[...] = there
    for name, each in values.items():
        if isinstance(each, Entry):
            each.of[each.key] = found.values[name]
    result = {name: each.loaded() for name, each in arrays.items()} | {name: found.values[name] for name in values}
    nbytes, seconds = format_nbytes(sum(here.nbytes for here, _ in reads)), perf_counter() - begun
    log.info("load: rank %d has read %s in %s in %.1f s", group.rank, nbytes, directory, seconds)
    return result


def reads_of(
    found: Checkpoint, arrays: Mapping[str, Held], values: Iterable[str] = ()
) -> Iterator[tuple[Array, Array]]:
    """(an array here, the elements for it in a file), in the order of the files, whose bytes are tested."""
    missing = [name for name in arrays if name not in found.arrays]
    if missing := [*missing, *(name for name in values if name not in found.values)]:
        raise LayoutError(f"{found.directory} lacks {len(missing)} names: {', '.join(missing[:MOST_NAMED])}")
    reads = defaultdict[str, list[tuple[tuple[int, int], Part, Box, Array]]](list)
    for name, each in arrays.items():
        stored = found.arrays[name]
        if stored.shape != each.shape:
            raise ShapeError(f"{name!r} has the shape {each.shape}, but {stored.shape} in {found.directory}")
        if stored.dtype != each.borrowed.dtype:
            raise LayoutError(f"{name!r} is {each.borrowed.dtype}, but {stored.dtype} in {found.directory}")
        for box, view in zip(each.boxes, each.views, strict=True):
            left = box.elements
            for part in stored.parts:
                if left and (both := common(box, part.box)) is not None:
                    left -= both.elements
                    rows = part.rows(both, view.itemsize)
                    reads[part.file].append((rows, part, both, view[box.slices(both)]))
            if left:
                raise LayoutError(f"{found.directory} lacks {left} elements of {box} of {name!r}, a hole")
    for file, of in sorted(reads.items()):
        of.sort(key=lambda read: read[0])
        memory = found.mapped(file, [rows for rows, *_ in of])
        for _, part, both, here in of:
            yield here, found.elements(part, both, memory, here.dtype)
