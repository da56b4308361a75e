"""One rank's program: compiled once, then run call after call.

- `compiled`: what does not depend on rows or addresses: kinds, peers, and what each op waits for.
- `dispatch`: the state machine of one call: it starts each op as soon as nothing holds it back.
- `program`: one call in flight: its beginning, turns, errors, and its trace.
- `given`: the tensors of one call: what they must be like, and the memory of the call.
- `bound_plan`: a plan on fixed memory: each op gets its arrays, in every call.
- `executor`: the `Executor`, a bound plan that can be called.
- `lower`: a compiled program as the table of a call in C; `native_run`: such calls, and how Python goes on with one.
- `binding`: `bind` makes an Executor: tensors are checked, and the ranks agree.
- `needs`, `default_device`: what a plan needs of a device's memory; the device of tensors on the host.
- `baselines`: the time of the kernels alone and of the messages alone, and the proof of a call.
- `alignment`: the traces of all ranks on one clock.
- `report`: what overlap gained in a job (FOMPI_REPORT), and in its `steps`; `report_text`: the same as text.
- `digest`, `recorder`: digests of results, or a record of the calls, in its place (FOMPI_DIGEST, FOMPI_RECORD).

This room may import `base`, `plans`, `traces`, `model`, `tensors`, `backends`, `mpi`, `native` and `engine`. It must
not import `schedules` or `planner`: it carries plans out, and does not know how they are written or chosen.
"""
