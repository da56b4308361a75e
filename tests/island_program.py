"""An island that trains vectors: `python island_program.py ADDRESS NAME STEPS FOLDER [JSON OF OPTIONS]`.

In FOLDER it writes the step where it is, at its end the sha256 of its outer copies and its longest pause, and its log.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import fompi
from fompi.parallel.outer import OuterSteps


def island(name, rank=0):
    """The parameters of an island, and its inner step."""
    waves = {"w": np.cos(np.arange(3000) + ord(name) + rank), "v": np.cos(np.arange(7) + ord(name))}
    start = {key: np.zeros(wave.shape, np.float32) for key, wave in waves.items()}
    return start, lambda params: {key: x - (waves[key] + x / 50).astype(x.dtype) for key, x in params.items()}


class LeavesOnce(OuterSteps):
    """It loses the others in the first meeting with a new island, in which that gets what the others have."""

    has_left = False

    def _compare(self, of_others=None):
        super()._compare(of_others)
        if self.steps and self.comm.size == 3 and not self.has_left:
            self.has_left = True
            raise fompi.WaitTimeout("it leaves")


def run(
    address, name, steps, folder, rests_at=0, rows=1, wait=None, least=1, ranks=1, pause=0.01, leaves=False, **options
):
    """`rests_at`: the step after which it does nothing for 3 s. `ranks`: of this island. `leaves`: `LeavesOnce`."""
    comm = fompi.Communicator() if ranks > 1 else None
    rank = comm.rank if comm else 0
    params, inner = island(name, rank)
    options = dict(sync_every=4, fragments=2, delay=1, wire="int8", feedback=True) | options
    log, last, longest = folder / f"{name}.epochs", time.monotonic(), 0.0
    how = dict(least=least, alone=True, ttl=1.5, wait=wait, log=log, comm=comm)
    with (
        fompi.islands.join(address, name=name, **how) as islands,
        (LeavesOnce if leaves else OuterSteps)(params, comm=islands, **options) as outer,
    ):
        params |= outer.received(params.__getitem__)
        while outer.steps < steps:
            params = outer.step(inner(params), rows=rows)
            (folder / f"{name}.step").write_text(str(outer.steps))
            time.sleep(3 if outer.steps == rests_at else pause)
            last, longest = time.monotonic(), max(longest, time.monotonic() - last)
        (folder / f"{name}.{rank}.sha").write_text(outer.sha256(0) + outer.sha256(1))
    (folder / f"{name}.end").write_text(f"{longest:.2f}")


if __name__ == "__main__":
    try:
        run(*sys.argv[1:3], int(sys.argv[3]), Path(sys.argv[4]), **json.loads([*sys.argv, "{}"][5]))
    except fompi.MismatchError as error:
        sys.exit(Path(f"refused.{fompi.Communicator().rank}").write_text(str(error)))
