"""Rivals on torch.distributed with gloo. Threads of gloo move the messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fompi.bench.rivals.rival import Array, Rival, piece_rows, result_rows

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

    def _operands(self, x: Array, w: Array) -> tuple[Any, Any]:
        return self.torch.from_numpy(x), self.torch.from_numpy(w)

    def _empty(self, *shape: int) -> Any:
        return self.torch.empty(shape, dtype=self.torch.float32)

    def blocking(self, operation: str, x: Array, w: Array) -> Rival:
        """The kernel and one collective. A reduce-scatter is an all-to-all and a sum: gloo's own one takes longer."""
        torch, rows, columns = self.torch, len(x), w.shape[1]
        shard, weight = self._operands(x, w)
        y = self._empty(result_rows(operation, self.size, rows), columns)
        product, arrived = self._empty(rows, columns), self._empty(rows, columns)
        gathered = self._empty(rows * self.size, x.shape[1])
        terms = arrived.view(self.size, -1, columns)

        def all_gather_matmul() -> Array:
            self._all_gather(gathered, shard)
            return torch.mm(gathered, weight, out=y).numpy()

        def matmul_reduce_scatter() -> Array:
            torch.mm(shard, weight, out=product)
            self._all_to_all(arrived, product)
            return torch.sum(terms, 0, out=y).numpy()

        def matmul_all_reduce() -> Array:
            torch.mm(shard, weight, out=y)
            self.distributed.all_reduce(y)
            return y.numpy()

        def matmul_all_to_all() -> Array:
            torch.mm(shard, weight, out=product)
            self._all_to_all(y, product)
            return y.numpy()

        calls = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, matmul_all_to_all)
        return Rival({call.__name__: call for call in calls}[operation], _nothing)

    def slices(self, slices: int, operation: str, x: Array, w: Array) -> Rival:
        """`slices` collectives with async_op=True, each while the kernel of another slice runs. Adds on arrival."""
        if operation == "all_gather_matmul":
            return self._sliced_gather(slices, x, w)
        if operation == "matmul_all_reduce":
            return self._sliced_all_reduce(slices, x, w)
        return self._sliced_scatter(slices, operation, x, w)

    def _sliced_gather(self, slices: int, x: Array, w: Array) -> Rival:
        torch, size, columns = self.torch, self.size, w.shape[1]
        rows = piece_rows("all_gather_matmul", size, len(x), slices)
        shard, weight = self._operands(x, w)
        y = self._empty(size * len(x), columns)
        y_places = y.view(-1, slices, rows, columns)  # [owner, slice]
        gathered, product = self._empty(slices, size * rows, x.shape[1]), self._empty(size * rows, columns)

        def call() -> Array:
            works = [
                self._all_gather(gathered[j], shard[j * rows : (j + 1) * rows], async_op=True) for j in range(slices)
            ]
            for j, work in enumerate(works):
                work.wait()
                torch.mm(gathered[j], weight, out=product)
                y_places[:, j] = product.view(size, rows, columns)
            return y.numpy()

        return Rival(call, _nothing)

    def _sliced_all_reduce(self, slices: int, x: Array, w: Array) -> Rival:
        """Its slices are runs of rows, so they are multiplied and summed in place."""
        torch = self.torch
        rows = self.size * piece_rows("matmul_all_reduce", self.size, len(x), slices)
        shard, weight = self._operands(x, w)
        y = self._empty(len(x), w.shape[1])

        def call() -> Array:
            works = []
            for j in range(slices):
                y_slice = y[j * rows : (j + 1) * rows]
                torch.mm(shard[j * rows : (j + 1) * rows], weight, out=y_slice)
                works.append(self.distributed.all_reduce(y_slice, async_op=True))
            for work in works:
                work.wait()
            return y.numpy()

        return Rival(call, _nothing)

    def _sliced_scatter(self, slices: int, operation: str, x: Array, w: Array) -> Rival:
        torch, size, columns = self.torch, self.size, w.shape[1]
        rows = piece_rows(operation, size, len(x), slices)
        shard, weight = self._operands(x, w)
        y = self._empty(result_rows(operation, size, len(x)), columns)
        y_places = y.view(-1, slices, rows, columns)  # [owner, slice]
        product, arrived = self._empty(slices, size * rows, columns), self._empty(slices, size * rows, columns)
        packed = self._empty(size * rows, x.shape[1])

        def start(j: int) -> Work:
            packed.view(size, rows, -1).copy_(shard.view(size, slices, rows, -1)[:, j])
            torch.mm(packed, weight, out=product[j])
            return self._all_to_all(arrived[j], product[j], async_op=True)

        def finish(j: int) -> None:
            terms = arrived[j].view(size, rows, columns)
            if operation == "matmul_reduce_scatter":
                torch.sum(terms, 0, out=y[j * rows : (j + 1) * rows])
            else:
                y_places[:, j] = terms

        def call() -> Array:
            works: list[tuple[int, Work]] = []
            for j in range(slices):
                works.append((j, start(j)))
                while works[0][1].is_completed() and len(works) > 1:
                    finish(works.pop(0)[0])
            for j, work in works:
                work.wait()
                finish(j)
            return y.numpy()

        return Rival(call, _nothing)


def _nothing() -> None:
    pass
