"""What the ranks decide once about a call that is repeated: the rows of all of them, and the plan. Collective.

    local, plan = decide("all_gather", lambda: localise(...), comm, call_options, "bound")

`operation.bind` and the call sites of compiled JAX programs stand on it. An unbound call decides the same every time,
without a message of its own (`fompi.ops.pending`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fompi.base.call_options import CallOptions
from fompi.base.errors import ShapeError
from fompi.base.layout import Sizes
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import begin_agreement
from fompi.ops.arguments import LocalCall
from fompi.ops.compared import common_of, in_words, schedule_of, signature_of
from fompi.planner.choose import encode_rows, is_even, window_of_call
from fompi.plans.plan import Plan
from fompi.plans.problems import Problem
from fompi.plans.verify import verify
from fompi.schedules.registry import REGISTERED, write


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
