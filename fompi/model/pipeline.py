"""Pipelines as formulas: the time of a schedule, and the micro-batches that are alive. All stages are equal.

`fompi.parallel.actions` writes the actions. Its event walk is exact, and the tests compare it with these formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from fompi.base.errors import PlanError, quoted

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipev")
"""The names of the schedules. GPipe: 1811.06965. 1F1B: 1806.03377. Interleaved: 2104.04473. Zero bubble: 2401.10241.
ZBV: 2405.15362. DualPipeV: 2412.19437, cut in half (Sea AI Lab)."""

PLACEMENTS = ("loop", "v")
"""Which stages a rank has. loop: r, r + ranks, r + 2 ranks, ... v: r, then 2 ranks - 1 - r, so there and back."""


def stages_of(rank: int, ranks: int, chunks: int, placement: str) -> list[int]:
    """The stages of a rank, in order."""
    back = ranks - 1 - rank if placement == "v" else rank
    return [chunk * ranks + (back if chunk % 2 else rank) for chunk in range(chunks)]


def rank_of(stage: int, ranks: int, placement: str) -> int:
    """The rank that has a stage."""
    chunk, at = divmod(stage, ranks)
    return ranks - 1 - at if chunk % 2 and placement == "v" else at


def placement_of(schedule: str) -> str:
    """The placement of a known schedule."""
    return "v" if schedule in ("zbv", "dualpipev") else "loop"


def has_chunks(schedule: str, chunks: int) -> bool:
    """True if a schedule has this number of stages on each rank."""
    if schedule == "interleaved":
        return True
    return chunks == (2 if placement_of(schedule) == "v" else 1)


def predicted(
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    seconds: Mapping[str, float] | None = None,
    message: float = 0.0,
) -> float:
    """The time of a schedule with equal stages, in seconds.

    `seconds` are those of F, B, I and W of one stage. So with interleaving a rank has `chunks` times as much work.
    The formulas hold if `has_formula`, and in a V for messages that take at most as long as a forward. Raises PlanError
    for an unknown schedule.
    """
    p, m, v, c = ranks, microbatches, chunks, message
    s = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, **(seconds or {})}
    if schedule not in SCHEDULES:
        raise PlanError(f"there is no formula for {quoted(schedule, SCHEDULES)}; known: {', '.join(SCHEDULES)}")
    if p == 1:
        c = 0.0
    if placement_of(schedule) == "v":
        work, missing = s["F"] + s["I"] + s["W"], 2 if schedule == "zbv" else 1
        each = max(0.0, s["F"] + s["I"] - missing * s["W"])
        if schedule == "zbv":
            return 2 * m * work + (p - 1) * each + max((6 * p - 8) * c, 6 * (p - 1) * c - s["F"])
        return 2 * m * work + max((p - 1) * each + 4 * (p - 1) * c, (p - 2) * each + 6 * (p - 1) * c)
    if schedule in ("zb-h1", "zb-h2"):
        work, missing = s["F"] + s["I"] + s["W"], 1 if schedule == "zb-h1" else 2
        bubble = (p - 1) * (s["F"] + s["I"] - missing * s["W"])
        return m * work + bubble + (4 if schedule == "zb-h1" else 2) * (p - 1) * c
    work = s["F"] + s["B"]
    added = {"1f1b": 2 * (p - 1) * m / p + 2 * (p - 2), "interleaved": 2 * (p * v - 1)}.get(schedule, 2 * (p - 1))
    return v * m * work + (p - 1) * work + added * c


def has_formula(schedule: str, ranks: int, microbatches: int) -> bool:
    """True if there are enough micro-batches for `predicted` and `alive`: a multiple of `ranks` for interleaving."""
    if schedule == "interleaved":
        return microbatches % ranks == 0
    least = {"zb-h1": ranks, "zb-h2": 2 * ranks - 1, "zbv": 2 * ranks - 1, "dualpipev": 2 * ranks}
    return microbatches >= least.get(schedule, 1)


def alive(schedule: str, ranks: int, microbatches: int, rank: int, chunks: int = 1) -> tuple[int, int]:
    """The most micro-batches of a rank between F and its B or I, and between I and W, if `has_formula`.

    With several stages: of each.
    """
    p, m, r = ranks, microbatches, rank
    if schedule == "interleaved":
        return min(m * chunks, 2 * (p - r - 1) + (chunks - 1) * p + 1), 0
    if schedule == "gpipe":
        return m, 0
    if placement_of(schedule) == "v":  # half as much each: as 1F1B has on its first rank
        return (2 * p, 2 * r + 1) if schedule == "zbv" else (2 * p + 1, r + 1)
    activations = min(m, p - r if schedule in ("1f1b", "zb-h1") else 2 * (p - r) - 1)
    return activations, min(m, {"zb-h1": r + 1, "zb-h2": 2 * r + 1}.get(schedule, 0))
