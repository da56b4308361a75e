"""The fixtures and the exchange of failures of tests/mpi."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("conftest_of_mpi", Path(__file__).parents[1] / "mpi" / "conftest.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: value for name, value in vars(_module).items() if not name.startswith("__")})
