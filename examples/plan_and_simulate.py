"""A plan is a value: make it, verify it, and predict its time on a machine, without MPI and without data.

    python examples/plan_and_simulate.py

This example needs no `mpirun`. A `Spec` holds the shape of a whole tensor, its dtype, and how the ranks share it:
`Shard(0)` spreads the rows over the ranks, `Shard(1)` the columns.
"""

import fompi
from fompi import Shard, Spec

x = Spec((3072, 1024), "float32", Shard(0))
w = Spec((1024, 1536), "float32", Shard(1))

plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=3, schedule="ring")
fompi.verify(plan)  # checks that the plan ends with the right result; a PlanError names the rank and the op at fault
print(plan)  # one column for each rank: x[0]>1 sends block 0 of x to rank 1, full[2]<2 receives block 2 from rank 2

machine = fompi.Machine.load("gigabit")  # or a file that `python -m fompi calibrate` writes
print(f"\nPredicted on {machine.name}. Exposed is the time in which no kernel runs:")
for schedule, slices in (("unfused", 1), ("sliced", 4), ("ring", 1), ("ring", 4)):
    plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=3, schedule=schedule, slices=slices)
    trace = fompi.simulate(plan, machine)
    exposed = max(trace.summary(rank).exposed for rank in trace.ranks)
    print(f"{schedule:7} slices={slices} {1e3 * trace.seconds:6.1f} ms, exposed {1e3 * exposed:5.1f} ms")

best = fompi.explain(fompi.all_gather_matmul, x, w, ranks=3, machine=machine)  # tries all schedules and slices
print(f"The best of all is {best.plan.schedule} with slices={best.plan.parts}.")  # print(best) says why

# Output:
# all_gather_matmul(float32[:, 1024], w[1024, 512]) by ring: 3 ranks, 1 part, scratch 12.0 MiB per rank
# a[0]>1 sends block 0 of a to rank 1; a[0]<1 receives it from rank 1; f(a) -> b runs kernel f
#       rank 0                         rank 1                         rank 2
#    0  full[2]<2                      full[0]<0                      full[1]<1
#    1  x[0]>1                         x[1]>2                         x[2]>0
#    2  matmul(x[0], w[0]) -> y[0]     matmul(x[1], w[0]) -> y[1]     matmul(x[2], w[0]) -> y[2]
#    3  full[1]<2                      full[2]<0                      full[0]<1
#    4  full[2]>1                      full[0]>2                      full[1]>0
#    5  matmul(full[2], w[0]) -> y[2]  matmul(full[0], w[0]) -> y[0]  matmul(full[1], w[0]) -> y[1]
#    6  matmul(full[1], w[0]) -> y[1]  matmul(full[2], w[0]) -> y[2]  matmul(full[0], w[0]) -> y[0]
#
# Predicted on gigabit. Exposed is the time in which no kernel runs:
# unfused slices=1  206.7 ms, exposed 142.3 ms
# sliced  slices=4  158.7 ms, exposed  94.3 ms
# ring    slices=1   92.7 ms, exposed  28.2 ms
# ring    slices=4   76.5 ms, exposed  12.1 ms
# The best of all is ring with slices=16.
