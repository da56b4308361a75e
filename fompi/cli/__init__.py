"""The command line: `fompi`, or `python -m fompi`, which is the same program.

Each subcommand is a module with `EXAMPLE`, `add_arguments(parser)` and `run(options) -> int`, of its own name.
`main.py` imports it only when it is used. `plan.py` also has the arguments that describe a problem, `output.py` prints
tables, JSON and the progress line, `processes.py` is for `info`, `findings.py` is for `doctor`.

This room may import every room but `fompi.bench`: `main.py` names the module of `try` as text.
"""
