"""Files that torch has written, read without torch: of `torch.save`, and directories of torch.distributed.checkpoint.

    X.pt                        a zip file: a pickle of the objects, and the elements of each storage as they are
    .metadata                   a pickle: which boxes of which tensors are where in the other files
    __0_0.distcp, ...           such zip files, one behind the other: each has a box of a tensor, or another object

Nothing that a pickle names is imported or called: its names become the values of this file.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile
from zlib import crc32

import numpy as np

from fompi.base.errors import LayoutError
from fompi.base.layout import itemsize
from fompi.parallel.stored import NAMES, Array, Checkpoint, Part, Stored, flattened
from fompi.plans.boxes import Box, whole

METADATA = ".metadata"
"""The name of the file that makes a directory of torch.distributed.checkpoint."""

STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Bool": "bool", "Char": "int8",
    "Short": "int16", "Int": "int32", "Long": "int64", "Byte": "uint8", "ComplexFloat": "complex64",
}  # fmt: skip
"""The dtypes of torch's storages, as their classes are named."""


class Storage(NamedTuple):
    """Elements in a file, from byte `begin` on. `crc`: their sum; 0 where torch made none (`set_crc32_options`)."""

    dtype: str
    begin: int
    nbytes: int
    crc: int

    def check(self, memory: mmap.mmap, path: Path) -> None:
        if self.crc and crc32(memoryview(memory)[self.begin : self.begin + self.nbytes]) != self.crc:
            raise LayoutError(f"{path}: bytes from {self.begin} on are not those that were written")


@dataclass(frozen=True)
class TensorInFile:
    """A tensor whose first element is byte `begin` of a file. Strides are in elements."""

    dtype: str
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: Storage


class Named:
    """An object of a class that is not looked at: what it was made of, and its attributes."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.args = state

    def append(self, value: Any) -> None:
        """It was a list, of which nothing is kept."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """It was a mapping, of which nothing is kept."""


def _tensor(of: Storage, first: int, shape: Any, strides: Any, *more: Any) -> TensorInFile:
    dtype = next((each for each in more if isinstance(each, str)), of.dtype)  # an untyped storage has none
    begin = of.begin + first * (itemsize(dtype) if dtype in NAMES else 0)
    return TensorInFile(dtype, begin, tuple(shape), tuple(strides), of)


KNOWN = {
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: OrderedDict[Any, Any](),
}
"""What stands for a name in a pickle. A dtype is its name, and everything else is `Named`."""


class Reader(pickle.Unpickler):
    """`members`: where in the file the elements of each storage are."""

    def __init__(self, data: bytes, members: dict[str, Storage]):
        super().__init__(io.BytesIO(data))
        self.members = members

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return STORAGES.get(name.removesuffix("Storage"), name)
        if module == "torch" and name in NAMES:
            return name
        return KNOWN.get((module, name), Named)

    def persistent_load(self, pid: Any) -> Storage:
        _, dtype, key, *_ = pid
        return self.members[f"data/{key}"]._replace(dtype=dtype)


class Window(io.RawIOBase):
    """The bytes `begin` to `end` of a memory, as a file of which ZipFile reads."""

    def __init__(self, memory: mmap.mmap, begin: int, end: int):
        self.memory, self.begin, self.end, self.at = memory, begin, end, begin

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: self.begin, io.SEEK_CUR: self.at, io.SEEK_END: self.end}[whence]
        return self.at - self.begin

    def readinto(self, buffer: Any) -> int:
        data = self.memory[self.at : min(self.end, self.at + len(buffer))]
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


KEPT = {"mean": "exp_avg", "square": "exp_avg_sq", "steps": "step", "momentum": "momentum_buffer"}
"""What our optimizers keep, as those of torch name it."""


@dataclass
class TorchFiles(Checkpoint):
    """A checkpoint that torch has written. `archives`: (file, its first byte) -> the end of a zip file.

    In a directory each part is the tensor of a zip file. In a file of `torch.save` each has its bytes in `storages`.
    """

    archives: dict[tuple[str, int], int] = field(default_factory=dict)
    storages: dict[tuple[str, int], Storage] = field(default_factory=dict)

    @property
    def has_sums(self) -> bool:
        found = (self.members(file, begin, self.mapped(file, [])) for file, begin in self.archives)
        return all(each.crc or not each.nbytes for of in found for each in of.values())

    def elements(self, part: Part, box: Box, memory: mmap.mmap, dtype: Any) -> Array:
        """As of any checkpoint. A sum is that of a whole tensor: it is tested where all of it is read."""
        if (part.file, part.begin) in self.archives:
            found = self.read(part.file, part.begin, memory)
            if not isinstance(found, TensorInFile) or found.shape != part.box.shape:
                raise LayoutError(f"{self.directory / part.file}: the part {part.box} is not at byte {part.begin}")
            part, storage = Part(part.file, found.begin, part.box, found.strides), found.storage
        else:
            storage = self.storages[part.file, part.begin]
        if box == part.box and storage.nbytes == box.elements * np.dtype(dtype).itemsize:
            storage.check(memory, self.directory / part.file)
        return super().elements(part, box, memory, dtype)

    def know(self, names: Iterable[str]) -> None:
        """What torch's optimizers keep: "optimizer.up.weight.mean" is their "optimizer.state.up.weight.exp_avg"."""
        for name in names:
            *path, key = name.split(".")
            for i in range(len(path) if key in KEPT else 0):
                if stored := self.arrays.get(".".join([*path[:i], "state", *path[i:], KEPT[key]])):
                    self.arrays[name], part = stored, stored.parts[0]
                    if key == "steps":
                        memory = self.mapped(part.file, [])
                        self.values[name] = int(self.elements(part, part.box, memory, stored.dtype))

    def members(self, file: str, begin: int, memory: mmap.mmap) -> dict[str, Storage]:
        """The bytes of what is in a zip file, by its name there. Raises anything if it is none of torch."""
        found = dict[str, Storage]()
        with ZipFile(Window(memory, begin, self.archives[file, begin])) as archive:
            for entry in archive.infolist():
                if entry.compress_type != ZIP_STORED:
                    raise LayoutError(f"{entry.filename} is compressed")
                at = begin + entry.header_offset  # the header has lengths of its own: torch aligns elements by them
                at += 30 + sum(int.from_bytes(memory[at + i : at + i + 2], "little") for i in (26, 28))
                found[entry.filename.partition("/")[2]] = Storage("", at, entry.file_size, entry.CRC)
        return found

    def read(self, file: str, begin: int, memory: mmap.mmap) -> Any:
        """The object in a zip file, with each tensor as a TensorInFile. Raises LayoutError if it is none of torch."""
        try:
            members = self.members(file, begin, memory)
            data = members["data.pkl"]
            data.check(memory, self.directory / file)
            return Reader(memory[data.begin : data.begin + data.nbytes], members).load()
        except Exception as error:  # what is no zip file and no pickle raises anything
            kind = f"{type(error).__name__}: {error}"
            raise LayoutError(f"{self.directory / file} is not as torch.save writes it ({kind})") from None

    def check(self) -> None:
        for file, begin in self.archives:
            with self.mapped(file, []) as memory:
                self.read(file, begin, memory)
                for each in self.members(file, begin, memory).values():
                    each.check(memory, self.directory / file)

    def enter(self, name: str, value: Any, file: str) -> None:
        """Its tensors and values of JSON, by their names. Objects of other kinds are left out."""
        for key, each in flattened(value, name):
            if isinstance(each, TensorInFile):
                part = Part(file, each.begin, whole(each.shape), each.strides)
                self.arrays[key] = Stored(each.dtype, each.shape, [part])
                self.storages[file, each.begin] = each.storage
            elif not isinstance(each, (Named, bytes)):
                self.values[key] = each


def open_torch_file(path: Path) -> TorchFiles:
    """What a file of `torch.save` has. Raises LayoutError if it is none."""
    found = TorchFiles(path.parent)
    memory = found.mapped(path.name, [])
    found.archives[path.name, 0] = len(memory)
    found.enter("", found.read(path.name, 0, memory), path.name)
    return _checked(found)


def open_torch_directory(path: Path) -> TorchFiles:
    """What `torch.distributed.checkpoint.save` has written. Raises LayoutError if it is none, or broken."""
    found, objects = TorchFiles(path), list[tuple[str, str, int]]()
    try:
        metadata = Reader((path / METADATA).read_bytes(), {}).load()
        places = {(index.fqn, getattr(index, "offset", None)): info for index, info in metadata.storage_data.items()}
        for name, entry in metadata.state_dict_metadata.items():
            chunks: Sequence[Any] = getattr(entry, "chunks", [None])  # another object has none
            parts = list[Part]()
            for chunk in chunks:
                info = places[name, chunk and chunk.offsets]
                if getattr(info, "transform_descriptors", None):
                    raise LayoutError(f"{path}: {name!r} was encoded ({info.transform_descriptors}): use dcp.load")
                found.archives[info.relative_path, info.offset] = end = info.offset + info.length
                most, _ = found.sums.get(info.relative_path, (0, []))
                found.sums[info.relative_path] = max(most, end), []
                if chunk is None:
                    objects.append((name, info.relative_path, info.offset))
                else:
                    parts.append(Part(info.relative_path, info.offset, Box(chunk.offsets, chunk.sizes)))
            if hasattr(entry, "chunks"):
                found.arrays[name] = Stored(entry.properties.args[0], entry.size, parts)
    except LayoutError:
        raise
    except Exception as error:  # what is no pickle raises anything
        raise LayoutError(f"{path / METADATA} is not as torch writes it ({type(error).__name__}: {error})") from None
    for name, file, begin in objects:
        found.enter(name, found.read(file, begin, found.mapped(file, [])), file)
    return _checked(found)


def _checked(found: TorchFiles) -> TorchFiles:
    for name, stored in found.arrays.items():
        if stored.dtype not in NAMES:
            raise LayoutError(f"{found.directory}: {name!r} has the unknown dtype {stored.dtype}")
    return found
