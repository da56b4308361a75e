"""Replays a record: its calls and kernels as a graph, walked on the links of the record or of another machine.

    graph = Graph.of(load("run/"))
    print(graph.measured.step, graph.run().step)        # seconds

Each rank has a row of events: a call begins (BEGIN), the program waits for it (WAIT), a step ends (MARK). Before each
of them the program computes for `gap` seconds. A call is over on a rank `service` seconds after its last rank has begun
it, or after the call before it on one of its ranks: calls of a rank share its link. So ranks that come late need no
rule of their own. A call that was over before one that was ready earlier did not wait for it: it goes beside that.
`fompi.planner.advice` changes a graph and runs it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.base.errors import LayoutError
from fompi.model.machine import Machine
from fompi.traces.record import STEP, CallKind, RankRecord

Array = np.ndarray[Any, Any]

BEGIN, WAIT, MARK, NOTHING = range(4)
"""What an event is. NOTHING is left of a call that was taken away."""


@dataclass(frozen=True)
class Replayed:
    """When each event of a graph ended, and when the program came to it: it waited in between. `steps`: their times."""

    came: Array
    ended: Array
    steps: Array

    @property
    def step(self) -> float:
        """The seconds of the typical step: the median."""
        return float(np.median(self.steps))


@dataclass(frozen=True)
class Graph:
    """Events of all ranks, rank by rank: those of the rank at place r are from `first[r]` to `first[r + 1]`.

    `part` is the part of its rank in the call of an event, or the number of a step. The parts of call c are from
    `members[c]` to `members[c + 1]`. Part p is that of `ranks[p]` in `call[p]`, of `kinds[kind[p]]`; in its `service`,
    kernels take `inside` seconds. The calls `beside` wait for no other. `measured` is what the ranks have recorded.
    """

    kinds: tuple[CallKind, ...]
    first: Array
    rank: Array
    what: Array
    part: Array
    gap: Array
    members: Array
    ranks: Array
    call: Array
    kind: Array
    service: Array
    inside: Array
    beside: Array
    measured: Replayed

    @classmethod
    def of(cls, records: Sequence[RankRecord]) -> Graph:
        """The steps that all ranks have. Without steps, the whole run is one. Raises LayoutError without calls."""
        kinds: dict[CallKind, int] = {}
        windows = _windows(records)
        rows: list[tuple[Any, ...]] = []
        for place, (record, marks) in enumerate(zip(records, windows, strict=True)):
            calls = record.calls[np.argsort(record.calls["begin"], kind="stable")]
            calls = calls[(calls["kind"] != STEP) & (calls["begin"] >= marks[0, 0]) & (calls["begin"] <= marks[0, -1])]
            known = np.array([kinds.setdefault(kind, len(kinds)) for kind in record.kinds])[calls["kind"]]
            rows.append((np.full(len(calls), place), known, calls, _waits(calls, marks[0])))
        channels: dict[Any, int] = {}
        channel = np.array([channels.setdefault((kind.channel, kind.group), len(channels)) for kind in kinds])
        columns: list[Any] = [np.concatenate(each) for each in zip(*rows, strict=True)]
        _, number = np.unique(columns[2]["number"], return_inverse=True)
        _, call = np.unique(channel[columns[1]] * len(number) + number, return_inverse=True)
        order = np.lexsort((columns[0], call))
        ranks, kind, calls, waits, call = (each[order] for each in (*columns, call))
        members = np.searchsorted(call, np.arange(call.max() + 2))
        late = _clocks(call, ranks, calls["end"], 3 * (len({record.host for record in records}) > 1), len(records))
        begins, ends, waits = (times - late[ranks] for times in (calls["begin"], calls["end"], waits))
        service, inside, beside, awaited = _services(members, call, ranks, begins, ends, calls["inside"])

        marks = np.concatenate([each - seconds for each, seconds in zip(windows, late, strict=True)], 1)
        rank = np.concatenate([ranks, ranks[awaited], np.repeat(np.arange(len(windows)), windows[0].shape[1])])
        what = np.repeat([BEGIN, WAIT, MARK], [len(ranks), int(awaited.sum()), marks.shape[1]])
        came = np.concatenate([begins, waits[awaited], marks[0]])
        ended = np.concatenate([begins, np.maximum(waits, ends)[awaited], marks[1]])
        part = np.concatenate([np.arange(len(ranks)), np.flatnonzero(awaited), np.zeros(marks.shape[1], int)])
        order = np.lexsort((what, ended, came, rank))
        rank, what, came, ended, part = (values[order] for values in (rank, what, came, ended, part))
        first = np.searchsorted(rank, np.arange(len(windows) + 1))
        gap = np.zeros(len(came))
        for begin, end in pairwise(first):  # a rank waits for one call after the other
            earlier = np.maximum.accumulate(ended[begin:end])[:-1]
            gap[begin + 1 : end] = np.maximum(0.0, came[begin + 1 : end] - earlier)
            came[begin + 1 : end] = np.maximum(came[begin + 1 : end], earlier)
        took = Replayed(came, ended, _steps(came, ended, what, len(windows)))
        of_parts = ranks, call, kind, service, inside
        return cls(tuple(kinds), first, rank, what, part, gap, members, *of_parts, beside, took)

    def run(self) -> Replayed:
        """Walk the graph: in each round, every rank that need not wait goes on by one event."""
        at, last = self.first[:-1].copy(), self.first[1:]
        now, size = self.measured.came[at], np.diff(self.members)
        count, ready, begun = np.zeros(len(size), int), np.full(len(size), -np.inf), np.full(len(size), np.inf)
        free = np.full(len(at), -np.inf)  # when the link of each rank is free
        came, ended = np.empty(len(self.rank)), np.empty(len(self.rank))
        active = np.flatnonzero(at < last)
        while len(active):
            event = at[active]
            is_wait = self.what[event] == WAIT
            blocked = np.zeros(len(active), bool)
            blocked[is_wait] = np.isinf(begun[self.call[self.part[event[is_wait]]]])
            if blocked.all():  # some rank has not recorded its part: nobody waits for it
                calls = self.call[self.part[event]]
                begun[calls] = ready[calls]
                continue
            ranks, event, is_wait = active[~blocked], event[~blocked], is_wait[~blocked]
            came[event] = ended[event] = now[ranks] + self.gap[event]
            waits, parts = event[is_wait], self.part[event[is_wait]]
            ended[waits] = np.maximum(came[waits], begun[self.call[parts]] + self.service[parts])
            now[ranks], at[ranks] = ended[event], event + 1
            begins = event[self.what[event] == BEGIN]
            calls = self.call[self.part[begins]]
            np.add.at(count, calls, 1)
            np.maximum.at(ready, calls, came[begins])
            calls = np.unique(calls)
            calls = calls[count[calls] == size[calls]]
            parts = np.repeat(self.members[calls] - np.cumsum(size[calls]) + size[calls], size[calls])
            parts = parts + np.arange(len(parts))
            begun[calls] = ready[calls]
            queued = parts[~self.beside[self.call[parts]]]
            np.maximum.at(begun, self.call[queued], free[self.ranks[queued]])
            np.maximum.at(free, self.ranks[parts], begun[self.call[parts]] + self.service[parts])
            active = active[at[active] < last[active]]
        return Replayed(came, ended, _steps(came, ended, self.what, len(at)))

    def on(self, machine: Machine) -> Graph:
        """This graph with the links of a machine. The kernels of the program stay as they are."""
        world, seconds = int(self.rank.max()) + 1, []
        for kind in self.kinds:
            x, size = kind.nbytes, len(kind.group)
            both = {"all_gather": x * (1 + size), "reduce_scatter": x + x / size, "broadcast": x}.get(kind.moves, 2 * x)
            if kind.moves in ("send", "recv"):
                seconds.append(machine.link(*kind.group).seconds(x))
            else:
                seconds.append(machine.part(kind.group, world).library(kind.moves, both, size))
        moving = np.array(seconds)[self.kind]
        hidden = np.minimum(moving, self.inside) * (1 - 1 / np.diff(self.members)[self.call])
        return replace(self, service=moving + self.inside - hidden)

    def waited(self, replayed: Replayed) -> Array:
        """For each kind of calls the seconds of a step in which a rank waits for them, in the mean."""
        waits = self.what == WAIT
        seconds = (replayed.ended - replayed.came)[waits]
        total: Array = np.bincount(self.kind[self.part[waits]], seconds, len(self.kinds))
        return total / (len(self.first) - 1) / len(replayed.steps)


def _windows(records: Sequence[RankRecord]) -> list[Array]:
    """For each rank the ends of the steps that all ranks have, and the begins of the next ones.

    Without steps, the begin and the end of the run.
    """
    if not all((record.calls["kind"] != STEP).any() for record in records):
        raise LayoutError("a rank of the record has no call")
    ends = [record.calls[record.calls["kind"] == STEP] for record in records]
    if all(map(len, ends)):
        low, high = max(each["number"][0] for each in ends), min(each["number"][-1] for each in ends)
        if low < high:
            common = [each[(each["number"] >= low) & (each["number"] <= high)] for each in ends]
            return [np.array([each["begin"], each["end"]]) for each in common]
    return [np.array([[record.calls["begin"].min(), record.calls["end"].max()]] * 2) for record in records]


def _clocks(call: Array, ranks: Array, ends: Array, rounds: int, size: int) -> Array:
    """How late the clock of each rank is: hosts have different ones, but a call ends on its ranks at about one time."""
    late = np.zeros(size)
    for _ in range(rounds):
        own = ends - late[ranks]
        mean = np.bincount(call, own) / np.bincount(call)
        late += np.bincount(ranks, own - mean[call], size) / np.bincount(ranks, minlength=size)
    return late


def _waits(calls: Array, marks: Array) -> Array:
    """When the program begins to wait for each call of a rank, in the order in which they began.

    A call that returns only when it is over, while another thread goes on, holds up nobody before that thread waits,
    too. A call for which nobody was seen to wait is awaited when the last one before the end of the step has begun:
    so it is where C++ code of torch waits for gradients.
    """
    begins, ends, waits = calls["begin"], calls["end"], calls["wait"]
    last = np.searchsorted(begins, ends) - 1
    resumed = np.sort(np.fmax(waits, ends))
    before = np.concatenate([[-np.inf], resumed])[np.searchsorted(resumed, ends)]
    beside = (waits <= begins) & (last > np.arange(len(calls)))
    waits = np.where(beside, np.where(before > begins[last], ends, begins[last]), waits)
    back = np.where(calls["back"] > begins, calls["back"], ends)
    step = np.append(marks, np.inf)[np.searchsorted(marks, begins, "right")]
    return np.where(np.isnan(waits), np.fmax(back, back[np.searchsorted(begins, step) - 1]), waits)


def _services(
    members: Array, call: Array, ranks: Array, begins: Array, ends: Array, inside: Array
) -> tuple[Array, Array, Array, Array]:
    """The service of each part and its kernels, which calls go beside others, and whether a rank waits for the others.

    The arrays are sorted by call. Calls queue in the order in which their last ranks have come. One that goes beside
    another has its kernels among its own. A rank that is through before the last one has come waits for nobody: the
    root of a broadcast, or a sender.
    """
    ready = np.maximum.reduceat(begins, members[:-1])
    order = np.lexsort((ready[call], ranks))
    apart = ranks[order] * (ends.max() - begins.min() + 1.0)  # so that the latest end until now is one of this rank
    before = np.concatenate([[-np.inf], np.maximum.accumulate(ends[order] + apart)[:-1]]) - apart
    before[np.flatnonzero(np.diff(ranks[order], prepend=-1))] = -np.inf
    overtakes, free = np.flatnonzero(ends[order] < before), np.empty(len(call))
    free[order] = before
    beside = np.zeros(len(ready), bool)
    beside[call[order[overtakes]]] = True
    own, other = order[overtakes], order[overtakes - 1]
    both = inside.astype(float)
    np.add.at(both, own, inside[other])
    np.add.at(both, other, inside[own])
    begun = np.where(beside, ready, np.maximum(ready, np.maximum.reduceat(free, members[:-1])))[call]
    return np.maximum(0.0, ends - begun), both, beside, ends >= ready[call]


def _steps(came: Array, ended: Array, what: Array, ranks: int) -> Array:
    """The seconds of each step, in the mean of the ranks."""
    ends, begins = (each[what == MARK].reshape(ranks, -1) for each in (came, ended))
    return np.asarray((ends[:, 1:] - begins[:, :-1]).mean(axis=0))
