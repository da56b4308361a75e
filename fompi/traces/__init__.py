"""When each op of a call ran, and what overlap gained.

- `trace`: events and traces, predicted or measured, and the times that follow from them.
- `timeline`: a trace as text or as SVG.
- `clocks`: the clock of another rank, fitted to samples.
- `drift`: a warning if calls take longer than predicted.
- `record`: the calls and steps of a run, as FOMPI_RECORD writes them.
- `proof`: the exposed time of a call, and what the kernels waited for.

This room may import `base`, `plans` and `schedules`, and Python's standard library; `record` also NumPy.
"""
