"""Which schedule, and why: candidates, estimates, explanations, choices, whole layers."""
