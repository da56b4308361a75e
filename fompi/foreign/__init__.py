"""Schedules that other systems wrote: read, and proven right or wrong.

- `algorithm`: what such a schedule is: threads of steps on each rank, with a queue for each connection.
- `msccl`: reads the XML of MSCCL, which RCCL and the MSCCL scheduler run.
- `proof`: whether it ends, whether two threads touch a chunk at the same time, and what the result holds.
- `translate`: the same as a Plan, which is verified once more, simulated, and run.

This room may import `base`, `plans`, `schedules`, `traces`, `model` and `planner`, and Python's standard library.
"""
