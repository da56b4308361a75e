"""A product that announces its groups of tiles while it runs, and the order in which it stores them. Pure.

    tiling = Tiling(rows=4096, columns=8192, high=128, broad=256, owners=4)
    sizes = tiles_of(waves, tiling.tiles, processors)    # groups of tiles, cut where a wave ends
    order = by_owner(tiling, sizes)                      # for a reduce-scatter: one run of memory a group and rank
    index = received(order, rank)                        # for `gather` or `rmsnorm` on what has arrived

The kernel stores each piece of a tile at `order.place`. The last tile of a group sets the counter of the group back to
0 and writes the number of the call, its epoch, into `flag[group]` in page-locked memory. The host reads these words
(`Signals`), and sends a group while the rest is computed. So a group must lie in one run of memory for each receiver:

| order             | pieces                                | receivers                                              |
|-------------------|---------------------------------------|--------------------------------------------------------|
| `by_tile`         | tiles                                 | all take the whole group: all-reduce                   |
| `by_owner`        | the rows of a tile that one rank owns | rank r takes those of its own rows: reduce-scatter     |
| `by_destination`  | rows of a tile                        | rank r takes the rows that go to it: all-to-all        |

Groups that are runs of rows need no order: their tiles are stored where the plan has them (`in_place`).

A piece is `high` x `broad` elements. Those at the edge of the matrix are stored whole, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import DeviceError, LayoutError, StateError
from fompi.model.flow_shop import Groups, announced

Array = np.ndarray[Any, Any]

MOST_EPOCHS = 2**31 - 1
"""Epochs are 32-bit integers. The one after the last is 1: all flags hold the last one then."""

MOST_BEHIND = 1 << 16
"""A flag may hold the epoch of a call that is at most so many calls old."""


# -------------------------------------------------------------------------------------------------------------- waves


def waves(tiles: int, processors: int) -> int:
    """How often the processors of the device work side by side on `tiles` tiles: ceil(tiles / processors)."""
    return -(-tiles // processors)


def cost(sizes: Sequence[int], processors: int) -> int:
    """Waves of groups of so many tiles, if each group is a kernel of its own."""
    return sum(waves(size, processors) for size in sizes)


def tiles_of(groups: Sequence[int], tiles: int, processors: int) -> tuple[int, ...]:
    """The number of tiles in groups of so many waves. The last wave may have fewer tiles.

    Raises LayoutError if the groups do not have all waves.
    """
    if sum(groups) != waves(tiles, processors) or min(groups, default=1) < 1:
        raise LayoutError(
            f"groups of {tuple(groups)} waves are not the {waves(tiles, processors)} waves of the product"
        )
    sizes = [group * processors for group in groups]
    return (*sizes[:-1], tiles - sum(sizes[:-1])) if sizes else ()


def best_waves(tiles: int, processors: int, wave_seconds: float, send: Callable[[int], float]) -> Groups:
    """The groups, in waves, with which a single kernel and the messages of its groups end first.

    `send(n)` is the time to send n tiles. The last wave is taken as full. Exact (`fompi.model.flow_shop.announced`).
    """
    count = waves(tiles, processors)
    return announced([(i + 1) * wave_seconds for i in range(count)], lambda n: send(min(n * processors, tiles)))


def row_groups(down: int, across: int, processors: int, groups: int) -> tuple[int, ...]:
    """`down` rows of `across` tiles in this many groups, each a kernel of its own: the sizes in rows of tiles.

    The groups have the least `cost`, and of these cuts the smallest largest group. Exact, in O(groups * down^2).

    Raises LayoutError if there are fewer rows of tiles than groups.
    """
    if not 1 <= groups <= down:
        raise LayoutError(f"{down} rows of tiles cannot be cut into {groups} groups")
    Best = tuple[int, int, tuple[int, ...]]  # (waves, largest group, sizes)
    best: list[Best | None] = [(0, 0, ()), *[None] * down]
    for _ in range(groups):
        after: list[Best | None] = [None] * (down + 1)
        for rows in range(1, down + 1):
            found = [
                (before[0] + waves(size * across, processors), max(before[1], size), (*before[2], size))
                for size in range(1, rows + 1)
                if (before := best[rows - size]) is not None
            ]
            after[rows] = min(found, default=None)
        best = after
    chosen = best[down]
    assert chosen is not None
    return chosen[2]


# ------------------------------------------------------------------------------------------------------------- orders


@dataclass(frozen=True)
class Tiling:
    """A product in tiles of `high` x `broad` elements, numbered row by row.

    The kernel starts tiles in the order of `launched`: down the columns of a band of `band` rows of tiles, so that
    tiles that run at the same time share their operands. Rank r owns rows r * shard to (r + 1) * shard. A tile has
    `share` rows of each owner: tile row m has rows m * share to (m + 1) * share of each shard. So each tile, and each
    group of tiles, has equally much for every owner, and no row changes its owner.

    Raises LayoutError if `owners` does not divide the rows and the height of a tile.
    """

    rows: int
    columns: int
    high: int
    broad: int
    owners: int = 1
    band: int = 1

    def __post_init__(self) -> None:
        if min(self.high, self.broad, self.owners, self.band) < 1:
            raise LayoutError(f"tiles, owners and bands must be at least 1: {self}")
        if self.rows % self.owners or self.high % self.owners:
            raise LayoutError(f"{self.owners} owners do not divide {self.rows} rows and tiles of {self.high} rows")

    @property
    def shard(self) -> int:
        return self.rows // self.owners

    @property
    def share(self) -> int:
        return self.high // self.owners

    @property
    def down(self) -> int:
        return -(-self.shard // self.share)

    @property
    def across(self) -> int:
        return -(-self.columns // self.broad)

    @property
    def tiles(self) -> int:
        return self.down * self.across

    @cached_property
    def launched(self) -> Array:
        """The number of the t-th tile that starts."""
        bands = [range(first, min(first + self.band, self.down)) for first in range(0, self.down, self.band)]
        tiles = [m * self.across + n for band in bands for n in range(self.across) for m in band]
        return np.array(tiles, np.int32)


@dataclass(frozen=True, eq=False)
class Order:
    """Where a product stores its pieces, and which tiles each group has."""

    tiling: Tiling
    high: int
    """Rows of a piece."""
    place: Array
    """place[p] is the slot of piece p. Pieces are numbered row by row, over the rows of all owners."""
    group: Array
    """group[t] is the group of the t-th tile that starts."""
    need: Array
    """need[g] is the number of tiles of group g."""
    receiver: Array
    """receiver[p] is the rank that takes piece p."""
    counts: Array
    """counts[g, r] is the number of pieces of group g for rank r."""

    def run(self, group: int, receiver: int) -> range:
        """The slots of the pieces of this group for this rank."""
        before = int(self.counts[:group].sum() + self.counts[group, :receiver].sum())
        return range(before, before + int(self.counts[group, receiver]))


def by_tile(tiling: Tiling, sizes: Sequence[int]) -> Order:
    """Tiles in the order in which they start. Each group of `sizes` tiles is one run."""
    if tiling.owners != 1:
        raise LayoutError("an order by tile has one owner of all rows")
    return _order(tiling, sizes, tiling.high, np.zeros(tiling.down, np.int32), 1)


def by_owner(tiling: Tiling, sizes: Sequence[int]) -> Order:
    """The rows that rank r owns, of all tiles of a group, are one run; the run of rank 0 comes first."""
    return _order(tiling, sizes, tiling.share, np.repeat(np.arange(tiling.owners), tiling.down), tiling.owners)


def by_destination(tiling: Tiling, sizes: Sequence[int], destination: Sequence[int] | Array, ranks: int) -> Order:
    """The rows i with `destination[i] == r`, of all tiles of a group, are one run. Runs may have any length.

    Raises LayoutError if a row has no destination below `ranks`.
    """
    to = np.asarray(destination)
    if tiling.owners != 1 or to.shape != (tiling.rows,) or ((to < 0) | (to >= ranks)).any():
        raise LayoutError(f"each of {tiling.rows} rows needs one destination below {ranks}, and one owner has all rows")
    return _order(tiling, sizes, 1, to, ranks)


def _order(tiling: Tiling, sizes: Sequence[int], high: int, to: Array, ranks: int) -> Order:
    """`to[i]` is the rank that takes the pieces of row i of pieces."""
    if sum(sizes) != tiling.tiles or min(sizes, default=1) < 1:
        raise LayoutError(f"groups of {tuple(sizes)} tiles are not the {tiling.tiles} tiles of the product")
    group = np.repeat(np.arange(len(sizes)), sizes)
    started = np.empty(tiling.tiles, np.int64)
    started[tiling.launched] = np.arange(tiling.tiles)
    of_shard = -(-tiling.shard // high)  # rows of pieces in the shard of an owner
    tile_row = np.arange(len(to)) % max(of_shard, 1) * high // tiling.share
    when = started[np.add.outer(tile_row * tiling.across, np.arange(tiling.across))].reshape(-1)
    receiver = np.repeat(to, tiling.across)
    slots = np.lexsort((when, receiver, group[when]))
    place = np.empty(len(slots), np.int32)
    place[slots] = np.arange(len(slots))
    counts = np.zeros((len(sizes), ranks), np.int64)
    np.add.at(counts, (group[when], receiver), 1)
    return Order(tiling, high, place, group.astype(np.int32), np.array(sizes, np.int32), receiver, counts)


def inverse(place: Array) -> Array:
    """The piece in each slot: inverse(place)[place[p]] == p."""
    pieces = np.empty_like(place)
    pieces[place] = np.arange(len(place))
    return pieces


def received(order: Order, rank: int) -> Array:
    """The index of `gather` and `rmsnorm` (`fompi.backends.cuda.kernels`) for the runs of `rank`, one after the other.

    The result of `gather` has the rows of this rank, in order. From an order by destination of another rank it has the
    rows that this rank got from there.
    """
    slots = order.place[order.receiver == rank]
    return inverse(np.argsort(slots, kind="stable").astype(np.int32))


# ---------------------------------------------------------------------------------------------------- groups in place


class Rows(NamedTuple):
    """A run of rows of one product: the addresses of x, of the result, and of the bias of each row (0: none)."""

    x: int
    y: int
    bias: int
    rows: int


WORDS = ("x", "y", "bias", "rows", "column", "group")
"""The 64-bit words of a tile in the table of `in_place`: three addresses, its rows, its block of columns, its group."""


def in_place(
    groups: Sequence[Sequence[Rows]], columns: int, x_row: int, y_row: int, high: int, broad: int, band: int
) -> Array:
    """A table of tiles in the order in which they start, for products whose results lie where the plan wants them.

    Each group has runs of rows, so nothing has to be reordered. Rows of x are `x_row` bytes apart, those of the results
    `y_row`. The groups start one after the other; tiles of a run start as those of a Tiling with this `band`.
    """
    words = []
    for group, runs in enumerate(groups):
        for run in runs:
            tiling = Tiling(run.rows, columns, high, broad, band=band)
            m, column = np.divmod(tiling.launched.astype(np.int64), max(tiling.across, 1))
            first = m * high
            rows = np.minimum(high, run.rows - first)
            fields = run.x + first * x_row, run.y + first * y_row, run.bias, rows, column, group
            words.append(np.stack(np.broadcast_arrays(*fields), 1))
    return np.concatenate(words).astype(np.int64)


# ------------------------------------------------------------------------------------------------------------ signals


class Signals:
    """The flags of a kernel, as the host sees them. `flags` is a 32-bit word for each group, in page-locked memory.

        epoch = signals.begin()          # an argument of the kernel, which is launched next
        while not signals.all_seen:
            for group in signals.new():  # those that the kernel has raised since
                send(group)

    A call begins when all groups of the last one were seen. So flags never have to be set back.
    """

    def __init__(self, flags: Array):
        self.flags, self.epoch, self._open = flags, 0, frozenset[int]()
        flags[...] = 0

    @property
    def all_seen(self) -> bool:
        return not self._open

    def begin(self) -> int:
        """The epoch of the next call. Raises StateError if groups of the last call were not seen."""
        if self._open:
            raise StateError(f"the last call has not announced its groups {sorted(self._open)}: wait for them before")
        self._open = frozenset(range(len(self.flags)))
        return self.next()

    def next(self) -> int:
        """As `begin`, for a host that asks with `is_raised`: it may have groups of older calls to see."""
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

    def new(self) -> Iterator[int]:
        """The groups that were raised and not seen before. Raises DeviceError if a flag holds what no kernel wrote."""
        for group in sorted(self._open):
            flag = int(self.flags[group])
            if flag == self.epoch:
                self._open -= {group}
                yield group
            elif flag != (self.epoch - 2) % MOST_EPOCHS + 1 and (flag, self.epoch) != (0, 1):
                raise DeviceError(f"the flag of group {group} is {flag} in call {self.epoch}: two kernels write it")
