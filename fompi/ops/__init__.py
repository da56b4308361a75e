"""The public operations, and their gradients.

- `operations`: the operations with their docstrings; `plan` and `explain`.
- `operation`: one call, from the caller's tensors to the result: `Operation` and `Pending`.
- `arguments`: the arguments of a call on one rank, checked.
- `adjoints`: the backward of every operation, written as operations, for every framework.

This room may import `base`, `plans`, `schedules`, `traces`, `model`, `planner`, `tensors`, `backends`, `mpi`, `engine`
and `runtime`. `operation.HOOKS` calls rooms that it must not import.
"""
