"""Checkpoints that no rank has to hold: `fompi.save` and `fompi.load`.

A rank says which boxes of which arrays it has. Saving, the ranks tell each other, and each writes its share of what
several have. Loading is the same resharding with files in the place of ranks: each rank reads what its boxes need.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from secrets import token_hex
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from fompi.backends.half import storage
from fompi.backends.numbers import place
from fompi.base.doors import DOORS
from fompi.base.errors import LayoutError, ShapeError, StateError, TensorError
from fompi.base.log import log
from fompi.base.stored import BLOCK, INDEX, Checkpoint, Part, Stored, header_bytes, open_checkpoint
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.ops.operations import all_gather
from fompi.parallel.arrays import Array, borrow_any, call, lent
from fompi.parallel.buckets import MOST_NAMED, detached
from fompi.parallel.reshard import Startable, in_memory
from fompi.parallel.section import in_section
from fompi.plans.boxes import Box, Boxes, common, row_major, volume
from fompi.plans.plan import format_nbytes
from fompi.plans.resharding import dealt, held_cells
from fompi.tensors import dlpack


@dataclass
class Held:
    """What a rank has of a named array: a tensor, and its boxes in the memory of that, in the order of its rows.

    Without boxes it is the whole array, the same on all ranks; with `of_first` that of the first rank that has it. An
    `optional` one stays as it is where a checkpoint has none of its name.
    """

    tensor: Any
    shape: tuple[int, ...] = ()
    boxes: tuple[Box, ...] | None = None
    optional: bool = False
    of_first: bool = False

    def __post_init__(self) -> None:
        self.borrowed = borrow_any(detached(self.tensor), "a tensor of the state")
        self.array: Array = self.borrowed.array
        if place(self.array) is not None:
            raise TensorError("checkpoints are of tensors on the host: copy those of a device")
        self.is_alike = self.boxes is None and not self.of_first
        if self.boxes is None:
            self.shape = self.array.shape
            self.boxes = (Box((0,) * len(self.shape), self.shape, 0, row_major(self.shape)),)

    @property
    def flat(self) -> Array:
        return np.ascontiguousarray(self.array).reshape(-1)

    def words(self) -> dict[str, Any]:
        """What other ranks must know of it."""
        alike = crc32(self.flat.view(np.uint8).data) if self.is_alike else None
        return {"dtype": self.borrowed.dtype, "shape": self.shape, "boxes": self.boxes, "sum": alike,
                "elements": self.array.size, "of_first": self.of_first}  # fmt: skip


def held_in(state: Any, rank: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a state, as Held, and its other values, by names that are joined with dots."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Boxes):
        array, boxes = borrow_any(detached(state[0]), prefix).array, state[1]
        if rank >= boxes.size or array.shape != boxes.arrays[rank]:
            raise ShapeError(f"{prefix!r} has the shape {array.shape}, which is not that of rank {rank} of its boxes")
        yield prefix, Held(state[0], boxes.shape, boxes.of[rank])
    elif isinstance(state, Held) or state is None or isinstance(state, (str, bool, int, float, list)):
        yield prefix, state
    elif isinstance(parts := _parts_of(state), Mapping):
        for key, value in parts.items():
            yield from held_in(value, rank, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, Held(state)


def _parts_of(state: Any) -> Any:
    """The mapping that an object is, or says it is."""
    if hasattr(state, "checkpoint_parts"):
        return state.checkpoint_parts()
    return DOORS.parts_of_torch(state) if hasattr(state, "state_dict") else state


def _read_state(what: str, state: Any, comm: Communicator, error: Exception | None = None) -> dict[str, Any]:
    """What this rank has. All ranks go on with the same words of `what`, or all raise."""
    found: dict[str, Any] = {}
    try:
        for name, value in held_in(state, comm.rank) if error is None else ():
            found[name] = value
    except Exception as refusal:
        error = refusal
    agree(comm, what, error)
    return found


# ------------------------------------------------------------------------------------------------------------- save


@Startable
@in_section("save")
def save(directory: Any, state: Any, *, step: int | None = None, comm: Any = None) -> Saving:
    """Write what the ranks have to a directory: each its own part, and what several have once.

        fompi.save("run", {"model": model, "x": (x, Boxes.over((n, k), Shard(0), comm.size)), "epoch": 3}, step=100)
        saving = fompi.save.start(...)                              # a copy; saving.wait() before the next one

    `state` is a nested mapping. Its values are modules of torch and `fompi.torch`, `DataParallel`s, pairs of a tensor
    and its `Boxes`, tensors that are the same on all ranks, and values of JSON. Ranks may have different names. What is
    there stays whole until all ranks have written all bytes; then one rename puts the new checkpoint in its place.
    Collective. Raises LayoutError where ranks contradict each other or nobody has some elements, and StateError if a
    rank cannot write, on all ranks.
    """
    group = Communicator.of(comm)
    held = _read_state(f"save, {os.fspath(directory)!r}, {step=}", state, group)
    arrays = {name: value for name, value in held.items() if isinstance(value, Held)}
    values = {name: value for name, value in held.items() if not isinstance(value, Held)}
    words = {name: each.words() for name, each in arrays.items()}
    tables = _told({"arrays": words, "values": values, "id": token_hex(8)}, group)
    merged = {name: value for table in tables for name, value in table["values"].items()}
    for rank, table in enumerate(tables):
        for name, value in table["values"].items():
            if json.dumps(value) != json.dumps(merged[name]):
                raise LayoutError(f"save: {name!r} is {value!r} on rank {rank}, but {merged[name]!r} on another rank")
    made = Checkpoint(Path(directory), {}, merged, tables[0]["id"], step, group.size)
    flats = {name: each.flat for name, each in arrays.items()}
    shares = _shares(made, tables)[group.rank]
    return Saving(made, {key: np.array(in_memory(flats[name], box)) for key, (name, box) in shares.items()}, group)


def _told(table: Any, comm: Communicator) -> list[Any]:
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
    boxes_of: dict[str, Boxes] = {}
    for name in dict.fromkeys(name for table in tables for name in table["arrays"]):
        found = {r: table["arrays"][name] for r, table in enumerate(tables) if name in table["arrays"]}
        (first, form), *others = found.items()
        for other, each in others:
            for what in ("dtype", "shape", "sum"):
                if each[what] != form[what]:
                    same = "the bits" if what == "sum" else f"the {what} {each[what]}"
                    raise LayoutError(
                        f"save: {name!r} on rank {other} has not {same} of rank {first}: where ranks have parts or "
                        "values of their own, pair the tensor with its Boxes, or give it a name of its own on each rank"
                    )
        each_rank = [found.get(r, {"boxes": [], "elements": 0}) for r in range(len(tables))]
        of = tuple(tuple(Box(tuple(o), tuple(n), at, tuple(s)) for o, n, at, s in each["boxes"]) for each in each_rank)
        boxes = boxes_of[name] = Boxes(tuple(form["shape"]), of, tuple((each["elements"],) for each in each_rank))
        made.arrays[name] = Stored(form["dtype"], boxes.shape, [])
        for region, owners in held_cells(boxes):
            if not owners:
                raise LayoutError(f"save: no rank has the elements {region} of {name!r}, a hole")
            wanted[owners[:1] if form["of_first"] else owners].append((name, region, None))
    files = defaultdict[int, dict[str, tuple[str, Box]]](dict)
    for owner, name, region, _ in dealt(wanted):
        box = next(b for b in boxes_of[name].of[owner] if common(b.region, region) == region).part(region)
        files[owner][f"{name}#{len(files[owner])}"] = name, box
    for owner, keys in sorted(files.items()):
        _, begins = header_bytes({k: (made.arrays[n].dtype, b.shape) for k, (n, b) in keys.items()}, made.id)
        for (name, box), begin in zip(keys.values(), begins, strict=False):
            made.arrays[name].parts.append(Part(file_of(made, owner), begin, box.offset, box.shape))
    return files


def file_of(made: Checkpoint, rank: int) -> str:
    return f"{made.id}-{rank}.safetensors"


class Saving:
    """A checkpoint on its way to the disk. `wait()` ends it; until then the old one is the one that counts."""

    def __init__(self, made: Checkpoint, copies: dict[str, Array], comm: Communicator):
        self._made, self._copies, self._comm, self._begun = made, copies, comm, perf_counter()
        self._error: Exception | None = None
        self._path, self._written = made.directory / file_of(made, comm.rank), (0, list[int]())
        self._writer: Thread | None = Thread(target=self._write, name="fompi save", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        """In a thread: the file of this rank."""
        names = [key.rpartition("#")[0] for key in self._copies]
        forms = {key: (self._made.arrays[name].dtype, array.shape)
                 for (key, array), name in zip(self._copies.items(), names, strict=True)}  # fmt: skip
        try:
            self._made.directory.mkdir(parents=True, exist_ok=True)
            self._written = write_file(self._path, header_bytes(forms, self._made.id)[0], self._copies.values())
        except Exception as error:
            why = getattr(error, "strerror", None) or error
            self._error = StateError(
                f"rank {self._comm.rank} cannot write {self._path}: {why}. The old checkpoint stays"
            )
        self._copies = {}

    @in_section("save")
    def wait(self) -> None:
        """All ranks have written, and the new checkpoint is there. Or all raise, and the old one is. Collective."""
        if self._writer is None:
            raise StateError("this save has been waited for")
        self._writer.join()
        self._writer, made = None, self._made
        try:
            agree(self._comm, "save: the files of all ranks", self._error)
            written = _told(self._written, self._comm)
            made.sums = {file_of(made, rank): tuple(each) for rank, each in enumerate(written)}
            agree(self._comm, "save: the rename", finish(made) if self._comm.rank == 0 else None)
        except Exception:
            self._path.unlink(missing_ok=True)
            raise
        seconds = perf_counter() - self._begun
        log.info("save: %s in %s in %.1f s", format_nbytes(made.nbytes), made.directory, seconds)


def write_file(path: Path, head: bytes, arrays: Iterable[Array]) -> tuple[int, list[int]]:
    """Write a file, and await that the disk has it. Returns its bytes and the sums of its blocks."""
    nbytes, sums = 0, list[int]()
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
        file.flush()
        os.fsync(file.fileno())
    return nbytes, sums


def finish(made: Checkpoint) -> Exception | None:
    """The new index takes the place of the old one: from then on it is the checkpoint. Old files go."""
    folder = made.directory
    beside = folder / f"{made.id}.json"
    try:
        write_file(beside, made.text().encode(), ())
        os.replace(beside, folder / INDEX)
    except OSError as error:
        beside.unlink(missing_ok=True)
        return StateError(f"rank 0 cannot write {folder / INDEX}: {error.strerror}. The old checkpoint stays")
    for old in (*folder.glob("????????????????-*.safetensors"), *folder.glob("????????????????.json")):
        if old.name not in made.sums:
            old.unlink(missing_ok=True)
    return None


# ------------------------------------------------------------------------------------------------------------- load


@in_section("load")
def load(directory: Any, state: Any, *, comm: Any = None) -> dict[str, Any]:
    """Read what `state` needs into it, from a checkpoint of any number of ranks or a folder of the Hugging Face hub.

        values = fompi.load("run", {"model": model, "x": (x, boxes), "epoch": 0})
        epoch = values["epoch"]

    `state` is as for `fompi.save`. Tensors are written in place; those that cannot be, as of JAX, are new in the
    result, a flat mapping: "model.layer.weight" -> the tensor, or the value. Each rank reads only what its boxes need,
    and tests the sums of that before anything is written. Other names of the checkpoint are left out. Collective.
    Raises LayoutError on all ranks for a checkpoint that is not whole or lacks something, and ShapeError or LayoutError
    for shapes and dtypes that differ; nothing is loaded then.
    """
    group, begun = Communicator.of(comm), perf_counter()
    found, error = Checkpoint(Path(directory)), None
    try:
        found = open_checkpoint(directory)
    except Exception as refusal:
        error = refusal
    state_here = _read_state(f"load, checkpoint {found.id}, step {found.step}", state, group, error)
    arrays = {name: each for name, each in state_here.items() if isinstance(each, Held)}
    reads: dict[str, list[_Read]] = {}
    try:
        _check_names(found, state_here)
        reads = _reads(found, arrays)
        mapped = {file: found.mapped(file, [read.run for read in of]) for file, of in reads.items()}
    except Exception as refusal:
        error = refusal
    agree(group, "load: the files", error)
    flats = {name: each.flat if each.array.flags.writeable else each.flat.copy() for name, each in arrays.items()}
    for file, of in reads.items():
        for read in of:
            memory = np.frombuffer(mapped[file], flats[read.name].dtype, read.there.end, read.begin)
            in_memory(flats[read.name], read.here)[...] = in_memory(memory, read.there)
    result = {name: found.values.get(name) for name in state_here}
    for name, each in arrays.items():
        result[name] = each.tensor
        if not each.array.flags.writeable:
            result[name] = lent(flats[name].reshape(each.array.shape), each.borrowed)
        elif not np.shares_memory(flats[name], each.array):
            each.array[...] = flats[name].reshape(each.array.shape)
        dlpack.mark_written(each.tensor)
    read_here = {n: flats.get(n, result[n]) for n in state_here if n in found.arrays or n in found.values}
    _tell_loaded(state, read_here)
    words = format_nbytes(sum(end - begin for of in reads.values() for begin, end in (read.run for read in of)))
    log.info("load: rank %d has read %s in %s in %.1f s", group.rank, words, directory, perf_counter() - begun)
    return result


class _Read(NamedTuple):
    """A box of an array here, and the same elements in a file: behind byte `begin`, between the bytes of `run`."""

    name: str
    here: Box
    there: Box
    begin: int
    run: tuple[int, int]


def _check_names(found: Checkpoint, state: Mapping[str, Any]) -> None:
    missing = []
    for name, each in state.items():
        of_kind = found.arrays if isinstance(each, Held) else found.values
        if name not in of_kind and not getattr(each, "optional", False):
            missing.append(name)
    if missing:
        raise LayoutError(f"{found.directory} lacks {len(missing)} names: {', '.join(missing[:MOST_NAMED])}")


def _reads(found: Checkpoint, arrays: Mapping[str, Held]) -> dict[str, list[_Read]]:
    """For each file what is read of it, in its order."""
    reads = defaultdict[str, list[_Read]](list)
    for name, each in arrays.items():
        if name not in found.arrays:
            continue
        stored, size = found.arrays[name], storage(each.borrowed.dtype).itemsize
        if stored.shape != tuple(each.shape):
            raise ShapeError(f"{name!r} has the shape {tuple(each.shape)}, but {stored.shape} in {found.directory}")
        if stored.dtype != each.borrowed.dtype:
            raise LayoutError(f"{name!r} is {each.borrowed.dtype}, but {stored.dtype} in {found.directory}")
        for box in each.boxes or ():
            left = prod(box.shape)
            for part in stored.parts:
                whole = Box(part.offset, part.shape, 0, row_major(part.shape))
                if left and (both := common(box.region, whole.region)) is not None:
                    left, there = left - volume(both), whole.part(both)
                    run = part.begin + there.at * size, part.begin + there.end * size
                    reads[part.file].append(_Read(name, box.part(both), there, part.begin, run))
            if left:
                raise LayoutError(f"{found.directory} lacks {left} elements of {box} of {name!r}, a hole")
    return {file: sorted(of, key=lambda read: read.run) for file, of in sorted(reads.items())}


def _tell_loaded(state: Any, flats: Mapping[str, Any], prefix: str = "") -> None:
    """Objects hear what was read: `checkpoint_loaded(arrays)`, by the names of their own."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            _tell_loaded(value, flats, f"{prefix}{key}.")
    elif hasattr(state, "checkpoint_loaded"):
        state.checkpoint_loaded({name[len(prefix) :]: a for name, a in flats.items() if name.startswith(prefix)})
