"""Traces of runs that never saw fompi as records for `fompi replay` and `fompi advise`; and records as Chakra traces.

    python tools/traces.py TRACES run/           Chakra execution traces, or JSON of Kineto: one file for each rank
    python tools/traces.py --chakra run/ OUT     a record as Chakra execution traces, OUT/chakra.RANK.et
    python tools/traces.py --perfetto run/ FILE  the last steps, measured and replayed, for ui.perfetto.dev

A call of a trace is in flight while its kernel runs. The program waits for it from the end of the kernels, and the
begin of the calls, before its end on. Chakra: https://github.com/mlcommons/chakra, schema/protobuf/et_def.proto.
Kineto: torch.profiler with record_shapes=True.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import FompiError, LayoutError
from fompi.model.machine import Machine
from fompi.model.replay import BEGIN, MARK, WAIT, Graph
from fompi.traces.record import CALL, STEP, CallKind, RankRecord, load
from fompi.traces.trace import Event, Trace, merge, union

COLLECTIVES = ("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter")
"""Chakra's collectives by their numbers."""

COMPUTE, SENDS, RECEIVES, COLLECTIVE = 4, 5, 6, 7
"""Chakra's types of nodes."""

MOST_DRAWN = 16, 4
"""A timeline for Perfetto has this many ranks, the first ones, and steps, the last ones."""

NOISE = 1e-9
"""A call whose kernels end this many seconds after its begin has none behind it."""

SIZES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1}
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
"""The types of Kineto: bytes, and the names that fompi has."""


class Call(NamedTuple):
    """A call of a trace. Times are in seconds. `group` is () if the trace does not say which ranks take part."""

    moves: str
    channel: str
    group: tuple[int, ...]
    nbytes: int
    begin: float
    end: float
    dtype: str = ""


class ForeignTrace(NamedTuple):
    """What a trace of one rank says: calls, the intervals of kernels, the ends of steps."""

    rank: int
    calls: list[Call]
    kernels: list[tuple[float, float]]
    steps: list[float]


# ---------------------------------------------------------------------------------------------------------- protobuf


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: (number, value). Numbers are integers, 8 or 4 bytes stay bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(wire)
        if length is None:
            length, at = varint(data, at)
        yield key >> 3, data[at : at + length]
        at += length


def encoded(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return encoded(number << 3) + encoded(value)
    data = value.encode() if isinstance(value, str) else value
    return encoded(number << 3 | 2) + encoded(len(data)) + data


def attribute(name: str, value: int | str) -> bytes:
    """An attribute of a node: int64_val, or string_val."""
    return field(10, field(1, name) + field(29 if isinstance(value, str) else 9, value))


# ------------------------------------------------------------------------------------------------------------ Chakra


def of_chakra(path: Path) -> ForeignTrace:
    """A Chakra execution trace of one rank. Without times, its nodes follow each other."""
    data, at, nodes = path.read_bytes(), 0, []
    while at < len(data):
        length, at = varint(data, at)
        nodes.append(list(fields(data[at : at + length])))
        at += length
    calls: list[Call] = []
    kernels, now = [], 0.0
    for node in nodes[1:]:  # the first message is the metadata
        plain = {number: value for number, value in node if number != 10}
        attributes = {}
        for number, value in node:
            if number == 10:
                parts = dict(fields(value))
                own = next((parts[n] for n in sorted(parts) if n > 2), 0)
                attributes[bytes(parts.get(1, b"")).decode()] = own
        if attributes.get("is_cpu_op"):
            continue
        begin = 1e-6 * plain[6] if plain.get(6) else now
        end = begin + 1e-6 * plain.get(7, 0)
        now, kind = max(now, end), plain.get(3, 0)
        if kind == COMPUTE:
            kernels.append((begin, end))
        elif kind in (SENDS, RECEIVES, COLLECTIVE):
            name = attributes.get("pg_name", b"world")
            channel = bytes(name).decode() if isinstance(name, bytes) else str(name)
            group: tuple[int, ...] = ()
            moves = "send" if kind == SENDS else "recv"
            if kind == COLLECTIVE:
                number = attributes.get("comm_type", 0)
                moves = COLLECTIVES[number] if number < len(COLLECTIVES) else "all_reduce"
            else:
                ends = (attributes.get("comm_src", 0), attributes.get("comm_dst", 0))
                channel, group = f"{channel}, tag {attributes.get('comm_tag', 0)}", ends
            calls.append(Call(moves, channel, group, attributes.get("comm_size", 0), begin, end))
    found = re.findall(r"\d+", path.stem)
    return ForeignTrace(int(found[-1]) if found else 0, calls, kernels, [])


def to_chakra(records: Sequence[RankRecord], out: Path) -> None:
    """Write a record: kernels are nodes that follow each other, and need the calls for which the program waited."""
    graph = Graph.of(records)
    out.mkdir(parents=True, exist_ok=True)
    for place, record in enumerate(records):
        messages, last, number, of_part, needs = [field(1, "0.0.4")], 0, 0, {}, list[int]()
        for e in range(graph.first[place], graph.first[place + 1]):
            kind, part = graph.kinds[graph.kind[graph.part[e]]], int(graph.part[e])
            if graph.gap[e] > 0:
                number += 1
                begun = round(1e6 * (graph.measured.came[e] - graph.gap[e]))
                deps = b"".join(field(5, n) for n in (*needs, *[last] * (last > 0)))
                times = field(6, max(0, begun)) + field(7, max(1, round(1e6 * graph.gap[e])))
                own = field(1, number) + field(2, "kernels") + field(3, COMPUTE) + deps + times
                messages.append(own + field(10, field(1, "is_cpu_op") + field(27, 0)))
                last, needs = number, []
            if graph.what[e] == BEGIN:
                number += 1
                of_part[part] = number
                names = {"send": SENDS, "recv": RECEIVES}
                attributes = [attribute("comm_size", kind.nbytes), attribute("pg_name", kind.channel)]
                if kind.moves in names:
                    ends = zip(("comm_src", "comm_dst"), kind.group, strict=True)
                    attributes += [attribute(name, rank) for name, rank in ends]
                else:
                    known = COLLECTIVES.index(kind.moves) if kind.moves in COLLECTIVES else 0
                    attributes.append(attribute("comm_type", known))
                seconds = 1e6 * graph.measured.came[e], 1e6 * graph.service[part]
                times = field(6, max(0, round(seconds[0]))) + field(7, max(1, round(seconds[1])))
                head = field(1, number) + field(2, str(kind)) + field(3, names.get(kind.moves, COLLECTIVE))
                deps = field(5, last) if last else b""
                cpu = field(10, field(1, "is_cpu_op") + field(27, 0))
                messages.append(head + deps + times + b"".join(attributes) + cpu)
            elif graph.what[e] == WAIT and part in of_part:
                needs.append(of_part[part])
        text = b"".join(encoded(len(message)) + message for message in messages)
        (out / f"chakra.{record.rank}.et").write_bytes(text)


# ------------------------------------------------------------------------------------------------------------ Kineto


def moves_of(name: str) -> str:
    """A collective of torch in words of fompi."""
    words = re.sub(r"[^a-z]", "", name.lower().removeprefix("nccl:").removeprefix("gloo:"))
    known = sorted((*COLLECTIVES, "send", "recv"), key=len, reverse=True)  # all_reduce before reduce
    return next((each for each in known if each.replace("_", "") in words), name)


def of_kineto(path: Path) -> ForeignTrace:
    """The JSON of torch.profiler. Kernels of a GPU count if there are some, else operators of the host."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = json.loads(text)
    events = [each for each in data["traceEvents"] if each.get("ph") == "X"]
    info = data.get("distributedInfo") or {}
    found = re.findall(r"\d+", path.name.partition(".")[0])
    rank = int(info.get("rank", found[-1] if found else 0))
    on_device = any(each.get("cat") == "kernel" for each in events)
    calls: list[Call] = []
    kernels: list[tuple[float, float]] = []
    steps: list[float] = []
    for each in events:
        args, begin = each.get("args") or {}, 1e-6 * float(each["ts"])
        end = begin + 1e-6 * float(each.get("dur", 0))
        if str(each["name"]).startswith("ProfilerStep#") and each.get("cat") != "gpu_user_annotation":
            steps += [begin] * (not steps) + [end]
        elif not on_device and str(each["name"]).startswith("gloo:"):
            dims, types = (args.get(name) or [[0]] for name in ("Input Dims", "Input type"))
            nbytes = sum(
                int(np.prod(dim)) * SIZES.get(str(of).capitalize(), 4) for dim, of in zip(dims, types, strict=False)
            )
            moves, dtype = moves_of(each["name"]), DTYPES.get(str(types[0]).capitalize(), "")
            calls.append(Call(moves, "gloo", (), nbytes, begin, end, dtype))
        elif (each.get("cat") == "kernel") != on_device or str(each["name"]).startswith("c10d::"):
            continue
        elif "Collective name" in args:
            ranks = re.findall(r"\d+", str(args.get("Process Group Ranks", "")))
            group = tuple(map(int, ranks)) if len(ranks) == args.get("Group size", len(ranks)) else ()
            dtype = args.get("dtype", "")
            nbytes = int(args.get("In msg nelems", 0)) * SIZES.get(dtype, 4)
            moves, channel = moves_of(args["Collective name"]), str(args.get("Process Group Name", "world"))
            calls.append(Call(moves, channel, group, nbytes, begin, end, DTYPES.get(dtype, dtype)))
        elif on_device or each.get("cat") == "cpu_op":
            kernels.append((begin, end))
    return ForeignTrace(rank, calls, kernels, steps)


# ------------------------------------------------------------------------------------------------------------ records


def records_of(traces: Sequence[ForeignTrace]) -> list[RankRecord]:
    """The records of all ranks. A group that no trace names are the ranks that have calls on this channel."""
    size = 1 + max(trace.rank for trace in traces)
    having = defaultdict(set)
    for trace in traces:
        for call in trace.calls:
            having[call.channel].add(trace.rank)
    records = []
    for trace in traces:
        kinds: dict[CallKind, int] = {}
        numbers: defaultdict[str, int] = defaultdict(int)
        busy, rows = np.array(union(trace.kernels) or [(-np.inf, -np.inf)]), []
        calls = sorted(trace.calls, key=lambda call: call.begin)
        begins = np.array([call.begin for call in calls])
        for call in calls:
            group = call.group or tuple(sorted(having[call.channel]))
            kind = CallKind(call.moves, call.moves, call.channel, group, call.nbytes, call.dtype)
            last = np.searchsorted(busy[:, 0], call.end) - 1
            busy_until = busy[last, 1] if last >= 0 else call.begin
            wait = min(call.end, max(busy_until, begins[np.searchsorted(begins, call.end) - 1]))
            if wait > call.begin + NOISE:
                times = call.begin, call.begin + NOISE, wait, call.end
            else:
                times = call.begin, call.begin, call.begin, call.end
            rows.append((kinds.setdefault(kind, len(kinds)), -1, numbers[call.channel], *times, 0.0))
            numbers[call.channel] += 1
        rows += [(STEP, -1, n, t, t, t, t, 0.0) for n, t in enumerate(sorted(trace.steps))]
        records.append(RankRecord(trace.rank, size, f"rank {trace.rank}", tuple(kinds), np.array(rows, CALL)))
    return records


def read(folder: Path) -> list[RankRecord]:
    """The traces of a folder as records. Raises LayoutError if a file is no trace."""
    traces = []
    for path in sorted(folder.iterdir()):
        reader = of_chakra if path.suffix == ".et" else of_kineto if ".json" in path.suffixes else None
        try:
            traces += [reader(path)] if reader is not None else []
        except (ValueError, LookupError, TypeError, AttributeError, OSError, struct.error) as error:
            raise LayoutError(f"{path} is no trace: {error!r}") from None
    if not traces:
        raise LayoutError(f"{folder} has no trace: *.et of Chakra, or *.json and *.json.gz of Kineto")
    return records_of(traces)


def to_perfetto(graph: Graph, path: Path) -> None:
    """Write the kernels and the waits of the last steps of the first ranks: measured, and below that replayed."""
    ranks, traces = min(MOST_DRAWN[0], len(graph.first) - 1), list[Trace]()
    for kind, played in (("measured", graph.measured), ("replayed", graph.run())):
        marks, events = played.ended[(graph.what == MARK) & (graph.rank == 0)], []
        since = marks[max(0, len(marks) - 1 - MOST_DRAWN[1])]
        for e in np.flatnonzero((graph.rank < ranks) & (played.came >= since)).tolist():
            came, ended, gap = (float(each[e]) for each in (played.came, played.ended, graph.gap))
            rank, call = int(graph.rank[e]) + ranks * len(traces), graph.kinds[graph.kind[graph.part[e]]]
            if gap > 0:
                events.append(Event(rank, "compute", -1, "kernels", came - gap, came))
            if graph.what[e] == WAIT:
                events.append(Event(rank, "waits", -1, str(call), came, ended, call.nbytes))
        traces.append(Trace(kind, "the last steps", tuple(events)))
    replace(merge(traces), hosts=("measured",) * ranks + ("replayed",) * ranks).save(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chakra", action="store_true", help="write a record as Chakra execution traces")
    parser.add_argument("--perfetto", action="store_true", help="write the timelines of a record for Perfetto")
    parser.add_argument("--machine", help="of --perfetto: a JSON file or a preset, whose links are replayed")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.chakra:
            to_chakra(load(options.source), options.target)
        elif options.perfetto:
            graph = Graph.of(load(options.source))
            to_perfetto(graph.on(Machine.load(options.machine)) if options.machine else graph, options.target)
        else:
            for record in read(options.source):
                record.save(options.target)
    except FompiError as error:
        print(f"traces: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
