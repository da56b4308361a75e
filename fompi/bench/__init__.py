"""Benchmarks: `fompi bench` (`command.py`) and `fompi try` (`trial.py`).

A suite is a module with `rows(bench) -> list[Row]`: `fused.py`, `overhead.py`, or a file of the
user. What suites share: `measure.py` says how much is measured, where, and how calls become a row; `cluster.py`
which ranks share a host; `device.py` where tensors are with `--device`; `cases.py` has the shapes of fused operations;
`table.py` prints; `rivals.py` is what fompi is measured against.

This room may import every other room. Nothing of the product imports it: `fompi.cli.main` names two modules as text.
"""
