"""Agreement before payload: 32 bytes to every peer say what this rank calls, and with how many rows.

Ranks that disagree, or one that refuses its own arguments, end the call with a typed error on all ranks; nothing has
moved. Which ranks are missing is known too, since each sends for itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from time import perf_counter
from typing import Protocol

from fompi.base.errors import MismatchError, ShapeError
from fompi.engine.control import Channel
from fompi.engine.engine import Engine
from fompi.engine.tasks import CONFIRMATION, DESCRIPTION, HANDSHAKE, Task
from fompi.mpi.link import Link
from fompi.plans.plan import MESSAGE_BITS

_HEADER = struct.Struct("<qqqq")  # call number, digest, rows for the peer and what we tell, rows expected (or -1)
_ROWS_BITS, HINT_BITS, SIGNATURE_BITS = 34, 7, 22
VALUE_BITS = _ROWS_BITS
_DESCRIPTION_NBYTES = 1024
REFUSED = -1


class Members(Protocol):
    """What an agreement needs of a `Communicator`."""

    name: str
    rank: int
    size: int
    engine: Engine
    link: Link
    channel: Channel

    def check(self) -> None:
        """Raise StateError if nothing can be called on it any more."""

    def next_call(self) -> tuple[int, int]:
        """Stamp and tag slot of the next unbound call."""

    def slot(self, stamp: int) -> int:
        """The tag slot of an unbound call."""

    def begins(self, what: str, stamp: int) -> None:
        """Note the last thing that this rank began."""


def digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())


def agree(comm: Members, text: str, refusal: Exception | None = None, value: int = 0) -> Sequence[int]:
    """Wait until all ranks come to `text`: the number that each gives. 0 <= value < 1 << VALUE_BITS.

    Raises on all of them if one refuses, or comes to something else.
    """
    comm.check()
    with comm.engine.lock:
        stamp, _ = comm.next_call()
        agreement = Agreement(comm, stamp, digest(text), lambda: text, [value] * comm.size, refusal=refusal)
        comm.begins(text, stamp)
        agreement.start()
    comm.engine.wait(agreement, comm.channel)
    if agreement.error is not None:
        raise agreement.error
    return agreement.rows


class Agreement(Task):
    """`then(self)` is called when it is finished: `rows[source]` are what each rank has for us, or `error` is set.

    `signature` are 22 bits of what may differ between the ranks. `same_signature` tells afterwards whether it does not.
    `hint` is a small number of 7 bits. `hints` holds those of all ranks afterwards.

    `expects` (-1: any) is how many rows must arrive here. Unless as many arrive everywhere
    (`equal_totals`), each rank knows only its own number, and says in a second round whether that number fits.
    """

    begins = True
    # What every call replaces stands here: making an Agreement is part of what a small call costs.
    rows: Sequence[int] = ()
    same_signature = True
    hints: Sequence[int] = ()
    then: Callable[[Agreement], None] | None = None
    begun = 0.0
    last = 0  # the rank that came last
    _round = HANDSHAKE
    _left = 0
    _inbox = bytearray()
    _arrived: set[int] = set()  # noqa: RUF012

    def __init__(
        self,
        comm: Members,
        stamp: int,
        digest: int,
        describe: Callable[[], str],
        rows: Sequence[int],
        expects: int = -1,
        refusal: Exception | None = None,
        equal_totals: bool = True,
        signature: int = 0,
        hint: int = 0,
    ):
        self.comm, self.stamp, self.digest, self.describe = comm, stamp, digest, describe
        self.outgoing, self.expects, self.refusal, self.equal_totals = rows, expects, refusal, equal_totals
        self.hint = (signature << HINT_BITS | hint) << _ROWS_BITS

    def start(self) -> None:
        channel = self.comm.channel
        self.touched = self.begun = perf_counter()
        channel.begin(self.stamp, self)
        self._exchange_headers(HANDSHAKE)
        if self.stamp in channel.failures and not self.finished:
            error, fatal = channel.failures[self.stamp]
            if fatal:  # the others have given this call up, and found our handshake
                self.abandon(error)

    def _exchange_headers(self, round: int) -> None:
        mine = REFUSED if self.refusal is not None else self.digest
        pack, stamp, hint, expects = _HEADER.pack, self.stamp, self.hint, self.expects
        headers = [pack(stamp, mine, rows | hint, expects) for rows in self.outgoing]
        self._exchange(_HEADER.size, round, headers)

    def _exchange(self, nbytes: int, round: int, messages: Sequence[bytes]) -> None:
        """Every rank's message for us into the inbox, `nbytes` each, in the order of ranks.

        Handshakes are told apart by the order of calls, later rounds by the last tags of their call.
        """
        comm, engine = self.comm, self.comm.engine
        rank, size, link = comm.rank, comm.size, comm.link
        self._round, tag = round, round
        if round != HANDSHAKE:
            tag = (comm.slot(self.stamp) + 1 << MESSAGE_BITS) - round
        self._inbox, self._arrived = bytearray(nbytes * size), {rank}
        into = memoryview(self._inbox)
        into[rank * nbytes : (rank + 1) * nbytes] = messages[rank]
        self._left = size - 1  # to arrive; our own go by themselves
        for peer in range(size):
            if peer != rank:
                engine.post(link.irecv(into[peer * nbytes : (peer + 1) * nbytes], peer, tag), self, peer)
        for peer in (*range(rank + 1, size), *range(rank)):
            engine.sent(link.isend(messages[peer], peer, tag), nbytes, self, -1)
        if self._left == 0:
            self._exchanged()

    def completed(self, key: int) -> None:
        if key < 0:  # sent
            return
        self.touched = perf_counter()
        self.last = key
        self._arrived.add(key)
        self._left -= 1
        if self._left == 0 and not self.finished:
            self._exchanged()

    def _exchanged(self) -> None:
        if self._round == DESCRIPTION:
            self._disagree()
            return
        size = self.comm.size
        fields = struct.unpack(f"<{4 * size}q", self._inbox)
        stamps, digests, rows, expected = fields[::4], fields[1::4], fields[2::4], fields[3::4]
        if digests[0] != REFUSED and stamps.count(self.stamp) == digests.count(digests[0]) == size:
            if self._round == HANDSHAKE:
                if self.hint or max(rows) >> _ROWS_BITS:
                    self.same_signature = len({n >> _ROWS_BITS + HINT_BITS for n in rows}) == 1
                    self.hints = [n >> _ROWS_BITS & (1 << HINT_BITS) - 1 for n in rows]
                    rows = tuple(n & (1 << _ROWS_BITS) - 1 for n in rows)
                self.rows = rows
                if max(expected) >= 0 and self._check_expected(expected):
                    self._exchange_headers(CONFIRMATION)
                    return
            self._finish()
            return
        words = f"{type(self.refusal).__name__}: {self.refusal}" if self.refusal is not None else self.describe()
        text = words.encode()[: _DESCRIPTION_NBYTES - 1]
        message = bytes([self.refusal is not None]) + text.ljust(_DESCRIPTION_NBYTES - 1, b"\0")
        self._exchange(_DESCRIPTION_NBYTES, DESCRIPTION, [message] * self.comm.size)

    def _check_expected(self, expected: Sequence[int]) -> bool:
        """Some rank expects so many rows: must all hear from each other once more, to know if all are content?"""
        total = sum(self.rows)
        if not self.equal_totals:
            if self.expects not in (-1, total):
                self.refusal = ShapeError(
                    f"{self.describe()}: {total} rows arrive here, but an operand or out= has {self.expects}"
                )
            return True
        for rank, rows in enumerate(expected):
            if rows not in (-1, total):
                self.error = ShapeError(
                    f"{self.describe()}: {total} rows are gathered, but rank {rank} has an operand or out= with {rows}"
                )
                break
        return False

    def _disagree(self) -> None:
        said: dict[str, list[int]] = {}
        size = _DESCRIPTION_NBYTES
        for rank in range(self.comm.size):
            flag, text = self._inbox[rank * size], self._inbox[rank * size + 1 : (rank + 1) * size]
            verb = "refuse" if flag else "call"
            said.setdefault(f"{verb} {bytes(text).rstrip(bytes(1)).decode(errors='replace')}", []).append(rank)
        each = "; ".join(f"{_ranks(ranks, what)}" for what, ranks in said.items())
        error = MismatchError(f"the ranks disagree in call {self.stamp} of {self.comm.name}: {each}")
        self.error = self.refusal or error
        self._finish()

    def _finish(self) -> None:
        self.comm.channel.active.pop(self.stamp, None)
        if self.error is not None:
            self.comm.channel.failures.pop(self.stamp, None)
        then, self.then = self.then, None
        if then is not None:
            then(self)
        self.finished = True  # last: a thread that waits for it looks for what `then` has made

    def abandon(self, error: BaseException) -> None:
        if not self.finished:
            self.error = self.error or error
            self._finish()

    def broke(self, error: Exception) -> None:
        self.comm.channel.fail(self, error)

    def waits_for(self) -> tuple[int, str] | None:
        for peer in range(self.comm.size):
            if peer not in self._arrived:
                return peer, f"rank {peer} to come to call {self.stamp}, {self.describe()}"
        return None


def _ranks(ranks: list[int], what: str) -> str:
    """'ranks 0, 2 call x' or 'rank 1 calls x'."""
    if len(ranks) == 1:
        verb, _, rest = what.partition(" ")
        return f"rank {ranks[0]} {verb}s {rest}"
    return f"ranks {', '.join(map(str, ranks))} {what}"
