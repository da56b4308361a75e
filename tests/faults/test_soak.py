"""Many fresh jobs: `make soak` runs them, `make test` does not."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_fresh_runs_end_cleanly(launch):
    """Jobs that start something large, leave it to the helper thread, and end."""
    for _ in range(20):
        launch(
            3,
            """
pending = fompi.all_reduce.start(np.ones(1 << 20), comm=world)
assert (fompi.all_gather(np.ones((2, 3)), comm=world) == 1).all()
assert (pending.wait() == size).all()
""",
        ).assert_clean()


def test_failing_runs_end_on_all_ranks(launch):
    """A rank that raises ends the job, with one traceback, every time."""
    for _ in range(20):
        code = """
if rank == 1:
    raise RuntimeError("on purpose")
fompi.all_reduce(np.ones(1 << 16), comm=world)
"""
        ended = launch(3, code)
        assert ended.finished.returncode != 0 and ended.tracebacks == 1, ended.output
        assert not ended.finished.timed_out and not ended.finished.left_behind, ended.output
