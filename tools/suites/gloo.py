"""Rivals on torch.distributed with gloo. Threads of gloo move the messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed

from c10d import start_gloo
from fompi.bench.fused import Array
from sliced import Sliced

Work = Any


class Gloo:
    """The default group, made by `start_gloo`."""

    def __init__(self, comm: Any, address: str):
        start_gloo(comm, address)
        self.size = comm.Get_size()
        # Newer versions call it all_gather_single.
        self._all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self._all_to_all = distributed.all_to_all_single

    def close(self) -> None:
        distributed.destroy_process_group()

    def blocking(self, operation: str, x: Array, w: Array) -> Callable[[], Array]:
        """The kernel and one collective."""
        return self.slices(1, operation, x, w)

    def slices(self, slices: int, operation: str, x: Array, w: Array) -> Callable[[], Array]:
        """`slices` collectives with async_op=True, each while the kernel of another slice runs. Adds on arrival.

        A reduce-scatter is an all-to-all and a sum: gloo's own one takes longer.
        """
        sliced, tensor = Sliced(operation, self.size, x, w, slices, self._matmul), torch.from_numpy
        if operation == "all_gather_matmul":
            return partial(self._gathered, sliced)
        if operation == "matmul_all_reduce":
            sliced.product = sliced.y_parts  # summed in place
            return partial(self._summed, sliced)
        adds, product = operation == "matmul_reduce_scatter", sliced.product.reshape(slices, -1, sliced.columns)
        is_in_place = slices == 1 and not adds  # what arrives is the result
        arrived = sliced.y[None] if is_in_place else np.empty_like(product)
        terms = arrived.reshape(slices, sliced.size, sliced.rows, -1)

        def finish(j: int) -> None:
            if adds:
                torch.sum(tensor(terms[j]), 0, out=tensor(sliced.y[sliced.run(j)]))
            elif not is_in_place:
                sliced.y_places[:, j] = terms[j]

        def call() -> Array:
            works: list[tuple[int, Work]] = []
            for j in range(slices):
                sliced.multiply(j)
                works.append((j, self._all_to_all(tensor(arrived[j]), tensor(product[j]), async_op=True)))
                while works[0][1].is_completed() and len(works) > 1:
                    finish(works.pop(0)[0])
            for j, work in works:
                work.wait()
                finish(j)
            return sliced.y

        return call

    def _gathered(self, sliced: Sliced) -> Array:
        tensor, works = torch.from_numpy, []
        for j in range(sliced.slices):
            gathered = tensor(sliced.gathered[j].reshape(-1, sliced.x.shape[1]))
            works.append(self._all_gather(gathered, tensor(sliced.own(j)), async_op=True))
        for j, work in enumerate(works):
            work.wait()
            sliced.multiply_gathered(j)
        return sliced.y

    def _summed(self, sliced: Sliced) -> Array:
        works = []
        for j in range(sliced.slices):
            sliced.multiply(j)
            works.append(distributed.all_reduce(torch.from_numpy(sliced.y_slices[j]), async_op=True))
        for work in works:
            work.wait()
        return sliced.y

    def _matmul(self, a: Array, b: Array, out: Array) -> None:
        """By torch, as its users have it."""
        x, w, y = map(torch.from_numpy, (a, b, out))
        torch.mm(x, w, out=y)
