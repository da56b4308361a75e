"""The report of a job as text, from the notes of its ranks: totals, a verdict, the largest exposures, a table.

It is a function of the JSON value that `fompi.runtime.report` gathers. `operations` of a rank are records of
`Calls.record`: times in seconds, medians of the calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fompi.traces.proof import WORTH_SECONDS, WORTH_SHARE

Record = Mapping[str, Any]

MOST_LINES = 10
"""The table has this many operations. The others are summed in one line."""

MOST_REASONS = 3
"""At most this many exposures are explained."""

HIDDEN_SHARE = 0.05
"""Communication counts as hidden if this share of the time in fompi is exposed, or less."""

ADVISE = "FOMPI_RECORD=run/, then `fompi advise run/`"


def text(report: Mapping[str, Any]) -> str:
    """A table of a screen. A line of it is the rank with the most exposed time in this operation."""
    operations = [max(ranks, key=lambda o: o["exposed"]) for ranks in by_operation(report)]
    lines = _head(report)
    if not operations:
        return "\n".join([*lines, "no operation was called"])
    label = _labels(operations)
    lines += [_totals(report), *(_steps(report) or _communicators(report))]
    lines.append(f"verdict: {_verdict(report)}")
    lines += shares_line(report)
    by_exposed = sorted(operations, key=lambda o: -_total(o, "exposed"))
    for number, o in enumerate((o for o in by_exposed[:MOST_REASONS] if (_why(o))), 1):
        lines.append(f"exposed {number}: {_duration(_total(o, 'exposed'))} in {label(o)}: {_why(o)}")
    lines += ["", "  calls   total ms    p50 ms   compute  messages    hidden   exposed  operation"]
    for o in by_exposed[:MOST_LINES]:
        cells = "".join(_ms(o[key]) for key in ("p50", "compute", "messages_alone", "hidden", "exposed"))
        lines.append(f"{o['calls']:>7} {_ms(_total(o, 'p50'))}{cells}  {label(o)}")
    if rest := by_exposed[MOST_LINES:]:
        calls, seconds = sum(o["calls"] for o in rest), sum(_total(o, "p50") for o in rest)
        exposed = sum(_total(o, "exposed") for o in rest)
        lines.append(
            f"{calls:>7} {_ms(seconds)}{' ' * 50}  {len(rest)} more operations, {_duration(exposed)} exposed "
            "(FOMPI_REPORT=full shows all)"
        )
    return "\n".join(lines)


def short_text(report: Mapping[str, Any]) -> str:
    """Three lines: the calls, what was hidden and where most of the rest is, what would help; and one of steps."""
    operations = _records(report)
    head = _head(report)
    if not operations:
        return "\n".join([*head, "no operation was called"])
    rank, sums = _sums(report)
    mine = [o for r in report["ranks"] if r["rank"] == rank for o in r["operations"]]
    worst = max(mine, key=lambda o: _total(o, "exposed"))
    head[0] += f"; {sum(o['calls'] for o in mine)} calls, {_duration(sums['p50'])} on rank {rank}"
    communication = sums["hidden"] + sums["exposed"]
    line = f"hidden: {_duration(sums['hidden'])} of {_duration(communication)} of communication"
    if sums["exposed"]:
        line += f"; of the other {_duration(sums['exposed'])}, {_duration(_total(worst, 'exposed'))} are in "
        line += f"{worst['calls']} call{'s' * (worst['calls'] > 1)} of {_labels(mine)(worst)}"
    verdict = _verdict(report)
    advice = ADVISE if verdict.endswith(ADVISE) else f"nothing: {verdict}"
    return "\n".join([*head, *_steps(report)[:1], line, f"what would help: {advice} (FOMPI_REPORT=1 shows the calls)"])


def full_text(report: Mapping[str, Any]) -> str:
    """One block for each operation, with one line for each rank, and what the rank waited for."""
    lines = _head(report)
    lines += [*_steps(report), *shares_line(report)] if _records(report) else []
    label = _labels([o for rank in report["ranks"] for o in rank["operations"]])
    for ranks in by_operation(report):
        first = ranks[0]
        lines.append("")
        lines.append(f"{label(first)}, {first['calls']} calls")
        lines.append(
            "rank       p50       p99   compute    slower  messages     alone    hidden   exposed      tail   "
            "(medians in ms)"
        )
        for o in ranks:
            cells = [_ms(o["p50"]), _ms(o["p99"]), _ms(o["compute"]), f"{o['slowdown']:10.2f}", _ms(o["communication"])]
            cells += [_ms(o["messages_alone"]), _ms(o["hidden"]), _ms(o["exposed"]), _ms(o["tail"])]
            remarks = ["no compute baseline"] * (o["compute_alone"] is None)
            remarks += [f"{1e3 * o['elsewhere']:.3f} ms elsewhere"] * (o["elsewhere"] > 0)
            lines.append("   ".join([f"{o['rank']:>4}{''.join(cells)}", *remarks]))
        for o in ranks:
            if o["waits"]:
                lines.append(f"  rank {o['rank']} waited {'; '.join(reason for _, reason in o['waits'][:3])}")
        if first.get("not_overlapped"):
            lines.append(f"  not overlapped: {first['not_overlapped']}")
    return "\n".join(lines)


def shares_line(report: Mapping[str, Any]) -> list[str]:
    """What other shares would gain, where products take unequal times: ranks together have the sum of their rates."""
    busy = []  # of each rank the seconds of its products, and their operations
    for rank in report["ranks"]:
        known = [o for o in rank["operations"] if o["flops"]]
        seconds, flops = (sum(_total(o, name) for o in known) for name in ("kernels", "flops"))
        busy += [(seconds, flops, rank["rank"])] if seconds and flops else []
    most, _, slowest = max(busy, default=(0.0, 0.0, 0))
    best = sum(flops for _, flops, _ in busy) / sum(flops / seconds for seconds, flops, _ in busy) if busy else 0.0
    if most < LEAST_BUSY or most < GAIN * best or len(report["ranks"]) < report["size"]:
        return []
    took = f"shares: products took {_duration(most)} on rank {slowest}. With shares that fit all would need"
    return [f"{took} {_duration(best)}, {most / best:.2f} times as fast: fompi.balance(comm, sizes), and rebalance"]


GAIN, LEAST_BUSY = 1.15, 0.02
"""Other shares are worth a line if they are faster by this factor, and products took so many seconds."""


def overlap_warnings(report: Mapping[str, Any]) -> list[str]:
    """One warning for each operation: the warning of the rank with the most exposed time."""
    messages = []
    for ranks in by_operation(report):
        if warned := [o for o in ranks if o["warning"]]:
            messages.append(max(warned, key=lambda o: o["exposed"])["warning"])
    return messages


def by_operation(report: Mapping[str, Any]) -> list[list[Record]]:
    """For each operation the records of its ranks, in the order of ranks."""
    records: dict[object, list[Record]] = defaultdict(list)
    for rank in report["ranks"]:
        for o in rank["operations"]:
            records[tuple(o["members"]), o["communicator"], o["number"], o["stamp"], o["title"]].append(o)
    return list(records.values())


def _labels(operations: Sequence[Record]) -> Any:
    """A function: record -> the call, its schedule, its communicator. Two communicators never have the same label."""
    ranks = defaultdict(set)
    for o in operations:
        ranks[o["communicator"]].add(tuple(o["members"]))

    def label(o: Record) -> str:
        of_ranks = f" of ranks {', '.join(map(str, o['members']))}" * (len(ranks[o["communicator"]]) > 1)
        number = f" #{o['number'] + 1}" if o["number"] else ""
        return f"{o['call']} {o['title'].partition(' ')[2]} on {o['communicator']}{number}{of_ranks}"

    return label


def _head(report: Mapping[str, Any]) -> list[str]:
    lines = [f"fompi report: {report['size']} ranks, {report['mpi']}, progress: {report['progress']}"]
    if report.get("threads"):
        lines.append(f"warning: {report['threads']}")
    most: Record = max(report["ranks"], key=lambda rank: rank.get("device_nbytes", 0), default={})
    if nbytes := most.get("device_nbytes", 0):
        lines.append(f"device memory of fompi: at most {nbytes / 1e6:.1f} MB at a time, on rank {most['rank']}")
        longest: Record = max(report["ranks"], key=lambda rank: rank.get("host_waits", 0.0))
        seconds, steps = longest.get("host_waits", 0.0), (longest.get("steps") or {}).get("count", 0)
        each = f", {1e3 * seconds / steps:.3g} ms for each of {steps} steps" if steps else ""
        lines.append(f"the host waited for messages: {1e3 * seconds:.3g} ms in all{each}, on rank {longest['rank']}")
    if missing := sorted(set(range(report["size"])) - {rank["rank"] for rank in report["ranks"]}):
        lines.append(f"missing: the notes of rank {', '.join(map(str, missing))}")
    return lines


# ------------------------------------------------------------------------------------------------ totals and verdict


def _sums(report: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The rank with the most exposed time, and its total seconds."""
    names = ("p50", "compute", "hidden", "exposed", "messages_alone")
    sums = {
        rank["rank"]: {name: sum(_total(o, name) for o in rank["operations"]) for name in names}
        for rank in report["ranks"]
    }
    worst = max(sums, key=lambda rank: sums[rank]["exposed"])
    return worst, sums[worst]


def _totals(report: Mapping[str, Any]) -> str:
    rank, sums = _sums(report)
    calls = sum(o["calls"] for r in report["ranks"] if r["rank"] == rank for o in r["operations"])
    names = {"compute": "kernels", "exposed": "exposed", "hidden": "hidden", "messages_alone": "messages alone"}
    parts = ", ".join(f"{word} {_duration(sums[name])}" for name, word in names.items())
    return f"total: {calls} calls, {_duration(sums['p50'])} on rank {rank}, which has the most exposed time: {parts}"


def _communicators(report: Mapping[str, Any]) -> list[str]:
    """Which communicators the exposed time is in, on the rank that has the most. One communicator is no news."""
    worst, _ = _sums(report)
    exposed = _exposed([(o["calls"], o) for r in report["ranks"] if r["rank"] == worst for o in r["operations"]])
    return [f"exposed by communicator: {_listed(exposed)}"] * (len(exposed) > 1)


def _steps(report: Mapping[str, Any]) -> list[str]:
    """What a step takes, how fast it is, and which communicators its exposed time is in. Nothing without steps.

    The times are those of the rank with the most exposed time. Tokens are those that rank 0 has marked.
    """
    worst, _ = _sums(report)
    of = {rank["rank"]: rank for rank in report["ranks"]}
    steps = of[worst].get("steps")
    if not steps:
        return []
    seconds, marked = steps["total"] / steps["count"], of.get(0, {}).get("steps") or steps
    often = [(calls / steps["count"], o) for calls, o in zip(steps["calls"], of[worst]["operations"], strict=True)]
    inside, tail, products = (sum(n * (o[name] or 0) for n, o in often) for name in ("p50", "tail", "flops"))
    line = f"steps: {steps['count']}, {_duration(steps['p50'])} each (p99 {_duration(steps['p99'])})"
    if marked["tokens"]:
        line += f", {marked['tokens'] / marked['total']:,.0f} tokens/s"
    if flops := marked["flops"] / marked["count"] / report["size"] or products:
        rate, peak = flops / seconds, report.get("flops_rate")
        line += f", {rate / 1e9:.3g} GFLOP/s a rank"
        line += f" ({rate / peak:.0%} of the {peak / 1e9:.3g} of the machine)" if peak else ""
    exposed = _exposed(often)
    whole = sum(exposed.values())
    within = f"a step has {_duration(inside)} in fompi, {_duration(whole)} exposed ({whole / seconds:.0%})"
    return [line, f"{within}: {_listed(exposed)}; {_duration(tail)} after the last kernels"]


def _exposed(often: Iterable[tuple[float, Record]]) -> dict[str, float]:
    """The exposed seconds of each communicator, the largest first. Each operation comes with its number of calls."""
    exposed: dict[str, float] = defaultdict(float)
    for calls, o in often:
        exposed[o["communicator"]] += calls * o["exposed"]
    return dict(sorted(exposed.items(), key=lambda item: (-item[1], item[0])))


def _listed(exposed: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_duration(seconds)}" for name, seconds in exposed.items())


def _verdict(report: Mapping[str, Any]) -> str:
    """How much is exposed."""
    _, sums = _sums(report)
    share = sums["exposed"] / sums["p50"] if sums["p50"] else 0.0
    if report["size"] == 1:
        return "one rank has no messages"
    if share <= HIDDEN_SHARE:
        return f"communication is hidden: {share:.0%} of the time in fompi is exposed"
    return f"{share:.0%} of the time in fompi is exposed. What would help: {ADVISE}"


def _records(report: Mapping[str, Any]) -> list[Record]:
    return [o for rank in report["ranks"] for o in rank["operations"]]


def _why(o: Record) -> str:
    """Why time is exposed on this rank, if it is more than noise."""
    if o["exposed"] <= max(WORTH_SECONDS, WORTH_SHARE * o["p50"]) and not o["warning"]:
        return ""
    waited = [f"rank {o['rank']} waited {reason}" for _, reason in o["waits"][:1]]
    return "; ".join([*filter(None, [o.get("not_overlapped")]), *waited])


def _total(o: Record, name: str) -> float:
    """The seconds of all calls of an operation: the median times the number of calls."""
    return float(o["calls"] * (o[name] or 0.0))


def _ms(seconds: float | None) -> str:
    return f"{'-':>10}" if seconds is None else f" {1e3 * seconds:9.3f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
