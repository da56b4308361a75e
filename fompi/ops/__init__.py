"""The public operations, and their gradients.

- `operations`: the operations with their docstrings; `plan` and `explain`.
- `operation`: how a call begins; `pending`: the call in flight, up to its result.
- `arguments`: the arguments of a call on one rank, checked.
- `compared`: what the ranks compare before a call, and the schedule that follows.
- `ticket`: unbound calls that were made before, in C; `keys`: how they are found by a key of their arguments.
- `messages`: send, recv and sendrecv; `message_forms`: what they carry; `messages_in_c`: those that C carries out;
  `intracomm`: `fompi.mpi.Comm`; `by_library`: which of its collectives are the library's own.
- `bound_call`: `operation.bind`, a call that is agreed once; `decide`: what the ranks decide about such a call;
  `certified`: the largest error of its result.
- `replicated`: the sum of gradients of replicated parameters.
- `adjoints`: the backward of every operation, written as operations, for every framework.

This room may import `base`, `plans`, `schedules`, `traces`, `model`, `planner`, `tensors`, `backends`, `mpi`, `engine`
and `runtime`. It calls others through `fompi.base.doors`.
"""
