"""The pure half runs without MPI, without a framework, without a compiler: nothing here may load one."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOREIGN = {"mpi4py", "torch", "jax", "jaxlib", "ml_dtypes", "cupy", "numba"}
REPORTED = pytest.StashKey[set]()


@pytest.fixture(autouse=True)
def nothing_foreign_is_loaded(request):
    """Fails the first test after which one of them is there; the modules that only import it count too."""
    pure_session = all(HERE in item.path.parents for item in request.session.items)
    reported = request.config.stash.setdefault(REPORTED, set())
    yield
    loaded = FOREIGN & sys.modules.keys() - reported
    reported |= loaded
    if pure_session:
        assert not loaded, f"{', '.join(sorted(loaded))} loaded by this test or by an import before it"
