"""What was measured, kept on disk: a JSON file for each set of conditions. A file that fails only costs time."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any


def file_of(folder: Path | None, conditions: dict[str, Any], prefix: str = "") -> Path | None:
    """The file of what was measured under these conditions. None: nothing is kept."""
    name = blake2b(json.dumps(conditions, sort_keys=True).encode(), digest_size=16).hexdigest()
    return None if folder is None else folder / f"{prefix}{name}.json"


def load(path: Path | None, conditions: dict[str, Any], name: str) -> Any:
    """What `store` has kept as `name` under these conditions. None: nothing, or the file is damaged."""
    if path is None:
        return None
    with suppress(Exception):
        data = json.loads(path.read_text())
        return data[name] if data["about"] == conditions else None
    return None


def store(path: Path | None, conditions: dict[str, Any], name: str, value: Any) -> None:
    """Replace the whole file at once: other jobs may read it. Without space on disk nothing is kept."""
    if path is None:
        return
    draft = path.with_suffix(f".{os.uname().nodename}.{os.getpid()}")  # hosts may share the folder
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(json.dumps({"about": conditions, name: value}, indent=1))
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
