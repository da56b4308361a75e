"""A program of mpi4py before and after: gather, then multiply; or both as one operation, each behind the other.

    mpirun -n 2 python examples/before_after.py

On two hosts the second one is faster. The lab makes two on one machine, joined by a link of 1 Gbit/s:

    python -m fompi.lab run --hosts 2 --rate 1gbit -- python examples/before_after.py

There it printed, on two cores on 2026-11-26: before 39 to 40 ms, after 27 to 30 ms with MPICH 5.0.2; before 38.8 ms,
after 35.7 ms with Open MPI 5.0.11. On one host nothing is gained: a message is a copy by a core.
"""

from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

import fompi

comm = MPI.COMM_WORLD
random = np.random.default_rng(comm.rank)
x = random.standard_normal((1024 // comm.size, 1024), np.float32)  # the rows of this rank
w = random.standard_normal((1024, 1024), np.float32)  # the columns of this rank


def before():
    full = np.empty((comm.size * len(x), 1024), np.float32)
    comm.Allgather(x, full)
    return full @ w


def after():
    return fompi.all_gather_matmul(x, w, comm=comm)


equal = np.allclose(before(), after(), rtol=1e-3, atol=1e-3)
times = {before: [], after: []}
for _ in range(11):  # in turns, so that both meet the same noise
    for call, seconds in times.items():
        comm.Barrier()
        begun = perf_counter()
        call()
        comm.Barrier()
        seconds.append(perf_counter() - begun)
took = [1e3 * median(seconds[1:]) for seconds in times.values()]
if comm.rank == 0:
    print(f"equal: {equal}; before {took[0]:.1f} ms, after {took[1]:.1f} ms")

# Output on 2 ranks:
# equal: True; before 20.5 ms, after 20.9 ms
