"""What a benchmark measures, and how much of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fompi.cli.output import Progress

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """The rounds of every row. With `quick` there are fewer and smaller rows. `progress` shows which row runs.

    With `row` only the rows run whose name has it, in small or capital letters.
    """

    rounds: int
    quick: bool = False
    progress: Progress = field(default_factory=Progress)
    row: str = ""

    def wants(self, name: str) -> bool:
        return self.row.lower() in name.lower()

    def each(self, items: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """The items with a name that is wanted. The progress shows each when it is taken."""
        return self.progress.each([item for item in items if self.wants(name(item))], name)
