"""The lower bound of a problem on a machine: no schedule is faster.

The bound is the largest of these times, which every schedule needs:

- the kernels of a rank, in one call each, with the sums that are necessary;
- the bytes that must enter or leave a rank, through its ports;
- the bytes that must enter or leave a group of ranks, through its ports;
- one kernel before the first message or after the last one.

The bytes that all-gather, reduce-scatter and all-reduce must move are those of Patarasuk and Yuan (2009), rank by rank.
A schedule that uses collectives of the MPI library may be faster than the bound. Their times are curves of the machine,
and a measured curve may be faster than the sums in kernels of fompi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from fompi.base.layout import Sizes, itemsize
from fompi.base.wires import WIRES
from fompi.model.machine import Level, Machine
from fompi.plans.problems import Problem


class LowerBound(NamedTuple):
    """`seconds`, and what takes them: "the kernels of rank 0", "the bytes that rank 3 receives"."""

    seconds: float
    what: str


def lower_bound(
    problem: Problem, sizes: Sizes, machine: Machine, at: Callable[[int], Problem] | None = None
) -> LowerBound:
    """The largest of all bounds.

    `at(rank)` is the problem of each rank, if ranks have different numbers of columns that stay on the rank.
    """
    return max(_lower_bounds(problem, sizes, machine, at or (lambda rank: problem)))


def _lower_bounds(
    problem: Problem, sizes: Sizes, machine: Machine, at: Callable[[int], Problem]
) -> Iterator[LowerBound]:
    size = problem.size
    kernels = [call_seconds(at(rank), machine, rows_worked(problem, sizes, rank)) for rank in range(size)]
    yield from (LowerBound(seconds, f"the kernels of rank {rank}") for rank, seconds in enumerate(kernels))
    if size == 1:
        return
    if problem.sums and machine.lanes == 1:
        term, rounded = row_nbytes(problem)
        sums = (2 * term + rounded) * (size - 1) * sum(sizes.rows) / machine.memory_rate  # of all ranks
        yield LowerBound((sum(kernels) + sums) / size, "kernels and sums, on average over the ranks")
    computes = bool(problem.weights or problem.gradients)
    edge = machine.overhead if computes else 0.0  # a kernel before the first message or after the last one
    ports = [machine.innermost, *machine.levels]
    lag = _lag(ports)
    enter, leave, together = _moved(problem, sizes, 1)
    rates = [machine.rate(rank) for rank in range(size)]
    own = machine.innermost.fastest * min(machine.ports, size - 1)
    full = own + sum(level.fastest for level in machine.levels)  # a rank may use its ports at all levels at once
    for rank in range(size):
        for way, nbytes in (("receives", enter[rank]), ("sends", leave[rank])):
            if nbytes:
                yield LowerBound(edge + lag + nbytes / full / rates[rank], f"the bytes that rank {rank} {way}")
    if together:
        yield LowerBound(edge + lag + together / full / sum(rates), "the bytes that all ranks receive")
    for i, level in enumerate(machine.levels):
        if size % level.ranks or size == level.ranks:
            continue
        outer = machine.levels[i:]
        rate = sum(port.fastest * (1 if port.shared else level.ranks) for port in outer)
        lag = _lag(outer)
        enter, leave, together = _moved(problem, sizes, level.ranks)
        for group in range(size // level.ranks):
            for way, nbytes in (("enter", enter[group]), ("leave", leave[group])):
                if nbytes:
                    first, last = group * level.ranks, (group + 1) * level.ranks - 1
                    what = f"the bytes that {way} the group of ranks {first} to {last}"
                    yield LowerBound(edge + lag + nbytes / rate, what)
        if together:
            seconds = edge + lag + together / rate / len(enter)
            yield LowerBound(seconds, f"the bytes between groups of {level.ranks} ranks")


def _lag(ports: Sequence[Level]) -> float:
    """Seconds in addition to all bytes at the rate of these ports: one latency, minus the burst that passes at once."""
    return min(port.latency for port in ports) - max(port.burst for port in ports)


def call_seconds(problem: Problem, machine: Machine, rows: float, runs: int = 1) -> float:
    """Seconds of the kernels of a problem on `rows` rows, in one call each.

    `runs` is the number of separate pieces of these rows. Each piece is a product that packs the weight again. Where
    rows go to experts, each piece is a product for each of them.
    """
    runs *= problem.runs
    width, item = prod(problem.row), itemsize(problem.dtype)
    wide = itemsize(problem.accumulator)
    seconds = 0.0
    for weight in problem.weights:
        packed = rows * width * item + runs * problem.row[-1] * weight.columns * wide
        elements = rows * prod(problem.row[:-1]) * weight.columns
        seconds += machine.kernel(2 * rows * width * weight.columns, rows * width * item, packed, elements, runs)
    for gradient in problem.gradients:
        packed = rows * (width + prod(gradient.row)) * item
        elements = problem.row[-1] * gradient.row[-1] * runs
        seconds += machine.kernel(2 * rows * width * gradient.row[-1], rows * width * item, packed, elements, runs)
    return seconds


def rows_worked(problem: Problem, sizes: Sizes, rank: int) -> int:
    """The number of rows that a rank multiplies."""
    if problem.deals_product:
        return sizes.rows[rank]
    if not sizes.pairs:
        return sum(sizes.rows)
    return sum(sizes.pairs[rank]) if problem.multiplies_first else sum(row[rank] for row in sizes.pairs)


def most_rows_worked(problem: Problem, sizes: Sizes) -> int:
    """The number of rows that a rank multiplies at most."""
    alike = not (problem.deals_product or sizes.pairs)
    return max(rows_worked(problem, sizes, rank) for rank in range(1 if alike else problem.size))


def row_nbytes(problem: Problem) -> tuple[float, float]:
    """Bytes of a row in a message: of a term of a sum, which is not rounded yet, and of any other row.

    Where the columns of a product are dealt, it is a row with the columns of all ranks.
    """
    summed = problem.multiplies_first and problem.sums
    width = prod(problem.sent_row)
    if problem.deals_product:
        width = prod(problem.row[:-1]) * sum(problem.columns)
    if problem.wire:
        each = width * WIRES[problem.wire].each
        return each, each
    return width * itemsize(problem.accumulator if summed else problem.dtype), width * itemsize(problem.dtype)


def dealt(problem: Problem, sizes: Sizes) -> Sizes:
    """The elements of each pair of ranks, in the dimension that is dealt: the rows of one and the columns of the other.

    A row that comes together belongs to the rank that receives it, every other row to the rank that sends it.
    """
    rows, columns = sizes.rows, problem.columns
    if problem.moves == "reduce_scatter":
        return Sizes(pairs=tuple(tuple(n * mine for n in rows) for mine in columns))
    return Sizes(pairs=tuple(tuple(mine * n for n in columns) for mine in rows))


def library_nbytes(problem: Problem, rows: float) -> float:
    """Bytes that a collective of the library reads and writes on a rank, for `rows` rows of all shards together."""
    once = rows * max(row_nbytes(problem))
    shares = {"all_reduce": 2.0, "all_to_all": 2.0, "broadcast": 1.0}
    return once * shares.get(problem.moves, 1 + 1 / problem.size)


def _moved(problem: Problem, sizes: Sizes, ranks: int) -> tuple[list[float], list[float], float]:
    """The bytes that must enter each group of `ranks` ranks (1: each rank), leave each, and enter all together."""
    count, (term, each) = problem.size // ranks, row_nbytes(problem)
    if problem.columns:  # by element of the split dimension
        element = WIRES[problem.wire].each if problem.wire else itemsize(problem.dtype)
        each = prod(problem.row[:-1] if problem.weights else problem.row[1:]) * element
        sizes = dealt(problem, sizes)
    if sizes.pairs:
        enter, leave = [0.0] * count, [0.0] * count
        for source, row in enumerate(sizes.pairs):
            for dest, rows in enumerate(row):
                if source // ranks != dest // ranks:
                    enter[dest // ranks] += rows * each
                    leave[source // ranks] += rows * each
        return enter, leave, sum(enter)
    own, total = [sum(sizes.rows[g * ranks : (g + 1) * ranks]) for g in range(count)], sum(sizes.rows)
    others = [total - n for n in own]
    if problem.moves == "all_gather":
        return [n * each for n in others], [n * each for n in own], sum(others) * each
    if problem.moves == "reduce_scatter":
        return [n * term for n in own], [n * term for n in others], sum(others) * term
    if problem.moves == "all_reduce":
        return [total * each] * count, [total * each] * count, sum(others) * (term + each)
    root = problem.root // ranks
    received = [0 if g == root else total * each for g in range(count)]
    return received, [total * each if g == root else 0 for g in range(count)], sum(received)
