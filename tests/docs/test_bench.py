"""python -m fompi bench, as a user types it: every contestant is there, is right, and is timed. No figure is judged."""

from __future__ import annotations

import json

import pytest

from fompi.bench import peers


@pytest.mark.timeout(200)
def test_peers(mpirun, tmp_path):
    """mpi4py, gloo and JAX run; what is not installed says so. JAX needs processes of its own for this."""
    files = ["--json", tmp_path / "rows.json", "--markdown", tmp_path / "rows.md", "--plot", tmp_path / "rows.svg"]
    done = mpirun(2, "-m", "fompi", "bench", "peers", "--quick", "--rounds", "2", *files, seconds=180)
    assert done.returncode == 0 and not done.left_behind, done.output
    assert (tmp_path / "rows.md").read_text() in done.stdout and b"<svg" in (tmp_path / "rows.svg").read_bytes()
    *rows, summary = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["what"].split(",")[0] for row in rows] == list(peers.OPERATIONS)
    for row in rows:
        told = row["samples"].keys() | row["absent"].keys()
        for name in (*peers.UNFUSED, *peers.FUSED, "gloo blocking", "gloo, 2 slices", "JAX collectives"):
            assert name in told
        assert {"native slices 2", "P2P slices 2", "JAX ppermute ring", "kernel alone"} <= row["samples"].keys()
        assert "mpi4jax" in told and row["absent"].keys() <= {"mpi4jax"}
        assert row["errors"].keys() == row["samples"].keys() - {"kernel alone"} and max(row["errors"].values()) < 1e-5
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["samples"].values())
        assert "shared memory: no wire" in row["setup"] and row["reached"] is None
    assert [figure["value"] > 0 for figure in summary["figures"]] == [True] * 3  # slices, others, gloo in slices


@pytest.mark.timeout(100)
def test_collectives(mpirun):
    """JSON alone on standard output."""
    done = mpirun(2, "-m", "fompi", "bench", "collectives", "--quick", "--rounds", "2", "--json", seconds=90)
    assert done.returncode == 0, done.output
    read = json.loads(done.stdout)
    assert read["about"]["mpi"] and read["about"]["command"].startswith("python -m fompi bench collectives")
    assert [row["what"] for row in read["rows"]] == [
        f"{name} of 4 MiB" for name in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    ]
    assert all(set(row["errors"].values()) == {0.0} for row in read["rows"])


@pytest.mark.timeout(200)
def test_planner(mpirun):
    """The machine first, then shapes; every candidate that was walked through is measured and right."""
    done = mpirun(2, "-m", "fompi", "bench", "planner", "--quick", "--rounds", "2", "--json", seconds=180)
    assert done.returncode == 0, done.output
    machine, *rows, summary = json.loads(done.stdout)["rows"]
    assert machine["what"] == "the machine" and "kernels:" in machine["setup"]
    assert len(rows) == 2 and all(max(row["errors"].values()) < 1e-5 for row in rows)
    assert all(row["base"] in row["samples"] and "unfused" in row["samples"] for row in rows)
    assert len(summary["figures"]) == 12 and summary["reached"] is None


def test_adapt_needs_links_that_can_be_changed(mpirun):
    done = mpirun(2, "-m", "fompi", "bench", "adapt")
    assert done.returncode != 0 and "tools/netlab.py" in done.output
