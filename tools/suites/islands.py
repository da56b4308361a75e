"""A GPT of 17 million parameters on a slow link: outer steps beside data parallelism, by time and by loss.

    python -m fompi.lab run --hosts 2 --rate 100mbit -- python -m fompi bench tools/suites/islands.py --rounds 5
    python -m fompi.lab run --hosts 4 --groups 2x2 --between 40mbit,80ms -- \\
        python -m fompi bench tools/suites/islands.py --row 2x2
    python tools/suites/islands.py --curves --steps 2000             # one process: the loss at equal tokens

A call is a period of 30 inner steps, so that the exchange of `DiLoCo` is in it. All contestants train the same model
with AdamW on tokens of their own.

| contestant          | what it is                                                                              |
|---------------------|-----------------------------------------------------------------------------------------|
| `alone`             | each rank trains by itself: no messages                                                 |
| `DDP, gloo`         | torch's DistributedDataParallel on a group of gloo                                      |
| `DDP, fompi`        | the same class on a group of the backend "fompi"                                        |
| `DDP, fompi int8`   | `fompi.torch.DistributedDataParallel` with messages of 8 bits                           |
| `DiLoCo`            | `fompi.torch.DiLoCo`, H = 30, delay 1, two fragments, each rank an island               |

The row `delay 12` has `alone` and `DiLoCo` only: a fragment may take as long as 12 steps, as at 100 Mbit/s.

The row `2x2` has islands of two ranks with `fompi.torch.DistributedDataParallel` inside, on different sides of the slow
link, which exchange by messages of 8 bits, 10 steps later. Its figure is the share of a step for which outer steps have
waited.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import fompi
from fompi.bench.measure import Bench
from fompi.parallel.outer import OuterNumbers, OuterRule, OuterSchedule
from fompi.torch import DiLoCo, DistributedDataParallel
from fompi.tuning.rounds import Figure, Row
from means import repeated
from training import Gpt, TorchStep, alone, data_parallel

FULL, QUICK = Gpt(6, 384, 6, 8192, 4, 64), Gpt(2, 32, 2, 64, 2, 8)
PERIOD, FRAGMENTS, DELAY, FAR_DELAY = 30, 2, 1, 12
ALONE, OURS = "alone", "DiLoCo"
LEAST_SHARE, MOST_EXPOSED = 0.97, 0.01
"""Asked between hosts: tokens a second of an island beside a lone host's, and the share of a step that is exposed."""


def rows(bench: Bench) -> list[Row]:
    makers = {"GPT": _beside, f"GPT, delay {FAR_DELAY}": _far}
    if bench.comm.size == 4:
        makers["GPT, 2x2"] = _on_groups
    return bench.rows(makers)


def trained(step: TorchStep, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """A period of inner steps with AdamW. `then`: after each of them."""
    optimizer = torch.optim.AdamW(step.modules[0].parameters(), lr=1e-4)

    def once() -> None:
        step()
        optimizer.step()
        then()

    return partial(repeated, once, PERIOD)


def _beside(bench: Bench) -> Row:
    size, comm = QUICK if bench.quick else FULL, bench.comm
    from c10d import beside_torch  # --curves runs as a file, and needs no peers

    with beside_torch(bench) as (beside, group):
        task = size.task(comm.rank)
        models = [size.task(comm.rank).model for _ in range(2)]
        ours = DistributedDataParallel(models[0], comm.using(wire="int8"))
        how = {"sync_every": PERIOD, "fragments": FRAGMENTS, "delay": DELAY}
        with DiLoCo(models[1], None, comm, **how) as outer:
            calls = {
                ALONE: trained(alone(task)),
                "DDP, gloo": trained(data_parallel(size.task(comm.rank))),
                "DDP, fompi": trained(data_parallel(size.task(comm.rank), group)),
                "DDP, fompi int8": trained(alone(task, ours)),
                OURS: trained(alone(task, models[1]), outer.step),
            }
            row = beside.row("GPT", calls, base=OURS)
        ours.close()
    tokens = PERIOD * size.sequences * size.length
    figures = [Figure(f"{name}: tokens a second and rank", tokens / row.median(name)) for name in calls]
    figures += [row.ratio(name, OURS) for name in calls if name != ALONE and name != OURS]
    return replace(row, figures=[row.ratio(ALONE, OURS, least=bench.asked(LEAST_SHARE)), *figures])


def _far(bench: Bench) -> Row:
    """For links on which a fragment takes longer than a step: DDP would take ten times as long."""
    size, comm = QUICK if bench.quick else FULL, bench.comm
    model = size.task(comm.rank).model
    with DiLoCo(model, None, comm, sync_every=PERIOD, fragments=FRAGMENTS, delay=FAR_DELAY) as outer:
        task = size.task(comm.rank)
        calls = {ALONE: trained(alone(task)), OURS: trained(alone(task, model), outer.step)}
        row = bench.row(f"GPT, delay {FAR_DELAY}", calls, base=OURS)
    return replace(row, figures=[row.ratio(ALONE, OURS, least=bench.asked(LEAST_SHARE))])


def _on_groups(bench: Bench) -> Row:
    size, comm, numbers = QUICK if bench.quick else FULL, bench.comm, list[OuterNumbers]()
    mesh = fompi.Mesh(comm, priority=["dp"], islands=2, dp=2)
    task = size.task(comm.rank)
    model = DistributedDataParallel(task.model, mesh["dp"])
    how = {"sync_every": PERIOD, "fragments": FRAGMENTS, "delay": 10, "wire": "int8", "on_exchange": numbers.append}
    with DiLoCo(model.module, None, mesh["islands"], **how) as outer:
        calls = {ALONE: trained(alone(size.task(comm.rank))), OURS: trained(alone(task, model), outer.step)}
        row = bench.row("GPT, 2x2", calls, base=OURS)
    model.close()
    mesh.close()
    steps = PERIOD / FRAGMENTS  # between two exchanges
    mean = float(np.mean([each.exposed for each in numbers[1:] or numbers]))
    exposed = Figure("exposed", mean / (steps * row.median(OURS) / PERIOD), most=bench.asked(MOST_EXPOSED))
    return replace(row, figures=[exposed, row.ratio(ALONE, OURS)])


# ----------------------------------------------------------------------------------------------------------- the loss


SMALL = Gpt(4, 128, 4, 128, 8, 64)


def batches(text: Any, size: Gpt, seed: int) -> Iterator[tuple[Any, Any]]:
    """Tokens and the ones that follow them, from random places."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - size.length - 1, (size.sequences, 1), generator=generator)
        tokens = text[starts + torch.arange(size.length + 1)]
        yield tokens[:, :-1], tokens[:, 1:]


def curves(steps: int, islands: int, period: int, rule: OuterRule, points: int = 20) -> list[tuple[int, float, float]]:
    """(step, loss of data parallelism, of outer steps) on text that was not trained on, at equal tokens.

    All islands one after the other in this process. Data parallelism has the gradient of all batches of a step.
    """
    size = SMALL
    text = "".join(pydoc_data.topics.topics.values()).encode()  # the reference of Python, as pydoc has it
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=size.vocabulary - 1)
    kept, task = len(data) * 9 // 10, size.task(0)
    tests = [next(each) for each in [batches(data[kept:], size, 99)] for _ in range(16)]
    sources = [[batches(data[:kept], size, seed) for seed in range(islands)] for _ in range(2)]
    together, models = size.task(0).model, [size.task(0).model for _ in range(islands)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (together, *models)]
    schedule = OuterSchedule(period)
    outer = [p.detach().numpy().copy() for p in together.parameters()]
    velocity = [np.zeros_like(p) for p in outer]

    def loss(model: Any, batch: tuple[Any, Any]) -> Any:
        return task.loss(model(batch[0]), batch[1])

    def tested(model: Any) -> float:
        with torch.no_grad():
            return float(np.mean([float(loss(model, batch)) for batch in tests]))

    found = []
    for step in range(1, steps + 1):
        optimizers[0].zero_grad()
        for source in sources[0]:
            (loss(together, next(source)) / islands).backward()
        optimizers[0].step()
        for model, optimizer, source in zip(models, optimizers[1:], sources[1], strict=True):
            optimizer.zero_grad()
            loss(model, next(source)).backward()
            optimizer.step()
        if schedule.begins(step) is not None:
            for i, parameters in enumerate(zip(*(model.parameters() for model in models), strict=True)):
                rule.update(outer[i], velocity[i], np.mean([outer[i] - p.detach().numpy() for p in parameters], axis=0))
                for p in parameters:
                    p.data.copy_(torch.from_numpy(outer[i]))
        if step % max(1, steps // points) == 0:
            found.append((step, tested(together), tested(models[0])))
    return found


def main() -> int:
    """The command line of `--curves`."""
    parser = argparse.ArgumentParser(description="the loss of outer steps beside data parallelism, at equal tokens")
    parser.add_argument("--curves", action="store_true", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--period", type=int, default=10, metavar="H")
    parser.add_argument("--outer-lr", type=float, default=OuterRule.outer_lr)
    parser.add_argument("--outer-momentum", type=float, default=OuterRule.outer_momentum)
    options = parser.parse_args()
    rule = OuterRule(options.outer_lr, options.outer_momentum)
    found = curves(options.steps, options.islands, options.period, rule)
    for step, ddp, diloco in found:
        print(f"step {step:6d}   DDP {ddp:.4f}   DiLoCo, H={options.period} {diloco:.4f}   {diloco / ddp - 1:+.2%}")
    print("a small model shows neither the gain nor the loss of the papers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
