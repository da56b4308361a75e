"""How much a suite measures."""

from __future__ import annotations

from dataclasses import dataclass, field

from fompi.cli.output import Progress


@dataclass(frozen=True)
class Options:
    """The rounds of every row. With `quick` there are fewer and smaller rows. `progress` shows which row runs."""

    rounds: int
    quick: bool = False
    progress: Progress = field(default_factory=Progress)
