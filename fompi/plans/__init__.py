"""What a collective is: the problem, the plan that solves it, and whether the plan is right.

- `meaning`: what each operation means: what moves its rows, and the layouts of its operands and its result.
- `problems`: an operation with the shapes and dtypes of its operands, and the buffers that each rank has for it.
- `rows`: the rows of a call: how many each rank has, sends and gets.
- `specs`: the problem of an operation on global tensors, for every rank.
- `conditions`: what the inputs and the outputs of each rank hold.
- `plan`: a plan as a value: for every rank its buffers and its list of ops.
- `kernels`: the names of kernels, what each one computes, and what it costs.
- `dependencies`: when an op may start, derived from what the ops read and write.
- `staged`: plans for buffers on a device: messages through host memory, and products of half types.
- `encoded`: plans whose messages carry fewer bits; `certified`: how far their results can be off.
- `over_x`: plans whose result is written over x.
- `verify`: checks that a plan is right.

This room may import `base` and Python's standard library.
"""
