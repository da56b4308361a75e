"""What the executor asks of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Kernel = Callable[[], object]
"""A kernel bound to its operands."""


class Backend(Protocol):
    name: str

    def storage(self, dtype: str) -> Any:
        """The array dtype in which elements of this dtype are kept."""
        ...

    def poisoned(self, shape: Sequence[int], dtype: str) -> Any:
        """A fresh array full of NaN, or of the largest integer: what is read by mistake shows."""
        ...

    def bind(
        self,
        kernel: str,
        reads: Sequence[Any],
        writes: Sequence[Any],
        read_dtypes: Sequence[str],
        write_dtypes: Sequence[str],
    ) -> Kernel:
        """The call that does `kernel` on these arrays."""
        ...
