"""Messages between two ranks as calls in C: those whose header is known before it arrives.

| message | C does                                                                   |
|---------|--------------------------------------------------------------------------|
| small   | sends the header and the data as one; receives it, compares, copies      |
| larger  | sends both; receives the header, compares it, then receives the data     |

A receive expects the header of its `out=`, or of the last message. If another one arrives, Python reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fompi.engine.communicator import Communicator
from fompi.engine.in_flight import EAGER_NBYTES, FINISHED
from fompi.engine.tasks import DONE, Task
from fompi.runtime.lower import message_table
from fompi.runtime.native_run import STALL_SECONDS, InC, called, seconds_in_c

MOST_FORMS = 256
"""The forms of messages that a communicator remembers."""


class MessageInC(InC):
    """A message in flight that C carries out."""

    def _enter(self) -> None:
        self.comm.channel.active[self.stamp] = self


class Packet:
    """The memory of one message: what is sent or received first, and the header that is sent or expected."""

    def __init__(self, form: MessageForm):
        self.packet = np.zeros(EAGER_NBYTES, np.uint8)
        self.header = np.frombuffer(form.header, np.uint8)
        if form.is_send:
            self.packet[: len(self.header)] = self.header
        self.call = called(form.comm.library, form.table, form.comm, True)
        self.call.place(np.array([self.packet.ctypes.data, 0, self.header.ctypes.data], np.uint64))
        self.call.form(np.array([1], np.int32), 0, 8)


class MessageForm:
    """The messages with one header to or from one rank, with one tag."""

    def __init__(self, comm: Communicator, is_send: bool, peer: int, tag: int, header: bytes, nbytes: int):
        self.comm, self.is_send, self.header, self.nbytes = comm, is_send, header, nbytes
        self.table = message_table(is_send, peer, tag, len(header), nbytes)
        self._free: list[Packet] = []

    def begin(
        self,
        stamp: int,
        address: int,
        held: object,
        take_over: Callable[[Packet], Task],
        arrived: Callable[[Any], object],
        waits: bool,
    ) -> Task:
        """Begin a message whose data is at this address. The engine is locked. DONE: it is through.

        `held` is kept until then. `arrived(call)` is called once a message that is in flight now is through.
        """
        engine = self.comm.engine
        packet = self._free.pop() if self._free else Packet(self)
        call, is_finished = packet.call, False
        try:
            is_finished = call.run_on(0, seconds_in_c(engine, waits, True), STALL_SECONDS, 0, (address,)) == FINISHED
        finally:
            if not is_finished:

                def through() -> None:
                    arrived(call)
                    self._free.append(packet)

                task = MessageInC(call, self.comm, stamp, lambda: take_over(packet), through, (packet, held))
                task.awaited = waits
                task.moved()
        if is_finished:
            self._free.append(packet)
            return DONE
        return task


def may_be_in_c(comm: Communicator, peer: int, nbytes: int) -> bool:
    """True if a message of this many bytes to or from this rank may be carried out by C."""
    engine = comm.engine
    return (
        comm.library is not None
        and peer != comm.rank
        and comm.urgency is None
        and comm.recording is None
        and engine.report is engine.recorder
        and nbytes <= comm.most_nbytes
        and nbytes < 1 << 31
    )


def form_of(
    comm: Communicator, forms: dict[Any, MessageForm], is_send: bool, peer: int, tag: int, header: bytes, nbytes: int
) -> MessageForm:
    """The form of a message, among those that are known."""
    key = is_send, peer, tag, header
    form = forms.get(key)
    if form is None:
        while len(forms) >= MOST_FORMS:
            del forms[next(iter(forms))]
        form = forms[key] = MessageForm(comm, is_send, peer, tag, header, nbytes)
    return form
