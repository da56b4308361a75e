"""The digital twin: a plan run with data in this process, without MPI.

`twin(plan, inputs, backend)` is the event walk with random durations. Each seed gives another interleaving of the ops.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fompi.backends.half import storage
from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.model.walk import Call, Walk, rows_of
from fompi.plans.plan import Chunk, Compute, Plan


def twin(
    plan: Plan,
    inputs: Sequence[dict[str, Any]],
    backend: Any,
    *,
    sizes: Sizes | None = None,
    seed: int = 0,
    kernels: Mapping[str, Callable[..., object]] | None = None,
) -> list[dict[str, Any]]:
    """The outputs of all ranks, by name, after a run of the plan in the interleaving number `seed`.

    `inputs` are the input arrays of each rank, by name. Scratch and outputs start as NaN, or as the largest integer. A
    message is read from its source either when it begins or when it ends, at random. A correct plan gives the same
    result in both cases. `kernels` are those of the user, by name. They are called as in `fompi.bind`.
    """
    return _Twin(plan, sizes or plan.sizes, inputs, backend, seed, kernels or {}).outputs()


def poisoned(shape: Sequence[int], dtype: str) -> Any:
    """A new array full of NaN, or of the largest integer. A value that is read by mistake becomes visible."""
    if dtype == "bfloat16":
        return np.full(shape, 0x7FC0, np.uint16)
    kind = storage(dtype)
    filler: Any = np.nan if kind.kind in "fc" else True if kind.kind == "b" else np.iinfo(kind).max
    return np.full(shape, filler, kind)


class _Twin(Walk):
    def __init__(
        self,
        plan: Plan,
        sizes: Sizes,
        inputs: Sequence[dict[str, Any]],
        backend: Any,
        seed: int,
        kernels: Mapping[str, Callable[..., object]],
    ):
        seconds = (1.0,)  # durations are random: those that a kernel of the user declares do not matter
        plan = replace(plan, kernels=tuple(replace(kernel, seconds=seconds) for kernel in plan.kernels))
        super().__init__(plan, sizes, Machine("chance", 0.0, 1.0, 1.0, 1.0, 1.0, lanes=2), plan.size)
        self.random, self.backend, self.kernels = random.Random(seed), backend, kernels
        self.memory = []
        for program, extents, arrays in zip(self.programs, self.extents, inputs, strict=True):
            made = {b.name: poisoned(b.shape(extents), b.dtype) for b in program.buffers if not b.is_input}
            self.memory.append({**arrays, **made})
        self.early: dict[Call, Any] = {}  # data of messages that were read when they began

    def outputs(self) -> list[dict[str, Any]]:
        self.run()
        return [
            {b.name: memory[b.name] for b in program.buffers if b.is_output}
            for program, memory in zip(self.programs, self.memory, strict=True)
        ]

    def jitter(self) -> float:
        """A random factor on a duration."""
        return self.random.expovariate(1.0)

    def view(self, rank: int, chunk: Chunk) -> Any:
        array = self.memory[rank][chunk.buffer]
        if self.programs[rank].buffer(chunk.buffer).axis == "whole":
            return array
        first, last = rows_of(self.programs[rank], self.offsets[rank], chunk)
        return array[first:last]

    def message_begins(self, source: Call, dest: Call) -> None:
        if self.random.random() < 0.5:
            self.early[source] = self.view(source[0], self.op(source).reads[0]).copy()

    def message_ends(self, source: Call, dest: Call) -> None:
        sent = self.early.pop(source) if source in self.early else self.view(source[0], self.op(source).reads[0])
        self.view(dest[0], self.op(dest).writes[0])[...] = sent

    def kernel_ends(self, rank: int, op: Compute) -> None:
        program = self.programs[rank]
        dtypes = [program.buffer(c.buffer).dtype for c in (*op.reads, *op.writes)]
        reads, writes = [self.view(rank, c) for c in op.reads], [self.view(rank, c) for c in op.writes]
        if self.plan.kernel(op.kernel) is not None:
            self.kernels[op.kernel](op.args, reads, writes)
            return
        self.backend.bind(op.kernel, reads, writes, dtypes[: len(reads)], dtypes[len(reads) :])()

    def collective_ends(self, calls: list[Call]) -> None:
        ops = [self.op(call) for call in calls]
        read = [[self.view(rank, c).copy() for c in op.reads] for rank, op in enumerate(ops)]
        name = ops[0].name  # type: ignore[union-attr]
        for rank, op in enumerate(ops):
            targets = [self.view(rank, c) for c in op.writes]
            if name == "all_gather":
                pieces = [chunks[0] for chunks in read]
            elif name == "all_to_all":
                pieces = [chunks[rank] for chunks in read]
            elif name == "broadcast":
                pieces = [chunks[0] for chunks in read if chunks] if targets else []
            else:
                summed = sum((chunks[0] for chunks in read[1:]), read[0][0])
                if name == "reduce_scatter":
                    rows = [self.shape(r, o.writes[0])[0] for r, o in enumerate(ops)]
                    summed = summed[sum(rows[:rank]) : sum(rows[: rank + 1])]
                pieces = [summed]
            for target, piece in zip(targets, pieces, strict=True):
                target[...] = piece
