"""Rivals on torch.distributed with gloo. Threads of gloo move the messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

from fompi.bench.rivals.rival import Array, Sliced

Work = Any


class Gloo:
    """A process group over the ranks of `comm` (mpi4py). Its processes meet at `address`, a port of rank 0.

    The variable GLOO_SOCKET_IFNAME names the network interface. Raises ImportError if torch is not installed.
    """

    def __init__(self, comm: Any, address: str):
        import torch
        import torch.distributed as distributed

        self.torch, self.distributed = torch, distributed
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        torch.set_num_threads(1)  # like the kernels of all contestants
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{address}", rank=self.rank, world_size=self.size, timeout=timedelta(seconds=60)
        )
        # Newer versions call it all_gather_single.
        self._all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self._all_to_all = distributed.all_to_all_single

    def close(self) -> None:
        self.distributed.destroy_process_group()

    def blocking(self, operation: str, x: Array, w: Array) -> Callable[[], Array]:
        """The kernel and one collective."""
        return self.slices(1, operation, x, w)

    def slices(self, slices: int, operation: str, x: Array, w: Array) -> Callable[[], Array]:
        """`slices` collectives with async_op=True, each while the kernel of another slice runs. Adds on arrival.

        A reduce-scatter is an all-to-all and a sum: gloo's own one takes longer.
        """
        sliced, tensor = Sliced(operation, self.size, x, w, slices, self._matmul), self.torch.from_numpy
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
                self.torch.sum(tensor(terms[j]), 0, out=tensor(sliced.y[sliced.run(j)]))
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
        tensor, works = self.torch.from_numpy, []
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
            works.append(self.distributed.all_reduce(self.torch.from_numpy(sliced.y_slices[j]), async_op=True))
        for work in works:
            work.wait()
        return sliced.y

    def _matmul(self, a: Array, b: Array, out: Array) -> None:
        """By torch, as its users have it."""
        x, w, y = map(self.torch.from_numpy, (a, b, out))
        self.torch.mm(x, w, out=y)
