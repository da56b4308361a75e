"""Is a schedule of another system right? `check` runs it on terms instead of data, and looks for what could go wrong.

- Every message is taken, with as many chunks as were sent.
- All threads end, with queues of `slots` messages. Else the circle of threads that wait for each other is named.
- No two threads touch a chunk at once, one of them writing: of two such steps one happens before the other (Lamport
  1978), by the order of a thread, by what a step waits for, or by a message. So every run gives the same result.
- No chunk is read before it is written.
- Each chunk of the result holds the sum of exactly the terms of its collective.

One run is enough for the rest: a thread cannot see what other threads do, except by messages and by what it waits for
(a Kahn network), so that all runs end in the same state, or none ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from algorithm import Algorithm, Connection, Region, ScheduleError, Step, StepKey, Term, Thread

SLOTS = (1, 2, 4, 8)
"""How many messages a connection may hold, before its sender waits. With more than the last of these none is right."""

MOST_REASONS = 5
"""At most this many reasons are listed."""

MOST_WORK = 1 << 25
"""The most terms that all ranks or steps may move, and steps or thread blocks by thread blocks."""

Value = tuple[Term, ...]
"""The terms of a chunk, sorted."""

At = tuple[int, int]
"""A thread: (rank, number)."""


class Judgement(NamedTuple):
    """`reasons` say what is wrong: empty if the schedule is right. `slots` is how many its connections need at least.

    `moved` are the chunks that each rank sends, `depth` the messages on the longest chain of them, and `order` are all
    steps in an order in which they can be done. `taken` are the messages that steps take then: the number of the first
    chunk among all from its source to its dest, and one term of each chunk.
    """

    reasons: tuple[str, ...]
    slots: int = 0
    moved: tuple[int, ...] = ()
    depth: int = 0
    order: tuple[Step, ...] = ()
    taken: Mapping[StepKey, tuple[int, list[Term]]] = MappingProxyType({})

    @property
    def is_right(self) -> bool:
        return not self.reasons


def check(algorithm: Algorithm) -> Judgement:
    """The Judgement of a schedule. Raises ScheduleError if it is too large to be proven."""
    reasons = [*_form(algorithm)]
    if reasons:
        return Judgement(tuple(reasons[:MOST_REASONS]))
    _check_size(algorithm)
    run = _OnTerms(algorithm)
    run.go()
    if not run.has_ended:
        return Judgement((run.stuck(),))
    reasons = [*run.reasons, *islice(_result(algorithm, run), MOST_REASONS)]
    slots = next((n for n in SLOTS if _OnTerms(algorithm, n).go().has_ended), 0)
    if not slots:
        reasons.append(_OnTerms(algorithm, SLOTS[-1]).go().stuck())
    moved = [0] * algorithm.ranks
    for step in algorithm.steps:
        moved[step.rank] += step.source.length if step.kind.sends else 0
    return Judgement(tuple(reasons[:MOST_REASONS]), slots, tuple(moved), run.depth, tuple(run.order), run.taken)


def _check_size(algorithm: Algorithm) -> None:
    """Raise ScheduleError for a schedule whose proof would take hours, or more memory than there is."""
    ranks, threads, steps = algorithm.ranks, len(algorithm.threads), algorithm.steps
    terms = max(ranks * algorithm.chunks, sum(s.source.length + s.dest.length for s in steps)) * ranks
    if max(terms, threads * max(threads, len(steps))) > MOST_WORK:
        words = f"{ranks} ranks, {algorithm.chunks} chunks, {threads} thread blocks and {len(steps)} steps"
        raise ScheduleError(f"{words}: too many to be proven")


def _form(algorithm: Algorithm) -> Iterator[str]:
    """What is wrong before anything runs: places outside of buffers, connections without a thread at the other end."""
    here = {(thread.rank, thread.number): thread for thread in algorithm.threads}
    if len(here) < len(algorithm.threads):
        yield "two thread blocks of a rank have the same number"
        return
    for step in algorithm.steps:
        yield from _form_of(step, here, algorithm)
    yield from _connections(algorithm)


def _form_of(step: Step, here: dict[At, Thread], algorithm: Algorithm) -> Iterator[str]:
    """What is wrong with one step."""
    thread, kind = here[step.rank, step.thread], step.kind
    if kind.receives and thread.takes is None:
        yield f"{step} takes a message, but its thread block has no connection to take it from"
    if kind.sends and thread.sends is None:
        yield f"{step} sends, but its thread block has no connection to send to"
    for place in [step.source] * kind.reads + [step.dest] * kind.writes:
        size = algorithm.sizes[step.rank].get(place.buffer, 0)
        if place.first < 0 or place.first + place.length > size:
            yield f"{step} uses {place}, but the rank has {size} chunks there"
    for on, number in step.after:
        other = here.get((step.rank, on))
        if other is None or number >= len(other.steps):
            yield f"{step} waits for step {number} of thread block {on}, which is not there"


def _connections(algorithm: Algorithm) -> Iterator[str]:
    """What is wrong with the messages: each is taken, with the chunks that were sent."""
    ends: dict[str, dict[Connection, Thread]] = {"take from": {}, "send to": {}}
    for thread in algorithm.threads:
        for verb, connection in (("take from", thread.takes), ("send to", thread.sends)):
            if connection is None:
                continue
            source, dest, channel = connection
            if source == dest or max(source, dest) >= algorithm.ranks:
                yield f"rank {thread.rank}, thread block {thread.number}: no connection from rank {source} to {dest}"
            if connection in ends[verb]:
                yield f"two thread blocks {verb} the connection from rank {source} to {dest}, channel {channel}"
            ends[verb][connection] = thread
    for connection in sorted({*ends["take from"], *ends["send to"]}):
        sent = [s for s in _steps(ends["send to"].get(connection)) if s.kind.sends]
        taken = [s for s in _steps(ends["take from"].get(connection)) if s.kind.receives]
        for k, (out, into) in enumerate(zip(sent, taken, strict=False)):
            if out.source.length != into.source.length:
                yield f"{out} sends {out.source.length} chunks, but {into} takes {into.source.length} (message {k})"
        if len(sent) > len(taken):
            yield f"{sent[len(taken)]} sends a message to rank {connection[1]} that nobody takes"
        if len(taken) > len(sent):
            yield f"{taken[len(sent)]} waits for a message from rank {connection[0]} that nobody sends"


def _steps(thread: Thread | None) -> Sequence[Step]:
    return () if thread is None else thread.steps


Queued = tuple[list[Value], dict[At, int], int, int]
"""A message: its values, the clock of its sender, the length of its chain, and the number of its first chunk."""


class _OnTerms:
    """One run on terms. Each thread has a clock: how many steps of every other thread have happened before."""

    def __init__(self, algorithm: Algorithm, slots: int = 0):
        self.algorithm, self.slots, self.most = algorithm, slots, 2 * algorithm.ranks
        self.threads = {(thread.rank, thread.number): thread for thread in algorithm.threads}
        self.at = dict.fromkeys(self.threads, 0)
        self.queues: defaultdict[Connection, list[Queued]] = defaultdict(list)
        self.clocks: dict[At, dict[At, int]] = {at: {} for at in self.threads}
        self.clock_of: dict[StepKey, dict[At, int]] = {}
        self.sent: defaultdict[tuple[int, int], int] = defaultdict(int)  # chunks from one rank to another
        self.taken: dict[StepKey, tuple[int, list[Term]]] = {}
        self.depths = dict.fromkeys(self.threads, 0)
        self.memory: list[dict[tuple[str, int], Value]] = [
            {chunk: (term,) for chunk, term in algorithm.before(rank).items()} for rank in range(algorithm.ranks)
        ]
        self.writer: dict[tuple[int, str, int], Step] = {}
        self.readers: defaultdict[tuple[int, str, int], list[Step]] = defaultdict(list)
        self.reasons: list[str] = []
        self.order: list[Step] = []
        self.depth = 0

    def go(self) -> _OnTerms:
        waiting = [*self.threads]
        while waiting:
            moved = [at for at in waiting if self._advance(at)]
            waiting = [at for at in waiting if self.at[at] < len(self.threads[at].steps)]
            if not moved:
                break
        return self

    @property
    def has_ended(self) -> bool:
        return all(self.at[at] == len(thread.steps) for at, thread in self.threads.items())

    def _advance(self, at: At) -> bool:
        """Do all steps of a thread that can be done now. False: there is none."""
        thread, begun = self.threads[at], self.at[at]
        while self.at[at] < len(thread.steps) and self._waits_for(at) is None:
            self._do(thread, thread.steps[self.at[at]])
            self.at[at] += 1
        return self.at[at] > begun

    def _waits_for(self, at: At) -> tuple[At | None, str] | None:
        """The thread for which the next step of this one waits, and why, in words. None: it does not wait."""
        thread = self.threads[at]
        step = thread.steps[self.at[at]]
        for on, number in step.after:
            if self.at[step.rank, on] <= number:
                return (step.rank, on), f"waits for step {number} of thread block {on}"
        if step.kind.receives and thread.takes is not None and not self.queues[thread.takes]:
            sender = next((a for a, t in self.threads.items() if t.sends == thread.takes), None)
            return sender, f"waits for a message from rank {thread.takes[0]}"
        if step.kind.sends and self.slots and thread.sends and len(self.queues[thread.sends]) >= self.slots:
            taker = next((a for a, t in self.threads.items() if t.takes == thread.sends), None)
            return taker, f"waits until rank {thread.sends[1]} takes one of {self.slots} messages"
        return None

    def stuck(self) -> str:
        """The circle of threads that wait for each other."""
        at: At | None = next(a for a, thread in self.threads.items() if self.at[a] < len(thread.steps))
        path: list[At] = []
        while at is not None and at not in path:
            path.append(at)
            found = self._waits_for(at) if self.at[at] < len(self.threads[at].steps) else None
            at = found[0] if found else None
        circle = path[path.index(at) :] if at in path else path
        words = [f"{self.threads[a].steps[self.at[a]]} {(self._waits_for(a) or (None, ''))[1]}" for a in circle]
        slots = f", with {self.slots} slots" if self.slots else ""
        return f"it never ends{slots}: {'; '.join(words)}"

    def _do(self, thread: Thread, step: Step) -> None:
        at, kind, memory = (step.rank, step.thread), step.kind, self.memory[step.rank]
        clock = self.clocks[at]
        for on, number in step.after:
            _join(clock, self.clock_of[step.rank, on, number])
        values: list[Value] | None = None
        if kind.receives and thread.takes is not None:
            values, sender, depth, number = self.queues[thread.takes].pop(0)
            self.taken[step.key] = number, [terms[0] for terms in values if terms]
            _join(clock, sender)
            self.depths[at] = max(self.depths[at], depth)
        clock[at] = step.number + 1
        if kind.reads:
            values = _sums(values, self._read(step, step.source), self.most)
        if kind.adds:
            values = _sums(values, self._read(step, step.dest), self.most)
        if kind.writes:
            self._note_write(step)
            memory.update(zip(step.dest.chunks, values or (), strict=True))
        if kind.sends and thread.sends is not None:
            pair = thread.sends[:2]
            self.queues[thread.sends].append((values or [], dict(clock), self.depths[at] + 1, self.sent[pair]))
            self.sent[pair] += step.source.length
            self.depth = max(self.depth, self.depths[at] + 1)
        self.clock_of[step.key] = dict(clock)
        self.order.append(step)

    def _happened(self, earlier: Step, now: Step) -> bool:
        """True if one step has happened before the other one in every run."""
        return self.clocks[now.rank, now.thread].get((earlier.rank, earlier.thread), 0) > earlier.number

    def _read(self, step: Step, place: Region) -> list[Value]:
        memory, values = self.memory[step.rank], []
        for chunk in place.chunks:
            writer = self.writer.get((step.rank, *chunk))
            if writer is not None and not self._happened(writer, step):
                self.reasons.append(f"{step} may read {chunk[0]}[{chunk[1]}] while {writer} writes it")
            if chunk not in memory:
                self.reasons.append(f"{step} reads {chunk[0]}[{chunk[1]}], which nothing has written")
            values.append(memory.get(chunk, ()))
            self.readers[step.rank, *chunk].append(step)
        return values

    def _note_write(self, step: Step) -> None:
        for chunk in step.dest.chunks:
            key = (step.rank, *chunk)
            before = [*self.readers.pop(key, ()), *([self.writer[key]] if key in self.writer else ())]
            for other in before:
                if other is not step and not self._happened(other, step):
                    verb = "reads" if self.writer.get(key) is not other else "writes"
                    self.reasons.append(f"{step} may write {chunk[0]}[{chunk[1]}] while {other} {verb} it")
            self.writer[key] = step


def _sums(values: list[Value] | None, more: list[Value], most: int) -> list[Value]:
    """The sums, of `most` terms each: more than a right sum has. A chunk that is added to itself has 2**n of them."""
    if values is None:
        return more
    return [tuple(sorted((*a, *b))[:most]) for a, b in zip(values, more, strict=True)]


def _join(clock: dict[At, int], other: dict[At, int]) -> None:
    for at, count in other.items():
        if clock.get(at, 0) < count:
            clock[at] = count


def _result(algorithm: Algorithm, run: _OnTerms) -> Iterator[str]:
    """What the result has too much, or lacks."""
    for rank, memory in enumerate(run.memory):
        for (buffer, i), terms in algorithm.after(rank).items():
            got, wanted = [*memory.get((buffer, i), ())], sorted(terms)
            lacks, extra = ([*(Counter(a) - Counter(b)).elements()] for a, b in ((wanted, got), (got, wanted)))
            if not lacks and not extra:
                continue
            writer = run.writer.get((rank, buffer, i))
            last = f"; {writer} wrote it last" if writer is not None else "; nothing writes it"
            words = [f"lacks chunk {c} of rank {r}" for r, c in lacks[:2]]
            words += [f"has chunk {c} of rank {r} too often" for r, c in extra[:2]]
            yield f"at the end {buffer}[{i}] of rank {rank} {', '.join(words)}{last}"
