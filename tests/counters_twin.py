"""A product that raises counters, as a Numba kernel in Numba's simulator, while a host thread sends its groups by MPI.

The kernel is the twin of the one in `fompi.backends.cuda.triton`. Two ranks run this file, with NUMBA_ENABLE_CUDASIM=1:

    mpirun -n 2 python tests/counters_twin.py reduce_scatter|all_to_all|all_reduce
"""

import os
import sys
import threading
import time

import numpy as np
from mpi4py import MPI
from numba import cuda

from fompi.backends.cuda.signal import Signals, Tiling, by_destination, by_owner, by_tile, received

ROWS, COLUMNS, DEPTH, CALLS, SECONDS = 12, 10, 6, 3, 40


@cuda.jit
def multiply(a, b, c, place, group, need, count, flag, epoch, launched, share, shard, high, across):
    """Block t computes the t-th tile of a @ b and stores its pieces. The last tile of a group raises its flag."""
    t, i, j = cuda.blockIdx.x, cuda.threadIdx.y, cuda.threadIdx.x
    m, n = launched[t] // across, launched[t] % across
    owner, q, column = i // share, m * share + i % share, n * cuda.blockDim.x + j
    of_shard = (shard + high - 1) // high
    if q // high < of_shard:
        total = 0.0
        if q < shard and column < b.shape[1]:
            for k in range(b.shape[0]):
                total += a[owner * shard + q, k] * b[k, column]
        c[place[(owner * of_shard + q // high) * across + n], q % high, j] = total
    cuda.threadfence()
    cuda.syncthreads()
    if i == 0 and j == 0:
        g = group[t]
        if cuda.atomic.add(count, g, 1) == need[g] - 1:
            count[g] = 0
            cuda.threadfence_system()
            flag[g] = epoch


def restored(pieces, index, shape):
    high, broad = pieces.shape[1:]
    across = -(-shape[1] // broad)
    out = np.zeros(shape, pieces.dtype)
    for p, slot in enumerate(index):
        i, j = p // across * high, p % across * broad
        part = out[i : i + high, j : j + broad]
        part[...] = pieces[slot][: part.shape[0], : part.shape[1]]
    return out


def main(moves):
    comm = MPI.COMM_WORLD
    rank, ranks = comm.rank, comm.size
    tiling = Tiling(ROWS, COLUMNS, 4, 4, ranks if moves == "reduce_scatter" else 1, band=2)
    sizes = (3, 4, tiling.tiles - 7)
    destinations = [(np.arange(ROWS) * (3 + source) // 4) % ranks for source in range(ranks)]  # unequal counts
    if moves == "reduce_scatter":
        orders = [by_owner(tiling, sizes)] * ranks
    elif moves == "all_reduce":
        orders = [by_tile(tiling, sizes)] * ranks
    else:
        orders = [by_destination(tiling, sizes, to, ranks) for to in destinations]
    order, groups = orders[rank], len(sizes)
    receivers = order.counts.shape[1]  # 1 if all ranks take all

    flags, count = cuda.mapped_array(groups, np.int32), np.zeros(groups, np.int32)
    c = cuda.mapped_array((len(order.place), order.high, tiling.broad), np.float64)
    signals = Signals(flags)
    for call in range(CALLS):
        operands = [np.random.default_rng([call, source]) for source in range(ranks)]
        operands = [
            (g.integers(-9, 9, (ROWS, DEPTH)) + 0.0, g.integers(-9, 9, (DEPTH, COLUMNS)) + 0.0) for g in operands
        ]
        products = [a @ b for a, b in operands]
        c[...] = np.nan
        epoch = signals.begin()
        failed = []

        def run(epoch=epoch, operands=operands, failed=failed):
            try:
                multiply[tiling.tiles, (tiling.broad, tiling.high)](
                    *operands[rank], c, order.place, order.group, order.need, count, flags, epoch, tiling.launched,
                    tiling.share, tiling.shard, order.high, tiling.across,
                )  # fmt: skip
            except BaseException as error:
                failed.append(error)

        kernel = threading.Thread(target=run)
        kernel.start()
        peer, arrived, requests, early = 1 - rank, {}, [], 0
        deadline = time.monotonic() + SECONDS
        while not signals.all_seen:
            assert time.monotonic() < deadline and not failed, failed
            for g in signals.new():
                mine, theirs = (
                    order.run(g, peer % order.counts.shape[1]),
                    orders[peer].run(g, rank % order.counts.shape[1]),
                )
                arrived[g] = np.empty((len(theirs), order.high, tiling.broad))
                requests += [comm.Irecv(arrived[g], peer, g), comm.Isend(c[mine.start : mine.stop], peer, g)]
                early += g < groups - 1 and kernel.is_alive()
            MPI.Request.Testall(requests)
            time.sleep(1e-4)
        kernel.join(SECONDS)
        assert not kernel.is_alive() and not failed and not count.any(), (failed, count)
        while not MPI.Request.Testall(requests):
            assert time.monotonic() < deadline
        theirs = np.concatenate([arrived[g] for g in range(groups)])
        receiver = rank % receivers
        own = np.concatenate([c[order.run(g, receiver).start : order.run(g, receiver).stop] for g in range(groups)])
        if moves == "all_to_all":
            got = restored(theirs, received(orders[peer], rank), ((destinations[peer] == rank).sum(), COLUMNS))
            wanted = products[peer][destinations[peer] == rank]
        else:
            rows = slice(rank * tiling.shard, (rank + 1) * tiling.shard) if moves == "reduce_scatter" else slice(None)
            wanted = sum(products)[rows]
            got = restored(own + theirs, received(order, receiver), wanted.shape)
        np.testing.assert_array_equal(got, wanted)
        line = f"rank {rank}: call {epoch} is right, {early} groups left while the kernel ran\n"
        os.write(1, line.encode())  # one write: the ranks share the output


if __name__ == "__main__":
    main(sys.argv[1])
