"""Benchmarks: `fompi bench` (`command.py`) and `fompi try` (`trial.py`).

A suite is a module with `rows(bench) -> list[Row]`, of its own name. `pipelines.py` and `axes.py`
are rows of the suite `parallel`. What suites share: `measure.py` says how much is measured, where, and how calls become
a row; `cluster.py` which ranks share a host; `device.py` where tensors are with `--device`; `accelerator.py` is an
emulated accelerator; `strategies.py` and `training.py` are what is measured; `table.py` prints; `rivals/` is what fompi
is measured against.

This room may import every other room. Nothing of the product imports it: `fompi.cli.main` names two modules as text.
"""
