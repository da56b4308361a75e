"""A schedule of your own: which rank sends what, and which kernels run between. fompi verifies it before it runs.

    mpirun -n 3 python examples/own_schedule.py

A schedule is a generator of the ops of one rank: `Send`, `Recv` and `Compute`. It contains no waits: fompi derives
from the memory that an op reads and writes what the op must wait for. All ranks register the same schedules. Any
number of ranks works, and the output is the same.
"""

import numpy as np

import fompi
from fompi.plans.plan import Compute, Recv, Send


@fompi.schedule("far first", "all_gather")
def far_first(problem, work):
    """all_gather_matmul in float32: multiply own rows, then those of the farthest rank, and so on."""
    rank, size, parts = work.rank, work.size, work.parts
    x, w, y = work["x"], work["w"], work["y"]
    full = work.scratch("full", "rows", problem.row, problem.dtype)  # the rows of the other ranks arrive here

    def shard(buffer, owner):  # the blocks of one rank
        return buffer[owner * parts : (owner + 1) * parts]

    yield Compute("matmul", (x[:], w[:]), (shard(y, rank),))
    for distance in range(size - 1, 0, -1):
        source, dest = (rank - distance) % size, (rank + distance) % size
        yield Recv(source, shard(full, source))
        yield Send(dest, x[:])  # reads x, which no kernel writes: it starts at once
        yield Compute("matmul", (shard(full, source), w[:]), (shard(y, source),))  # waits for the rows of source


@fompi.schedule("wrong", "all_gather")
def wrong(problem, work):
    """The same, but rank 1 sends nothing."""
    yield from (op for op in far_first(problem, work) if not (work.rank == 1 and isinstance(op, Send)))


comm = fompi.Communicator()
x = np.arange(6, dtype=np.float32).reshape(2, 3) + comm.rank
w = np.ones((3, 4), np.float32)
y = fompi.all_gather_matmul(x, w, comm=comm, schedule="far first")
equal = np.array_equal(y, fompi.all_gather(x, comm=comm) @ w)

if comm.rank == 0:
    specs = fompi.Spec((6, 3), "float32", fompi.Shard(0)), fompi.Spec((3, 12), "float32", fompi.Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=3, schedule="far first")  # print(plan) shows every op
    print(f"proven for {plan.size} ranks: {plan.problem} by {plan.schedule}")
    print(f"equal to all_gather(x) @ w: {equal}")
    try:
        fompi.plan(fompi.all_gather_matmul, *specs, ranks=3, schedule="wrong")
    except fompi.PlanError as error:
        print(f"PlanError: {error}")

# Output on 3 ranks:
# proven for 3 ranks: all_gather_matmul(float32[:, 3], w[3, 4]) by far first
# equal to all_gather(x) @ w: True
# PlanError: rank 0, op 1, full[1]<1: rank 1 never sends it
