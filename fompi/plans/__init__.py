"""What a collective is: the problem, the plan that solves it, and whether the plan is right.

- `problems`: the meaning of each operation: its operands, their layouts, its results, and a reference.
- `plan`: a plan as a value: for every rank its buffers and its list of ops.
- `kernels`: the names of kernels, what each one computes, and what it costs.
- `dependencies`: when an op may start, derived from what the ops read and write.
- `verify`: checks that a plan is right.

This room may import `base` and Python's standard library.
"""
