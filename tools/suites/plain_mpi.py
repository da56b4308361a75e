"""The rivals on mpi4py: pairwise without overlap, and in slices. Each is as fast as we can make it.

`NAME(operation, comm, x, w, held)` returns a call, until `held` closes it. Buffers are made once. Messages go in the
permutations rank -> rank + d. Each slice is one kernel call on rows that are first copied next to each other. One call
per shard would be slower, because it would pack w for every shard. Sums compute first, gathers communicate first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from fompi.bench import fused
from fompi.bench.fused import Array, FusedCase
from fompi.bench.measure import Bench
from messages import Requests, Sum
from sliced import Sliced

Call = Callable[[], Array]

PAIRWISE = "unfused, mpi4py P2P"
UNFUSED = (*fused.UNFUSED, PAIRWISE)


def without_fompi(bench: Bench, held: ExitStack, case: FusedCase, slices: Sequence[int]) -> dict[str, Call]:
    """The operation without overlap, and by mpi4py in slices, bound until `held` closes them."""
    mpi, operation = bench.mpi, case.operation
    x, w = case.operands(bench.comm.rank, bench.comm.size)
    return {
        **fused.without_overlap(bench, held, case),
        PAIRWISE: pairwise(operation, mpi, x, w, held),
        **{f"{s} slices, library": library_slices(operation, mpi, x, w, held, s) for s in slices},
        **{f"{s} slices, P2P": pairwise(operation, mpi, x, w, held, s) for s in slices},
    }


def library_slices(
    operation: str, comm: Any, x: Array, w: Array, held: ExitStack, slices: int, window: int = 2
) -> Call:
    """`slices` non-blocking collectives of the library, each while the kernel of another slice runs.

    All-gathers run one at a time. Two at a time would share the link and delay the first slice, which all ranks need.
    """
    sliced = _InFlight(operation, comm, x, w, held, slices, 1 if operation == "all_gather_matmul" else window)
    messages, dup = sliced.messages, sliced.messages.comm

    def exchange(j: int) -> None:
        product = sliced.product[j]
        if operation == "matmul_reduce_scatter":
            messages.queue(lambda: dup.Ireduce_scatter_block(product, sliced.y[sliced.run(j)]))
        elif operation == "matmul_all_reduce":
            messages.queue(lambda: dup.Iallreduce(product, sliced.y_slices[j]))
        else:
            count = sliced.rows * sliced.columns
            places = [(source * slices + j) * count for source in range(sliced.size)]
            counts = [count] * sliced.size
            messages.queue(lambda: dup.Ialltoallv([product, (counts, None)], [sliced.y, (counts, places)]))

    def fetch(j: int) -> None:
        arrived = partial(sliced.arrived, j, sliced.size)
        messages.queue(lambda: dup.Iallgather(sliced.own(j), sliced.gathered[j]), arrived)

    if operation == "all_gather_matmul":
        return lambda: sliced.gather(fetch)
    return lambda: sliced.scatter(lambda: None, exchange)


def pairwise(operation: str, comm: Any, x: Array, w: Array, held: ExitStack, slices: int = 1, window: int = 2) -> Call:
    """Messages in the permutations rank -> rank + d, one exchange per slice. With one slice nothing overlaps."""
    sliced = _InFlight(operation, comm, x, w, held, slices, window)
    if operation == "all_gather_matmul":
        return _pairwise_gather(sliced)
    if operation == "matmul_all_to_all":
        return _pairwise_all_to_all(sliced)
    return _pairwise_sum(sliced, is_all_reduce=operation == "matmul_all_reduce")


def _pairwise_gather(sliced: _InFlight) -> Call:
    messages, rank, size = sliced.messages, sliced.rank, sliced.size

    def fetch(j: int) -> None:
        own = sliced.own(j)
        for d in range(1, size):
            source = (rank - d) % size
            messages.receive(sliced.gathered[j, source], source, j, partial(sliced.arrived, j, 1))
        for d in range(1, size):
            messages.send(own, (rank + d) % size, j)
        messages.locked(np.copyto, sliced.gathered[j, rank], own)
        messages.locked(sliced.arrived, j, 1)

    return lambda: sliced.gather(fetch)


def _pairwise_all_to_all(sliced: _InFlight) -> Call:
    messages, rank, size = sliced.messages, sliced.rank, sliced.size

    def post_receives() -> None:
        for j in range(sliced.slices):
            for d in range(1, size):
                source = (rank - d) % size
                messages.receive(sliced.y_places[source, j], source, j, lambda: None)

    def send(j: int) -> None:
        for d in range(1, size):
            messages.send(sliced.product[j, (rank + d) % size], (rank + d) % size, j)
        np.copyto(sliced.y_places[rank, j], sliced.product[j, rank])

    return lambda: sliced.scatter(post_receives, send)


def _pairwise_sum(sliced: _InFlight, is_all_reduce: bool) -> Call:
    messages, rank, size, rows, slices = sliced.messages, sliced.rank, sliced.size, sliced.rows, sliced.slices
    inbox = np.empty((slices, size, rows, sliced.columns), sliced.x.dtype)
    sums: list[Sum] = []

    def send_sum(j: int) -> None:
        for d in range(1, size):
            messages.send(sliced.y_parts[j, rank], (rank + d) % size, slices + j)

    def post_receives() -> None:
        sums.clear()
        for j in range(slices):
            y = sliced.y_parts[j, rank] if is_all_reduce else sliced.y[sliced.run(j)]
            sums.append(Sum(y, size, partial(send_sum, j) if is_all_reduce else lambda: None))
            for d in range(1, size):
                source = (rank - d) % size
                messages.receive(inbox[j, d], source, j, partial(sums[j].add, inbox[j, d]))
                if is_all_reduce:
                    messages.receive(sliced.y_parts[j, source], source, slices + j, lambda: None)

    def send_terms(j: int) -> None:
        for d in range(1, size):
            messages.send(sliced.product[j, (rank + d) % size], (rank + d) % size, j)
        messages.locked(sums[j].add, sliced.product[j, rank])

    return lambda: sliced.scatter(post_receives, send_terms)


class _InFlight(Sliced):
    """An operation in slices, with requests in flight, and the two loops over slices."""

    def __init__(self, operation: str, comm: Any, x: Array, w: Array, held: ExitStack, slices: int, window: int):
        super().__init__(operation, comm.Get_size(), x, w, slices)
        self.rank, self.messages = comm.Get_rank(), Requests(comm, window)
        held.callback(self.messages.close)
        self.missing: list[int] = []

    def arrived(self, j: int, count: int) -> None:
        self.missing[j] -= count

    def gather(self, fetch: Callable[[int], None]) -> Array:
        """Communicate first: multiply slice j while slice j + 1 travels."""
        self.missing = [self.size] * self.slices
        for j in range(self.slices):
            fetch(j)
        for j in range(self.slices):
            self.messages.wait(lambda j=j: self.missing[j] == 0)  # type: ignore[misc]
            with self.messages.kernel():
                self.multiply_gathered(j)
        self.messages.finish()
        return self.y

    def scatter(self, post_receives: Callable[[], None], exchange: Callable[[int], None]) -> Array:
        """Compute first: slice j travels while the product of slice j + 1 is computed."""
        post_receives()
        for j in range(self.slices):
            with self.messages.kernel():
                self.multiply(j)
            exchange(j)
        self.messages.finish()
        return self.y
