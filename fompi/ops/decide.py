"""What the ranks compare before a call, and the schedule and the plan that follow from what all of them know.

    local, plan = decide("all_gather", lambda: localise(...), comm, call_options, "bound")

`decide` is for a call that is repeated: `operation.bind` and the call sites of compiled JAX programs stand on it. An
unbound call compares and decides the same every time, without a message of its own (`fompi.ops.pending`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from fompi.base.call_options import CallOptions
from fompi.base.errors import ShapeError
from fompi.base.layout import Sizes, Slices
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import SIGNATURE_BITS, begin_agreement, digest
from fompi.ops.arguments import LocalCall
from fompi.planner.choose import choose_schedule, encode_rows, is_even, window_of_call
from fompi.plans.plan import MOST_MESSAGES, Plan
from fompi.plans.problems import Problem
from fompi.plans.verify import verify
from fompi.schedules.registry import REGISTERED, messages_per_peer, write


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


def decide(
    name: str,
    localised: Callable[[], LocalCall],
    comm: Communicator,
    call_options: CallOptions,
    where: str,
    words: str = "",
    refusal: Exception | None = None,
    packs: bool = True,
) -> tuple[LocalCall, Plan]:
    """This rank's part of the call of the operation `name`, and the plan. Collective.

    `localised()` checks the tensors of this rank. Its error, or `refusal`, is raised on this rank, and the others raise
    a MismatchError that quotes it. `where` says what makes the call, `words` what else the ranks compare. If `packs`,
    the plan packs an x that is strided on some rank.
    """
    local, text, signature, compared = None, name, 0, 0
    told: Sequence[int] = ()
    try:
        if refusal is not None:
            raise refusal
        local, how = localised(), call_options[:2]
        text, signature = in_words(comm, local, *how, words), signature_of(local.problem)
        compared, told = common_of(comm, local, *how, f"{where} {words}"), _told(local)
    except Exception as error:
        refusal = error
    strided = local is not None and local.packed
    agreement = begin_agreement(comm, f"{text} {where}", refusal, signature << 1 | strided, compared, told)
    values = agreement.values()
    assert local is not None
    problem = replace(local.problem, packed=packs and any(value & 1 for value in values))
    sizes = _sizes_of(local, agreement.arrived)
    return local, plan_of(comm, problem, sizes, call_options, len({value >> 1 for value in values}) == 1)


def _told(local: LocalCall) -> Sequence[int]:
    """What the other ranks cannot know: the rows that this rank sends to each, and how many it expects."""
    if local.problem.moves not in ("all_gather", "all_to_all"):
        return ()
    return *([n for run in local.runs for n in run] or local.rows), local.expects


def _sizes_of(local: LocalCall, table: Sequence[Sequence[int]]) -> Sizes:
    """The rows of all ranks, from what each has told. Raises ShapeError on all ranks if they are not as expected."""
    if not table:
        return Sizes(local.rows)
    sizes = Sizes(pairs=tuple(tuple(rows) for *rows, _ in table))
    if local.runs:
        most = local.problem.runs
        sizes = Sizes.grouped([[rows[at : at + most] for at in range(0, len(rows), most)] for *rows, _ in table])
    for rank, (*_, expects) in enumerate(table):
        arriving = sum(row[rank] for row in sizes.pairs)
        if expects not in (-1, arriving):
            raise ShapeError(
                f"{local.problem.operation}: the operand on rank {rank} has {expects} rows, but {arriving} arrive there"
            )
    if local.problem.moves == "all_gather":
        return Sizes(tuple(row[0] for row in table))
    return sizes


def plan_of(
    comm: Communicator, problem: Problem, sizes: Sizes, call_options: CallOptions, is_same: bool = True
) -> Plan:
    """The plan of the call. "auto" chooses by the machine of the communicator, if all ranks have the same problem.

    Raises PlanError, on all ranks.
    """
    even = comm.size == 1 or all(encode_rows(rows, rank) & 1 for rank, rows in enumerate(sizes.pairs))
    if problem.columns:
        even = is_even(sizes.rows) and is_even(problem.columns)
    total = sum(map(sum, sizes.pairs)) if sizes.pairs else sum(sizes.rows)
    schedule, slices = schedule_of(comm, problem, total, even, is_same, *call_options[:2])
    slices = 1 if slices is None else slices
    by_model = comm.machine is not None and is_same
    window = window_of_call(problem, schedule, slices, comm.network, by_model)
    plan = write(problem, schedule, slices, sizes, window=window)
    if schedule in REGISTERED:
        verify(plan)
    return plan
