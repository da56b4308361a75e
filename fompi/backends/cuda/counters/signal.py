"""The tiles of products that one kernel computes and announces, and the flags that it raises. Pure.

    table = in_place(groups, columns, x_row, y_row, high, broad, band)   # the tiles, in the order in which they start
    signals = Signals(flags)                                             # a word for each group, in page-locked memory
    epoch = signals.next()                                               # the number of the launch
    while not signals.is_raised(0, epoch): ...                           # then the first group is written

A group is what one message or more may take as soon as it is written: the rows of one op of a plan. They are runs of
rows, and each run belongs to one group. So a tile is stored where the plan has it, and no order has to be restored.

The last tile of a group sets the counter of the group back to 0, and writes the epoch into its flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import DeviceError

Array = np.ndarray[Any, Any]

MOST_EPOCHS = 2**31 - 1
"""Epochs are 32-bit integers. The one after the last is 1: all flags hold the last one then."""

MOST_BEHIND = 1 << 16
"""A flag may hold the epoch of a call that is at most this many calls old."""


class RowRun(NamedTuple):
    """A run of rows of one product: the addresses of x, of the result, and of the bias of each row (0: none)."""

    x: int
    y: int
    bias: int
    rows: int


WORDS = ("x", "y", "bias", "rows", "column", "group")
"""The 64-bit words of a tile in the table of `in_place`: three addresses, its rows, its block of columns, its group."""


def in_place(
    groups: Sequence[Sequence[RowRun]], columns: int, x_row: int, y_row: int, high: int, broad: int, band: int
) -> Array:
    """A table of tiles in the order in which they start, for products whose results lie where the plan wants them.

    A tile has at most `high` rows and `broad` columns. Rows of x are `x_row` bytes apart, those of the results `y_row`.
    The groups start one after the other, and so do the runs of a group.
    """
    words = []
    for group, runs in enumerate(groups):
        for run in runs:
            m, column = launched(-(-run.rows // high), -(-columns // broad), band)
            first = m * high
            rows = np.minimum(high, run.rows - first)
            fields = run.x + first * x_row, run.y + first * y_row, run.bias, rows, column, group
            words.append(np.stack(np.broadcast_arrays(*fields), 1))
    return np.concatenate(words).astype(np.int64)


def launched(down: int, across: int, band: int) -> tuple[Array, Array]:
    """The row and the column of the t-th tile that starts, of `down` rows of `across` tiles.

    Tiles start down the columns of a band of `band` rows. So tiles that run at the same time share their operands.
    """
    bands = [range(first, min(first + band, down)) for first in range(0, down, band)]
    tiles = [(m, n) for rows in bands for n in range(across) for m in rows]
    m, n = np.array(tiles, np.int64).reshape(-1, 2).T
    return m, n


class Signals:
    """The flags of a kernel, as the host sees them. `flags` is a 32-bit word for each group, in page-locked memory.

    An epoch is never used twice, so flags never have to be set back.
    """

    def __init__(self, flags: Array):
        self.flags, self.epoch = flags, 0
        flags[...] = 0

    def next(self) -> int:
        """The epoch of the next launch, an argument of the kernel. Groups of older launches may be unseen."""
        self.epoch = self.epoch % MOST_EPOCHS + 1
        return self.epoch

    def is_raised(self, group: int, epoch: int) -> bool:
        """True once the kernel of `epoch`, or a later one, has raised the flag of `group`.

        Raises DeviceError if the flag holds what no kernel of the last MOST_BEHIND ones wrote.
        """
        flag = int(self.flags[group])
        if not flag:  # no kernel has raised it yet
            return False
        behind = (self.epoch - flag) % MOST_EPOCHS
        if behind > MOST_BEHIND:
            raise DeviceError(f"the flag of group {group} is {flag} in call {self.epoch}: two kernels write it")
        return behind <= (self.epoch - epoch) % MOST_EPOCHS
