"""The table of the tiles of a kernel that announces its groups, its flags, and what runs of rows lose against tiles."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fompi.backends.cuda.counters import signal
from fompi.backends.cuda.counters.announced import tile_of
from fompi.backends.cuda.counters.signal import WORDS, RowRun, Signals, in_place, launched
from fompi.base.errors import DeviceError
from fompi.model.flow_shop import announced
from fompi.model.machine import PRESETS, TILE

# ------------------------------------------------------------------------------------------------------------- tables

SIZES = st.integers(1, 40)


def test_a_band_starts_tiles_that_share_operands():
    """Three rows of four tiles, in bands of two rows."""
    m, n = launched(3, 4, 2)
    assert [*zip(m.tolist(), n.tolist(), strict=True)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3),
    ]  # fmt: skip


@given(st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=4), SIZES, st.integers(1, 9), SIZES)
def test_tiles_cover_each_product_once(groups, columns, high, broad):
    """Each element of each product lies in one tile of its group. Groups start one after the other."""
    x_row, y_row, at, listed = 12, 8, 1000, []
    for runs in groups:
        listed.append([RowRun(at + 7 * i, (at := at + 4000), 5 * i, rows) for i, rows in enumerate(runs)])
    table = in_place(listed, columns, x_row, y_row, high, broad, band=2)
    assert table.dtype == np.int64 and table.shape[1] == len(WORDS) and (np.diff(table[:, 5]) >= 0).all()
    for group, runs in enumerate(listed):
        for run in runs:
            count = np.zeros((run.rows, columns), int)
            for x, y, bias, rows, column, of in table.tolist():
                if of == group and run.y <= y < run.y + run.rows * y_row:
                    first, rest = divmod(y - run.y, y_row)
                    assert rest == 0 and x == run.x + first * x_row and bias == run.bias and 0 < rows <= high
                    count[first : first + rows, column * broad : (column + 1) * broad] += 1
            assert (count == 1).all()


# -------------------------------------------------------------------------------------------------------------- flags


def test_flags_of_older_and_newer_calls():
    signals = Signals(np.full(2, 77, np.int32))
    first, second = signals.next(), signals.next()
    assert not signals.is_raised(0, first) and not signals.is_raised(0, second)
    signals.flags[0] = first
    assert signals.is_raised(0, first) and not signals.is_raised(0, second)
    signals.flags[0] = second
    assert signals.is_raised(0, first) and signals.is_raised(0, second) and not signals.is_raised(1, first)
    signals.epoch = signal.MOST_EPOCHS - 1
    signals.flags[...] = signals.epoch
    last, again = signals.next(), signals.next()
    assert (last, again) == (signal.MOST_EPOCHS, 1)
    assert not signals.is_raised(0, last) and not signals.is_raised(0, again)
    signals.flags[...] = last, again
    assert signals.is_raised(0, last) and not signals.is_raised(0, again)
    assert signals.is_raised(1, last) and signals.is_raised(1, again)
    signals.flags[1] = 5
    with pytest.raises(DeviceError, match="the flag of group 1 is 5 in call 1: two kernels write it"):
        signals.is_raised(1, again)


# --------------------------------------------------------------------------------- runs of rows against groups of tiles

MACHINE = PRESETS["h100-nvlink"]
PROCESSORS, (HIGH, BROAD, _) = MACHINE.wave // TILE, tile_of("bfloat16")
ITEM = 2  # bytes of an element
ROWS = (128, 256, 1024, 2048, 4096, 8192, 16384)
SHAPES = ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
"""Columns of w, and its rows on all ranks: the products of Llama 8B and 70B that are summed after them."""
RANKS = (2, 4, 8)
SLICES = (1, 2, 4, 8, 16)
ANY = ("all_reduce", "reduce_scatter", "all_to_all")


class Case(NamedTuple):
    """A product of one rank, and its messages. `counts` are the rows for each rank, its own first."""

    moves: str
    counts: tuple[int, ...]
    columns: int
    depth: int

    @property
    def rows(self):
        return sum(self.counts)

    @property
    def across(self):
        return ceil(self.columns / BROAD)

    def computed(self, machine, tiles):
        """When this many tiles are computed: a wave takes as long as its slowest tile."""
        return machine.overhead + ceil(tiles / PROCESSORS) * 2 * machine.wave * self.depth / machine.flops_rate

    def message(self, machine, rows):
        return machine.link(0, 1).seconds(rows * self.columns * ITEM)

    def sent(self, machine, rows):
        """The messages of a group of `rows` rows, one after the other. Each other rank takes its part of the group."""
        if self.moves == "all_reduce":  # terms, and then their sums
            return 2 * (len(self.counts) - 1) * self.message(machine, rows / len(self.counts))
        return sum(self.message(machine, rows * count / self.rows) for count in self.counts[1:])

    def uncut(self, machine):
        return self.computed(machine, ceil(self.rows / HIGH) * self.across) + self.sent(machine, self.rows)

    def in_tiles(self, machine):
        """The best groups of whole waves of any tiles. Tiles are moved to one run of memory for each receiver."""
        tiles = ceil(self.rows / HIGH) * self.across
        waves = ceil(tiles / PROCESSORS)
        done = [self.computed(machine, (i + 1) * PROCESSORS) for i in range(waves)]
        return announced(done, lambda n: self.sent(machine, min(1, n * PROCESSORS / tiles) * self.rows)).seconds

    def restored(self, machine):
        """One more pass through memory: what has arrived is read in the order of tiles, and written in that of rows."""
        rows = self.counts[0] if self.moves == "reduce_scatter" else self.rows
        return machine.kernel(0, 2 * rows * self.columns * ITEM)

    def in_rows(self, machine):
        """The best cut of a plan: all rows for an all-reduce, else the rows of each receiver, the own ones last."""
        if self.moves == "all_reduce":
            done = [self.computed(machine, (i + 1) * self.across) for i in range(ceil(self.rows / HIGH))]
            cut = announced(done, lambda n: self.sent(machine, min(n * HIGH, self.rows))).seconds
        else:
            cut = min(self._in_slices(machine, slices) for slices in SLICES)
        return min(cut, self.uncut(machine))

    def _in_slices(self, machine, slices):
        tiles = sent = 0
        for count, i in product(self.counts[1:], range(slices)):
            rows = count * (i + 1) // slices - count * i // slices
            if rows:
                tiles += ceil(rows / HIGH) * self.across
                sent = max(sent, self.computed(machine, tiles)) + self.message(machine, rows)
        return max(sent, self.computed(machine, tiles + ceil(self.counts[0] / HIGH) * self.across))


def cases(moves, rows, is_equal=True):
    for ranks, (columns, depth) in product(RANKS, SHAPES):
        for seed in range(1 if is_equal else 5):
            chance = Random(seed)
            shares = [1.0 if is_equal else 0.05 + chance.random() ** 2 for _ in range(ranks)]
            others = [int(rows * share / sum(shares)) for share in shares[1:]]
            yield Case(moves, (rows - sum(others), *others), columns, depth // ranks)


def losses(moves, rows, machine, is_equal=True):
    """The most that rows lose against tiles: if restoring the order costs nothing, and if it is a pass of its own."""
    free, whole = [], []
    for case in cases(moves, rows, is_equal):
        ours, theirs, uncut = case.in_rows(machine), case.in_tiles(machine), case.uncut(machine)
        free.append(ours / theirs - 1)
        whole.append(ours / min(theirs + case.restored(machine), uncut) - 1)
    return max(free), max(whole)


def test_the_tiles_of_a_cut_are_those_of_the_table():
    """By `in_place`, as the kernel gets them: 300 rows for each of two ranks, in two slices."""
    case = Case("reduce_scatter", (300, 300), 512, 64)
    groups = [[RowRun(0, 0, 0, rows)] for rows in (150, 150, 300)]
    of = in_place(groups, case.columns, 128, 1024, HIGH, BROAD, band=8)[:, 5]
    last = [int(np.flatnonzero(of == group)[-1]) + 1 for group in range(3)]
    machine = replace(MACHINE, wave=TILE)
    assert last == [8, 16, 28] and case.across == 4
    sent = 0
    for tiles in last[:2]:
        sent = max(sent, case.computed(machine, tiles)) + case.message(machine, 150)
    assert case._in_slices(machine, 2) == max(sent, case.computed(machine, 28))


@pytest.mark.parametrize("latency", [MACHINE.latency, 0.0])
@pytest.mark.parametrize("moves", ANY)
def test_equal_shares_lose_nothing_in_rows(moves, latency):
    """Even if the order of tiles were restored for nothing, and if messages had no latency."""
    machine = replace(MACHINE, latency=latency)
    assert max(losses(moves, rows, machine)[0] for rows in ROWS) < 1e-6


PAGE = Path(__file__).parents[2] / "docs" / "inside" / "design.md"


def test_the_page_says_what_runs_of_rows_lose():
    """The table of the page, computed. A message costs what the planner counts for it."""

    def cell(moves, rows, is_equal=True):
        return " / ".join(f"{100 * loss:.0f}".replace("-0", "0") for loss in losses(moves, rows, MACHINE, is_equal))

    lines = [
        f"| {rows:,} | {' | '.join(cell(moves, rows) for moves in ANY)} | {cell('all_to_all', rows, False)} |"
        for rows in ROWS
    ]
    assert re.findall(r"^\| [\d,]+ \| .* / .* \|$", PAGE.read_text(), re.M) == lines, "\n".join(lines)
