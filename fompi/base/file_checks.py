"""Checks of values that come from a JSON file, for example a machine file.

Each function returns the value in its proper type, or raises a LayoutError that names the field.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from fompi.base.errors import LayoutError
from fompi.base.layout import MOST_NBYTES

Points = tuple[tuple[float, float], ...]
"""A curve, as points (x, y) with increasing x. It is linear between two points and beyond the last two."""

MOST_SECONDS, LEAST_SPEED, MOST_SPEED = 1e9, 1e-9, 1e300
"""Limits of times (seconds) and rates (per second). Within them, sums of times stay finite floats."""

MOST_FILE_NBYTES, MOST_DIGITS, MOST_LETTERS = 16 << 20, 400, 1000
"""Limits of a file (bytes), an integer in it (digits) and a string (characters). Real files stay far below."""


def read(path: Path, most: int = MOST_FILE_NBYTES) -> bytes:
    """The content of a file, no pipe or device. Raises LayoutError if it has more than `most` bytes."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise LayoutError("not a file")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise LayoutError(f"longer than {most >> 20} MiB")
    return content


def decoded(content: bytes) -> str:
    """The text of a file of any encoding that begins with its mark, else of UTF-8, without the mark."""
    utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if utf_16 else "utf-8-sig", errors="replace")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises LayoutError if the text is too long or an object has a field twice."""
    if len(text) > MOST_FILE_NBYTES:
        raise LayoutError(f"longer than {MOST_FILE_NBYTES >> 20} MiB")
    try:
        return json.loads(text, object_pairs_hook=_unique_fields, parse_int=_integer)
    except LayoutError:  # LayoutError is a ValueError; its text is better than the one below
        raise
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"not JSON: {error}") from error


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise LayoutError(f"the field {shown(repeated)} appears twice")
    return fields


def _integer(digits: str) -> float:
    """An integer. Infinity stands for one with too many digits: every check refuses it."""
    return int(digits) if len(digits) <= MOST_DIGITS else inf


def line(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > MOST_LETTERS:
        raise LayoutError(f"{name} must be one line of at most {MOST_LETTERS} characters, not {shown(value)}")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise LayoutError(f"{name} must be true or false, not {shown(value)}")
    return value


def integer(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise LayoutError(f"{name} must be an integer from {least} to {most}, not {shown(value)}")
    return value


def number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LayoutError(f"{name} must be a number, not {shown(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = inf
    if not least <= result <= most:
        raise LayoutError(f"{name}={shown(value)} must be from {least:g} to {most:g}")
    return result


def seconds(name: str, value: Any) -> float:
    return number(name, value, 0.0, MOST_SECONDS)


def speed(name: str, value: Any, fastest: float) -> float:
    """A rate. An infinite rate becomes the greatest one that a file may hold."""
    return min(MOST_SPEED, number(name, value, LEAST_SPEED, fastest))


def sequence(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise LayoutError(f"{name} must be a list, not {shown(value)}")
    return value


def points(name: str, value: Any) -> Points:
    """A curve of seconds with at least one point."""
    curve = []
    for i, point in enumerate(sequence(name, value)):
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise LayoutError(f"{name}[{i}] must be two numbers, x and seconds, not {shown(point)}")
        curve.append((number(f"{name}[{i}][0]", point[0], 0.0, MOST_NBYTES), seconds(f"{name}[{i}][1]", point[1])))
    if not curve or any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(curve)):
        raise LayoutError(f"{name} must have at least one point; x must increase and seconds must not decrease")
    if any((b[1] - a[1]) * LEAST_SPEED > b[0] - a[0] for a, b in pairwise(curve)):
        raise LayoutError(f"{name} rises by more than {1 / LEAST_SPEED:g} seconds per unit of x")
    return tuple(curve)
