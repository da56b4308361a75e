"""What is in a directory of checkpoints: of ours, of the Hugging Face hub, or of torch.

A folder as the hub has it has no sums. Each array is one part, or several, if torch.distributed.checkpoint has written
it: then the headers have the offsets of the parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

from fompi.base.errors import LayoutError
from fompi.parallel.stored import INDEX, NAMES, Checkpoint, Part, Stored, header_of
from fompi.parallel.torch_files import METADATA, open_torch_directory, open_torch_file
from fompi.plans.boxes import Box, common


def open_checkpoint(directory: Any) -> Checkpoint:
    """What is in a directory of ours, of the Hugging Face hub or of torch, or in a file of `torch.save`.

    Raises LayoutError if it is none, or broken.
    """
    path = Path(directory)
    try:
        if path.is_file():
            return open_torch_file(path)
        if (path / METADATA).exists():
            return open_torch_directory(path)
        if (path / INDEX).exists():
            return _opened(path, (path / INDEX).read_text())
        files = sorted(path.glob("*.safetensors"))
        next(path.iterdir(), None)  # glob hides a directory that cannot be read
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not files:
        raise LayoutError(
            f"{path} has no {INDEX}, no *.safetensors and no {METADATA}: no checkpoint was ever finished there"
        )
    found, dtypes = Checkpoint(path), {name: dtype for dtype, name in NAMES.items()}
    for file in files:
        memory = found.mapped(file.name, [])
        header, begin = header_of(memory, file), 8 + int.from_bytes(memory[:8], "little")
        facts = header.pop("__metadata__", {})
        offsets = json.loads(facts.get("DCP_SHARDING_INFO", "{}"))
        if begin + max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(memory):
            raise LayoutError(f"{file} has {len(memory)} bytes, and not those of its header: it was cut short")
        for name, entry in header.items():
            if entry["dtype"] not in dtypes:
                raise LayoutError(f"{file}: {name!r} has the unknown dtype {entry['dtype']}")
            shape = tuple(entry["shape"])
            box = Box(tuple(offsets.get(name, {}).get("saved_offsets", (0,) * len(shape))), shape)
            dtype, part = dtypes[entry["dtype"]], Part(file.name, begin + entry["data_offsets"][0], box)
            known = found.arrays.get(name, Stored(dtype, box.end, []))
            if any(common(box, other.box) for other in known.parts) or known.dtype != dtype:
                raise LayoutError(f"{path}: {name!r} is in {known.parts[0].file} and in {file.name}: which one counts?")
            ends = tuple(map(max, known.shape, box.end))
            found.arrays[name] = Stored(dtype, ends, [*known.parts, part])
    return found


def _opened(path: Path, text: str) -> Checkpoint:
    try:
        outer = json.loads(text)
        found = json.loads(outer["checkpoint"])
        if outer["sum"] != crc32(outer["checkpoint"].encode()):
            raise ValueError("its sum is not that of what is in it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"{path / INDEX} is not as it was written: {error}") from None
    arrays = dict[str, Stored]()
    for name, (dtype, shape, parts) in found.pop("arrays").items():
        placed = [Part(file, begin, Box(tuple(offset), tuple(n))) for file, begin, (offset, n), _ in parts]
        arrays[name] = Stored(dtype, tuple(shape), placed)
    return Checkpoint(path, arrays, **found)
