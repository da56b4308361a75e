"""One rank's program: compiled once, then run call after call.

- `compiled`: what does not depend on rows or addresses: kinds, peers, and what each op waits for.
- `dispatch`: the state machine of one call: it starts each op as soon as nothing holds it back.
- `program`: one call in flight: its beginning, turns, errors, and its trace.
- `binding`: a plan on fixed memory: tensors are checked, and each op gets its arrays.
- `executor`: `bind` and the `Executor`, a bound plan that can be called.
- `baselines`: the time of the kernels alone and of the messages alone.
- `alignment`: the traces of all ranks on one clock.
- `report`: what overlap gained in a job (FOMPI_REPORT).

This room may import `base`, `plans`, `traces`, `model`, `tensors`, `backends`, `mpi` and `engine`. It must not import
`schedules` or `planner`: it carries plans out, and does not know how they are written or chosen.
"""
