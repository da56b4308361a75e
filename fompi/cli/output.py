"""Output of the command line: tables, JSON and a progress line.

Standard output holds results, standard error the rest. What all ranks would say, rank 0 says. Tables are drawn by rich
if it is installed and standard output is a terminal. Otherwise they are plain text: a pipe gets the same text on every
machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Self, TypeVar

from fompi.base.errors import LayoutError
from fompi.base.tables import Table
from fompi.mpi import launcher

T = TypeVar("T")

OUTPUT, ERRORS = 1, 2
"""The standard streams, by file descriptor."""

DEFAULT_COLUMNS = 80
"""The width of a terminal that does not know its width."""

ERASE = "\r\x1b[K"
"""Returns to the start of the line and clears it."""

LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun"}
"""The names of processes that start ranks and copy what they print."""


class UsageError(Exception):
    """Arguments that do not fit together. It is printed as an error of the subcommand."""


# ------------------------------------------------------------------------------------------------------------ ranks


def is_first_rank() -> bool:
    """True on rank 0, and without a launcher. The variables of the launcher say so: MPI is not started."""
    return not launcher.detect().rank


@contextmanager
def first_rank_only() -> Iterator[None]:
    """What is written to the standard streams inside of it is written by rank 0 only."""
    if is_first_rank():
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


# ------------------------------------------------------------------------------------------------------------ tables


def show(*parts: Table | str) -> None:
    """Print texts and tables, with an empty line between two of them."""
    show_parts([each for part in parts for each in ("", part)][1:])


def show_parts(parts: Iterable[Table | str]) -> None:
    """Print texts and tables, one below the other. On a terminal tables are drawn, if rich is installed."""
    console = _console()
    for part in parts:
        if console is None or isinstance(part, str):
            print(part)
        else:
            console.print(_drawn(part))
    sys.stdout.flush()


def show_markdown(text: str) -> None:
    """Print Markdown. On a terminal its tables are drawn, if rich is installed."""
    console = _console()
    if console is None:
        print(text, flush=True)
        return
    from rich.markdown import Markdown

    console.print(Markdown(text))


def show_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2), flush=True)


def _console() -> Any:
    """A console of rich on standard output. None without rich or without a terminal."""
    columns = terminal_columns(OUTPUT)
    if columns is None:
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    # A rank writes into a pipe of its launcher, so rich cannot find the terminal and its width.
    return Console(force_terminal=True, width=columns, highlight=False, markup=False, emoji=False)


def _drawn(table: Table) -> Any:
    from rich import box
    from rich.table import Table as Drawn

    drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in table.columns:
        drawn.add_column(name, justify="right" if name in table.right else "left")
    for row in table.rows:
        drawn.add_row(*map(str, row))
    return drawn


# ------------------------------------------------------------------------------------------------------- the terminal


def terminal_columns(stream: int) -> int | None:
    """The width of the terminal on which a standard stream of this process ends. None if it ends on no terminal.

    A rank writes to a pipe, or to a terminal of the launcher's own making. The launcher copies what it reads, so the
    launcher's stream counts. A launcher on another host cannot be found: then the answer is None.
    """
    if launcher.detect().launcher in ("none", "sbatch"):
        return _columns(stream)
    process = _launcher_process()
    if process is None:
        return None
    with suppress(OSError):
        descriptor = os.open(f"/proc/{process}/fd/{stream}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return _columns(descriptor)
        finally:
            os.close(descriptor)
    return None


def _columns(descriptor: int) -> int | None:
    try:
        return os.get_terminal_size(descriptor).columns or DEFAULT_COLUMNS
    except OSError:  # not a terminal, or closed
        return None


def _launcher_process() -> int | None:
    """The nearest process above this one that is a launcher. None if there is none on this host."""
    process = os.getppid()
    with suppress(OSError, ValueError):
        while process > 1:
            if Path(f"/proc/{process}/comm").read_text().strip() in LAUNCHERS:
                return process
            # The name may hold spaces and brackets. The state and the parent follow its last bracket.
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


# ------------------------------------------------------------------------------------------------------- the progress


class Progress:
    """One line on standard error that says which step of a long measurement runs.

    It is shown by one rank only: `Progress.of_rank(rank, title)`. `Progress()` shows nothing. The line is written when
    a step begins. No thread redraws it, because that would disturb the measurement. Without a terminal each step is a
    line of its own. The launcher of Open MPI holds a line back until it ends: there too.
    """

    def __init__(self, title: str = "", columns: int | None = None, is_shown: bool = False):
        self.title, self.columns, self.is_shown = title, columns, is_shown
        self._replaces = columns is not None and launcher.detect().launcher != "openmpi"
        self._begun = perf_counter()

    @classmethod
    def of_rank(cls, rank: int, title: str) -> Progress:
        """The progress line of rank 0. On other ranks it shows nothing."""
        return cls(title) if rank else cls(title, terminal_columns(ERRORS), is_shown=True)

    def step(self, text: str) -> None:
        """Show that this step begins now."""
        if self.is_shown:
            line = f"{self.title}, {perf_counter() - self._begun:.0f} s: {text}"
            line = line if self.columns is None else line[: self.columns - 1]
            self._write(f"{ERASE}{line}" if self._replaces else f"{line}\n")

    def each(self, items: Sequence[T], label: Callable[[T], str] = str) -> Iterator[T]:
        """The items. Each becomes a step when it is taken, with its number."""
        for number, item in enumerate(items, 1):
            self.step(f"{number} of {len(items)}, {label(item)}")
            yield item

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def erase(self) -> None:
        """Make room for results."""
        if self.is_shown and self._replaces:
            self._write(ERASE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()


# ---------------------------------------------------------------------------------------------------------- the files


def check_writable(path: str | Path) -> None:
    """Raise OSError if the file cannot be written. The file does not change."""
    path = Path(path)
    is_new = not path.exists()
    path.open("a").close()
    if is_new:
        path.unlink()


def unwritable(rank: int, path: str | None) -> Exception | None:
    """Why rank 0 cannot write the file for what is measured. It is asked before. None or "-": there is no file."""
    try:
        if rank == 0 and path not in (None, "-"):
            check_writable(path)
    except OSError as error:
        return error
    return None


def check_picture(path: str | Path) -> None:
    """Raise LayoutError unless the suffix of a picture is .svg."""
    if Path(path).suffix != ".svg":
        raise LayoutError(f"{path}: a picture is SVG, so the name must end in .svg")
