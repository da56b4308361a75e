"""Which schedule, by measurement: `effort="measure"` runs the best few in place, and keeps the fastest.

    y = fompi.matmul_reduce_scatter(x, w, effort="measure")      # the first call tries, later ones know
    step = fompi.bind(fompi.explain(...), effort="measure", comm=tp, x=x, w=w)

The unfused call is always among those that are tried, so what is kept is not slower than it. All ranks keep the same
one, by the median of the slowest rank. It is also kept on disk, for the next run on such a machine with this version:
in FOMPI_CACHE (a folder; 0: nowhere), else in $XDG_CACHE_HOME/fompi or ~/.cache/fompi. Only rank 0 reads and writes
there; a file that cannot be read, or not written, changes nothing but the time of the first call.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fompi.base.layout import Sizes, Slices
from fompi.base.version import __version__
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import HINT_BITS, VALUE_BITS, agree, digest
from fompi.mpi import launcher
from fompi.mpi.transport import library
from fompi.ops import operations
from fompi.ops.arguments import Arguments, LocalCall
from fompi.ops.operation import HOOKS, CallOptions, Operation
from fompi.planner.candidates import UNFUSED, Candidate, candidates_without_machine
from fompi.planner.choose import decode_rows, encode_rows
from fompi.planner.explain import Explanation, explain
from fompi.plans.plan import MOST_MESSAGES
from fompi.plans.problems import Problem
from fompi.plans.verify import flaw
from fompi.schedules.registry import REGISTERED, fingerprint, is_available, shares_of, to_one_peer, write

ROUNDS, FEW = 5, 5
"""How often each is run, after once to warm up; how many beside those without overlap."""


def choose(operation: Operation, arguments: Arguments, local: LocalCall, comm: Communicator) -> tuple[str, Slices]:
    """The schedule and slices that are the fastest for such a call, by running it. Collective where it is not known.

    Calls are alike if every rank has the same problem in them as before, and all together have about as many rows (to
    a power of two; an all-to-all is even or not): the ranks tell each other, which costs each call an agreement more
    than one that does not measure.
    """
    problem = local.problem
    sizes = Sizes(pairs=(local.rows,) * comm.size) if problem.moves == "all_to_all" else Sizes(local.rows)
    mine = digest(str(problem)) % (1 << VALUE_BITS - HINT_BITS) << HINT_BITS | encode_rows(local.rows, comm.rank)
    everyone = agree(comm, f'{problem.operation}(..., effort="measure")', value=mine)
    rows, even = decode_rows([one % (1 << HINT_BITS) for one in everyone])
    problems = digest(str([one >> HINT_BITS for one in everyone]))
    key = f"{problem.common} on {comm.size}, {problems:014x}, {rows.bit_length()} bits of rows"
    if problem.moves == "all_to_all":
        key += ", even" * even

    def listed() -> Iterable[Candidate]:
        return candidates(problem, sizes, comm)

    def timed(candidate: Candidate) -> float:
        begun = perf_counter()
        operation.begin(arguments, comm, CallOptions(candidate.schedule, candidate.slices)).wait()
        return perf_counter() - begun

    def can_be(candidate: Candidate) -> bool:
        fits = to_one_peer(problem, candidate.schedule, candidate.slices) <= MOST_MESSAGES
        return fits and candidate.anywhere(problem.size) and is_available(problem, candidate.schedule)

    winner = race(comm, key, listed, can_be, timed)
    return winner.schedule, winner.slices


def candidates(problem: Problem, sizes: Sizes, comm: Communicator) -> list[Candidate]:
    """Those worth a try: the best few on the machine that FOMPI_MACHINE names, else some of every kind."""
    if comm.machine is None:
        listed = [c for c in candidates_without_machine(problem) if c.anywhere(problem.size)]
        return [c for c in listed if c.schedule not in REGISTERED or not flaw(partial(write, problem, *c[:2], sizes))]
    return few(explain(problem, sizes, comm.machine), lambda c: c.anywhere(problem.size))


def few(explained: Explanation, can_be: Callable[[Candidate], bool] = lambda _: True) -> list[Candidate]:
    """Of those that can be, the best few by the model, and all without overlap."""
    walked = [one.candidate for one in explained.judged if one.proof is not None and can_be(one.candidate)]
    return [c for c in walked if c not in UNFUSED][:FEW] + [c for c in walked if c in UNFUSED]


def race(
    comm: Communicator,
    key: str,
    listed: Callable[[], Iterable[Candidate]],
    can_be: Callable[[Candidate], bool],
    timed: Callable[[Candidate], float],
    keep: bool = True,
) -> Candidate:
    """The fastest of those that rank 0 lists, by the seconds of `timed`. Collective if `key` is not known.

    What is known is known to all ranks alike, as long as they ask for the same in the same order. What is on disk is
    taken if it `can_be`. Nothing of that if it is not to `keep`. What is wrong on rank 0 is raised on all ranks.
    """
    key += fingerprint()
    if keep and (known := comm.choices.get(key)) is not None:
        return known
    told: list[Candidate] = []
    wrong: Exception | None = None
    try:
        if comm.rank == 0:
            stored = _load(comm, key, can_be) if keep else None
            told = list(listed()) if stored is None else [stored]
    except Exception as error:
        wrong = error
    agree(comm, f"a choice by measurement for {key}", wrong)
    tried = _told_by_rank_0(comm, told)
    winner = tried[0] if len(tried) == 1 else _fastest(comm, tried, timed)
    if keep:
        comm.choices[key] = winner
    if comm.rank == 0 and len(tried) > 1 and keep:
        _store(comm, key, winner)
    return winner


def _fastest(comm: Communicator, tried: Sequence[Candidate], timed: Callable[[Candidate], float]) -> Candidate:
    """The one whose slowest rank is the fastest, in the median of rounds that take turns."""
    seconds = np.zeros((ROUNDS, len(tried)))
    for candidate in tried:
        timed(candidate)
    for i in range(ROUNDS):
        for turn in range(len(tried)):
            k = (i + turn) % len(tried)
            seconds[i, k] = timed(tried[k])
    everyone = np.asarray(operations.all_gather(seconds[None], comm=comm))
    slowest = everyone.max(axis=0)
    return tried[min(range(len(tried)), key=lambda k: median(slowest[:, k]))]


def _told_by_rank_0(comm: Communicator, told: Sequence[Candidate]) -> list[Candidate]:
    text = np.frombuffer(json.dumps([list(c) for c in told]).encode(), np.uint8)
    nbytes = int(np.asarray(operations.broadcast(np.array([text.size]), comm=comm))[0])
    heard = operations.broadcast(text if comm.rank == 0 else np.zeros(nbytes, np.uint8), comm=comm)
    return [_candidate(fields) for fields in json.loads(bytes(np.asarray(heard)).decode())]


def _candidate(fields: Any) -> Candidate:
    """What JSON made of a candidate. Raises TypeError or ValueError for what is none."""
    schedule, slices, window, rows, order = fields
    slices = tuple(map(int, slices)) if isinstance(slices, list) else int(slices)
    owned = None if rows is None else tuple(map(int, rows))
    dests = tuple(tuple(map(int, each)) for each in order)
    return Candidate(str(schedule), slices, None if window is None else int(window), owned, dests)


# ---------------------------------------------------------------------------------------------------------- on disk


def folder() -> Path | None:
    """Where choices are kept; None: nowhere."""
    asked = os.environ.get("FOMPI_CACHE")
    if asked in ("0", ""):
        return None
    if asked is not None:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # nobody's home
        return (Path(base) if base else Path.home() / ".cache") / "fompi"
    return None


def _about(comm: Communicator, key: str) -> dict[str, Any]:
    """What a choice holds for."""
    here = library()
    machine = None if comm.machine is None else comm.machine.to_json()
    return {
        "fompi": __version__,
        "mpi": f"{here.name} {here.version}",
        "hosts": f"{comm.hosts:014x}" if machine is None else machine,
        "cpu": f"{platform.machine()}, {launcher.cores_per_rank():g} cores a rank",
        "network": comm.network,
        "ranks_on_host": launcher.detect().local_size,
        "progress": comm.engine.progress_mode,
        "call": key,
    }


def _file(about: dict[str, Any]) -> Path | None:
    kept = folder()
    name = blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()
    return None if kept is None else kept / f"{name}.json"


def _load(comm: Communicator, key: str, can_be: Callable[[Candidate], bool]) -> Candidate | None:
    about = _about(comm, key)
    path = _file(about)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text())
        found = _candidate(data["choice"])
        shares_of(found.schedule, found.slices)
        return found if data["about"] == about and can_be(found) else None
    except Exception:  # whatever it is, it is no choice of ours
        return None


def _store(comm: Communicator, key: str, winner: Candidate) -> None:
    about = _about(comm, key)
    path = _file(about)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        try:
            draft.write_text(json.dumps({"about": about, "choice": list(winner)}, indent=1))
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


HOOKS.measure = choose
