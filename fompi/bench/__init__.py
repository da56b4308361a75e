"""Benchmarks: one file per suite, run by `python -m fompi bench`. Nothing of the product imports this room."""
