"""The kernels around the messages of a schedule: before a block is sent, and after a block has arrived.

`Gather` and `Scatter` are the two families of `fompi.plans.meaning`. A schedule decides the order of the messages.
These classes yield the kernels that belong to the messages. So one loop serves all operations of a family.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import groupby

from fompi.base.layout import accumulator, offsets
from fompi.plans.kernels import REDUCTIONS, last_kernel
from fompi.plans.plan import Buffer, Chunk, Compute, Op, Workspace
from fompi.plans.problems import Problem
from fompi.plans.tree import middle_of


def merged(*columns: Iterable[Chunk]) -> list[tuple[Chunk, ...]]:
    """The chunks of each column, joined into as few chunks as possible.

    Two neighbours are joined only if they are contiguous in every column.
    """
    runs: list[tuple[Chunk, ...]] = []
    for row in zip(*columns, strict=True):
        if runs and all(a.buffer == b.buffer and a.stop == b.start for a, b in zip(runs[-1], row, strict=True)):
            runs[-1] = tuple(a._replace(stop=b.stop) for a, b in zip(runs[-1], row, strict=True))
        else:
            runs.append(row)
    return list(zip(*runs, strict=True))


def skewed(pieces: Iterable[Iterator[Op | None]]) -> Iterator[Op]:
    """Run the pieces side by side, each one step behind the piece before it. A piece yields None at the end of a step.

    piece 0   0   1   2
    piece 1       0   1   2
    piece 2           0   1   2

    Within a step the newest piece comes first, because its first messages wait for no other rank.
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


class _LocalWork:
    """The beginning of both families: a strided x is packed, and weights of half type are widened once.

    `parts` is the number of messages to each rank. Where rows go to experts, a message has several blocks: with s
    slices and e experts a pair has s e blocks, and each of its s messages has e of them. Thus few messages carry many
    runs. `number` is that of one of several terms that the rank has of a sum.
    """

    def __init__(self, problem: Problem, work: Workspace, number: int = 0):
        self.problem, self.work, self.number = problem, work, number
        self.rank, self.size, self.parts = work.rank, work.size, work.parts // problem.runs
        self.leaves = problem.terms[self.rank][number] if problem.sums else 1
        self.x = work[f"x{number}" if problem.is_split else "x"]
        names = [problem.name("w", i) for i in range(len(problem.weights))]
        if names and problem.is_split:
            names = [f"w{number}"]
        elif names and problem.columns:
            names = [f"w{rank}" for rank in range(work.size)]
        self.weights = [work[name] for name in names]

    def begin(self) -> Iterator[Op]:
        """Pack x and widen the weights, if needed."""
        if self.problem.packed:
            self.x = self.work.scratch("x_packed", self.x.axis, self.x.row, self.x.dtype)
            step = self.problem.runs
            for block in range(self.x.first, self.x.first + self.x.count, step):
                yield Compute("pack", (self.work["x"][block : block + step],), (self.x[block : block + step],))
        for i, weight in enumerate(self.weights):
            if self.problem.half and weight.count:
                self.weights[i] = self.work.scratch(f"{weight.name}_wide", weight.axis, weight.row, "float32")
                yield Compute("copy", (weight[:],), (self.weights[i][:],))

    def message(self, buffer: Buffer, peer: int, part: int, worker: int) -> Chunk:
        """The rows of a message to or from `peer`. `worker` multiplies them. Without experts it has no blocks."""
        if not self.problem.experts:
            return buffer[peer * self.parts + part]
        experts = self.problem.experts[worker]
        first = peer * self.work.parts + part * experts
        return buffer[first : first + experts]

    def multiply(self, i: int, x: Iterable[Chunk], y: Iterable[Chunk], bias: bool) -> Iterator[Op]:
        """y = x @ w of the i-th weight, plus its bias if `bias`."""
        if bias:
            operands = (self.weights[i][:], self.work[self.problem.name("bias", i)][:])
            yield Compute(self.problem.kernel("matmul_bias", self.leaves), (*x, *operands), tuple(y))
        elif self.problem.experts:
            for experts, (rows, products) in self.by_expert(x, y):
                yield Compute("matmul_grouped", (*rows, self.weights[i][experts]), products)
        else:
            yield Compute(self.problem.kernel("matmul", self.leaves), (*x, self.weights[i][:]), tuple(y))

    def by_expert(self, *columns: Iterable[Chunk]) -> Iterator[tuple[slice, list[tuple[Chunk, ...]]]]:
        """The chunks of each column cut at the ends of runs: for each peer its experts, and a chunk for each of them.

        The numbers of the last column say which blocks they are.
        """
        runs: dict[tuple[int, int], list[tuple[Chunk, ...]]] = {}
        for chunks in zip(*columns, strict=True):
            for at in range(chunks[-1].stop - chunks[-1].start):
                peer, part = divmod(chunks[-1].start + at, self.work.parts)
                block = tuple(c._replace(start=c.start + at, stop=c.start + at + 1) for c in chunks)
                runs.setdefault((peer, part // self.parts), []).append(block)
        there = [key for key in runs if key[1] < self.work.experts]
        for _, keys in groupby(there, key=lambda key: key[0]):
            experts = [*keys]
            ends = [zip(runs[key][0], runs[key][-1], strict=True) for key in experts]
            pieces = [tuple(a._replace(stop=b.stop) for a, b in pairs) for pairs in ends]
            yield slice(experts[0][1], experts[-1][1] + 1), list(zip(*pieces, strict=True))


class Dealt(_LocalWork):
    """Products of which each rank has some columns, or with rows of which each rank has some columns."""

    def __init__(self, problem: Problem, work: Workspace):
        super().__init__(problem, work)
        self.biases = [*problem.biases]
        self.own = slice(self.rank * self.parts, (self.rank + 1) * self.parts)  # the blocks of this rank's rows

    def product(self, i: int, x: Chunk, y: Chunk) -> Op:
        """y = x @ the i-th piece of the weight, plus the bias that belongs to it, if there is one."""
        if not self.biases:
            return Compute("matmul", (x, self.weights[i][:]), (y,))
        bias = self.work[self.biases[i if len(self.biases) > 1 else 0]]
        return Compute("matmul_bias", (x, self.weights[i][:], bias[:]), (y,))

    def pieces(self, name: str, ranks: Iterable[int]) -> dict[int, Buffer]:
        """For each of these ranks a scratch buffer for the rows of this rank, with the columns of that rank."""
        row, dtype = self.problem.columns_row, self.problem.dtype
        return {r: self.work.scratch(f"{name}{r}", "own", row(r), dtype) for r in ranks}


class Gather(_LocalWork):
    """Blocks of x are sent unchanged. The rank's own block and each block that arrives are kept, multiplied, or both.

    `late`: wait for all blocks and use them in one call of each kernel, instead of block by block. Gradients do so if
    their sum has an order.
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
        self.in_order = bool(problem.gradients and problem.order)
        self.sums: list[Buffer] = []
        self.started: set[tuple[int, int]] = set()  # gradient and expert: the sums that have a first term

    def outgoing(self, dest: int, part: int) -> Chunk:
        """The block that this rank sends to `dest`."""
        owner = dest if self.x.axis == "send" else self.rank
        return self.message(self.x, owner, part, dest)

    def place(self, source: int, part: int) -> Chunk:
        """The place of the block of `source` among the gathered rows."""
        return self.message(self.full, source, part, self.rank)

    def _own(self) -> tuple[Chunk, Chunk]:
        """The rank's own blocks in x, and their place among the gathered rows."""
        parts = range(self.parts)
        (own,), (place,) = merged(
            [self.outgoing(self.rank, part) for part in parts], [self.place(self.rank, part) for part in parts]
        )
        return own, place

    def copy_own(self) -> Iterator[Op]:
        """Copy the rank's own blocks to their place among the gathered rows."""
        own, place = self._own()
        yield Compute("copy", (own,), (place,))

    def use_own(self) -> Iterator[Op]:
        """Use the rank's own blocks in one call: they wait for no message."""
        if self.keeps or self.late or self.in_order:
            yield from self.copy_own()
        own, place = self._own()
        yield from self._use([own], [place])

    def use(self, source: int, part: int) -> Iterator[Op]:
        """Use a block that has arrived."""
        yield from self._use([self.place(source, part)], [self.place(source, part)])

    def use_slice(self, part: int) -> Iterator[Op]:
        """Use one part of every shard. All of them have arrived."""
        (chunks,) = merged(self.place(source, part) for source in range(self.size))
        yield from self._use(chunks, chunks)

    def finish(self) -> Iterator[Op]:
        """Do the work that waits for all blocks, and round gradients of half type."""
        if self.late:
            self.late = False
            yield from self._use([self.full[:]], [self.full[:]])
        if self.in_order:
            yield from self._gradients([self.full[:]], [self.full[:]])
        for i, wide in enumerate(self.sums):
            if wide.name != self.problem.name("g", i):
                yield Compute("copy", (wide[:],), (self.work[self.problem.name("g", i)][:],))

    def _use(self, rows: Iterable[Chunk], places: Iterable[Chunk]) -> Iterator[Op]:
        """Multiply `rows`. They are the blocks of `places`, which may still be in x."""
        if self.late:
            return
        places = tuple(places)
        for i, weight in enumerate(self.problem.weights):
            y = [place._replace(buffer=self.problem.name("y", i)) for place in places]
            yield from self.multiply(i, rows, y, weight.bias)
        if not self.in_order:
            yield from self._gradients(rows, places)

    def _gradients(self, rows: Iterable[Chunk], places: Iterable[Chunk]) -> Iterator[Op]:
        for i, gradient in enumerate(self.problem.gradients):
            h = [place._replace(buffer=self.problem.name("h", i)) for place in places]
            operands = (h, rows) if gradient.flipped else (rows, h)
            if self.problem.experts:
                for experts, chunks in self.by_expert(*operands):
                    yield from self._add_grouped(i, experts, chunks)
            else:
                yield self._add(
                    self.problem.kernel("gradient"), i, range(1), [chunk for group in operands for chunk in group]
                )

    def _add_grouped(self, i: int, experts: slice, chunks: list[tuple[Chunk, ...]]) -> Iterator[Op]:
        """The terms of the i-th gradient for these experts. Some of them may have a first term already."""
        numbers = range(experts.start, experts.stop)
        for _, run in groupby(numbers, key=lambda e: (i, e) in self.started):
            those = [*run]
            cut = slice(those[0] - experts.start, those[-1] + 1 - experts.start)
            operands = [chunk for group in chunks for chunk in group[cut]]
            yield self._add("gradient_grouped", i, range(those[0], those[-1] + 1), operands)

    def _add(self, kernel: str, i: int, experts: range, operands: list[Chunk]) -> Op:
        """Add a term to the i-th gradient, or write the first one. Without experts it is that of expert 0."""
        g = self._sum(i)[experts.start : experts.stop]
        is_started = (i, experts[0]) in self.started
        self.started.update((i, e) for e in experts)
        if is_started:
            return Compute(f"{kernel}_add", (*operands, g), (g,))
        return Compute(kernel, tuple(operands), (g,))

    def _sum(self, i: int) -> Buffer:
        """The buffer in which a gradient is summed: the result, or a float32 buffer if the result has a half type."""
        if len(self.sums) <= i:
            g = self.work[self.problem.name("g", i)]
            wide = accumulator(g.dtype)
            self.sums.append(g if wide == g.dtype else self.work.scratch(f"{g.name}_wide", g.axis, g.row, wide))
        return self.sums[i]


class Scatter(_LocalWork):
    """This rank has a term of each block. The term is given (x) or computed (x @ w). A schedule sends it to its owner.

    `early`: compute all terms in one call before the first message, instead of block by block. `by_slices`: compute one
    part of every shard in a call.
    """

    def __init__(
        self, problem: Problem, work: Workspace, early: bool = False, by_slices: bool = False, number: int = 0
    ):
        super().__init__(problem, work, number)
        self.part_major = problem.moves == "all_reduce"  # each part is a run of rows, with a block of every rank
        self.early = early and problem.multiplies_first
        self.by_slices = (by_slices or (self.part_major and self.parts > 1)) and problem.multiplies_first
        self.computed = False
        self.computed_slices: set[int] = set()

    def block(self, owner: int, part: int) -> int:
        """The number of a block."""
        return part * self.size + owner if self.part_major else owner * self.parts + part

    def order(self, peers: Iterable[int]) -> list[tuple[int, int]]:
        """(peer, part) of all blocks for other ranks, in the order in which their terms are computed."""
        pairs = [(peer, part) for peer in peers for part in range(self.parts)]
        return sorted(pairs, key=lambda pair: pair[1]) if self.by_slices else pairs

    @property
    def sent_dtype(self) -> str:
        """The dtype of a single term in a message. Products that will be summed are sent unrounded."""
        summed = self.problem.multiplies_first and self.problem.moves != "all_to_all"
        return self.problem.accumulator if summed else self.problem.dtype

    def partial(self, dtype: str) -> Buffer:
        """The buffer of the computed terms."""
        return self.work.scratch(f"partial{self.number or ''}", self.x.axis, self.problem.sent_row, dtype)

    def begin(self) -> Iterator[Op]:
        """As in `_LocalWork`. With `early`, compute all terms too."""
        yield from super().begin()
        if self.early:
            partial = self.partial(self.sent_dtype)
            yield from self.products(
                [self.x[b] for b in range(self.x.count)], [partial[b] for b in range(partial.count)]
            )
            self.computed = True

    def has_bias(self, block: int) -> bool:
        """True if the product of this block includes the bias.

        An all-to-all adds the bias to every block. In a sum only the owner of the block adds it, or rank 0 to its
        first term if the sum has an order.
        """
        if not self.problem.weights or not self.problem.weights[0].bias:
            return False
        owner = block % self.size if self.part_major else block // self.parts
        if self.problem.order and self.problem.sums:
            return self.rank == self.number == 0
        return self.problem.moves == "all_to_all" or owner == self.rank

    def products(self, x: list[Chunk], y: list[Chunk]) -> Iterator[Op]:
        """Multiply these blocks: one call for those without bias, one call for those with bias."""
        for bias in (False, True):
            matching = [i for i, chunk in enumerate(x) if self.has_bias(chunk.start) == bias]
            if matching:
                rows, products = merged((x[i] for i in matching), (y[i] for i in matching))
                yield from self.multiply(0, rows, products, bias)

    def term(self, owner: int, part: int, dtype: str) -> Generator[Op, None, Chunk]:
        """Compute the term of one block, unless it exists. Returns its chunk, which has this dtype."""
        x = self.outgoing(self.x, owner, part)
        if self.computed:
            return self.outgoing(self.partial(dtype), owner, part)
        if self.by_slices:
            yield from self.slice(part, dtype)
        elif self.problem.multiplies_first:
            y = self.outgoing(self.partial(dtype), owner, part)
            yield from self.multiply(0, [x], [y], self.has_bias(self.block(owner, part)))
        elif dtype != self.problem.dtype:
            yield Compute("copy", (x,), (self.outgoing(self.partial(dtype), owner, part),))
        else:
            return x
        return self.outgoing(self.partial(dtype), owner, part)

    def outgoing(self, buffer: Buffer, owner: int, part: int) -> Chunk:
        """The block for `owner`, or its blocks where rows come from experts."""
        if self.problem.experts:
            return self.message(buffer, owner, part, self.rank)
        return buffer[self.block(owner, part)]

    def arriving(self, source: int, part: int) -> Chunk:
        """The place of what `source` sends in an all-to-all."""
        return self.message(self.work["y"], source, part, source)

    def slice(self, part: int, dtype: str) -> Iterator[Op]:
        """Compute the terms of one part of every shard, once."""
        if part not in self.computed_slices:
            self.computed_slices.add(part)
            owners, partial = range(self.size), self.partial(dtype)
            x, y = ([self.outgoing(buffer, owner, part) for owner in owners] for buffer in (self.x, partial))
            yield from self.products(x, y)

    def own_terms(self, dtype: str) -> Generator[Op, None, list[Chunk]]:
        """Compute the terms of the rank's own blocks in one call: no message waits for them. Returns their chunks."""
        if self.computed or self.by_slices or not self.problem.multiplies_first:
            terms = []
            for part in range(self.parts):
                terms.append((yield from self.term(self.rank, part, dtype)))
            return terms
        first, partial = self.block(self.rank, 0), self.partial(dtype)
        run = slice(first, first + self.parts)
        yield from self.multiply(0, [self.x[run]], [partial[run]], self.has_bias(first))
        return [partial[block] for block in range(run.start, run.stop)]

    def own_into(self, target: Chunk) -> Iterator[Op]:
        """Compute the terms of the rank's own blocks and write them to `target`."""
        run = slice(target.start, target.stop)
        if self.computed or self.by_slices:
            for part in range(self.parts if self.by_slices else 0):
                yield from self.slice(part, self.sent_dtype)
            yield Compute("copy", (self.partial(self.sent_dtype)[run],), (target,))
        elif self.problem.multiplies_first:
            yield from self.multiply(0, [self.x[run]], [target], self.has_bias(run.start))
        else:
            yield Compute("copy", (self.x[run],), (target,))

    def combine(self, a: Chunk, b: Chunk, to: Chunk, is_last: bool = False) -> Op:
        """to = a and b, reduced. `is_last`: this is the whole reduction."""
        op = self.problem.op
        return Compute(last_kernel(op, self.size) if is_last else REDUCTIONS[op], (a, b), (to,))

    def target(self, part: int) -> Chunk:
        """The place of one of the rank's own blocks in the result."""
        return self.work["y"][self.block(self.rank, part)]

    @property
    def targets(self) -> Chunk:
        """The place of all blocks of this rank in the result."""
        first, experts = self.rank * self.work.parts, self.work.experts if self.problem.experts else 1
        return self.work["y"][first : first + self.parts * experts]


def terms_of(problem: Problem, work: Workspace, early: bool = False, by_slices: bool = False) -> list[Scatter]:
    """The terms that this rank has of each block: one, or several subtrees of a sum with an order of leaves."""
    count = len(problem.terms[work.rank]) if problem.sums else 1
    return [Scatter(problem, work, early, by_slices, number) for number in range(count)]


class InOrder:
    """The additions of the tree of one block (`fompi.plans.tree`), on chunks.

    `terms` are those of the ranks, or of groups of them, in their order. `sizes` are how many leaves they have. Those
    of this rank are missing (None) until `finish` gets them. A sum replaces one of its terms if these are `wide`, as
    wide as the sum. Else it lies in `spare(k)`, where k counts from 0.
    """

    def __init__(
        self,
        local: Scatter,
        terms: Sequence[Chunk | None],
        wide: bool,
        spare: Callable[[int], Chunk] | None = None,
        sizes: Sequence[int] = (),
    ):
        self.local, self.terms, self.spare, self.made = local, [*terms], spare, 0
        self.ends = offsets(sizes or [1] * len(terms))
        self.done: dict[tuple[int, int], Chunk] = {}
        self.free: list[Chunk] = []  # chunks whose sum has been added to another one
        self.scratch = {term for term in terms if term is not None} if wide else set[Chunk]()

    def add(self) -> Iterator[Op]:
        """What needs no term of this rank."""
        yield from self._others(0, len(self.terms))

    def finish(self, own: Sequence[Chunk], target: Chunk, is_last: bool = True) -> Iterator[Op]:
        """The rest. `own`: the terms of this rank. `is_last`: this is the whole reduction."""
        mine = iter(own)
        self.terms = [next(mine) if term is None else term for term in self.terms]
        yield from self._node(0, len(self.terms), target, is_last)

    def _others(self, low: int, high: int) -> Iterator[Op]:
        if None not in self.terms[low:high]:
            yield from self._node(low, high)
        elif high - low > 1:
            middle = middle_of(self.ends, low, high)
            yield from self._others(low, middle)
            yield from self._others(middle, high)

    def _node(self, low: int, high: int, to: Chunk | None = None, is_last: bool = False) -> Iterator[Op]:
        """Add the terms from `low` to `high`."""
        if (low, high) in self.done or high - low == 1:
            return
        middle = middle_of(self.ends, low, high)
        yield from self._node(low, middle)
        yield from self._node(middle, high)
        a, b = self._at(low, middle), self._at(middle, high)
        usable = [chunk for chunk in (a, b) if chunk in self.scratch]
        if to is None:
            to = usable.pop(0) if usable else self._spare()
        self.free += usable
        yield self.local.combine(a, b, to, is_last)
        self.done[low, high] = to

    def _at(self, low: int, high: int) -> Chunk:
        chunk = self.terms[low] if high - low == 1 else self.done[low, high]
        assert chunk is not None
        return chunk

    def _spare(self) -> Chunk:
        if self.free:
            return self.free.pop()
        assert self.spare is not None
        made = self.spare(self.made)
        self.made += 1
        self.scratch.add(made)
        return made
