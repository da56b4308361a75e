"""One rank's program: compiled, in flight, bound to addresses; its baselines and reports."""
