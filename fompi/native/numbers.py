"""The numbers of C: kinds of ops, flags, states, kernels, dtypes and wires, which the module exports by their names."""

from __future__ import annotations

try:
    from fompi.native import _native
except ImportError:
    _native = None  # type: ignore[assignment]


def number(name: str) -> int:
    """The number of this name in the `enum`s of C. Without C it is -1, and nothing uses it."""
    found: int = -1 if _native is None else getattr(_native, name)
    return found
