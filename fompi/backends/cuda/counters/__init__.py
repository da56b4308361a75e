"""Several products of a plan as one kernel, which announces each of them while it runs (FOMPI_COUNTERS)."""
