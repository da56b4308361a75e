"""Agreement before data moves: each rank sends 56 bytes to every other rank that say what it calls, with how many rows.

If the ranks disagree, or if one refuses its own arguments, the call ends with a typed error on all ranks. No result has
been written then. Every rank sends its own message, so it is known which ranks are missing.

A rank that made the same call before presumes that all ranks will say what they said then. Its headers may carry the
first small messages of the plan that followed, behind their 56 bytes. A receiver takes them if that came true, which
all ranks see from the headers. Otherwise it ignores them, and they are sent again where they are needed.
"""

from __future__ import annotations

import functools
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol

from fompi.base.differences import MOST_LETTERS, in_what_they_differ, without_details
from fompi.base.errors import MismatchError, PeerError, ShapeError, in_words
from fompi.engine.control import Channel
from fompi.engine.engine import Engine
from fompi.engine.in_flight import EAGER_NBYTES
from fompi.engine.tasks import CONFIRMATION, DESCRIPTION, HANDSHAKE, Task
from fompi.mpi.link import Link
from fompi.mpi.transport import start_mpi
from fompi.plans.plan import MESSAGE_BITS

_HEADER = struct.Struct("<7q")
"""Call number, digest, signature + hint + rows for the peer, expected rows (or -1), what saves the second round, and
which message of the plan it carries (0: none).

What saves it is a digest of all rows of this rank, and one of all these digests in the last agreement of this rank with
these rows (0: there was none). If all ranks send the latter, and it is that of the digests that arrive, the rows fit
as they did. The message is its number plus the `presumption` of the sender.
"""

MOST_AGREED = 256
"""A communicator remembers this many agreements of two rounds."""

HEADER_NBYTES, _FIELDS = _HEADER.size, _HEADER.size // 8

MOST_CARRIED_NBYTES = 1 << 16
"""The headers of a call carry at most this many bytes to a rank, all together."""


def packet_nbytes(size: int) -> int:
    """The room for a header and what it carries, if there are `size` ranks."""
    return HEADER_NBYTES + min(EAGER_NBYTES, MOST_CARRIED_NBYTES // size // 8 * 8)


@functools.lru_cache(maxsize=64)
def _packets(size: int) -> struct.Struct:
    """The headers of `size` ranks, without what they carry."""
    return struct.Struct("<" + f"7q{packet_nbytes(size) - HEADER_NBYTES}x" * size)


_PRESUMED, _NUMBERS = (1 << 62 - MESSAGE_BITS) - 1, (1 << MESSAGE_BITS) - 1


def presumption(headers: Sequence[Sequence[int]]) -> int:
    """What says that these are the headers of all ranks but for the numbers of the call: a digest, a free number."""
    return (digest_of([word for header in headers for word in header[1:6]]) & _PRESUMED | 1) << MESSAGE_BITS


def numbers_of(words: Sequence[int], presumed: int) -> list[tuple[int, int]]:
    """The rank and the number of each message that headers with these last words carry, if this was presumed."""
    return [(rank, word - presumed) for rank, word in enumerate(words) if word and word & ~_NUMBERS == presumed]


def carried(packets: Any, words: Sequence[int], presumed: int) -> dict[tuple[int, int], Any]:
    """What the headers that have arrived from all ranks carry, by rank and number of the message."""
    nbytes, data = len(packets) // len(words), memoryview(packets)
    return {
        (rank, number): data[rank * nbytes + HEADER_NBYTES : (rank + 1) * nbytes]
        for rank, number in numbers_of(words, presumed)
    }


_ROWS_BITS, HINT_BITS, SIGNATURE_BITS = 34, 7, 22
"""The bits of the third field of a header. Together they fit into a signed 64-bit integer."""

VALUE_BITS = _ROWS_BITS
"""`agree` sends its value in place of the rows."""

_DESCRIPTION_NBYTES, _ALL_DESCRIPTIONS_NBYTES = 1 << 18, 1 << 26
"""The room for a description, which is compressed, and for those of all ranks. Hardly any of it is touched."""

REFUSED = -1
"""In place of the digest: this rank refuses its own arguments."""

ENDED = -2
"""In place of the digest: this rank has ended by an error what the call belongs to (`fompi.parallel.section`)."""

ENDS_STEP = -3
"""What a rank compares that has ended a step by an error, where the others may begin the next one. It only refuses."""

_REFUSALS_OF_STEPS = {REFUSED: -3, ENDED: -4}
"""The digests of such a refusal. The error of the other ranks then has `ends_step`."""


def digest(text: str) -> int:
    """56 bits that identify `text`, the same on all ranks. `hash` is another number in another build of Python."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())


def digest_of(numbers: Sequence[int]) -> int:
    """56 bits that identify integers of 64 bits, the same on all ranks."""
    return int.from_bytes(blake2b(array("q", numbers), digest_size=7).digest())


class Ranks(Protocol):
    """What an agreement needs of the Communicator of its ranks."""

    name: str
    rank: int
    size: int
    link: Link
    engine: Engine
    channel: Channel
    agreed: dict[tuple[int, int], int]

    def check(self) -> None: ...

    def next_call(self) -> tuple[int, int]: ...

    def note_start(self, name: str, stamp: int) -> None: ...

    def slot(self, stamp: int) -> int: ...


def agree(comm: Ranks, text: str, refusal: Exception | None = None, value: int = 0) -> Sequence[int]:
    """Wait until all ranks call this with the same `text`. Returns the `value` of every rank. Collective.

    0 <= value < 1 << VALUE_BITS. A rank that has a `refusal` raises it. If a rank refuses, or calls something else, all
    ranks raise an error.
    """
    return begin_agreement(comm, text, refusal, value).values()


def begin_agreement(
    comm: Ranks,
    text: str,
    refusal: Exception | None = None,
    value: int = 0,
    compared: int | None = None,
    told: Sequence[int] = (),
) -> Agreement:
    """`agree`, in flight: `values()` waits for it.

    With a digest `compared`, the ranks compare that, and `text` is only for errors. If they agree, `arrived` are the
    numbers that each rank has `told`, equally many.
    """
    comm.check()
    with comm.engine.lock:
        stamp, _ = comm.next_call()
        number = digest(text) if compared is None else compared
        agreement = Agreement(comm, stamp, number, lambda: text, [value] * comm.size)
        agreement.refusal = refusal
        agreement.runs = [told] * comm.size if told else ()
        comm.note_start(without_details(text), stamp)
        agreement.start()
    return agreement


class Agreement(Task):
    """The handshake of one call. It calls `then(self)` when it is finished.

    Then either `error` is set, or `rows[source]` is the number of rows that each rank has for this rank.

    `rows` are the rows that this rank has for each rank. `digest` must be the same on all ranks; `describe` says the
    call in words, for errors. `signature` is 22 bits that may differ between the ranks; `same_signature` says
    afterwards whether they are the same on all. `hint` is a number of 7 bits; `hints` holds the numbers of all ranks
    afterwards.

    `runs` says how the rows for each rank are divided: equally many numbers for every rank. The ranks exchange them in
    a second round, and `arrived` has those of each source.

    `expects` is how many rows must arrive on this rank (-1: any number). With `equal_totals` the same number arrives on
    every rank, so each rank can check all of them. Without it each rank knows only its own total, and confirms it in a
    second round, unless all these rows have fit before.
    """

    awaits_start = True
    # Default values live on the class and are rebound, never mutated. This keeps creating an Agreement cheap.
    refusal: Exception | None = None
    equal_totals = True
    rows: Sequence[int] = ()
    same_signature = True
    hints: Sequence[int] = ()
    runs: Sequence[Sequence[int]] = ()
    arrived: Sequence[Sequence[int]] = ()
    arriving: Sequence[int] | None = None  # with `expects`, without `equal_totals`: the rows from each rank
    then: Callable[[Agreement], None] | None = None
    begun = 0.0  # when this rank started it, in seconds of perf_counter
    last = 0  # the rank whose message arrived last
    _ended: int | None = None  # a rank that has ended by an error what the call belongs to
    _ends_step = False  # True if some rank has called it with ENDS_STEP
    _round = HANDSHAKE
    carried: Mapping[tuple[int, int], Any] = MappingProxyType({})  # what headers have carried, by rank and number
    sent: Sequence[tuple[int, int]] = ()  # the ranks and numbers of messages that this rank's headers have carried
    _carries: Sequence[int] = ()  # the last word of the header for each rank, if C has sent them
    _missing = 0  # messages of this round that have not arrived
    _inbox: Any = bytearray()
    _held: Any = None  # the memory of headers that C has sent
    _arrived: set[int] = set()  # noqa: RUF012

    def __init__(
        self,
        comm: Ranks,
        stamp: int,
        digest: int,
        describe: Callable[[], str],
        rows: Sequence[int],
        expects: int = -1,
        signature: int = 0,
        hint: int = 0,
    ):
        self.comm, self.stamp, self.digest, self.describe = comm, stamp, digest, describe
        self.outgoing, self.expects = rows, expects
        self.hint = (signature << HINT_BITS | hint) << _ROWS_BITS

    def values(self) -> Sequence[int]:
        """`rows`, once all ranks have agreed. Raises `error`."""
        self.comm.engine.wait(self, self.comm.channel)
        if self.error is not None:
            raise self.error
        return self.rows

    def start(self) -> None:
        """Send the headers. Called with the engine's lock held."""
        channel = self.comm.channel
        self.moved_at = self.begun = perf_counter()
        channel.begin(self.stamp, self)
        self._exchange_headers(HANDSHAKE)
        if self.stamp in channel.failures and not self.finished:
            error, fatal = channel.failures[self.stamp]
            if fatal:  # the other ranks have abandoned this call after they received this handshake
                self.abandon(error)

    def headers(self) -> list[bytes]:
        """The header for each rank."""
        own_digest = self.digest
        if self.refusal is not None:
            ends_step = self.digest == ENDS_STEP
            own_digest = REFUSED if getattr(self.refusal, "world_origin", None) is None else ENDED
            own_digest = _REFUSALS_OF_STEPS[own_digest] if ends_step else own_digest
        pack, stamp, hint, expects = _HEADER.pack, self.stamp, self.hint, self.expects
        whole = known = 0
        if not self.equal_totals and not self.runs:
            whole = digest_of((expects, *self.outgoing, *(self.arriving or ())))
            known = self.comm.agreed.get((own_digest, whole), 0)
        return [pack(stamp, own_digest, rows | hint, expects, whole, known, 0) for rows in self.outgoing]

    @property
    def _name(self) -> str:
        return without_details(self.describe())

    @property
    def has_one_round(self) -> bool:
        """True for a finished agreement that the headers have decided."""
        return self._round == HANDSHAKE

    @property
    def headers_in(self) -> bytes:
        """The headers of all ranks, in rank order, if it had one round."""
        inbox, packet = self._inbox, packet_nbytes(self.comm.size)
        return b"".join([inbox[at : at + HEADER_NBYTES] for at in range(0, len(inbox), packet)])

    def go_on(
        self, inbox: Any, carries: Sequence[int], requests: Sequence[tuple[int, int]], code: int, begun: float
    ) -> None:
        """Go on where C has left it. Called with the engine's lock held. A `code` that is not 0 is an error of MPI.

        It began at `begun`, in seconds of perf_counter.

        `inbox`: the headers of all ranks, in memory where some may still arrive. `carries`: the last word of the header
        for each rank. `requests`: the messages in flight as handles of MPI, those to come with their rank, those that
        are sent with -1.
        """
        comm, MPI = self.comm, start_mpi()
        self.moved_at, self.begun = perf_counter(), begun
        comm.channel.begin(self.stamp, self)
        self._inbox, self._held, self._carries = memoryview(inbox).cast("B"), inbox, carries
        awaited = {peer for _, peer in requests if peer >= 0}
        self._arrived, self._missing = {*range(comm.size)} - awaited, len(awaited)
        for handle, peer in requests:
            comm.engine.post(MPI.Request.fromhandle(handle), self, peer)
        if code:
            error = MPI.Exception(code)
            comm.channel.fail(self, error)
            raise error
        if not awaited:
            self._end_round()

    def _exchange_headers(self, round: int) -> None:
        headers = self.headers()
        if self.runs and round == CONFIRMATION:
            headers = [header + struct.pack(f"<{len(n)}q", *n) for header, n in zip(headers, self.runs, strict=True)]
        nbytes = packet_nbytes(self.comm.size) if round == HANDSHAKE else len(headers[0])
        self._exchange(nbytes, round, headers)

    def _exchange(self, nbytes: int, round: int, messages: Sequence[bytes]) -> None:
        """Send `messages[peer]` to each rank, and receive one of at most `nbytes` from each, in rank order.

        MPI matches handshakes by the order of calls. Later rounds use the last tags of their call.
        """
        comm, engine = self.comm, self.comm.engine
        rank, size, link = comm.rank, comm.size, comm.link
        self._round, tag = round, round
        if round != HANDSHAKE:
            tag = (comm.slot(self.stamp) + 1 << MESSAGE_BITS) - round
        self._inbox, self._arrived = bytearray(nbytes * size), {rank}
        into = memoryview(self._inbox)
        into[rank * nbytes : rank * nbytes + len(messages[rank])] = messages[rank]
        self._missing = size - 1
        for peer in range(size):
            if peer != rank:
                engine.post(link.irecv(into[peer * nbytes : (peer + 1) * nbytes], peer, tag), self, peer)
        for peer in (*range(rank + 1, size), *range(rank)):
            awaited = round == DESCRIPTION  # it may be large, and this rank may leave by its error
            sent = engine.post_send(link.isend(messages[peer], peer, tag), len(messages[peer]), self, -1 - awaited)
            self._missing += awaited and not sent
        if self._missing == 0:
            self._end_round()

    def completed(self, key: int) -> None:
        if key == -1:  # a send that nobody awaits
            return
        self.moved_at = perf_counter()
        if key >= 0:
            self.last = key
            self._arrived.add(key)
        self._missing -= 1
        if self._missing == 0 and not self.finished:
            self._end_round()

    def _end_round(self) -> None:
        """All messages of this round have arrived: finish, or start the next round."""
        if self._round == DESCRIPTION:
            self._disagree()
            return
        size, n = self.comm.size, _FIELDS
        if self.runs and self._round == CONFIRMATION:
            self._inbox = self._take_runs()
        is_first = self._round == HANDSHAKE
        fields = (_packets(size) if is_first else struct.Struct(f"<{n * size}q")).unpack(self._inbox)
        stamps, digests, rows, expected = fields[::n], fields[1::n], fields[2::n], fields[3::n]
        if digests[0] >= 0 and stamps.count(self.stamp) == digests.count(digests[0]) == size:
            if is_first:
                if self._carries or any(fields[6::n]):
                    self._take_carried(fields)
                if self.hint or max(rows) >> _ROWS_BITS:
                    self.same_signature = len({n >> _ROWS_BITS + HINT_BITS for n in rows}) == 1
                    self.hints = [n >> _ROWS_BITS & (1 << HINT_BITS) - 1 for n in rows]
                    rows = tuple(n & (1 << _ROWS_BITS) - 1 for n in rows)
                self.rows = rows
                if (max(expected) >= 0 and self._must_confirm(expected, fields[4::n], fields[5::n])) or self.runs:
                    self._exchange_headers(CONFIRMATION)
                    return
            elif not self.runs:
                self._remember(fields[4::n])
            self._finish()
            return
        self._ended = next((r for r, d in enumerate(digests) if d in (ENDED, _REFUSALS_OF_STEPS[ENDED])), None)
        self._ends_step = not {*digests}.isdisjoint(_REFUSALS_OF_STEPS.values())
        words = in_words(self.refusal) if self.refusal is not None else self.describe()
        nbytes, refuses = min(_DESCRIPTION_NBYTES, _ALL_DESCRIPTIONS_NBYTES // size), bytes([self.refusal is not None])
        message = refuses + zlib.compress(words.encode())
        if len(message) > nbytes:
            message = refuses + zlib.compress(without_details(words)[:MOST_LETTERS].encode())
        self._exchange(nbytes, DESCRIPTION, [message] * size)

    def _take_carried(self, fields: Sequence[int]) -> None:
        """Find what headers have carried: that of ranks that have presumed what came true."""
        presumed = presumption([fields[at : at + _FIELDS] for at in range(0, len(fields), _FIELDS)])
        self.carried = carried(self._inbox, fields[6::_FIELDS], presumed)
        self.sent = numbers_of(self._carries, presumed)

    def _must_confirm(self, expected: Sequence[int], wholes: Sequence[int], known: Sequence[int]) -> bool:
        """True if a second round must confirm that the rows fit: they did not before."""
        fit_as_before = known[0] != 0 and known.count(digest_of(wholes)) == self.comm.size
        return not fit_as_before and self._check_expected(expected)

    def _remember(self, wholes: Sequence[int]) -> None:
        """These rows fit on all ranks: the next call with them needs one round."""
        agreed = self.comm.agreed
        while len(agreed) >= MOST_AGREED:
            del agreed[next(iter(agreed))]
        agreed[self.digest, wholes[self.comm.rank]] = digest_of(wholes)

    def _take_runs(self) -> bytearray:
        """Take the runs out of what has arrived. Returns the headers."""
        inbox, count = self._inbox, len(self.runs[0])
        each = _HEADER.size + 8 * count
        starts = range(0, len(inbox), each)
        self.arrived = [struct.unpack_from(f"<{count}q", inbox, at + _HEADER.size) for at in starts]
        return bytearray().join(inbox[at : at + _HEADER.size] for at in starts)

    def _check_expected(self, expected: Sequence[int]) -> bool:
        """Compare the rows that arrive with `expected`. True: a second round must confirm that they fit everywhere."""
        total = sum(self.rows)
        if not self.equal_totals:
            if self.expects not in (-1, total):
                self.refusal = ShapeError(
                    f"{self._name}: {total} rows arrive here, but an operand or out= has {self.expects}"
                )
            elif self.arriving is not None and list(self.arriving) != list(self.rows):
                self.refusal = ShapeError(
                    f"{self._name}: {list(self.rows)} rows arrive here, a number from each rank, but "
                    f"{list(self.arriving)} are expected"
                )
            return True
        for rank, rows in enumerate(expected):
            if rows not in (-1, total):
                self.error = ShapeError(
                    f"{self._name}: {total} rows are gathered, but rank {rank} has an operand or out= with {rows}"
                )
                break
        return False

    def _disagree(self) -> None:
        """End with an error that quotes the descriptions of all ranks, or says in what they differ."""
        nbytes = len(self._inbox) // self.comm.size
        packets = [self._inbox[at : at + nbytes] for at in range(0, len(self._inbox), nbytes)]
        self._inbox = bytearray()  # the error keeps this agreement alive
        texts = [zlib.decompressobj().decompress(packet[1:]).decode(errors="replace") for packet in packets]
        calls = in_what_they_differ(texts, [bool(packet[0]) for packet in packets])
        what = f"call {self.stamp} of {self.comm.name}: {calls}"
        error: Exception = MismatchError(f"the ranks disagree in {what}")
        if self._ended is not None:
            error = PeerError(f"rank {self._ended} does not take part in {what}", self._ended)
            error.world_origin = self.comm.link.world_ranks[self._ended]
        error.ends_step = self._ends_step  # type: ignore[attr-defined]
        self.error = self.refusal or error
        if self._ended is None:
            self.error.raised_by_all = self.comm.channel  # type: ignore[attr-defined]
        if self.comm.channel.owed is not None:
            self.comm.channel.owed.pay()  # the program hears of it by this error
        self._finish()

    def _finish(self) -> None:
        self.comm.channel.active.pop(self.stamp, None)
        if self.error is not None:
            self.comm.channel.failures.pop(self.stamp, None)
        then, self.then = self.then, None
        if then is not None:
            then(self)
        self.finished = True  # last: a thread that waits for this task reads what `then` has made

    def abandon(self, error: BaseException) -> None:
        if not self.finished:
            self.error = self.error or error
            self.comm.link.given_up += self.comm.engine.give_up(self)
            self._finish()

    def broke(self, error: Exception) -> None:
        self.comm.channel.fail(self, error)

    def waits_for(self) -> tuple[int, str] | None:
        for peer in range(self.comm.size):
            if peer not in self._arrived:
                return peer, f"rank {peer} to start call {self.stamp}, {self._name}"
        return None
