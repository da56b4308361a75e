"""PMI-1, answered from a store: MPICH and its kin start under a launcher that starts no MPI, such as torchrun.

So do processes that a program has started itself, and that know an address, their rank and how many they are.

A launcher of MPI connects every rank to itself, and answers questions there: which rank this is, what the others have
published, are all of them here. Here a thread of each process answers them, from a store that all processes share.

1. `meet`      the processes find each other in the store, however often the launcher has restarted them
2. `connect`   PMI_FD, PMI_RANK and PMI_SIZE are set, and the thread begins to answer
3. `transport` calls MPI_Init, in a way that leaves the GIL to the thread

Open MPI cannot be started this way: it needs PMIx.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from math import inf
from time import perf_counter, sleep
from typing import Protocol

from fompi.base.errors import FompiError, LaunchError, WaitTimeout
from fompi.mpi import launcher

LONGEST_PAUSE = 0.05
"""Seconds between two questions to the store, while the answer is no."""

VALUE_NBYTES, KEY_NBYTES = 1024, 256
"""The longest value and key that MPI may publish. It splits longer ones."""


class KeyValueStore(Protocol):
    """What all processes share: `torch.distributed.Store` has these methods. None of them may wait for long."""

    def set(self, key: str, value: str) -> None:
        """Store the value."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins with 0, and return it."""

    def check(self, keys: list[str]) -> bool:
        """True if all keys are there."""


@dataclass(frozen=True)
class PmiJob:
    """The processes that met in `store`. Keys of the job begin with `name`; `nodes` is the node of each rank."""

    store: KeyValueStore
    name: str
    rank: int
    nodes: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.nodes)

    def key(self, *words: object) -> str:
        return "/".join(map(str, (self.name, *words)))


def meet(store: KeyValueStore, rank: int, size: int, node: str, library: str, seconds: float) -> PmiJob:
    """The Job of these `size` processes. Collective.

    The store may have the keys of an earlier job: a launcher that restarts its processes may keep it. So every rank
    brings a ticket that no other process has, and takes part in the job whose list has its ticket.
    Raises WaitTimeout after `seconds`, which names the ranks that are missing, and LaunchError if the ranks have loaded
    different MPI libraries, mean different numbers of ranks, or two of them are the same rank.
    """
    meeting = _Meeting(store, rank, size, [uuid.uuid4().hex, node, library, str(size)])
    carrier = "UCX" if library.startswith("UCX ") else "MPI"
    try:
        if not _waited(meeting.gather if rank == 0 else meeting.join, seconds):
            raise WaitTimeout(
                f"rank {rank} of {size} waited {launcher.in_seconds(seconds)} for {meeting.missing()} to start "
                f"{carrier}: " + (meeting.objection or "every process of the job must use fompi")
            )
    except FompiError:
        raise
    except Exception as error:
        why = meeting.objection or f"the store is gone, perhaps with the process that serves it: {error}"
        raise LaunchError(f"rank {rank} of {size} cannot start {carrier}: {why}") from error
    name, everyone = meeting.name, meeting.everyone
    libraries = [words[2] for words in everyone]
    if len({*libraries}) > 1:
        other = next(r for r in range(size) if libraries[r] != libraries[0])
        raise LaunchError(
            f"rank 0 has loaded {libraries[0]}, but rank {other} {libraries[other]}: give all hosts the same MPI"
        )
    return PmiJob(store, name, rank, tuple(words[1] for words in everyone))


class _Meeting:
    """One rank of `meet`. A rank that cannot take part objects, rank 0 refuses the job, and the others read that.

    Nobody else acts on an objection: it may belong to an earlier job, of which rank 0 is gone.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int, ticket: list[str]):
        self.store, self.rank, self.size, self.ticket = store, rank, size, ticket
        self.name = self.objection = ""
        self.everyone: list[list[str]] = [[] for _ in range(size)]
        self._ignores_refusal = False  # it was there before this rank: perhaps of an earlier job
        if rank == 0:
            self.name, self.everyone[0] = uuid.uuid4().hex, ticket
            store.set(self._key(0), json.dumps(ticket))
            store.set("job", self.name)

    def _key(self, *words: object) -> str:
        return "/".join(map(str, (self.name, *words)))

    def gather(self) -> bool:
        """On rank 0: true once all tickets are here, and all ranks can read them."""
        store, latest = self.store, self.store.get("job").decode()
        if latest != self.name:
            object_to(store, "two processes are rank 0: give each a rank of its own")
        if latest != self.name or store.check([self._key("objection")]):
            words = store.get(f"{latest}/objection").decode()
            store.set(self._key("refused"), words)
            sleep(4 * LONGEST_PAUSE)  # this rank may serve the store: the others read that
            raise LaunchError(f"MPI does not start: {words}")
        for r in range(self.size):
            if not self.everyone[r] and store.check([self._key(r)]):
                self.everyone[r] = json.loads(store.get(self._key(r)))
        if not all(self.everyone):
            return False
        store.set(self._key("all"), json.dumps(self.everyone))
        return True

    def join(self) -> bool:
        """On another rank: true once it is in the list of rank 0."""
        store = self.store
        if not store.check(["job"]):
            return False
        latest = store.get("job").decode()
        if latest != self.name:
            self.name = latest
            self._enter()
        if not self._ignores_refusal and store.check([self._key("refused")]):
            raise LaunchError(f"MPI does not start: {store.get(self._key('refused')).decode()}")
        if not store.check([self._key("all")]):
            return False
        self.everyone = json.loads(store.get(self._key("all")))
        return len(self.everyone) == self.size and self.everyone[self.rank] == self.ticket

    def _enter(self) -> None:
        """Bring the ticket to the job that is the latest now, or object to it."""
        store, size = self.store, self.ticket[-1]
        self._ignores_refusal, self.objection = store.check([self._key("refused")]), ""
        other = json.loads(store.get(self._key(0)))[-1]
        if other != size:
            self.objection = f"rank 0 is one of {other} ranks, but rank {self.rank} one of {size}: give all the same"
        elif store.add(self._key("came", self.rank), 1) > 1:
            self.objection = f"another process was rank {self.rank}: give each a rank of its own, a new job a new store"
        if self.objection:
            object_to(store, self.objection)
        store.set(self._key(self.rank), json.dumps(self.ticket))

    def missing(self) -> str:
        """Who is awaited. If there is a list of all, it is of an earlier job: rank 0 has begun no other one."""
        known = self.name and not self.store.check([self._key("all")])
        ranks = [str(r) for r in range(self.size) if not self.store.check([self._key(r)])] if known else []
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks or ['0'])}"


def object_to(store: KeyValueStore, words: str, seconds: float = 0.0) -> None:
    """Tell rank 0 why the job that begins here, within `seconds`, cannot start. It tells the others."""
    with suppress(Exception):  # the store is gone, and so is the job
        if _waited(lambda: store.check(["job"]), seconds):
            store.set(f"{store.get('job').decode()}/objection", words)


def _waited(is_done: Callable[[], bool], seconds: float) -> bool:
    """True once `is_done()`. False if it is not within `seconds`."""
    end, pause = perf_counter() + seconds, 1e-3
    while not is_done():
        if perf_counter() > end:
            return False
        sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def process_mapping(nodes: Sequence[str]) -> str:
    """Which ranks share a node, in the words of PMI: "(vector,(0,2,4),(2,1,3))".

    A block (first node, number of nodes, ranks on each) stands for ranks that follow each other.
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    blocks: list[list[int]] = []
    for node, ranks in groupby(nodes):
        number, count = numbers[node], len(list(ranks))
        if blocks and blocks[-1][2] == count and sum(blocks[-1][:2]) == number:
            blocks[-1][1] += 1
        else:
            blocks.append([number, 1, count])
    return f"(vector,{','.join(f'({first},{many},{each})' for first, many, each in blocks)})"


class Bridge:
    """Answers the MPI library of this process, in a thread that ends when the library closes the connection.

    A barrier of MPI_Init that takes longer than `seconds` ends the process. After `initialised` there is no limit.
    """

    def __init__(self, connection: socket.socket, job: PmiJob, seconds: float):
        self._connection, self._job, self._seconds = connection, job, seconds
        self._barriers, self._said_finalize, self._is_up = 0, False, False
        threading.Thread(target=self._serve, name="fompi PMI", daemon=True).start()

    def initialised(self) -> None:
        """MPI_Init has returned. From now on the caller limits its waits."""
        self._seconds, self._is_up = inf, True

    def finalised(self) -> None:
        """MPI_Finalize has returned. MPICH says "finalize" when the process exits, and no thread runs any more.

        So the answer is sent in advance, on a connection that nothing closes. If it is closed already, nobody asks.
        """
        with suppress(OSError):
            if not self._said_finalize:
                os.write(os.dup(self._connection.fileno()), b"cmd=finalize_ack rc=0\n")

    def _serve(self) -> None:
        with self._connection, self._connection.makefile("r") as lines:
            try:
                for line in lines:
                    answer = self.answer(dict(word.split("=", 1) for word in line.split() if "=" in word), line)
                    if answer:
                        self._connection.sendall(f"{answer}\n".encode())
                    if answer.startswith("cmd=finalize_ack"):
                        return
            except Exception as error:  # MPI ends the process, because the connection closes
                print(f"fompi: rank {self._job.rank} of {self._job.size}: {error}", file=sys.stderr, flush=True)

    def answer(self, words: dict[str, str], line: str = "") -> str:
        """The answer to one line of PMI-1, without its end. Empty: none is expected. Raises WaitTimeout."""
        command, key, job = words.get("cmd"), words.get("key", ""), self._job
        if command == "init":
            return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        if command == "get_maxes":
            return f"cmd=maxes kvsname_max=256 keylen_max={KEY_NBYTES} vallen_max={VALUE_NBYTES} rc=0"
        if command == "get_appnum":
            return "cmd=appnum appnum=0 rc=0"
        if command == "get_my_kvsname":
            # MPICH names shared memory after it: a job would write into that of another one, or of one that was killed.
            return f"cmd=my_kvsname kvsname={job.name} rc=0"
        if command == "get_universe_size":
            return f"cmd=universe_size size={job.size} rc=0"
        if command == "put":
            job.store.set(job.key("put", key), words.get("value", ""))
            return "cmd=put_result rc=0 msg=success"
        if command == "get":
            value = self._value(key)
            return f"cmd=get_result rc=0 msg=success value={value}" if value else "cmd=get_result rc=-1 msg=unknown_key"
        if command == "barrier_in":
            try:
                self._barrier()
            except Exception:
                if not self._is_up:
                    raise  # else MPI ends, and who served the store is gone: without an answer MPI would crash
            return "cmd=barrier_out rc=0"
        if command == "finalize":
            self._said_finalize = True
            return "cmd=finalize_ack rc=0"
        if command == "abort":  # MPI ends this process now, and the launcher ends the others
            return ""
        if line.strip() == "endcmd":
            command = "spawn"
        return f"cmd={command}_result rc=-1 msg=not_supported" if command else ""

    def _value(self, key: str) -> str:
        job = self._job
        if key == "PMI_process_mapping":
            mapping = process_mapping(job.nodes)
            return mapping if len(mapping) < VALUE_NBYTES else ""  # without it MPI compares the names of the hosts
        where = job.key("put", key)
        return job.store.get(where).decode() if job.store.check([where]) else ""

    def _barrier(self) -> None:
        job, self._barriers = self._job, self._barriers + 1
        arrived, opened = job.key("arrived", self._barriers), job.key("open", self._barriers)
        if job.store.add(arrived, 1) == job.size:
            job.store.set(opened, "1")
        elif not _waited(lambda: job.store.check([opened]), self._seconds):
            raise WaitTimeout(
                f"MPI_Init waited {launcher.in_seconds(self._seconds)} for all ranks: "
                f"{job.store.add(arrived, 0)} of {job.size} have come"
            )


LONGEST_FAREWELL = 5.0
"""Seconds that rank 0, which may serve the store, waits at its end for ranks that still need it."""


def leave(job: PmiJob) -> None:
    """This rank needs the store no more. Rank 0 waits until nobody does."""
    with suppress(Exception):  # the store is gone: so is the rank or the launcher that served it
        left = job.key("left")
        job.store.add(left, 1)
        if job.rank == 0:
            _waited(lambda: job.store.add(left, 0) >= job.size, LONGEST_FAREWELL)


def connect(job: PmiJob, environ: MutableMapping[str, str], seconds: float) -> Bridge:
    """Set the variables of PMI-1, and answer what MPI_Init will ask.

    Child processes do not inherit the connection. They see that they are children: `launcher.CONNECTED`.
    """
    ours, theirs = socket.socketpair()
    environ.update(PMI_FD=str(theirs.detach()), PMI_RANK=str(job.rank), PMI_SIZE=str(job.size))
    environ[launcher.CONNECTED] = launcher.process_of(environ)
    if launcher.MET in environ:  # nobody else has said what follows
        node = job.nodes[job.rank]
        environ.update(
            MPI_LOCALRANKID=str(job.nodes[: job.rank].count(node)), MPI_LOCALNRANKS=str(job.nodes.count(node))
        )
    for name in [name for name in environ if name.startswith("PMIX_")]:  # of an outer launcher
        del environ[name]
    return Bridge(ours, job, seconds)


def node_of(environ: MutableMapping[str, str]) -> str:
    """A name of this node: what torchrun calls it, else that of the host."""
    return environ.get("GROUP_RANK") or os.uname().nodename
