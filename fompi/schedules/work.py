"""The local work around the messages of a schedule: what is made before a block leaves, and done after one arrives.

`Gather` and `Scatter` are the two families of `fompi.plans.problems`. A schedule decides the order of messages; these
classes yield the kernels that go with them, so that each schedule is one loop for every operation of the family.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from fompi.base.layout import accumulator
from fompi.plans.plan import Buffer, Chunk, Compute, Op, Workspace
from fompi.plans.problems import Problem


def merged(*columns: Iterable[Chunk]) -> list[tuple[Chunk, ...]]:
    """The same blocks in as few runs as there are, where the columns go on side by side."""
    runs: list[tuple[Chunk, ...]] = []
    for row in zip(*columns, strict=True):
        if runs and all(a.buffer == b.buffer and a.stop == b.start for a, b in zip(runs[-1], row, strict=True)):
            runs[-1] = tuple(a._replace(stop=b.stop) for a, b in zip(runs[-1], row, strict=True))
        else:
            runs.append(row)
    return list(zip(*runs, strict=True))


def skewed(pieces: Iterable[Iterator[Op | None]]) -> Iterator[Op]:
    """Pieces that begin one step after the other; each says None where a step ends.

    piece 0   0   1   2                 the newest piece goes first: what its first step sends waits for nobody
    piece 1       0   1   2
    piece 2           0   1   2
    """
    waiting, active = iter(pieces), list[Iterator[Op | None]]()
    while True:
        active[:0] = [piece for piece in (next(waiting, None),) if piece is not None]
        if not active:
            return
        for piece in list(active):
            for op in piece:
                if op is None:
                    break
                yield op
            else:
                active.remove(piece)


class _Local:
    """What both families begin with: x packed if it came strided, half weights widened once."""

    def __init__(self, problem: Problem, work: Workspace):
        self.problem, self.work = problem, work
        self.rank, self.size, self.parts = work.rank, work.size, work.parts
        self.x = work["x"]
        self.weights = [work[problem.name("w", i)] for i in range(len(problem.weights))]

    def begin(self) -> Iterator[Op]:
        if self.problem.packed:
            self.x = self.work.scratch("x_packed", self.x.axis, self.x.row, self.x.dtype)
            for block in range(self.x.first, self.x.first + self.x.count):
                yield Compute("pack", (self.work["x"][block],), (self.x[block],))
        for i, weight in enumerate(self.weights):
            if self.problem.half:
                self.weights[i] = self.work.scratch(f"{weight.name}_wide", "whole", weight.row, "float32")
                yield Compute("copy", (weight[:],), (self.weights[i][:],))

    def multiply(self, i: int, x: Iterable[Chunk], y: Iterable[Chunk], bias: bool) -> Op:
        if bias:
            operands = (self.weights[i][:], self.work[self.problem.name("bias", i)][:])
            return Compute("matmul_bias", (*x, *operands), tuple(y))
        return Compute("matmul", (*x, self.weights[i][:]), tuple(y))


class Gather(_Local):
    """Blocks of x go out as they are; each block that arrives, and our own, is kept, multiplied, or both.

    `late`: use everything in one call per kernel when all of it is there, instead of block by block.
    """

    def __init__(self, problem: Problem, work: Workspace, late: bool = False):
        super().__init__(problem, work)
        self.keeps = problem.keep or not (problem.weights or problem.gradients)
        axis = problem.axes[1]
        if self.keeps:
            self.full = work[problem.kept]
        else:
            self.full = work.scratch("full", axis, problem.row, problem.dtype)
        self.late = late and bool(problem.weights or problem.gradients)
        self.sums: list[Buffer] = []
        self.begun: set[int] = set()

    def outgoing(self, dest: int, part: int) -> Chunk:
        """What dest gets from us."""
        owner = dest if self.x.axis == "send" else self.rank
        return self.x[owner * self.parts + part]

    def land(self, source: int, part: int) -> Chunk:
        """Where the block of source arrives, in its standard place."""
        return self.full[source * self.parts + part]

    def _own(self) -> tuple[Chunk, Chunk]:
        """Our own blocks, where they are and where they belong."""
        parts = range(self.parts)
        (own,), (place,) = merged(
            [self.outgoing(self.rank, part) for part in parts], [self.land(self.rank, part) for part in parts]
        )
        return own, place

    def copy_own(self) -> Iterator[Op]:
        """Put our own blocks to those that arrive."""
        own, place = self._own()
        yield Compute("copy", (own,), (place,))

    def use_own(self) -> Iterator[Op]:
        """Our own blocks need no message: they are used in one call."""
        if self.keeps or self.late:
            yield from self.copy_own()
        own, place = self._own()
        yield from self._use([own], [place])

    def use(self, source: int, part: int) -> Iterator[Op]:
        yield from self._use([self.land(source, part)], [self.land(source, part)])

    def use_slice(self, part: int) -> Iterator[Op]:
        """One part of every shard, all of them arrived."""
        (chunks,) = merged(self.land(source, part) for source in range(self.size))
        yield from self._use(chunks, chunks)

    def finish(self) -> Iterator[Op]:
        if self.late:
            self.late = False
            yield from self._use([self.full[:]], [self.full[:]])
        for i, wide in enumerate(self.sums):
            if wide.name != self.problem.name("g", i):
                yield Compute("copy", (wide[:],), (self.work[self.problem.name("g", i)][:],))

    def _use(self, rows: Iterable[Chunk], places: Iterable[Chunk]) -> Iterator[Op]:
        """Multiply `rows`, which stand for the blocks of `places`."""
        if self.late:
            return
        places = tuple(places)
        for i, weight in enumerate(self.problem.weights):
            y = [place._replace(buffer=self.problem.name("y", i)) for place in places]
            yield self.multiply(i, rows, y, weight.bias)
        for i, gradient in enumerate(self.problem.gradients):
            g = self._sum(i)
            h = [place._replace(buffer=self.problem.name("h", i)) for place in places]
            operands = (*h, *rows) if gradient.flipped else (*rows, *h)
            if i in self.begun:
                yield Compute("gradient_add", (*operands, g[:]), (g[:],))
            else:
                yield Compute("gradient", operands, (g[:],))
            self.begun.add(i)

    def _sum(self, i: int) -> Buffer:
        """Where a gradient is summed: in the result, or in float32 beside it."""
        if len(self.sums) <= i:
            g = self.work[self.problem.name("g", i)]
            wide = accumulator(g.dtype)
            self.sums.append(g if wide == g.dtype else self.work.scratch(f"{g.name}_wide", "whole", g.row, wide))
        return self.sums[i]


class Scatter(_Local):
    """Our term of each block is given (x) or made (x @ w); a schedule sends it to where the terms are summed.

    `early`: make everything in one call before the first message, instead of block by block. `by_slices`: make one
    part of every shard in a call.
    """

    def __init__(self, problem: Problem, work: Workspace, early: bool = False, by_slices: bool = False):
        super().__init__(problem, work)
        self.dealt = problem.moves == "all_reduce"  # slices of consecutive rows, dealt to the ranks
        self.early = early and problem.multiplies_first
        self.by_slices = (by_slices or (self.dealt and self.parts > 1)) and problem.multiplies_first
        self.made = False
        self.made_slices: set[int] = set()

    def block(self, owner: int, part: int) -> int:
        return part * self.size + owner if self.dealt else owner * self.parts + part

    def order(self, peers: Iterable[int]) -> list[tuple[int, int]]:
        """(peer, part) of all blocks for others, in the order in which they are made."""
        pairs = [(peer, part) for peer in peers for part in range(self.parts)]
        return sorted(pairs, key=lambda pair: pair[1]) if self.by_slices else pairs

    @property
    def wire(self) -> str:
        """The dtype in which a single term travels: products unrounded, if they are to be summed."""
        summed = self.problem.multiplies_first and self.problem.moves != "all_to_all"
        return self.problem.accumulator if summed else self.problem.dtype

    def partial(self, dtype: str) -> Buffer:
        return self.work.scratch("partial", self.x.axis, self.problem.sent_row, dtype)

    def begin(self) -> Iterator[Op]:
        yield from super().begin()
        if self.early:
            partial = self.partial(self.wire)
            yield from self.products(
                [self.x[b] for b in range(self.x.count)], [partial[b] for b in range(partial.count)]
            )
            self.made = True

    def has_bias(self, block: int) -> bool:
        """Whether our product of this block carries the bias: an all-to-all adds it before sending, a sum once."""
        if not self.problem.weights or not self.problem.weights[0].bias:
            return False
        owner = block % self.size if self.dealt else block // self.parts
        return self.problem.moves == "all_to_all" or owner == self.rank

    def products(self, x: list[Chunk], y: list[Chunk]) -> Iterator[Op]:
        """One call for neighbours that agree on the bias."""
        for bias in (False, True):
            of_kind = [i for i, chunk in enumerate(x) if self.has_bias(chunk.start) == bias]
            if of_kind:
                rows, products = merged((x[i] for i in of_kind), (y[i] for i in of_kind))
                yield self.multiply(0, rows, products, bias)

    def term(self, owner: int, part: int, dtype: str) -> Generator[Op, None, Chunk]:
        """Our term of one block, as a chunk of this dtype."""
        block = self.block(owner, part)
        x = self.x[block]
        if self.made:
            return self.partial(dtype)[block]
        if self.by_slices:
            yield from self.slice(part, dtype)
        elif self.problem.multiplies_first:
            yield self.multiply(0, [x], [self.partial(dtype)[block]], self.has_bias(block))
        elif dtype != self.problem.dtype:
            yield Compute("copy", (x,), (self.partial(dtype)[block],))
        else:
            return x
        return self.partial(dtype)[block]

    def slice(self, part: int, dtype: str) -> Iterator[Op]:
        """Our terms of one part of every shard."""
        if part not in self.made_slices:
            self.made_slices.add(part)
            blocks = [self.block(owner, part) for owner in range(self.size)]
            yield from self.products([self.x[b] for b in blocks], [self.partial(dtype)[b] for b in blocks])

    def own_terms(self, dtype: str) -> Generator[Op, None, list[Chunk]]:
        """Our terms of our own blocks, made in one call: no message waits for a part of it."""
        if self.made or self.by_slices or not self.problem.multiplies_first:
            terms = []
            for part in range(self.parts):
                terms.append((yield from self.term(self.rank, part, dtype)))
            return terms
        first, partial = self.block(self.rank, 0), self.partial(dtype)
        run = slice(first, first + self.parts)
        yield self.multiply(0, [self.x[run]], [partial[run]], self.has_bias(first))
        return [partial[block] for block in range(run.start, run.stop)]

    def own_into(self, target: Chunk) -> Iterator[Op]:
        """Our terms of our own blocks, written where they are wanted."""
        run = slice(self.rank * self.parts, (self.rank + 1) * self.parts)
        if self.made or self.by_slices:
            for part in range(self.parts if self.by_slices else 0):
                yield from self.slice(part, self.wire)
            yield Compute("copy", (self.partial(self.wire)[run],), (target,))
        elif self.problem.multiplies_first:
            yield self.multiply(0, [self.x[run]], [target], self.has_bias(run.start))
        else:
            yield Compute("copy", (self.x[run],), (target,))

    def target(self, part: int) -> Chunk:
        """Where our own block of the sum belongs."""
        return self.work["y"][self.block(self.rank, part)]

    @property
    def targets(self) -> Chunk:
        return self.work["y"][self.rank * self.parts : (self.rank + 1) * self.parts]
