"""The log of epochs: what islands did, in lines of JSON, by which a run can be repeated (`fompi islands replay`).

    {"kind": "outer", "sync_every": 30, ..., "parameters": {name: [dtype, shape, fragment, period]}}
    {"kind": "epoch", "epoch": 3, "islands": ["a", "b"], "roles": ["here", "new"], "steps": [97, 0], "start": 97, ...}
    {"kind": "exchange", "epoch": 3, "exchange": 12, "step": 120, "fragment": 0, "weights": [1, 1], ...}

Each line has the name of the island that has written it, and a check over itself and the line before. An island that is
started again writes on, where a line is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from fompi.base.errors import LayoutError


class EpochLog:
    """A log that is written."""

    def __init__(self, path: str, island: str):
        self._path, self._island = Path(path), island
        before = self._path.read_bytes() if self._path.exists() else b""
        whole = before[: before.rfind(b"\n") + 1]  # a killed island may have left a part of a line
        self._path.write_bytes(whole)
        self._check = whole[:-1].rpartition(b"\n")[2].decode(errors="replace").partition(" ")[0]

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps({"island": self._island, **line})
        self._check = _check(self._check, text)
        with self._path.open("ab") as file:
            file.write(f"{self._check} {text}\n".encode())


def _check(before: str, text: str) -> str:
    return sha256(f"{before} {text}".encode()).hexdigest()[:16]


def lines_of(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, what it says) of each line. Raises LayoutError for one that is not as it was written."""
    check, data = "", Path(path).read_bytes()
    for i, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]):
        found, _, text = line.decode(errors="replace").partition(" ")
        check = _check(check, text)
        if found != check:
            raise LayoutError(f"{path}, line {i + 1}: it is not as it was written")
        yield f"{path}, line {i + 1}", json.loads(text)
