"""What would happen on a machine: predictions, with plain numbers only.

- `machine`: machines: what messages and kernels cost; presets and machine files.
- `simulate`: the predicted trace of a plan, and its time.
- `walk`: the simulation itself, from event to event: lanes, kernels, collectives.
- `replay`: a record as a graph, walked again.
- `network`: its messages: links and ports that messages share.
- `lower_bound`: the lower bound of a problem: no schedule is faster.
- `flow_shop`: small scheduling problems with exact answers.
- `fit`: the numbers of a machine from measured times.

This room may import `base`, `plans`, `schedules` and `traces`, and Python's standard library; `replay` also NumPy.
"""
