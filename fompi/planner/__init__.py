"""Which schedule a problem should take on a machine, and why.

- `candidates`: the schedules of a problem, with the slices and windows that are compared.
- `estimate`: the approximate time of a candidate, by a formula.
- `explain`: `Explanation`: all candidates, the best first, and what the best one hides.
- `choose`: the schedule of a call: by the model of a machine, or by a simple rule.
- `advice`: what would help a recorded run.
- `layers`: predicted times of whole layers and training steps of known models.
- `layout`: which sizes of all kinds of parallelism are best for a model, by formulas.
- `shares`: exact shares of units for ranks that are not equally fast.
- `demands`: what the units of a model demand of such ranks.
- `balance`: which shares of a model are best for them, and why.

This room may import `base`, `plans`, `schedules`, `traces` and `model`, and Python's standard library; `shares` also
SciPy, where it solves a mixed-integer program, and `advice` NumPy.
"""
