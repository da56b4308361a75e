"""`fompi replay`: a recorded run on a machine, beside what was measured. `fompi advise`: what would help it."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from fompi.base.tables import Table
from fompi.cli import plan
from fompi.cli.output import show_parts
from fompi.model.replay import Graph
from fompi.planner.advice import advise
from fompi.traces.record import load

EXAMPLE = "{} {command} run/    # FOMPI_RECORD=run/ mpirun -n 4 python train.py has written it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="what a job with FOMPI_RECORD=FOLDER has written")
    parser.add_argument("--machine", help="a JSON file or a preset: its links in place of those of the record")


def run(options: argparse.Namespace) -> int:
    records = load(options.folder)
    graph = Graph.of(records) if options.machine is None else Graph.of(records).on(plan.machine_of(options))
    played, before, size = graph.run(), graph.measured, len(records)
    said = f"{len(before.steps)} steps of {size} of {records[0].size} ranks: measured {1e3 * before.step:.3f} ms"
    parts: list[Any] = [f"{said}, replayed {1e3 * played.step:.3f} ms ({played.step / before.step - 1:+.1%})"]
    if options.command == "replay":
        steps = [(f"step {i + 1}", *both) for i, both in enumerate(zip(before.steps, played.steps, strict=True))]
        waits = zip(map(str, graph.kinds), graph.waited(before), graph.waited(played), strict=True)
        for name, pairs in (("step", steps), ("waits of a rank in a step", [*waits])):
            worst = sorted(pairs, key=lambda row: -abs(row[1] - row[2]))[:5]
            rows = [(what, f"{1e3 * a:.3f}", f"{1e3 * b:.3f}") for what, a, b in worst]
            parts.append(Table((f"{name}, the largest error first", "measured ms", "replayed ms"), rows))
    elif found := advise(graph, [record.host for record in records]):
        advices = [(a.what, f"{1e3 * a.seconds:.3f}", f"{1 - a.seconds / played.step:.1%}", a.write) for a in found]
        parts.append(Table(("what would help", "step ms", "gain", "how"), advices, ("step ms", "gain")))
    else:
        kernels = np.bincount(graph.kind, graph.inside, len(graph.kinds)) / size / len(before.steps)
        own = 1 - np.maximum(0.0, graph.waited(before) - kernels).sum() / before.steps.mean()
        parts.append(f"nothing here helps: {own:.0%} of a step are your own kernels")
    show_parts(parts)
    return 0
