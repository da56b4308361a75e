"""Benchmarks: `fompi bench` (`command.py`) and `fompi try` (`trial.py`).

A suite is a module with `rows(bench) -> list[Row]`: `fused.py`, `overhead.py`, or a file of the user. All suites share
`measure.py` (how much is measured, on which hosts, and how calls become a row), `device.py` (where tensors are with
`--device`), and `table.py`, which prints.

This room may import every other room. Nothing of the product imports it: `fompi.cli.main` names two modules as text.
"""
