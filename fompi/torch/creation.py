"""What makes the groups of `torch.distributed`: `init_process_group("fompi")`, `new_group` and `_reconfigure`.

    dist.init_process_group("fompi", enable_reconfigure=True)       # torch >= 2.14: it has no members at first
    handle = dist._get_reconfigure_handle()                         # others get it by a store
    dist._reconfigure(uuid, handles).wait()                         # the ranks are in the order of the handles

Members that `_reconfigure` connects need no launcher, and may die, come late and come again (`fompi.members`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fompi import members
from fompi.base.errors import LaunchError, MismatchError, StateError, WaitTimeout
from fompi.engine.communicator import Communicator, engine_of_process
from fompi.mpi import launcher, transport
from fompi.mpi.link import of_members
from fompi.ops import messages
from fompi.torch import private
from fompi.torch.parameters import forms
from fompi.torch.process_group import KEPT, MEETING, Group, OfDevices
from fompi.torch.store import own_connection, seconds_to_start
from fompi.torch.work import Work, in_words_of_torch


class NoMembers:
    """Stands for the communicator of a group that has none. Each use raises a StateError that says why."""

    calls, closed = 0, True

    def __init__(self, rank: int, size: int, why: str):
        self.rank, self.size, self.why = rank, size, why
        self.channel = SimpleNamespace(timeout=None, broken=None)

    def check(self) -> None:
        raise StateError(f"the group has no members: {self.why}")

    def __getattr__(self, name: str) -> Any:
        self.check()


class Joining:
    """A group that joins an epoch, in a thread, because torch waits for it later. Used as a `Pending`."""

    def __init__(self, join: Callable[[], Any]):
        self._future: Future[Any] = Future()
        self.done = self._future.done
        Thread(target=self._run, args=(join,), name="fompi _reconfigure", daemon=True).start()

    def _run(self, join: Callable[[], Any]) -> None:
        try:
            self._future.set_result(join())
        except BaseException as error:
            self._future.set_exception(error)

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._future.result(timeout)
        except TimeoutError:
            if self.done():
                raise
            raise WaitTimeout(f"_reconfigure has not connected the members after {timeout:g} s") from None

    def then(self, callback: Callable[[], object]) -> None:
        self._future.add_done_callback(lambda _: callback())

    result = property(lambda self: self.wait())


class Reconfigurable(Group):
    """A Group whose ranks are those of its last `_reconfigure`. Others may have died, or go on without this one."""

    supports_reconfigure = property(lambda self: True)
    remedy = "dist._reconfigure(uuid, handles).wait() connects them"

    def __init__(self, rank: int, size: int, name: str, store: Any, timeout: timedelta):
        transport.start_alone()
        engine_of_process()  # in this thread, because it handles Ctrl-C
        nobody: Any = NoMembers(rank, size, f"_reconfigure was not called yet. {self.remedy}")
        super().__init__(nobody, name, store, timeout)
        self._used: set[int] = set()

    def get_backend(self, device: Any = None) -> Any:
        return self

    def get_reconfigure_handle(self) -> str:
        return members.handle()

    def reconfigure(self, opts: Any) -> Work:
        """Leave the members of before, and connect those with the handles of `opts`: a list, or a set in any order."""
        uuid, handles = opts.uuid, opts.handles
        if uuid in self._used:
            raise in_words_of_torch(StateError(f"the uuid {uuid} was already used: take another one"), "_reconfigure")
        self._used.add(uuid)
        given = opts.timeout or self._timeout
        seconds = given.total_seconds() if given > timedelta(0) else self._timeout.total_seconds()
        ordered = sorted(handles) if isinstance(handles, set | frozenset) else list(handles)
        self._leave("it was reconfigured", "_reconfigure is not finished: wait for its Work")
        return Work("_reconfigure", self.comm, [Joining(partial(self._join, uuid, ordered, seconds))])

    def _join(self, name: object, handles: Sequence[str], seconds: float) -> None:
        try:
            comm = members.join(name, handles, seconds)
        except BaseException as error:
            self._leave(f"it was not connected: {error}")
            raise
        self._use(comm)
        self.set_timeout(self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        super().set_timeout(timeout)

    def abort(self) -> None:
        """Leave the members: their waits for this rank end with an error. `_reconfigure` connects them again."""
        self._leave("it was aborted")

    def shutdown(self) -> None:
        KEPT.discard(self)
        self._leave("it was shut down")

    def _leave(self, why: str, now: str = "") -> None:
        comm = self.comm
        nobody: Any = NoMembers(comm.rank, comm.size, f"{now or why}. {self.remedy}")
        self._use(nobody)
        if not isinstance(comm, NoMembers):
            comm.abort(why)

    def get_error(self) -> Any:
        """What has ended the members of now: `ErrorType.TIMEOUT`, `REMOTE_ERROR`, or `SUCCESS`."""
        broken = self.comm.channel.broken
        name = "TIMEOUT" if isinstance(broken, WaitTimeout) else "SUCCESS" if broken is None else "REMOTE_ERROR"
        return getattr(private.ERROR_TYPE, name)


def create(opts: Any, _: Any = None) -> Any:
    """The group of torch's `init_process_group("fompi")` or `new_group`. Only its members call it.

    Raises LaunchError if torch and MPI number the ranks differently or this torch has one backend for all devices of a
    group, and DistBackendError if a member does not come.
    """
    by_device = private.backends_of_new_group()
    has_others = len(set(by_device.values())) > 1
    if has_others and OfDevices is None:
        text = ",".join(f"{device}:{backend}" for device, backend in by_device.items())
        raise LaunchError(
            f"the backend {text!r} needs torch 2.14 or later, but this is {torch.__version__}: before, a backend in "
            'Python has all devices of a group. Use init_process_group("fompi"), or another backend with '
            'new_group(backend="fompi") besides'
        )
    ranks, name, seconds = list(opts.global_ranks_in_group), str(opts.group_id), seconds_to_start(opts.timeout)
    if getattr(opts, "enable_reconfigure", False):
        KEPT.add(group := Reconfigurable(opts.group_rank, opts.group_size, name, opts.store, opts.timeout))
        return group
    world = private.with_communicator(dist.group.WORLD) if dist.is_initialized() else None
    within = None
    if isinstance(world, Reconfigurable):
        ranks, within = ranks or [*range(world.size())], world.comm.link.comm
    elif not ranks or len(ranks) == dist.get_world_size():
        transport.start_by_store(partial(own_connection, opts.store), opts.group_rank, opts.group_size, seconds)
    if ranks:
        chosen = of_members(ranks, _meet_members(ranks, zlib.crc32(name.encode()) % 30000, seconds), within)
        comm = Communicator(chosen, f"torch {name}", seconds=seconds)
        chosen.Free()
    else:
        comm = Communicator(None, "torch", seconds=seconds)
    refusal = None
    if (comm.rank, comm.size) != (opts.group_rank, opts.group_size):
        refusal = LaunchError(
            f"torch has rank {opts.group_rank} of {opts.group_size} here, but MPI has rank {comm.rank} of {comm.size}: "
            + (
                "leave out rank and world_size, or give them as MPI numbers the ranks (also RANK and WORLD_SIZE)"
                if comm.size > 1
                else "MPI has started before, alone. Call init_process_group before anything that starts MPI, or start "
                "with mpirun or torchrun. Lightning starts MPI to look for it: give it plugins=[LightningEnvironment()]"
            )
        )
    comm.agree(f"a group of torch of {ranks or 'all ranks'}", refusal)
    _prepare_wrappers()
    made = (OfDevices if has_others else Group)(comm, name, opts.store, opts.timeout)
    KEPT.add(made)
    return made


@cache
def _prepare_wrappers() -> None:
    """FSDP2 over these groups communicates behind computation, and DDP says which parameter differs, unasked."""

    def compare(wrapper: Any, module: torch.nn.Module) -> None:
        if (group := private.with_communicator(wrapper.process_group)) is not None:
            group.comm.agree(f"DistributedDataParallel of torch{forms(module, wrapper.parameters_to_ignore)}")

    private.before_ddp_compares(compare)
    private.at_first_forward(lambda model: import_module("fompi.torch.fully_sharded").by_default(model))


def _meet_members(ranks: Sequence[int], tag: int, seconds: float) -> int:
    """Wait until all members are here, at most `seconds`: MPI makes their communicator without a deadline.

    Returns the `tag` of the first member, for all of them: with `use_local_synchronization` torch may give a group
    another name on each rank. Raises MismatchError on all members if they mean different groups.
    """
    world = private.with_communicator(dist.group.WORLD)
    if world is None:
        return tag
    what, root, here = f"new_group of ranks {list(ranks)}", ranks[0], world.comm.rank
    others = [rank for rank in ranks if rank != root] if here == root else [root]
    note = np.array([zlib.crc32(what.encode()), tag])
    sends = [] if here == root else [world._start(messages.send, note, root, tag=MEETING)]
    receives = [world._start(messages.recv, rank, tag=MEETING) for rank in others]
    try:
        Work(what, world.comm, [*sends, *receives]).wait(timedelta(seconds=seconds))
    except dist.DistBackendError as error:
        late = [str(rank) for rank, receive in zip(others, receives, strict=True) if not receive.done()]
        if not late or not isinstance(error.__cause__, WaitTimeout):
            raise
        for receive in receives:
            receive.give_up()
        words = f"waited {launcher.in_seconds(seconds)} for rank {', '.join(late)} to call it: all ranks of it must"
        raise in_words_of_torch(WaitTimeout(words), what) from error
    notes = [receive.result for receive in receives]
    other = [rank for rank, (group, _) in zip(others, notes, strict=True) if group != note[0]]
    if here == root:
        answer = np.array([-1, tag]) if other else note
        Work(what, world.comm, [world._start(messages.send, answer, rank, tag=MEETING) for rank in others]).wait()
    if other:
        raise MismatchError(f"{what}: rank {other[0]} makes another group, or a member does: use the same order")
    return tag if here == root else int(notes[0][1])
