"""What would help a recorded run? Each change is a small transformation of its graph, which is walked again.

    for advice in advise(graph, hosts):
        print(advice.what, advice.seconds, advice.write)

A change is tried only where the record has what it changes. What is wrong (a late rank, a slow host or link) comes
first, then the rest by its gain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fompi.base.layout import itemsize
from fompi.base.wires import WIRES
from fompi.model.pipeline import has_formula, predicted
from fompi.model.replay import BEGIN, NOTHING, WAIT, Array, Graph
from fompi.planner.outer import smallest
from fompi.traces.record import CallKind

WORTH, LATE, SLOW, OFTEN, WIRED, SMALL_NBYTES = 0.01, 1.15, 1.5, 4, ("float32", "bfloat16", "float16"), 1 << 12
"""The least gain, as a share of a step. A rank is late, or a link slow, at this many times the median. Two
micro-batches are tried from this many calls a step on. What int8 shortens. Calls of at most this many bytes show the
latency, else the smallest ones, of at most 8 times as many."""

CODED, BACKWARD = 3e9, 2.0
"""A core encodes and decodes so many bytes of elements in a second. A backward takes as long as so many forwards."""

Change = tuple[str, str, Graph]


class Advice(NamedTuple):
    """`what` would give a step of `seconds`, and what to `write` for it. `is_fault`: something is wrong."""

    what: str
    write: str
    seconds: float
    is_fault: bool = False


def advise(graph: Graph, hosts: Sequence[str]) -> list[Advice]:
    """What gains something: faults first, then the largest gain. `hosts` are those of the ranks of the record."""
    found = [Advice(what, write, changed.run().step, True) for what, write, changed in faults(graph, hosts)]
    found += [Advice(what, write, changed.run().step) for what, write, changed in changes(graph, hosts)]
    found += [Advice(*each) for each in of_pipeline(graph)]
    most = (1 - WORTH) * graph.run().step
    return sorted((each for each in found if each.seconds < most), key=lambda each: (not each.is_fault, each.seconds))


# ------------------------------------------------------------------------------------------------- transformations


def parts_of(graph: Graph, chosen: Callable[[CallKind], bool] = lambda kind: True) -> Array:
    """Which parts are those of a kind that is chosen, with several ranks."""
    return np.array([len(kind.group) > 1 and chosen(kind) for kind in graph.kinds], bool)[graph.kind]


def latency_of(graph: Graph) -> float:
    """What small calls take, in seconds, but no more than most calls. 0: there is none."""
    sizes = np.where(parts_of(graph), np.array([kind.nbytes for kind in graph.kinds])[graph.kind], np.inf)
    small = sizes <= max(SMALL_NBYTES, min(sizes.min(), 8 * SMALL_NBYTES))
    return min(float(np.median(graph.service[each])) for each in (small, sizes >= 0)) if small.any() else 0.0


def moving(graph: Graph) -> Array:
    """The seconds of each part for its bytes, without kernels and without the latency."""
    return np.maximum(0.0, graph.service - graph.inside - latency_of(graph))


def faster(graph: Graph, parts: Array, share: Any) -> Graph:
    """The bytes of these parts take this share of their time."""
    return replace(graph, service=graph.service - np.where(parts, (1 - share) * moving(graph), 0.0))


def events_of(graph: Graph) -> tuple[Array, Array]:
    """The events BEGIN and WAIT of each part: BEGIN twice, where nobody waits."""
    found = np.zeros((2, len(graph.ranks)), int)
    for what, places in ((BEGIN, slice(2)), (WAIT, 1)):
        events = np.flatnonzero(graph.what == what)
        found[places, graph.part[events]] = events
    return found[0], found[1]


def hidden(graph: Graph, parts: Array, before: float, after: float) -> Graph:
    """These shares of the kernels before and after a call run while it is in flight."""
    gap, (begin, wait) = graph.gap.copy(), (events[parts] for events in events_of(graph))
    for source, share in ((begin, before), (wait + 1, after)):
        moved = np.where(wait > begin, np.minimum(gap[source], share * graph.gap[source]), 0.0)
        gap[wait] += moved
        gap[source] -= moved
    return replace(graph, gap=gap)


def without(graph: Graph, parts: Array) -> Graph:
    """These calls are not made."""
    what = graph.what.copy()
    what[np.concatenate([events[parts] for events in events_of(graph)])] = NOTHING
    return replace(graph, what=what)


def merged(graph: Graph, parts: Array) -> Graph:
    """Of these calls every two become one, which begins with the second, if nobody waits for the first before that."""
    (begin, wait), more, of_group = events_of(graph), moving(graph), defaultdict(list)
    what, part, service = graph.what.copy(), graph.part.copy(), graph.service.copy()
    for c in sorted(np.unique(graph.call[parts]), key=lambda c: begin[graph.members[c]]):
        own = np.arange(graph.members[c], graph.members[c + 1])
        of_group[tuple(graph.ranks[own])].append(own)
    for calls in of_group.values():
        for first, second in zip(calls[::2], calls[1::2], strict=False):
            if (wait[first] > begin[second]).all():
                what[begin[first]], part[wait[first]] = NOTHING, second
                service[second] += more[first]
    return replace(graph, what=what, part=part, service=service)


def halved(graph: Graph, parts: Array) -> Graph:
    """Each of these calls becomes two. The first one begins when half of the kernels before both have run.

    Both go one after the other: as one call that begins earlier by what the first one gains, with a latency more.
    """
    gap, begin, latency = graph.gap.copy(), events_of(graph)[0][parts], latency_of(graph)
    earlier = np.minimum(0.5 * graph.gap[begin], 0.5 * moving(graph)[parts] + latency)
    gap[begin] -= earlier
    gap[begin + 1] += earlier
    return replace(graph, gap=gap, service=graph.service + np.where(parts, latency, 0.0))


# ----------------------------------------------------------------------------------------------------- what to try


def faults(graph: Graph, hosts: Sequence[str]) -> Iterator[Change]:
    """Ranks and hosts whose kernels take longer, and groups of ranks on which calls do."""
    own = np.bincount(graph.rank, graph.gap)
    usual = max(float(np.sort(own)[(len(own) - 1) // 2]), 1e-9)  # the lower median: of two ranks the faster one's
    groups = {f"host {host}": np.flatnonzero(np.array([*hosts]) == host) for host in hosts if hosts.count(host) > 1}
    for name, ranks in (groups | {f"rank {own.argmax()}": np.array([own.argmax()])}).items():
        times = float(own[ranks].min()) / usual
        if times > LATE:
            gap = np.where(np.isin(graph.rank, ranks), graph.gap / times, graph.gap)
            yield f"{name} at the median speed", f"its kernels take {times:.2f} times", replace(graph, gap=gap)
    alike, often = defaultdict[Any, dict[Any, int]](dict), np.bincount(graph.kind, minlength=len(graph.kinds))
    mean = np.bincount(graph.kind, graph.service, len(graph.kinds)) / np.maximum(1, often)
    for number, kind in enumerate(graph.kinds):
        alike[kind.operation, kind.nbytes, len(kind.group)][kind.group] = number
    for numbers in ([*each.values()] for each in alike.values()):
        slowest = max(numbers, key=mean.__getitem__)
        kind, times = graph.kinds[slowest], mean[slowest] / max(float(np.median(mean[numbers])), 1e-9)
        if len(numbers) > 2 and times > SLOW:
            what = f"the link of ranks {', '.join(map(str, kind.group))} as fast as others"
            yield what, f"{kind} takes {times:.1f} times: fompi doctor", faster(graph, graph.kind == slowest, 1 / times)


def changes(graph: Graph, hosts: Sequence[str]) -> Iterator[Change]:
    """What a user can write, or buy."""
    everything, steps, (begin, wait) = parts_of(graph), len(graph.measured.steps), events_of(graph)
    yield "links twice as fast", "fompi replay --machine FILE tries a machine", faster(graph, everything, 0.5)
    each = [WIRES["int8"].each / itemsize(k.dtype) if k.dtype in WIRED and not k.wire else 1.0 for k in graph.kinds]
    wired = faster(graph, everything, np.minimum(1.0, each)[graph.kind])
    coded = wired.service + np.array([kind.nbytes / CODED for kind in graph.kinds])[graph.kind]
    yield "messages of int8", 'wire="int8"', replace(wired, service=np.minimum(graph.service, coded))
    own = np.bincount(graph.rank, graph.gap)
    shared = replace(graph, gap=graph.gap * (own.mean() / np.maximum(own, 1e-9))[graph.rank])
    yield "balanced shares", "fompi.balance(machine, model)", shared
    at_once = everything & (graph.measured.came[begin] == graph.measured.came[wait]) & (wait > begin)
    at_once &= parts_of(graph, lambda kind: "mat" not in kind.operation)
    gathers = at_once & parts_of(graph, lambda kind: kind.moves == "all_gather")
    sums = at_once & parts_of(graph, lambda kind: kind.moves in ("all_reduce", "reduce_scatter"))
    beside = 1 - 1 / float(np.median(np.diff(graph.members)))
    yield "gathers one layer ahead", "fully_shard: set_modules_to_forward_prefetch", hidden(graph, gathers, 1, 0)
    yield "gather and product in one call", "fompi.all_gather_matmul(x, w)", hidden(graph, gathers, 0, beside)
    yield "product and sum in one call", "fompi.matmul_reduce_scatter(h, w)", hidden(graph, sums, beside, 0)
    yield "sums started", "all_reduce.start(x), and wait() before the next call", hidden(graph, sums, 0, 1)
    if (gathers | sums).sum() >= OFTEN * steps * len(hosts):
        yield "two micro-batches at a time", "fompi.interleave(f, g)", hidden(graph, gathers | sums, 0.5, 0.5)
    started = (wait > begin) & ~at_once
    started &= parts_of(graph, lambda kind: kind.moves == "all_reduce" and "mat" not in kind.operation)
    yield "buckets twice as large", "DistributedDataParallel(bucket_cap_mb=...)", merged(graph, started)
    started &= parts_of(graph, lambda kind: kind.nbytes > SMALL_NBYTES)
    yield "buckets half as large", "DistributedDataParallel(bucket_cap_mb=...)", halved(graph, started)
    again, scattered = ~everything, {kind.channel for kind in graph.kinds if kind.moves == "reduce_scatter"}
    for number, kind in enumerate(graph.kinds):
        calls = np.unique(graph.call[graph.kind == number])
        if kind.moves == "all_gather" and kind.channel in scattered and len(calls) % (2 * steps) == 0 < len(calls):
            again = again | np.isin(graph.call, calls.reshape(steps, 2, -1)[:, 1])
    yield "parameters kept", "fully_shard(reshard_after_forward=False), zero=2", without(graph, again & everything)
    sums = parts_of(graph, lambda k: k.moves == "all_reduce" and len(k.group) == len(hosts) and k.nbytes > SMALL_NBYTES)
    alone, exchange = without(graph, sums), float(graph.service[sums].sum()) / len(hosts) / steps
    period = smallest(max(alone.run().step, 1e-9), [exchange / fragments for fragments in range(1, 9)])
    yield "outer steps", "DiLoCo(sync_every={}, delay={}, fragments={})".format(*period), alone


def of_pipeline(graph: Graph) -> Iterator[tuple[str, str, float]]:
    """Other schedules of a pipeline, a stage on each rank: messages go along a line of ranks, and back.

    The one end of a line begins with a send, the other one with a receive. Which kernels are forwards only BACKWARD
    says. Where messages go around, ranks have several stages: their schedule has a smaller bubble already.
    """
    count = Counter(graph.kinds[kind].group for kind in graph.kind.tolist() if graph.kinds[kind].moves == "send")
    peers = defaultdict[int, set[int]](set)
    for source, dest in count:
        peers[source].add(dest)
    ends = [rank for rank, each in peers.items() if len(each) == 1]
    if not ends or any(len(each) > 2 or not all(p in peers[q] for q in each) for p, each in [*peers.items()]):
        return
    parts = [graph.part[(graph.rank == rank) & (graph.what == BEGIN)] for rank in ends]
    begun = [next(w for k in graph.kind[own] if (w := graph.kinds[k].moves) in ("send", "recv")) for own in parts]
    if 2 * begun.count("send") != len(ends):
        return
    ranks, steps = 2 * len(peers) // len(ends), len(graph.measured.steps)  # of each line
    microbatches = round(float(np.median([*count.values()])) / steps)
    own = np.bincount(graph.rank, graph.gap)[[*peers]].mean() / steps
    if microbatches < 1 or not has_formula("interleaved", ranks, microbatches):
        return
    step, forward = graph.run().step, float(own) / microbatches / (1 + BACKWARD)
    message = float(np.median(graph.service[parts_of(graph, lambda kind: kind.moves == "recv")]))

    def seconds(schedule: str, chunks: int = 1) -> float:
        each = {"F": forward / chunks, "B": BACKWARD * forward / chunks, "I": forward, "W": (BACKWARD - 1) * forward}
        return predicted(schedule, ranks, microbatches, chunks, each, message)

    now = seconds("1f1b")
    for schedule, words, chunks in (("interleaved", "two stages on each rank", 2), ("zb-h1", "zero bubble", 1)):
        after = max(float(own), step - now + seconds(schedule, chunks))
        yield f"pipeline: {words}", f"Pipeline(..., schedule={schedule!r}), or that of torch", after
