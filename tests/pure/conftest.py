"""The pure rooms run without MPI, a framework or a compiler. So no test in this folder may load one."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOREIGN = {"mpi4py", "torch", "jax", "jaxlib", "ml_dtypes", "cupy", "numba"}
REPORTED = pytest.StashKey[set]()


@pytest.fixture(autouse=True)
def nothing_foreign_is_loaded(request):
    """Fail the first test after which such a module is loaded. An import by the test module counts too."""
    pure_session = all(HERE in item.path.parents for item in request.session.items)
    reported = request.config.stash.setdefault(REPORTED, set())
    yield
    loaded = FOREIGN & sys.modules.keys() - reported
    reported |= loaded
    if pure_session:
        assert not loaded, f"this test, or an import before it, loaded {', '.join(sorted(loaded))}"
