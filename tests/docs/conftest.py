"""Jobs of several ranks run one after the other: two at once take more than twice as long."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "mpirun" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("ranks"))
