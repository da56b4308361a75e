"""The XML of MSCCL: `<algo coll= ngpus= nchunksperloop= inplace=>`, `<gpu>`, `<tb send= recv= chan=>`, `<step type=>`.

| type   | means                                                                                |
|--------|--------------------------------------------------------------------------------------|
| `s`    | send src                                                                             |
| `r`    | dst = what comes                                                                     |
| `rcs`  | dst = what comes; send it on                                                         |
| `rrs`  | send what comes + src                                                                |
| `rrc`  | dst = what comes + src                                                               |
| `rrcs` | dst = what comes + src; send it on                                                   |
| `cpy`  | dst = src                                                                            |
| `re`   | dst = dst + src                                                                      |
| `nop`  | nothing: it waits                                                                    |

Sources: msccl-tools (Cowan et al., ASPLOS 2023) writes it; the interpreters of MSCCL and RCCL run it.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from reprlib import repr as shown

from algorithm import Algorithm, Connection, Kind, Region, ScheduleError, Step, Thread

KINDS = {
    "s": Kind(reads=True, sends=True),
    "r": Kind(receives=True, writes=True),
    "rcs": Kind(receives=True, writes=True, sends=True),
    "rrs": Kind(receives=True, reads=True, sends=True),
    "rrc": Kind(receives=True, reads=True, writes=True),
    "rrcs": Kind(receives=True, reads=True, writes=True, sends=True),
    "cpy": Kind(reads=True, writes=True),
    "re": Kind(reads=True, adds=True, writes=True),
    "nop": Kind(),
}

COLLECTIVES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip

BUFFERS = {"i": "input", "o": "output", "s": "scratch"}

Shift = dict[str, int] | None
"""Where the chunks of a buffer begin in the one that is input and output. None: these are two buffers."""

MOST = 1 << 20
"""The largest number in a file."""


def read(text: str | bytes) -> Algorithm:
    """The Algorithm of a file. Raises ScheduleError, with the element, for what is not known."""
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # the last two: of its encoding
        raise ScheduleError(f"it is no XML: {error}") from None
    if root.tag != "algo":
        raise ScheduleError(f"it is no schedule of MSCCL: the first element is <{root.tag}>, not <algo>")
    word = root.get("coll", "")
    if word not in COLLECTIVES:
        raise ScheduleError(f"coll={shown(word)} is none of {', '.join(COLLECTIVES)}: its result is not known")
    collective, ranks = COLLECTIVES[word], _number(root, "ngpus", 1)
    in_place, chunks = bool(_number(root, "inplace", 0, 0)), _number(root, "nchunksperloop", 1)
    if collective != "all_reduce" and chunks % ranks:
        raise ScheduleError(f"nchunksperloop={chunks} cannot be divided among {ranks} ranks")
    found = sorted(root.findall("gpu"), key=lambda gpu: _number(gpu, "id"))
    if [_number(gpu, "id") for gpu in found] != list(range(ranks)):
        raise ScheduleError(f"the gpus are {[gpu.get('id') for gpu in found]}, but ngpus is {ranks}")
    threads = []
    for rank, gpu in enumerate(found):
        part = rank * (chunks // ranks)  # of a rank, where input and output are one buffer
        shift = {"all_gather": {"i": part}, "reduce_scatter": {"o": part}}.get(collective, {}) if in_place else None
        threads += [_thread(rank, tb, shift) for tb in gpu.findall("tb")]
    return Algorithm(
        root.get("name", ""),
        collective,
        ranks,
        chunks,
        in_place,
        tuple(threads),
        tuple(_sizes(gpu, in_place) for gpu in found),
    )


def _sizes(gpu: ElementTree.Element, in_place: bool) -> dict[str, int]:
    given = {name: _number(gpu, f"{letter}_chunks", 0, 0) for letter, name in BUFFERS.items()}
    if in_place:
        given["output"] = max(given.pop("input"), given["output"])
    return given


def _thread(rank: int, tb: ElementTree.Element, shift: Shift) -> Thread:
    number, channel = _number(tb, "id"), _number(tb, "chan", 0, 0)
    send, recv = _number(tb, "send", -1), _number(tb, "recv", -1)
    takes: Connection | None = None if recv < 0 else (recv, rank, channel)
    sends: Connection | None = None if send < 0 else (rank, send, channel)
    steps = [_step(rank, number, at, each, shift) for at, each in enumerate(tb.findall("step"))]
    return Thread(rank, number, takes, sends, tuple(steps))


def _step(rank: int, thread: int, at: int, step: ElementTree.Element, shift: Shift) -> Step:
    name, number, here = step.get("type", ""), _number(step, "s"), f"rank {rank}, thread block {thread}"
    if number != at:
        raise ScheduleError(f"{here}: step {at} has the number {number}")
    if name not in KINDS:
        raise ScheduleError(f"{here}, step {at}: the type {shown(name)} is none of {', '.join(KINDS)}")
    kind, count = KINDS[name], _number(step, "cnt", 0, 1)
    source = _place(step, "src", count, shift)
    dest = _place(step, "dst", count, shift)
    on, before = _number(step, "depid", -1, -1), _number(step, "deps", -1, -1)
    return Step(rank, thread, at, name, kind, source, dest, ((on, before),) if on >= 0 and before >= 0 else ())


def _place(step: ElementTree.Element, end: str, count: int, shift: Shift) -> Region:
    letter, first = step.get(f"{end}buf", "i"), _number(step, f"{end}off", -1, 0)
    if letter not in BUFFERS:
        raise ScheduleError(f"{end}buf={letter!r} is none of {', '.join(BUFFERS)}")
    if shift is None or letter == "s":
        return Region(BUFFERS[letter], first, count)
    return Region("output", first + shift.get(letter, 0), count)


def _number(element: ElementTree.Element, name: str, least: int = 0, default: int | None = None) -> int:
    text = element.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise ScheduleError(f"<{element.tag}>: {name}={shown(text)} must be an integer") from None
    if not least <= value <= MOST:
        raise ScheduleError(f"<{element.tag}>: {name}={shown(value)} must be from {least} to {MOST}")
    return value
