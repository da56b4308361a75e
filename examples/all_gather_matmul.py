"""All-gather and matmul as one operation: each rank multiplies its own rows while the rows of the others arrive.

    mpirun -n 2 python examples/all_gather_matmul.py

The rows of x are spread over the ranks, and so are the columns of w. The operation means the same as these two lines,
in which every rank waits for all messages before it multiplies:

    x_full = fompi.all_gather(x, comm=comm)
    y = x_full @ w

Any number of ranks works.
"""

import numpy as np

import fompi

comm = fompi.Communicator()  # all ranks that mpirun started
random = np.random.default_rng(comm.rank)  # each rank draws its own numbers

x = random.standard_normal((3 + comm.rank, 8), np.float32)  # the rows of this rank: 3 on rank 0, 4 on rank 1, ...
w = random.standard_normal((8, 5), np.float32)  # the columns of this rank

y = fompi.all_gather_matmul(x, w, comm=comm)  # all rows, and the columns of this rank

pending = fompi.all_gather_matmul.start(x, w, comm=comm)  # the same, but the call returns at once
again = pending.wait()  # other work can go before this line

expected = fompi.all_gather(x, comm=comm) @ w
equal = np.allclose(y, expected, atol=1e-5) and np.allclose(again, expected, atol=1e-5)
equal_everywhere = fompi.all_gather(np.array([equal]), comm=comm).all()

if comm.rank == 0:
    print(f"rank 0 of {comm.size}: x {x.shape} and w {w.shape} give y {y.shape}")
    print(f"equal to all_gather(x) @ w on all ranks: {equal_everywhere}")

# Output on 2 ranks:
# rank 0 of 2: x (3, 8) and w (8, 5) give y (7, 5)
# equal to all_gather(x) @ w on all ranks: True
