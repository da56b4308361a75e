"""The rivals of the fused operations on torch.distributed with gloo, whose own threads move the messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fompi.bench.rivals import Array, Rival, cut_rows, result_rows

Work = Any


class Gloo:
    """A process group over the ranks of `comm` (mpi4py), which meets at `address` of rank 0.

    The interface is the one of the variable GLOO_SOCKET_IFNAME. Raises ImportError where there is no torch.
    """

    def __init__(self, comm: Any, address: str):
        import torch
        import torch.distributed as distributed

        self.torch, self.distributed = torch, distributed
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        torch.set_num_threads(1)  # as the kernels of everybody else
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{address}", rank=self.rank, world_size=self.size, timeout=timedelta(seconds=60)
        )
        # Newer versions call it all_gather_single.
        self._all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self._all_to_all = distributed.all_to_all_single

    def close(self) -> None:
        self.distributed.destroy_process_group()

    def _given(self, x: Array, w: Array) -> tuple[Any, Any]:
        return self.torch.from_numpy(x), self.torch.from_numpy(w)

    def _empty(self, *shape: int) -> Any:
        return self.torch.empty(shape, dtype=self.torch.float32)

    def blocking(self, operation: str, x: Array, w: Array) -> Rival:
        """The kernel and one collective. Sums are an all-to-all and a sum: its own reduce-scatter takes longer."""
        torch, rows, columns = self.torch, len(x), w.shape[1]
        given, weight = self._given(x, w)
        y = self._empty(result_rows(operation, self.size, rows), columns)
        product, arrived = self._empty(rows, columns), self._empty(rows, columns)
        gathered = self._empty(rows * self.size, x.shape[1])
        terms = arrived.view(self.size, -1, columns)

        def all_gather_matmul() -> Array:
            self._all_gather(gathered, given)
            return torch.mm(gathered, weight, out=y).numpy()

        def matmul_reduce_scatter() -> Array:
            torch.mm(given, weight, out=product)
            self._all_to_all(arrived, product)
            return torch.sum(terms, 0, out=y).numpy()

        def matmul_all_reduce() -> Array:
            torch.mm(given, weight, out=y)
            self.distributed.all_reduce(y)
            return y.numpy()

        def matmul_all_to_all() -> Array:
            torch.mm(given, weight, out=product)
            self._all_to_all(y, product)
            return y.numpy()

        calls = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, matmul_all_to_all)
        return Rival({call.__name__: call for call in calls}[operation], _nothing)

    def slices(self, slices: int, operation: str, x: Array, w: Array) -> Rival:
        """`slices` collectives with async_op=True, each while the kernel of another slice runs; adds on arrival."""
        torch, size, columns = self.torch, self.size, w.shape[1]
        each = cut_rows(operation, size, len(x), slices)
        given, weight = self._given(x, w)
        y = self._empty(result_rows(operation, size, len(x)), columns)
        y_places = y.view(-1, slices, each, columns)  # [owner, slice]

        if operation == "all_gather_matmul":
            gathered, made = self._empty(slices, size * each, x.shape[1]), self._empty(size * each, columns)

            def gather() -> Array:
                works = [
                    self._all_gather(gathered[j], given[j * each : (j + 1) * each], async_op=True)
                    for j in range(slices)
                ]
                for j, work in enumerate(works):
                    work.wait()
                    torch.mm(gathered[j], weight, out=made)
                    y_places[:, j] = made.view(size, each, columns)
                return y.numpy()

            return Rival(gather, _nothing)

        runs = operation == "matmul_all_reduce"  # whose slices are any runs of rows
        product, arrived = self._empty(slices, size * each, columns), self._empty(slices, size * each, columns)
        packed = self._empty(size * each, x.shape[1])

        def multiply(j: int) -> None:
            if runs:
                torch.mm(
                    given[j * size * each : (j + 1) * size * each], weight, out=y[j * size * each :][: size * each]
                )
            else:
                packed.view(size, each, -1).copy_(given.view(size, slices, each, -1)[:, j])
                torch.mm(packed, weight, out=product[j])

        def start(j: int) -> Work:
            if runs:
                return self.distributed.all_reduce(y[j * size * each : (j + 1) * size * each], async_op=True)
            return self._all_to_all(arrived[j], product[j], async_op=True)

        def finish(j: int) -> None:
            terms = arrived[j].view(size, each, columns)
            if operation == "matmul_reduce_scatter":
                torch.sum(terms, 0, out=y[j * each : (j + 1) * each])
            elif not runs:
                y_places[:, j] = terms

        def scatter() -> Array:
            works: list[tuple[int, Work]] = []
            for j in range(slices):
                multiply(j)
                works.append((j, start(j)))
                while works[0][1].is_completed() and len(works) > 1:
                    finish(works.pop(0)[0])
            for j, work in works:
                work.wait()
                finish(j)
            return y.numpy()

        return Rival(scatter, _nothing)


def _nothing() -> None:
    pass
