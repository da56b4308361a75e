"""A compiled program as the table that C carries out: each op with buffers, offsets and numbers, no Python object."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.in_c import BYTE, COPY, kernel_of
from fompi.base.layout import ITEMSIZE
from fompi.engine.in_flight import EAGER_NBYTES
from fompi.native.numbers import number
from fompi.plans.plan import Compute
from fompi.runtime.compiled import COLLECTIVE, COMPUTE, RECV, SEND, Compiled, Place, Sized

Array = np.ndarray[Any, Any]

OP = np.dtype(
    [
        *((name, "i4") for name in ("kind", "kernel", "flags", "peer", "number", "divisor")),
        ("buffers", "i4", 3),
        ("dtype", "i4"),
        ("offsets", "i8", 3),
        ("count", "i8"),
    ]
)
"""`Op` of engine.c."""

BLOCKS = np.dtype([("first", "3i4"), ("last", "3i4"), ("size", "3i4"), ("flags", "2i4"), ("width", "3i8")], align=True)
"""`Blocks` of engine.c."""

KIND = {SEND: number("SEND"), RECV: number("RECV"), COMPUTE: number("KERNEL")}
CHECK, IN_PYTHON = number("CHECK"), number("PYTHON")
"""The kind of an op that compares two chunks, and goes on if they are equal, and of a kernel that Python runs."""

MERGE = number("MERGE")
"""Flag of a kernel that Python runs: it is a sum or a copy."""

FLAGS = "SYNCHRONOUS", "TESTED", "ABSOLUTE", "CARRIED", "AWAITS_ROWS"
SYNCHRONOUS, TESTED, ABSOLUTE, CARRIED, AWAITS_ROWS = map(number, FLAGS)
"""Flags of a send: it is done when the receiver has posted its receive; its request is tested at once. Of any message:
its number is its tag. Of a receive: the header of the sender may have carried the data. Of a CHECK of headers: their
rows may be others.
"""

MOST_NBYTES = (1 << 31) - 1
"""A message of C has at most this many bytes."""


class CallTable(NamedTuple):
    """What C needs of a program, for some rows. `buffers` are those of the program, `nbytes` their sizes.

    `unplaced`: those that only kernels of Python use. `blocks`: of each op and each buffer, how it follows from the
    numbers of `starts_of`.
    """

    ops: Array
    on_start: tuple[Array, Array]
    on_done: tuple[Array, Array]
    blockers: Array
    first: Array
    buffers: tuple[str, ...]
    nbytes: Array
    unplaced: frozenset[str] = frozenset()
    blocks: Array | None = None

    @property
    def in_python(self) -> list[int]:
        """The ops that are kernels of Python."""
        return np.flatnonzero(self.ops["kind"] == IN_PYTHON).tolist()


def table(compiled: Compiled, sized: Sized, most_nbytes: int, kernels: Collection[str] = ()) -> CallTable | None:
    """The program with these rows. None: it has a collective of the library, or a message of more than `most_nbytes`.

    Kernels that C does not have are Python's, and so are these `kernels`.
    """
    if COLLECTIVE in compiled.kinds:
        return None
    names = tuple(compiled.buffers)
    index = {name: number for number, name in enumerate(names)}
    ops, blocks = np.zeros(len(compiled.ops), OP), np.zeros(len(compiled.ops) + len(names), BLOCKS)
    at, behind = dict[str, int](), 1  # 0 stands for what stays as it is
    for name, starts in sized.starts.items():
        at[name], behind = behind, behind + len(starts)
        buffer = blocks[len(compiled.ops) + index[name]]
        buffer["first"][0], buffer["width"][0] = behind - 1, compiled.buffers[name].row_nbytes
    for i, kind in enumerate(compiled.kinds):
        op = ops[i]
        op["kind"] = KIND[kind]
        operands = (_kernel(compiled, i, op, kernels) if kind == COMPUTE else compiled.places(i)) or []
        spans = [_span(compiled, sized, place) for place in operands]
        op["buffers"][: len(operands)] = [index[place.buffer] for place in operands]
        op["offsets"][: len(operands)] = [start for start, _ in spans]
        sizes = [1] * len(operands)
        if kind == COMPUTE and (op["kernel"], op["dtype"]) != (COPY, BYTE):
            buffers = [compiled.buffers[place.buffer] for place in operands]
            sizes = [0 if b.wire else ITEMSIZE[b.dtype] for b in buffers]  # 0: bytes, which C counts itself
        for k, (name, first, last, width) in enumerate(operands):
            if name in at:
                of_op = blocks[i]
                of_op["first"][k], of_op["last"][k] = at[name] + first, at[name] + last
                of_op["size"][k], of_op["width"][k] = sizes[k], width
        counts = {(stop - start) // size for (start, stop), size in zip(spans, sizes, strict=True) if size}
        if not operands or (kind == COMPUTE and len(counts) > 1):
            ops[i] = np.zeros((), OP)
            op["kind"], op["flags"] = IN_PYTHON, MERGE * compiled.merges[i]
            continue
        op["count"] = nbytes = counts.pop()
        if kind == COMPUTE:
            continue
        if len(operands) != 1 or nbytes > min(most_nbytes, MOST_NBYTES):
            return None
        op["peer"], op["number"] = compiled.peers[i], compiled.numbers[i]
        if kind == SEND:
            blocks[i]["flags"] = TESTED, SYNCHRONOUS * compiled.is_paced
            op["flags"] = blocks[i]["flags"][int(nbytes > EAGER_NBYTES)]
    return CallTable(
        ops,
        _edges(compiled.on_start),
        _edges(compiled.on_done),
        np.array(compiled.blockers, np.int32),
        np.array(compiled.first, np.int32),
        names,
        np.array([_nbytes(compiled, sized, name) for name in names], np.int64),
        frozenset(names) - compiled.touched(np.flatnonzero(ops["kind"] != IN_PYTHON).tolist()),
        blocks,
    )


def starts_of(sized: Sized) -> array[int]:
    """What `Call.resize` takes: the first row of each block of each buffer, and where the last one ends."""
    return array("q", [0, *(n for starts in sized.starts.values() for n in starts)])


HEADERS = ("headers out", "headers in", "headers expected")
"""The buffers of an agreement: a header for each rank, one from each, and what they must be (`with_agreement`)."""


class Headers(NamedTuple):
    """How the ranks agree: each sends a header of `nbytes` to each other one, with this tag.

    Its last word says which message of the plan it carries, and is not compared: `presumed` and the number of that
    message (`handshake.presumption`; 0: headers carry nothing). The data follow it. A header has room for `packet`
    bytes. `rows_differ`: from what is expected. The call waits for them then (`Call.sized`).
    """

    nbytes: int
    packet: int
    tag: int
    presumed: int = 0
    rows_differ: bool = False


class Agreed(NamedTuple):
    """A table that begins with an agreement of `front` ops. `carries`: the last word of the header for each rank."""

    table: CallTable
    front: int
    carries: list[int]


def with_agreement(plan: CallTable, rank: int, size: int, headers: Headers, in_place: bool = False) -> Agreed:
    """The call of `plan` behind an agreement. The last op of that compares all headers.

    A header goes to each rank and comes from each, in the order of `Agreement._exchange`. It carries the first message
    to that rank that waits for nothing and fits. `in_place`: one op more, the last of all, copies y to x.
    """
    nbytes, packet, _, presumed, _ = headers
    peers, outgoing, out = (
        [*range(rank), *range(rank + 1, size)],
        [*range(rank + 1, size), *range(rank)],
        len(plan.buffers),
    )
    ahead = _exchange(peers, outgoing, out, headers)
    front, last = len(ahead), len(ahead) - 1
    ops = np.concatenate([ahead, plan.ops])
    starts: list[list[int]] = [[] for _ in ahead] + _lists(plan.on_start, front)
    dones = [[last] for _ in peers] + [[] for _ in (*outgoing, last)] + _lists(plan.on_done, front)
    blockers = np.concatenate([np.array([0] * last + [len(peers)], np.int32), plan.blockers])
    blockers[front + plan.first] = 1
    carries = [0] * size
    if presumed:
        _may_be_carried(ops[front:], out + 1, headers)
        for peer, i in _carried(plan, packet - nbytes).items():
            send, at = len(peers) + outgoing.index(peer), front + i
            carries[peer] = presumed | int(ops[at]["number"])
            ops[send]["count"] += ops[at]["count"]
            ops[at] = _packed(ops[at], out, peer * packet + nbytes)
            blockers[send], blockers[at] = 1, 0
            dones[at].append(send)
    dones[last] = [front + i for i in plan.first.tolist() if blockers[front + i]]
    if in_place:
        for each in dones[last:]:
            each.append(len(ops))
        starts, dones = [*starts, []], [*dones, []]
        blockers = np.append(blockers, np.int32(1 + len(plan.ops)))
        ops = np.append(ops, _copy_of(plan, "y", "x"))
    fixed = np.zeros(front, BLOCKS), np.zeros(len(HEADERS), BLOCKS)
    table = CallTable(
        ops,
        _edges(starts),
        _edges(dones),
        blockers,
        np.flatnonzero(blockers == 0).astype(np.int32),
        (*plan.buffers, *HEADERS),
        np.concatenate([plan.nbytes, np.full(3, size * packet, np.int64)]),
        blocks=np.concatenate([fixed[0], plan.blocks, fixed[1]]) if headers.rows_differ else None,
    )
    return Agreed(table, front, carries)


def _exchange(peers: Sequence[int], outgoing: Sequence[int], out: int, headers: Headers) -> Array:
    """A receive from each rank, a send to each, and the check. `out`: the buffer of the headers that leave."""
    nbytes, packet, tag, _, rows_differ = headers
    ops = np.zeros(2 * len(peers) + 1, OP)
    for i, peer in enumerate((*peers, *outgoing)):
        op, is_send = ops[i], i >= len(peers)
        op["kind"], op["peer"], op["number"] = KIND[SEND if is_send else RECV], peer, tag
        op["count"], op["flags"] = nbytes if is_send else packet, ABSOLUTE | TESTED * is_send
        op["buffers"][0], op["offsets"][0] = out if is_send else out + 1, peer * packet
    check = ops[-1]
    check["kind"], check["buffers"][:2], check["count"] = CHECK, (out + 1, out + 2), (len(peers) + 1) * packet
    check["number"], check["divisor"], check["flags"] = nbytes - WORD_NBYTES, packet, AWAITS_ROWS * rows_differ
    return ops


def _copy_of(plan: CallTable, source: str, into: str) -> Array:
    """An op that copies one buffer to another one."""
    op, (y, x) = np.zeros(1, OP), map(plan.buffers.index, (source, into))
    op["kind"], op["kernel"], op["buffers"], op["divisor"], op["count"] = (
        KIND[COMPUTE],
        COPY,
        (y, y, x),
        1,
        plan.nbytes[y],
    )
    return op


WORD_NBYTES = 8
"""The size of the last word of a header."""


def _carried(plan: CallTable, most_nbytes: int) -> dict[int, int]:
    """For each rank, the first send to it that waits for nothing and has at most `most_nbytes`."""
    sends: dict[int, int] = {}
    for i in plan.first.tolist():
        op = plan.ops[i]
        if op["kind"] == KIND[SEND] and not op["flags"] & SYNCHRONOUS and 0 < op["count"] <= most_nbytes:
            sends.setdefault(int(op["peer"]), i)
    return sends


def _packed(send: Any, buffer: int, offset: int) -> Any:
    """In place of a send: a copy of its data to what a header carries."""
    op = send.copy()
    op["kind"], op["kernel"], op["dtype"], op["divisor"] = KIND[COMPUTE], COPY, BYTE, 1
    op["flags"] = op["peer"] = op["number"] = 0
    op["buffers"][1:], op["offsets"][1:] = (op["buffers"][0], buffer), (op["offsets"][0], offset)
    return op


def _may_be_carried(ops: Array, buffer: int, headers: Headers) -> None:
    """Let the receives take what headers have carried. `buffer`: the headers that arrive."""
    nbytes, packet, _, presumed, _ = headers
    for i in np.flatnonzero((ops["kind"] == KIND[RECV]) & (ops["count"] <= packet - nbytes)):
        op = ops[i]
        op["flags"] |= CARRIED
        op["buffers"][1], op["offsets"][1] = buffer, op["peer"] * packet + nbytes - WORD_NBYTES
        op["offsets"][2] = presumed | int(op["number"])


def message_table(is_send: bool, peer: int, tag: int, header_nbytes: int, nbytes: int) -> CallTable:
    """A message of two ranks (`fompi.ops.messages`): `nbytes` of data behind a header that is known.

    Its buffers are the packet, of EAGER_NBYTES, the data, and the header that is expected.
    """
    packet, data, expected, tags = 0, 1, 2, (2 * tag + 2, 2 * tag + 3)
    is_eager = header_nbytes + nbytes <= EAGER_NBYTES
    ops = np.zeros(3, OP)
    header, check, body = ops
    for op, tag_of in ((header, tags[0]), (body, tags[1])):
        op["kind"], op["flags"], op["peer"], op["number"] = KIND[SEND if is_send else RECV], ABSOLUTE, peer, tag_of
    header["count"] = header_nbytes + nbytes * is_eager if is_send else EAGER_NBYTES
    header["flags"] |= TESTED * is_send
    check["kind"], check["buffers"][:2], check["count"] = CHECK, (packet, expected), header_nbytes
    check["number"] = check["divisor"] = header_nbytes
    body["buffers"][0], body["count"] = data, nbytes
    body["flags"] |= TESTED * (is_send and nbytes <= EAGER_NBYTES)
    if is_eager:
        body["kind"], body["flags"], body["peer"], body["number"] = KIND[COMPUTE], 0, 0, 0
        body["kernel"], body["dtype"], body["divisor"] = COPY, BYTE, 1
        body["buffers"] = (data, data, packet) if is_send else (packet, packet, data)
        body["offsets"] = (0, 0, header_nbytes) if is_send else (header_nbytes, header_nbytes, 0)
    if is_send:
        ops = np.stack([body, header] if is_eager else [header, body])
        dones: list[list[int]] = [[1], []] if is_eager else [[], []]
    else:
        dones = [[1], [2], []]
    blockers = np.zeros(len(ops), np.int32)
    blockers[[i for each in dones for i in each]] = 1
    sizes = np.array([EAGER_NBYTES, nbytes, header_nbytes], np.int64)
    return CallTable(
        ops,
        _edges([[]] * len(ops)),
        _edges(dones),
        blockers,
        np.flatnonzero(blockers == 0).astype(np.int32),
        ("packet", "data", "header"),
        sizes,
    )


def _lists(edges: tuple[Array, Array], front: int) -> list[list[int]]:
    """The lists of `_edges`, behind `front` ops more."""
    begins, to = edges
    return [(to[a:b] + front).tolist() for a, b in pairwise(begins)]


def _kernel(compiled: Compiled, i: int, op: Any, kernels: Collection[str]) -> list[Place] | None:
    """Fill in the kernel of op `i`. Returns its two operands and its result, or None if C has no such kernel."""
    compute, (reads, writes) = compiled.ops[i], compiled.operands(i)
    assert isinstance(compute, Compute)
    if compiled.asynchronous or compute.kernel in kernels or compiled.plan.kernel(compute.kernel) is not None:
        return None
    found = kernel_of(compute.kernel, *([*map(str, dtypes)] for dtypes in compiled.dtypes(i)))
    if found is None:
        return None
    op["kernel"], op["dtype"], op["divisor"], op["flags"] = found
    return [*reads * (3 - len(reads)), *writes]


def _span(compiled: Compiled, sized: Sized, place: Place) -> tuple[int, int]:
    """The first byte of a chunk in its buffer, and the byte behind its last."""
    name, start, stop, width = place
    if name in sized.starts:
        return sized.starts[name][start] * width, sized.starts[name][stop] * width
    return 0, _nbytes(compiled, sized, name)


def _nbytes(compiled: Compiled, sized: Sized, name: str) -> int:
    return int(np.prod(sized.shapes[name], dtype=np.int64)) * ITEMSIZE[compiled.buffers[name].dtype]


def _edges(lists: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Lists of op numbers as one list, and where each of them begins there."""
    begins = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return begins, np.array([i for each in lists for i in each], np.int32)
