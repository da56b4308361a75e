"""What the ranks compare before a call, and the schedule that follows from what all of them know.

Unbound calls (`fompi.ops.pending`), bound calls and the call sites of compiled JAX programs (`fompi.ops.decide`) have
the same rules.
"""

from __future__ import annotations

import functools

from fompi.base.layout import Slices
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import SIGNATURE_BITS, digest
from fompi.ops.arguments import LocalCall
from fompi.planner.choose import choose_schedule
from fompi.plans.plan import MOST_MESSAGES
from fompi.plans.problems import Problem
from fompi.schedules.registry import messages_per_peer


def place_of(comm: Communicator, local: LocalCall) -> str:
    """On which device a call runs, and over which paths. Empty: on the host. The same text on all ranks."""
    device = local.device
    return "" if device is None else f" on a {comm.paths(device).title}"


def common_of(comm: Communicator, local: LocalCall, schedule: str, slices: Slices | None, words: str = "") -> int:
    """A digest of everything that must be the same on all ranks. `words`: what else the ranks compare."""
    # A dimension counts from the front: dim=-1 and dim=1 of a matrix are the same.
    number = _digest((local.problem.common, local.dim, local.split, schedule, slices))
    if local.device is not None:
        number ^= digest(place_of(comm, local))
    if words:  # not cached: the words of a backward differ between calls
        number ^= digest(words)
    if local.problem.moves in ("all_gather", "all_to_all"):
        return number
    # Not part of the cached digest: these may change at every call.
    return number ^ digest(str(local.shape if local.problem.flat else local.rows))


def in_words(comm: Communicator, local: LocalCall, schedule: str, slices: Slices | None, words: str = "") -> str:
    """The call as text, for error messages."""
    problem = local.problem
    text = str(problem)
    if problem.flat:
        text += f" with the shape {local.shape}"
    else:
        text += "" if problem.moves in ("all_gather", "all_to_all") else f" with rows {list(local.rows)}"
        text += f", dim={local.dim}" if local.dim else ""
        text += f", split_dim={local.split}" if local.split >= 0 else ""
    if (schedule, slices) != ("auto", None):
        text += f" by {schedule}, slices {slices}"
    return f"{text}{place_of(comm, local)}{' ' * bool(words)}{words}"


@functools.lru_cache(maxsize=1024)
def signature_of(problem: Problem) -> int:
    """A number that tells problems apart. Those of the ranks of a call may differ, in what is not sent."""
    return digest(str(problem)) & (1 << SIGNATURE_BITS) - 1


def schedule_of(
    comm: Communicator,
    problem: Problem,
    total: int | None,
    even: bool,
    is_same: bool,
    schedule: str,
    slices: Slices | None,
) -> tuple[str, Slices | None]:
    """The schedule and the slices of a call. "auto" chooses one for `total` rows.

    `even`: all ranks send equal shards in an all-to-all. `is_same`: all ranks have the same problem. For different ones
    a model could choose differently.
    """
    if schedule != "auto":
        return schedule, slices
    machine = comm.machine if is_same else None
    schedule, best = choose_schedule(problem, total, comm.network, machine, comm.crowded, even)
    if slices is None:
        return schedule, best
    return "direct" if messages_per_peer(problem, schedule, slices) > MOST_MESSAGES else schedule, slices


@functools.lru_cache(maxsize=1024)
def _digest(values: tuple[object, ...]) -> int:
    return digest(str(values))
