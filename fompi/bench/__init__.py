"""What `fompi try` measures (`trial.py`), and what it shares with the benchmarks of a checkout (`tools/bench`).

`fused.py` has the fused operations with overlap and without, `measure.py` how much is measured, on which hosts, and how
calls become a row.

This room may import every other room. Nothing of the product imports it: `fompi.cli.main` names a module as text.
"""
