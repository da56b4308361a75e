"""Calls in C (docs/inside/native.md). `_native` is missing where no compiler was: then the Python engine does all."""

try:
    from fompi.native import _native
except ImportError:
    _native = None  # type: ignore[assignment]


def number(name: str) -> int:
    """The number of this name in the `enum`s of C. Without C it is -1, and nothing uses it."""
    found: int = -1 if _native is None else getattr(_native, name)
    return found
