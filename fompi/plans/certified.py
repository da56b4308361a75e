"""How far a result can be off because messages have rounded it: from the units of the scales that were used.

    ops = roundings_of(plan)                     # the ops of all ranks that round a block: (rank, op, its mirror)
    for shares in shares_of(plan)[rank]:         # of each block of the result of a rank
        error = sum(share * half_unit[at] for at, share in shares.items())

The proof knows of each result which ops have rounded which of its terms (`kernels.rounded`). A sum adds the errors of
its terms, so the error of a result is at most the sum of what these ops have lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from fompi.base.errors import PlanError
from fompi.plans.conditions import after
from fompi.plans.dependencies import divisor
from fompi.plans.kernels import ENCODE, Term, Value, is_opaque, is_rounded
from fompi.plans.plan import Compute, Plan
from fompi.plans.verify import values_at_the_end

Place = tuple[int, int]
"""(rank, op)"""


def roundings_of(plan: Plan) -> dict[Place, tuple[str, int]]:
    """Each op that rounds a block, and the block of the mirror that it writes: (buffer, number).

    Raises PlanError if such a block is written again before the end.
    """
    found: dict[Place, tuple[str, int]] = {}
    for program in plan.programs:
        written = Counter(block for op in program.ops for chunk in op.writes for block in chunk.blocks)
        for i, op in enumerate(program.ops):
            if isinstance(op, Compute) and op.kernel in ENCODE:
                (block,) = op.writes[0].blocks
                if written[block] > 1:
                    why = f"by {plan.schedule!r} a message is written over by a later one: take schedule='direct'"
                    raise PlanError(f"certify=True: {why}", program.rank, i)
                found[program.rank, i] = block
    return found


def shares_of(plan: Plan) -> list[list[Mapping[Place, float]]]:
    """Of each rank, of each block of its results: how much of what each op has rounded is in it.

    Raises PlanError if what has travelled is multiplied on some rank.
    """
    return [
        [_shares(held[block]) for block in after(plan.problem, rank, plan.parts)]
        for rank, held in enumerate(values_at_the_end(plan))
    ]


def _shares(value: Value) -> Mapping[Place, float]:
    found: dict[Place, float] = {}
    for at, share in _rounded(value, 1.0):
        found[at] = found.get(at, 0.0) + share
    return found


def _rounded(value: Value, share: float) -> Iterator[tuple[Place, float]]:
    for term in value:
        if is_rounded((term,)):
            yield term[1], share
            yield from _rounded(term[2], share)
        elif len(term) == 2:
            count = divisor(term[0])
            for each in term[1]:
                yield from _rounded(each, share / (count or 1))
        elif _multiplies_what_is_rounded(term):
            raise PlanError("certify=True: what has travelled is multiplied here: certify the gather, then multiply")


def _multiplies_what_is_rounded(term: Term) -> bool:
    if is_rounded((term,)) or is_opaque(term):
        return True
    return len(term) == 3 and isinstance(term[1], tuple) and any(map(_multiplies_what_is_rounded, term[1:]))
