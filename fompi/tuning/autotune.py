"""Schedules that are chosen by measurement: `effort="measure"` runs the best candidates and keeps the fastest one.

    y = fompi.matmul_reduce_scatter(x, w, effort="measure")      # the first call measures, later calls know the result
    step = fompi.bind(fompi.explain(...), effort="measure", comm=tp, x=x, w=w)

The candidates without overlap are always measured too. So the kept one is not slower than they are. All ranks keep the
same one: the one whose slowest rank has the least median time.

The choice is also kept on disk, for later runs on the same hosts with this version. The folder is FOMPI_CACHE ("0":
none), else $XDG_CACHE_HOME/fompi or ~/.cache/fompi. Only rank 0 reads and writes there. If a file cannot be read or
written, only the time of the first call changes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fompi.base import kept
from fompi.base.call_options import CallOptions
from fompi.base.differences import detail
from fompi.base.layout import Sizes, Slices
from fompi.base.log import log
from fompi.base.version import __version__
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import HINT_BITS, VALUE_BITS, agree, digest
from fompi.mpi import environment, launcher
from fompi.mpi.transport import library
from fompi.ops import operations
from fompi.ops.arguments import Arguments, LocalCall
from fompi.ops.decide import place_of
from fompi.ops.operation import Operation
from fompi.planner.candidates import UNFUSED, Candidate, candidates_without_machine
from fompi.planner.choose import decode_rows, encode_rows
from fompi.planner.explain import Explanation, explain
from fompi.plans.plan import MOST_MESSAGES
from fompi.plans.problems import Problem, keywords
from fompi.plans.verify import flaw
from fompi.schedules.registry import REGISTERED, fingerprint, is_available, messages_per_peer, shares_of, write
from fompi.tuning.rounds import seconds_of, text_of_rank_0

ROUNDS = 5
"""How often each candidate is timed, after one call to warm up."""

MOST_CANDIDATES = 5
"""How many candidates are measured, besides those without overlap."""


def measured_schedule(
    operation: Operation[Any], arguments: Arguments, local: LocalCall, comm: Communicator
) -> tuple[str, Slices]:
    """Schedule and slices of the fastest candidate for a call. Collective; it runs the candidates if none is known.

    A known choice is used again if every rank has the same problem as then, and if all ranks together have about as
    many rows (to a power of two; an all-to-all must also be as even). The ranks exchange this. So each such call needs
    one agreement more than a call with effort="plan".
    """
    problem = local.problem
    if problem.experts:
        sizes = problem.spread((sum(local.rows),) * comm.size)
    else:
        sizes = Sizes(pairs=(local.rows,) * comm.size) if problem.moves == "all_to_all" else Sizes(local.rows)
    own = digest(str(problem)) % (1 << VALUE_BITS - HINT_BITS) << HINT_BITS | encode_rows(local.rows, comm.rank)
    values = agree(comm, f'{problem.operation}(..., effort="measure")', value=own)
    rows, even = decode_rows([value % (1 << HINT_BITS) for value in values])
    problems = digest(str([value >> HINT_BITS for value in values]))
    key = f"{problem.common} on {comm.size}{detail('the problems', '', problems)}, {rows.bit_length()} bits of rows"
    key += place_of(comm, local)
    if problem.moves == "all_to_all":
        key += ", even" * even

    def list_candidates() -> Iterable[Candidate]:
        return candidates(problem, sizes, comm)

    trial = replace(arguments, out=None, known=None) if local.in_place else arguments  # x is needed again

    def time_call(candidate: Candidate) -> float:
        options = CallOptions(candidate.schedule, candidate.slices, **keywords(problem))
        return seconds_of(lambda: operation.begin(trial, comm, options).wait())

    def is_usable(candidate: Candidate) -> bool:
        fits = messages_per_peer(problem, candidate.schedule, candidate.slices) <= MOST_MESSAGES
        return fits and candidate.fits_call(problem.size) and is_available(problem, candidate.schedule)

    best = fastest_of(comm, key, list_candidates, is_usable, time_call)
    return best.schedule, best.slices


def candidates(problem: Problem, sizes: Sizes, comm: Communicator) -> list[Candidate]:
    """The candidates that are measured: the best ones on the machine of FOMPI_MACHINE, else some of every kind."""
    if comm.machine is None:
        listed = [c for c in candidates_without_machine(problem) if c.fits_call(problem.size)]
        return [c for c in listed if c.schedule not in REGISTERED or not flaw(partial(write, problem, *c[:2], sizes))]
    return best_by_model(explain(problem, sizes, comm.machine), lambda c: c.fits_call(problem.size))


def best_by_model(explanation: Explanation, is_usable: Callable[[Candidate], bool] = lambda _: True) -> list[Candidate]:
    """The best usable candidates by the model, at most MOST_CANDIDATES, then all usable ones without overlap."""
    simulated = [judged.candidate for judged in explanation.judged if judged.proof is not None]
    usable = [candidate for candidate in simulated if is_usable(candidate)]
    return [c for c in usable if c not in UNFUSED][:MOST_CANDIDATES] + [c for c in usable if c in UNFUSED]


def fastest_of(
    comm: Communicator,
    key: str,
    list_candidates: Callable[[], Iterable[Candidate]],
    is_usable: Callable[[Candidate], bool],
    time_call: Callable[[Candidate], float],
    keep: bool = True,
) -> Candidate:
    """The fastest of the candidates that rank 0 lists. `time_call(candidate)` runs a call and returns its seconds.

    Collective if the communicator knows no choice for `key`. All ranks know the same choices, because they ask for the
    same keys in the same order. A choice on disk is used if `is_usable(candidate)`. `keep=False` neither uses nor keeps
    a choice. An error on rank 0 is raised on all ranks.
    """
    key += fingerprint()
    known: Candidate | None = comm.choices.get(key) if keep else None
    if known is not None:
        return known
    listed: list[Candidate] = []
    refusal: Exception | None = None
    try:
        if comm.rank == 0:
            stored = _load(comm, key, is_usable) if keep else None
            listed = list(list_candidates()) if stored is None else [stored]
    except Exception as error:
        refusal = error
    agree(comm, f"a choice by measurement for {key}", refusal)
    listed = _broadcast(comm, listed)
    best = listed[0] if len(listed) == 1 else _measure(comm, listed, time_call)
    if keep:
        comm.choices[key] = best
        log.info("%s: rank %d chose %s for %s by measuring", comm.name, comm.rank, best, key)
    if comm.rank == 0 and len(listed) > 1 and keep:
        _store(comm, key, best)
    return best


def _measure(comm: Communicator, listed: Sequence[Candidate], time_call: Callable[[Candidate], float]) -> Candidate:
    """Time the candidates, alternating. The best one has the least median of the times of its slowest rank."""
    seconds = np.zeros((ROUNDS, len(listed)))
    for candidate in listed:
        time_call(candidate)
    for i in range(ROUNDS):
        for place in range(len(listed)):
            k = (i + place) % len(listed)
            seconds[i, k] = time_call(listed[k])
    of_all_ranks = np.asarray(operations.all_gather(seconds[None], comm=comm))
    slowest = of_all_ranks.max(axis=0)
    return listed[min(range(len(listed)), key=lambda k: median(slowest[:, k]))]


def _broadcast(comm: Communicator, listed: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that rank 0 lists, on all ranks."""
    text = text_of_rank_0(comm, json.dumps([list(candidate) for candidate in listed]))
    return [_candidate(fields) for fields in json.loads(text)]


def _candidate(fields: Any) -> Candidate:
    """The candidate of a list that was read from JSON. Raises TypeError or ValueError if it is not one."""
    schedule, slices, window, rows, announced = fields
    slices = tuple(map(int, slices)) if isinstance(slices, list) else int(slices)
    rows = None if rows is None else tuple(map(int, rows))
    return Candidate(str(schedule), slices, None if window is None else int(window), rows, bool(announced))


# ---------------------------------------------------------------------------------------------------------- on disk


def _conditions(comm: Communicator, key: str) -> dict[str, Any]:
    """All conditions that a kept choice depends on."""
    mpi = library()
    machine = None if comm.machine is None else comm.machine.to_json()
    return {
        "fompi": __version__,
        "mpi": f"{mpi.name} {mpi.version}",
        "hosts": f"{comm.hosts:014x}" if machine is None else machine,
        "cpu": f"{platform.machine()}, {launcher.cores_per_rank():g} cores a rank",
        "network": comm.network,
        "ranks_on_host": launcher.detect().local_size,
        "progress": comm.engine.progress_mode,
        "call": key,
    }


def _file(conditions: dict[str, Any]) -> Path | None:
    """The file of the choice that was made under these conditions. None: choices are not kept on disk."""
    return kept.file_of(environment.cache_folder(), conditions)


def _load(comm: Communicator, key: str, is_usable: Callable[[Candidate], bool]) -> Candidate | None:
    conditions = _conditions(comm, key)
    with suppress(Exception):  # nothing is kept, or no candidate of this version: measure again
        candidate = _candidate(kept.load(_file(conditions), conditions, "choice"))
        shares_of(candidate.schedule, candidate.slices)
        return candidate if is_usable(candidate) else None
    return None


def _store(comm: Communicator, key: str, best: Candidate) -> None:
    conditions = _conditions(comm, key)
    kept.store(_file(conditions), conditions, "choice", list(best))
