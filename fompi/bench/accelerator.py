"""An emulated accelerator for all calls of a rank, whose speed a benchmark chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fompi.backends.emulated import Emulated
from fompi.bench.kernels import emulated
from fompi.engine.communicator import Communicator
from fompi.model.machine import Machine
from fompi.parallel.interleave import give_way

INSTANT = Machine("no time", 0.0, 1.0, 1e30, 1e30, 0.0)

PILOT_ROUNDS = 3
"""Rounds by which a benchmark chooses the speed of its accelerator."""

MARK = "emulated accelerator"
"""Marks rows of kernels on an emulated accelerator, with real messages."""


class Accelerator(Emulated):
    """The emulated accelerator of this rank. `flops` counts the operations of its kernels."""

    def __init__(self) -> None:
        super().__init__(INSTANT)
        self.meanwhile = give_way  # the host is free while a kernel runs
        self.flops = 0.0

    def use(self, flops_rate: float) -> None:
        self.machine = replace(INSTANT, flops_rate=flops_rate)

    def spend(self, flops: float, nbytes: float = 0.0, compute: Callable[[], object] = lambda: None) -> None:
        self.flops += flops
        super().spend(flops, nbytes, compute)

    def bind(self, kernel: str, reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> Any:
        if kernel.startswith(("matmul", "gradient")):
            rows, columns = reads[0].shape[0], reads[1].shape[-1]
            self.flops += 2.0 * rows * columns * reads[0].shape[-1]
        return super().bind(kernel, reads, writes, read_dtypes, write_dtypes)

    @contextmanager
    def on(self, comms: Iterable[Communicator]) -> Iterator[None]:
        """Inside, calls on these communicators compute here."""
        held = [*comms]
        for comm in held:
            comm.backend = self
        try:
            with emulated(self):
                yield
        finally:
            for comm in held:
                comm.backend = None
