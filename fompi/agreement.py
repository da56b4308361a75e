"""Agreement before payload: 32 bytes to every peer say what this rank calls, and with how many rows.

Ranks that disagree, or one that refuses its own arguments, end the call with a typed error on all ranks; nothing has
moved. Which ranks are missing is known too, since each sends for itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from time import perf_counter

from fompi.communicator import Communicator
from fompi.engine import DESCRIPTION, HANDSHAKE, Task
from fompi.errors import MismatchError, ShapeError

_HEADER = struct.Struct("<qqqq")  # call number, digest, rows for the peer, rows expected in all (or -1)
_DESCRIPTION_NBYTES = 1024
REFUSED = -1


def digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())


class Agreement(Task):
    """`then(self)` is called when it is finished: `rows[source]` are what each rank has for us, or `error` is set."""

    def __init__(
        self,
        comm: Communicator,
        stamp: int,
        digest: int,
        describe: Callable[[], str],
        rows: Sequence[int],
        expects: int = -1,
        refusal: Exception | None = None,
    ):
        self.comm, self.stamp, self.digest, self.describe = comm, stamp, digest, describe
        self.outgoing, self.expects, self.refusal = rows, expects, refusal
        self.rows: list[int] = []
        self.then: Callable[[Agreement], None] | None = None
        self.finished, self.error = False, None
        self._describing = False
        self._left = 0
        self._inbox = bytearray()
        self._arrived: set[int] = set()

    def start(self) -> None:
        self.touched = perf_counter()
        self.comm.channel.active[self.stamp] = self
        mine = REFUSED if self.refusal is not None else self.digest
        self._exchange(
            _HEADER.size,
            HANDSHAKE,
            [_HEADER.pack(self.stamp, mine, rows, self.expects) for rows in self.outgoing],
        )

    def _exchange(self, nbytes: int, tag: int, messages: Sequence[bytes]) -> None:
        """Every rank's message for us into the inbox, `nbytes` each, in the order of ranks."""
        comm, link, engine = self.comm, self.comm.link, self.comm.engine
        self._inbox, self._arrived = bytearray(nbytes * comm.size), {comm.rank}
        into = memoryview(self._inbox)
        into[comm.rank * nbytes : (comm.rank + 1) * nbytes] = messages[comm.rank]
        self._left = 2 * (comm.size - 1)
        for peer in range(comm.size):
            if peer != comm.rank:
                engine.post(link.irecv(into[peer * nbytes : (peer + 1) * nbytes], peer, tag), self, peer)
        for d in range(1, comm.size):
            peer = (comm.rank + d) % comm.size
            engine.post(link.isend(messages[peer], peer, tag), self, -1)
        if self._left == 0:
            self._exchanged()

    def completed(self, key: int) -> None:
        self.touched = perf_counter()
        if key >= 0:
            self._arrived.add(key)
        self._left -= 1
        if self._left == 0 and not self.finished:
            self._exchanged()

    def _exchanged(self) -> None:
        if self._describing:
            self._disagree()
            return
        headers = list(_HEADER.iter_unpack(self._inbox))
        _, first, *_ = headers[0]
        if first != REFUSED and all(h[0] == self.stamp and h[1] == first for h in headers):
            self.rows = [h[2] for h in headers]
            self._check_expected([h[3] for h in headers])
            self._finish()
            return
        self._describing = True
        words = f"{type(self.refusal).__name__}: {self.refusal}" if self.refusal is not None else self.describe()
        text = words.encode()[: _DESCRIPTION_NBYTES - 1]
        message = bytes([self.refusal is not None]) + text.ljust(_DESCRIPTION_NBYTES - 1, b"\0")
        self._exchange(_DESCRIPTION_NBYTES, DESCRIPTION, [message] * self.comm.size)

    def _check_expected(self, expected: Sequence[int]) -> None:
        total = sum(self.rows)
        for rank, rows in enumerate(expected):
            if rows not in (-1, total):
                self.error = ShapeError(
                    f"{self.describe()}: {total} rows are gathered, but rank {rank} has an operand or out= with {rows}"
                )
                return

    def _disagree(self) -> None:
        said: dict[str, list[int]] = {}
        size = _DESCRIPTION_NBYTES
        for rank in range(self.comm.size):
            flag, text = self._inbox[rank * size], self._inbox[rank * size + 1 : (rank + 1) * size]
            verb = "refuse" if flag else "call"
            said.setdefault(f"{verb} {bytes(text).rstrip(bytes(1)).decode(errors='replace')}", []).append(rank)
        each = "; ".join(f"{_ranks(ranks, what)}" for what, ranks in said.items())
        where = f"of {self.comm.name}" if self.stamp < 1 << 62 else f"of bind on {self.comm.name}"
        error = MismatchError(f"the ranks disagree in call {self.stamp & 0xFFFFFFFF} {where}: {each}")
        self.error = self.refusal or error
        self._finish()

    def _finish(self) -> None:
        self.finished = True
        self.comm.channel.active.pop(self.stamp, None)
        if self.then is not None:
            self.then(self)

    def abandon(self, error: BaseException) -> None:
        if not self.finished:
            self.error = self.error or error
            self._finish()

    def waits_for(self) -> tuple[int, str] | None:
        for peer in range(self.comm.size):
            if peer not in self._arrived:
                return peer, f"rank {peer} to come to call {self.stamp & 0xFFFFFFFF}, {self.describe()}"
        return None


def _ranks(ranks: list[int], what: str) -> str:
    """'ranks 0, 2 call x' or 'rank 1 calls x'."""
    if len(ranks) == 1:
        verb, _, rest = what.partition(" ")
        return f"rank {ranks[0]} {verb}s {rest}"
    return f"ranks {', '.join(map(str, ranks))} {what}"
