"""A schedule of another system as a Plan: `fompi.verify` proves it once more, `simulate` and `bind` take it.

A chunk becomes one block or several, so that their number can be divided among the ranks. What a place of the schedule
holds lies in the result if it belongs there, else in scratch memory. The steps come in an order in which they can be
done. Messages between two ranks go in that order, whatever their connection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import gcd

from algorithm import Algorithm, ScheduleError, Step, Term
from fompi.base.layout import Sizes
from fompi.plans.plan import Chunk, Compute, Op, Plan, Program, Programs, Recv, Send, Workspace
from fompi.plans.problems import Form, problem
from proof import Judgement

Place = tuple[str, int]
"""A chunk of a buffer of the schedule."""


def plan_of(algorithm: Algorithm, verdict: Judgement, rows: int, row: tuple[int, ...], dtype: str) -> Plan:
    """The Plan of a schedule that is right, as `verdict` says (`proof.check`).

    A row has the shape `row`. Of an all-reduce the tensor has `rows` rows for each rank to sum, of an all-gather each
    rank has `rows`, of a reduce-scatter it gets them, and of an all-to-all it has `rows` for every rank.
    Raises ScheduleError for an all-to-all that passes through other ranks, which no plan does.
    """
    size = algorithm.ranks
    made = problem(algorithm.collective, size, Form((0, *row), dtype))
    blocks = size // gcd(size, algorithm.chunks)  # of each chunk
    parts = algorithm.chunks * blocks // size
    by_rank: dict[int, list[Step]] = {rank: [] for rank in range(size)}
    for step in verdict.order:
        by_rank[step.rank].append(step)
    sizes = Sizes(pairs=((rows,) * size,) * size) if made.moves == "all_to_all" else Sizes((rows,) * size)

    def program(rank: int) -> Program:
        work = made.workspace(rank, parts)
        return work.program(_Rank(algorithm, work, blocks, verdict).ops(by_rank[rank]))

    return Plan(made, algorithm.name or "its schedule", (1,) * parts, sizes, Programs(size, program))


class _Rank:
    """The ops of one rank."""

    def __init__(self, algorithm: Algorithm, work: Workspace, blocks: int, verdict: Judgement):
        self.algorithm, self.work, self.blocks, self.taken = algorithm, work, blocks, verdict.taken
        self.ends = {
            thread.number: (thread.takes, thread.sends) for thread in algorithm.threads if thread.rank == work.rank
        }
        self.rank, self.x, self.y = work.rank, work["x"], work["y"]
        self.axis = "slices" if algorithm.collective == "all_reduce" else "rows"
        self.holds: dict[Place, tuple[Chunk, Term]] = {}
        self.used: defaultdict[int, int] = defaultdict(int)  # scratch chunks of each block
        self.lent: dict[tuple[Place, int], Chunk] = {}
        outputs = algorithm.after(self.rank)
        self.home = {self._number(terms[0]): place for place, terms in outputs.items()}
        for place, term in algorithm.before(self.rank).items():
            self.holds[place] = self._chunk(self.x.name, self._number(term)), term

    def ops(self, steps: Sequence[Step]) -> Iterator[Op]:
        """All ops. Where the messages of a source do not come in the order of the steps, they come in before these."""
        early = self._early(steps)
        arrived: dict[tuple[int, int], Chunk] = {}
        for step in sorted((s for s in steps if s.kind.receives), key=self._key):
            source = self._source(step)
            for i, term in enumerate(self.taken[step.key][1]):
                if source in early:
                    chunk = arrived[self._number_of(step), i] = self._scratch(self._number(term))
                    yield from (Recv(source, block) for block in self._blocks(chunk))
        for step in steps:
            yield from self._step(step, arrived if self._source(step) in early else None)
        for number, place in self.home.items():
            chunk, _ = self.holds[place]
            target = self._chunk(self.y.name, number)
            if chunk != target:
                yield Compute("copy", (chunk,), (target,))

    def _step(self, step: Step, arrived: dict[tuple[int, int], Chunk] | None) -> Iterator[Op]:
        kind = step.kind
        _, sends = self.ends[step.thread]
        for i in range(step.source.length):
            source, dest = step.source.chunks[i], step.dest.chunks[i]
            if kind.receives:
                term = self.taken[step.key][1][i]
                number = self._number(term)
                if arrived is not None:
                    value = arrived[self._number_of(step), i]
                else:
                    is_direct = kind.writes and not kind.reads
                    value = self._target(dest, number) if is_direct else self._scratch(number)
                    yield from (Recv(self._source(step), block) for block in self._blocks(value))
                terms = (value, self.holds[source][0]) if kind.reads else (value,)
            elif kind.reads:
                value, term = self.holds[source]
                terms = (self.holds[dest][0], value) if kind.adds else (value,)
            else:
                continue
            to = self._target(dest, self._number(term)) if kind.writes else value
            if terms != (to,):
                yield Compute("add" if len(terms) > 1 else "copy", terms, (to,))
            value = to
            if kind.writes:
                self.holds[dest] = value, term
            if kind.sends and sends is not None:
                yield from (Send(sends[1], block) for block in self._blocks(value))

    # -- where what lies
    def _number(self, term: Term) -> int:
        """The number of a chunk among those of the whole tensor, by one of its terms."""
        rank, i = term
        per = self.algorithm.per_rank
        if self.algorithm.collective == "all_gather":
            return rank * per + i
        if self.algorithm.collective == "all_to_all":  # in x it is the one for its dest, in y that of its source
            return i if rank == self.rank and i // per != self.rank else rank * per + i % per
        return i

    def _chunk(self, buffer: str, number: int) -> Chunk:
        return Chunk(buffer, number * self.blocks, (number + 1) * self.blocks)

    def _blocks(self, chunk: Chunk) -> list[Chunk]:
        return [chunk._replace(start=i, stop=i + 1) for i in range(chunk.start, chunk.stop)]

    def _target(self, place: Place, number: int) -> Chunk:
        """Where a chunk lies in this place: in the result if that is where it belongs."""
        if self.home.get(number) == place:
            return self._chunk(self.y.name, number)
        if (place, number) not in self.lent:
            self.lent[place, number] = self._scratch(number)
        return self.lent[place, number]

    def _scratch(self, number: int) -> Chunk:
        if self.algorithm.collective == "all_to_all":
            raise ScheduleError("an all-to-all that passes through other places cannot be run as a plan")
        name, self.used[number] = f"scratch{self.used[number]}", self.used[number] + 1
        buffer = self.work.scratch(name, self.axis, self.x.row, self.x.dtype)
        return self._chunk(buffer.name, number)

    # -- messages
    def _source(self, step: Step) -> int:
        takes, _ = self.ends[step.thread]
        return takes[0] if step.kind.receives and takes is not None else -1

    def _number_of(self, step: Step) -> int:
        return self.taken[step.key][0]

    def _key(self, step: Step) -> tuple[int, int]:
        return self._source(step), self._number_of(step)

    def _early(self, steps: Sequence[Step]) -> set[int]:
        """The sources whose messages do not come in the order of the steps that take them."""
        last: dict[int, int] = {}
        found = set()
        for step in steps:
            if step.kind.receives:
                source, number = self._key(step)
                if number < last.get(source, -1):
                    found.add(source)
                last[source] = number
        return found
