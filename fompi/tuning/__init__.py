"""Measurements on the ranks of a job, from which better plans are chosen.

- `rounds`: how alternatives are timed and compared: in rounds, by medians, with intervals. `bench` uses it too.
- `links`: the times of messages between ranks.
- `device`: the times of kernels, launches, copies and messages of a device.
- `verdict`: what others did on the cores meanwhile, and whether a measurement can be used.
- `calibrate`: measures the Machine of a job, and measures its links again after a change.
- `autotune`: `effort="measure"`: runs the best candidates of a call, and keeps the fastest, also on disk.
- `adaptive`: `bind`, and `Adaptive`: a bound operation that changes its plan when links change.

This room may import `base`, `plans`, `schedules`, `traces`, `model`, `planner`, `tensors`, `backends`, `mpi`, `engine`,
`runtime` and `ops`. It must not import `bench`.
"""
