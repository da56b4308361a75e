"""The state machine of one call: each op starts as soon as nothing holds it back.

The loop is the one of the design: start the next op of each lane, wait only for what this op needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from threading import get_ident
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

from fompi.backends.base import Token
from fompi.engine.communicator import Communicator
from fompi.engine.in_flight import EAGER_NBYTES
from fompi.engine.tasks import QUIET, Task
from fompi.mpi.paths import NOTHING, Offer, Paths, Pull
from fompi.plans.plan import MESSAGE_BITS
from fompi.runtime.compiled import COLLECTIVE, COMPUTE, SEND, Compiled
from fompi.tensors.device_array import DeviceArray

ENTRY = -2
"""The largest key of an event that a device reaches once it has done what the program had enqueued before.

A call has one for its start, and one for each part of an input that became ready while the program still wrote it.
"""


class Announcing(NamedTuple):
    """Products that one kernel of a device computes: `launch(after)` returns their tokens, in this order.

    A token of all but the last one is done when the kernel has raised a flag. The host starts what needs the product
    then, so no stream waits for a flag.
    """

    ops: tuple[int, ...]
    launch: Callable[[Sequence[Token]], Sequence[Token]]


def _skip_kernel() -> None:
    """Takes the place of a kernel after the call has failed."""


class Dispatch(Task):
    """Counts down the dependencies of the ops of one program, and starts each op whose count reaches zero.

    | op                                | how it starts                                                             |
    |-----------------------------------|---------------------------------------------------------------------------|
    | send, receive                     | its request goes to the engine                                            |
    | the same, carried by a header     | a send is done already; a receive copies what has arrived                 |
    | send on an axis with priority     | the port starts it in its turn                                            |
    | collective of the MPI library     | the same; an unbound call first waits for its turn                        |
    | kernel on the host                | it waits in `ready` or `ready_merges` until a thread takes it             |
    | small sum or copy                 | it runs at once, in the thread that released it                           |
    | kernel on a device                | the backend enqueues it at once                                           |
    | the same, by the caller           | it waits in `ready` until the thread of the program takes it              |
    | product that is announced         | with the others of its kernel, once all of them can start                 |
    | kernel that needs such a product  | when its flag was seen                                                    |

    After an error no kernel runs any more, but every message is still sent and received. So no message is left behind.

    On a device the call is finished for the program once its messages are done and its kernels are enqueued. It settles
    later, when the kernels are done: then its trace is complete.
    """

    # Rarely used attributes live on the class and are rebound, never mutated. This keeps creating a call cheap.
    tokens: dict[int, Token] = {}  # noqa: RUF012
    unready: dict[tuple[str, int], list[int]] = {}  # noqa: RUF012  # (input, block) not ready yet -> the ops that read it
    announcing: Announcing | None = None  # products that one kernel of the device computes
    gathered: tuple[int, ...] = ()  # those of them that can start, until all can
    mirrored: Collection[int] = ()  # messages whose memory was copied, so that another process can open it
    thread = 0  # that of the program, where kernels run in it
    made: dict[int, Token] = {}  # noqa: RUF012  # the tokens of such kernels that have just run
    awaiting: dict[int, list[int]] = {}  # noqa: RUF012  # product that is not announced yet -> the kernels that need it
    is_small = False
    agreed: tuple[float, float, int] | None = None  # when the agreement began and ended, and which rank was last
    paths: Paths | None = None  # how messages move that a device reads or writes
    notes: dict[int, list[Callable[[], None]]] = {}  # noqa: RUF012  # for such messages in flight: call them at the end
    entries: dict[int, tuple[Token, ...]] = {}  # noqa: RUF012  # kernel -> what the program had enqueued when its parts were ready
    held_entry: dict[int, list[int]] = {}  # noqa: RUF012  # key -> messages of device memory that the program may still write
    sent: Collection[tuple[int, int]] = ()  # the peers and numbers of messages that headers have carried
    carried: Mapping[tuple[int, int], Any] = MappingProxyType({})  # the data of those that have arrived
    on_finish: Callable[[], None] | None = None
    then: Callable[[], None] | None = None  # called once the kernels of a call that has returned are done
    end: Task | None = None  # what a thread waits for that needs these kernels

    # What the call decides (`fompi.runtime.program.Run`).
    has_turn: Callable[[int], bool]  # may this collective of the library start now? If not, the call starts it later
    is_held: Callable[[int], bool]  # must this op of a failed call not start yet? The call starts it later
    collective_started: Callable[[], None]  # one of the library's collectives has started
    token_arrived: Callable[[], None]  # the previous rank has started this call with the same label and counts
    entered: Callable[[int], None]  # the device has done what the program had enqueued (`hold`), with this key
    kernel_failed: Callable[[int, BaseException], None]  # the kernel of this op has raised an error
    kernel_failed_late: Callable[[int, BaseException], None]  # the same, after the call has returned to the program

    def __init__(self, compiled: Compiled, comm: Communicator, stamp: int, slot: int):
        self.compiled, self.comm, self.stamp = compiled, comm, stamp
        self.tag = slot << MESSAGE_BITS
        self.blockers = list(compiled.blockers)  # for each op: how many events it still waits for
        self.unfinished = len(compiled.ops)  # how many ops are not done
        self.ready: list[int] = []  # heaps of op numbers: the first op of the program comes first
        self.ready_merges: list[int] = []
        self.begun = [0.0] * self.unfinished  # for each op: when it began and ended, in seconds of perf_counter
        self.ended = [0.0] * self.unfinished
        self.actions: list[Any] = []
        self.collectives_left, self.forwards = compiled.collectives, compiled.forwards
        if compiled.asynchronous:
            self.tokens, self.notes, self.entries, self.held_entry = {}, {}, {}, {}
        if compiled.by_caller:
            self.thread, self.made = get_ident(), {}

    def has_ended(self, i: int) -> bool:
        """True once op `i` is done."""
        return bool(self.ended[i])

    # -- starting ops
    def start_ops(self, queue: list[int]) -> None:
        """Start these ops, and all ops that become free because these have started, or are done at once."""
        compiled, engine, link = self.compiled, self.comm.engine, self.comm.link
        kinds, peers, numbers, on_start, blockers = (
            compiled.kinds, compiled.peers, compiled.numbers, compiled.on_start, self.blockers,
        )  # fmt: skip
        urgency = self.comm.urgency
        if compiled.asynchronous:  # kernels first: enqueueing a kernel takes less time than starting a message
            queue.sort(key=lambda i: kinds[i] != COMPUTE)
        at = 0
        while at < len(queue):
            i = queue[at]
            at += 1
            kind = kinds[i]
            if kind == COMPUTE:
                if compiled.asynchronous and i not in compiled.by_caller:
                    self._enqueue(i, queue)
                elif self.is_small and compiled.merges[i]:
                    queue.extend(self._merge(i))
                else:
                    self._await_thread(i)
                continue
            action = self.actions[i]
            if (kind == COLLECTIVE and not self.has_turn(i)) or (
                self.error is not None and action is not None and self.is_held(i)
            ):
                continue
            self.begun[i] = perf_counter()
            if kind == COLLECTIVE and self.paths is None:
                engine.post(action.start(), self, i)
                self.collective_started()
            elif action is None or ((self.sent or self.carried) and self._is_carried(i)):  # no rows, or it was carried
                queue.extend(self._complete(i))
            elif (
                self.paths is not None
                or (nbytes := action.nbytes) > self.comm.most_nbytes
                or (urgency is not None and kind == SEND and nbytes > EAGER_NBYTES)
            ):
                if not self._start_specially(i):
                    continue
            elif kind == SEND:
                send = link.issend if compiled.is_paced and nbytes > EAGER_NBYTES else link.isend
                if engine.post_send(send(action, peers[i], self.tag + numbers[i]), nbytes, self, i):
                    queue.extend(self._complete(i))
            else:
                engine.post(link.irecv(action, peers[i], self.tag + numbers[i]), self, i)
            for j in on_start[i]:
                blockers[j] -= 1
                if blockers[j] == 0:
                    queue.append(j)

    def _start_specially(self, i: int) -> bool:
        """Start what a device uses, what is too large for one message, or what goes in its turn. False: not yet."""
        action, is_send = self.actions[i], self.compiled.kinds[i] == SEND
        if self.compiled.kinds[i] == COLLECTIVE:
            if not self._may_move(i, action.reads, action.writes):
                return False
            self.comm.engine.post(action.start(), self, i)
            self.collective_started()
        elif self.paths is not None:
            return self._move(i)
        elif is_send and self.comm.urgency is not None and action.nbytes > EAGER_NBYTES:
            self._send_in_turn(i, action)
        else:
            self._post_parts(i, action)
        return True

    def _await_thread(self, i: int) -> None:
        """A kernel on the host waits for a thread."""
        if not (self.ready or self.ready_merges):
            self.comm.engine.kernels_ready(self)
        heappush(self.ready_merges if self.compiled.merges[i] else self.ready, i)

    def _is_carried(self, i: int) -> bool:
        """True if a header has carried message `i` (`fompi.engine.handshake`). Takes in what has arrived."""
        if self.compiled.kinds[i] == COLLECTIVE:
            return False
        message = self.compiled.peers[i], self.compiled.numbers[i]
        if self.compiled.kinds[i] == SEND:
            return message in self.sent
        if message in self.carried and self.error is None:
            target = memoryview(self.actions[i]).cast("B")
            target[:] = self.carried[message][: target.nbytes]
        return message in self.carried

    def _send_in_turn(self, i: int, data: Any) -> None:
        """Send when nothing more urgent is on its way (`fompi.engine.port`)."""
        tag = self.tag + self.compiled.numbers[i]
        self.begun[i] = 0.0  # until then a wait does not report its receiver as missing
        self.comm.send_in_turn(self._call(i), data, self.compiled.peers[i], tag, self, i)

    def posted(self, key: int) -> None:
        self.begun[key] = perf_counter()

    def _post_parts(self, i: int, data: Any) -> None:
        """Send or receive data that is too large for one message, in several messages.

        Both ranks cut the data at the same places. MPI keeps the order of messages that have the same tag.
        """
        call, most, peer = self._call(i), self.comm.most_nbytes, self.compiled.peers[i]
        tag = self.tag + self.compiled.numbers[i]
        parts = [data[at : at + most] for at in range(0, data.nbytes, most)]
        self.comm.engine.post_all([partial(call, part, peer, tag) for part in parts], self, i)

    def _call(self, i: int) -> Callable[[Any, int, int], Any]:
        """The function of the link for message `i`, which is no small one."""
        link, compiled = self.comm.link, self.compiled
        if compiled.kinds[i] != SEND:
            return link.irecv
        return link.issend if compiled.is_paced else link.isend

    def _move(self, i: int) -> bool:
        """Send or receive memory that a device uses. False: not yet (`is_held`)."""
        paths, engine = self.paths, self.comm.engine
        assert paths is not None
        data, peer, is_send = self.actions[i], self.compiled.peers[i], self.compiled.kinds[i] == SEND
        tag, is_pulled = self.tag + self.compiled.numbers[i], paths.moves_by_ipc(peer)
        reads, writes = ([data], ()) if is_send else ((), [data])
        if is_pulled and is_send and not self._is_mirrored(i, data):
            return False
        is_noted = is_send or not is_pulled  # a pull is a copy of the device, which notes it
        if is_noted and not self._may_move(i, reads, writes):
            return False
        if is_pulled and is_send:
            handle = self._handle(i, data)
            if handle is None:
                return False
            engine.launched(Offer(paths.link, handle, peer, tag), self, i)
            return True
        if is_pulled:
            target = data if isinstance(data, DeviceArray) and self.error is None else None
            engine.launched(Pull(paths, target, peer, tag, str(self.compiled.ops[i])), self, i)
            return True
        if isinstance(data, DeviceArray):
            data = paths.device.memory(data)
        if is_send and self.comm.urgency is not None and data.nbytes > EAGER_NBYTES:
            self._send_in_turn(i, data)
        elif data.nbytes > self.comm.most_nbytes:
            self._post_parts(i, data)
        else:
            engine.post(self._call(i)(data, peer, tag), self, i)
        return True

    def _is_mirrored(self, i: int, data: Any) -> bool:
        """True if another process can open what message `i` sends. If not, a copy begins, and it starts after that."""
        if i in self.mirrored or not isinstance(data, DeviceArray) or self.error is not None or self.paths is None:
            return True
        try:
            token = self.paths.device.mirror(data)
        except Exception as error:
            return self._goes_on(i, error)
        if token is None:
            return True
        self.mirrored = {*self.mirrored, i}
        self.begun[i] = 0.0
        self.hold(token, [i])
        return False

    def _may_move(self, i: int, reads: Sequence[Any], writes: Sequence[Any]) -> bool:
        """Tell the device that a message begins to read and write these arrays. A race is an error of this call.

        False: the message has become worthless, and another rank does not know it yet (`is_held`).
        """
        if self.error is None and self.paths is not None:
            message, what = self.paths.device.message, str(self.compiled.ops[i])
            try:
                self.notes[i] = [*(message(what, a, False) for a in reads), *(message(what, a, True) for a in writes)]
            except Exception as error:
                return self._goes_on(i, error)
        return True

    def _handle(self, i: int, data: Any) -> bytes | None:
        """The handle of memory that another rank will copy. An error of the device is one of this call.

        None: the message has become worthless, and must not start yet (`is_held`).
        """
        if isinstance(data, DeviceArray) and self.error is None and self.paths is not None:
            try:
                return self.paths.handle(data)
            except Exception as error:
                if not self._goes_on(i, error):
                    return None
        return NOTHING

    def _goes_on(self, i: int, error: Exception) -> bool:
        """Message `i` has become worthless. False: another rank does not know it yet (`is_held`)."""
        self.kernel_failed(i, error)
        if self.is_held(i):
            self.begun[i] = 0.0
            return False
        return True

    def _merge(self, i: int) -> list[int]:
        """Run a small sum or copy in this thread. Returns the ops that become free."""
        self.begun[i] = perf_counter()
        if self.error is None:
            try:
                if self.compiled.moves[i]:
                    self.actions[i]()
                else:
                    QUIET.run(self.actions[i])  # the engine's lock is held, so only one thread uses it
            except Exception as error:
                self.kernel_failed(i, error)
        return self._complete(i)

    def _enqueue(self, i: int, queue: list[int]) -> None:
        """Give a kernel to the device, behind the kernels that it follows. Kernels that follow it become free."""
        self.begun[i] = perf_counter()
        if self.announcing is not None and self._is_gathered(i, queue):
            return
        if self.error is None:
            try:
                after = [self.tokens[j] for j in self.compiled.follows[i] if j in self.tokens]
                token = self.actions[i]([*after, *self.entries.pop(i, ())])
            except Exception as error:
                self.kernel_failed(i, error)
            else:
                self.tokens[i] = token
                self.comm.engine.launched(token, self, i)
        self._enqueued(i, queue)

    def launch_failed(self, i: int, error: Exception) -> None:
        """The kernel of op `i` could not be enqueued."""
        self.kernel_failed(i, error)
        queue: list[int] = []
        self._enqueued(i, queue)
        self.go_on(queue)

    def _enqueued(self, i: int, queue: list[int]) -> None:
        for j in self.compiled.on_start[i]:
            self.blockers[j] -= 1
            if self.blockers[j] == 0:
                queue.append(j)
        if self.error is not None:
            queue.extend(self._complete(i))

    def _is_gathered(self, i: int, queue: list[int]) -> bool:
        """True if kernel `i` waits for a product that is not announced yet, or is such a product.

        The kernel of all these products is launched once the last of them can start.
        """
        assert self.announcing is not None
        ops, launch = self.announcing
        follows, tokens = self.compiled.follows, self.tokens
        if i not in ops:
            missing = [j for j in follows[i] if j in self.awaiting]
            if not missing or self.error is not None:
                return False
            self.awaiting[missing[0]].append(i)  # then it comes here again
            return True
        self.gathered = (*self.gathered, i)
        if len(self.gathered) < len(ops):
            return True
        if self.error is None:
            try:
                made = launch([tokens[j] for j in dict.fromkeys(j for k in ops for j in follows[k]) if j in tokens])
            except Exception as error:
                self.kernel_failed(i, error)
            else:
                self.awaiting = {k: [] for k in ops[:-1]}
                for k, token in zip(ops, made, strict=True):
                    tokens[k] = token
                    self.comm.engine.launched(token, self, k)
        for k in ops:
            self._enqueued(k, queue)
        return True

    # -- completing ops
    def _complete(self, i: int) -> list[int]:
        """Op `i` is done. Returns the ops that become free."""
        self.ended[i] = self.moved_at = perf_counter()
        self.unfinished -= 1
        if self.notes and i in self.notes:
            for end in self.notes.pop(i):
                end()
        blockers, free = self.blockers, []
        for j in self.compiled.on_done[i]:
            blockers[j] -= 1
            if blockers[j] == 0:
                free.append(j)
        return free

    def completed(self, key: int) -> None:
        if self.finished and not self.is_enqueued:  # the call was abandoned
            return
        if key < 0:
            self.entered(key) if key <= ENTRY else self.token_arrived()
            return
        free = self._complete(key)
        if key in self.tokens:
            token = self.tokens.pop(key)
            self.begun[key], self.ended[key] = token.begun, token.due
        if self.awaiting:
            free = [*free, *self.awaiting.pop(key, ())]
        if free:
            self.start_ops(free)
        if self.unfinished == 0:
            self.finish()
        elif self.paths is not None:
            self.end_for_program()

    def go_on(self, free: list[int]) -> None:
        """Start these ops. If nothing is left then, the call ends. Without rows they are done at once."""
        self.start_ops(free)
        if self.unfinished == 0 and not self.finished:
            self.finish()
        elif self.paths is not None:
            self.end_for_program()

    def end_for_program(self) -> None:
        """On a device: the call is finished once all messages are done and all kernels are enqueued.

        The kernels keep the memory that they use until they are done. `settle` waits for them.
        """
        if self.end is not None:
            self.end.moved_at = self.moved_at
        if self.unfinished == len(self.tokens) and self.error is None and not self.finished:
            self.comm.channel.active.pop(self.stamp, None)
            self.is_enqueued = self.finished = True

    def in_flight(self) -> list[Token]:
        """The tokens of kernels that are enqueued and not known to be done, in the order of their launches."""
        with self.comm.engine.lock:
            return list(self.tokens.values())

    def settle(self) -> None:
        with self.comm.engine.lock:
            if not self.is_enqueued:
                return
            end = self.end = self.end or Task()
        self.comm.engine.wait(end, self.comm.channel, patient=True)
        if end.error is not None:
            raise end.error

    def take(self, merges_only: bool) -> tuple[int, Callable[[], object]] | None:
        """The next kernel. Sums and copies come first, since other ranks wait for them; then program order."""
        if self.ready_merges:
            i = heappop(self.ready_merges)
        elif self.ready and not merges_only and (not self.thread or self.thread == get_ident()):
            i = heappop(self.ready)
        else:
            return None
        if not (self.ready or self.ready_merges):
            self.comm.engine.kernels_done(self)
        if self.error is not None:
            return i, _skip_kernel
        return i, partial(self._run_by_caller, i) if self.thread else self.actions[i]

    def _run_by_caller(self, i: int) -> None:
        """Run a function of the program that enqueues on a device."""
        after = [self.tokens[j] for j in self.compiled.follows[i] if j in self.tokens]
        self.made[i] = self.actions[i](after)

    def ran(self, key: int, begun: float, error: BaseException | None) -> None:
        if key >= 0:
            self.begun[key] = begun
        if error is not None and self.error is None:
            if not self.finished:
                self.kernel_failed(key, error)
            elif self.is_enqueued:
                self.kernel_failed_late(key, error)
        if self.thread and key >= 0:
            self._ran_by_caller(key)
        else:
            self.completed(key)

    def _ran_by_caller(self, i: int) -> None:
        """What a function of the program has enqueued is a kernel in flight. Kernels that follow it become free."""
        token = self.made.pop(i, None)
        if token is not None and self.error is None:
            self.tokens[i] = token
            self.comm.engine.launched(token, self, i)
        queue: list[int] = []
        self._enqueued(i, queue)
        self.go_on(queue)

    def hold(self, entry: Token, messages: list[int]) -> None:
        """Let these messages wait until the device has done what the program had enqueued, whose token is `entry`."""
        key = min(self.held_entry, default=ENTRY + 1) - 1
        self.held_entry[key] = messages
        for i in messages:
            self.blockers[i] += 1
        self.comm.engine.launched(entry, self, key)

    def ready_part(self, name: str, block: int, entry: Token | None = None) -> None:
        """The program has written block `block` of the input `name`: the ops that read it may start.

        On a device `entry` is the token of what the program has enqueued until now. Only the kernels that read the
        block follow it. Messages that read the memory of the device wait for it.
        """
        free, readers = [], self.unready.pop((name, block), ())
        if entry is not None:
            for i in readers:
                if self.compiled.kinds[i] == COMPUTE:
                    self.entries[i] = (*self.entries.get(i, ()), entry)
            if messages := [i for i in readers if self.compiled.moves_device_memory(i)]:
                self.hold(entry, messages)
        for i in readers:
            self.blockers[i] -= 1
            if self.blockers[i] == 0:
                free.append(i)
        self.go_on(free)

    def finish(self) -> None:
        self.comm.channel.active.pop(self.stamp, None)
        on_finish, self.on_finish = self.on_finish, None
        try:
            if on_finish is not None and not self.unfinished:  # an abandoned call has unfinished ops
                on_finish()
        finally:
            self.finished = True  # last: a thread that waits for this call reads what `on_finish` has noted
            if self.is_enqueued:
                self._settled()

    def _settled(self) -> None:
        """The kernels of a call that has returned are done."""
        self.is_enqueued, then, self.then = False, self.then, None
        try:
            if then is not None:
                then()
        finally:
            if self.end is not None:
                self.end.finished = True
