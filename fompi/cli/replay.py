"""`fompi replay`: a recorded run on a machine, beside what was measured. `fompi advise`: what would help it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fompi.base.tables import Table
from fompi.cli import plan
from fompi.cli.output import check_writable, show_parts
from fompi.model.replay import Graph
from fompi.planner.advice import advise
from fompi.traces.record import load

EXAMPLE = "{} advise run/    # FOMPI_RECORD=run/ mpirun -n 4 python train.py has written it"

MOST_ROWS = 8
"""Of a table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="what a job with FOMPI_RECORD=FOLDER has written")
    parser.add_argument("--machine", help="a JSON file or a preset: its links in place of those of the record")
    parser.add_argument("--save", metavar="FILE", help="both timelines as Chrome JSON, for Perfetto")


def run(options: argparse.Namespace) -> int:
    records = load(options.folder)
    graph = Graph.of(records)
    if options.machine:
        graph = graph.on(plan.machine_of(options))
    played, missing = graph.run(), records[0].size - len(records)
    measured, step, steps = graph.measured.step, played.step, len(played.steps)
    off = f"{steps} step{'s' * (steps > 1)} of {len(records)} ranks"
    parts: list[Table | str] = [
        f"{off}: measured {1e3 * measured:.3f} ms, replayed {1e3 * step:.3f} ms ({step / measured - 1:+.1%})"
    ]
    parts += [f"warning: the records of {missing} ranks are missing"] * (missing > 0)
    if options.command == "replay":
        waits = zip(graph.kinds, graph.waited(graph.measured), graph.waited(played), strict=True)
        rows = [
            (f"{1e3 * a:.3f}", f"{1e3 * b:.3f}", kind) for kind, a, b in sorted(waits, key=lambda w: -abs(w[1] - w[2]))
        ]
        parts.append(
            Table(
                ("measured ms", "replayed ms", "waits of a rank in a step, the largest error first"),
                rows[:MOST_ROWS],
                ("measured ms", "replayed ms"),
            )
        )
        worst = max(range(steps), key=lambda i: abs(played.steps[i] - graph.measured.steps[i]))
        parts.append(
            f"the step that is most off is step {worst + 1}: measured {1e3 * graph.measured.steps[worst]:.3f} ms, replayed {1e3 * played.steps[worst]:.3f} ms"
        )
    else:
        found = advise(graph, [record.host for record in records])
        rows = [(f"{1e3 * a.seconds:.3f}", f"{1 - a.seconds / step:.1%}", a.what, a.write) for a in found]
        own = 1 - graph.waited(graph.measured).sum() / graph.measured.steps.mean()
        parts.append(
            Table(("step ms", "gain", "what would help", "how"), rows, ("step ms", "gain"))
            if rows
            else f"nothing here helps: {own:.0%} of a step are your own kernels"
        )
    show_parts(parts)
    if options.save:
        check_writable(options.save)
        both, other = graph.trace(graph.measured, "measured").chrome(), graph.trace(played, "replayed").chrome()
        for event in other["traceEvents"]:
            event["pid"] += len(records)
            if event["name"] == "process_name":
                event["args"]["name"] += ", replayed"
        both["traceEvents"] += other["traceEvents"]
        Path(options.save).write_text(json.dumps(both))
    return 0
