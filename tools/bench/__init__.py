"""The benchmarks of fompi: `python -m fompi bench SUITE`, in a checkout.

A suite is a module with `rows(bench) -> list[Row]`: `fused.py`, `overhead.py`, a file of `tools/suites`, or a file of
yours. All suites share `fompi.bench.measure` (how much is measured, on which hosts, and how calls become a row),
`device.py` (where tensors are with `--device`), and `table.py`, which prints. `command.py` is the command line.
"""
