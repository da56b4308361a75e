"""What is measured to choose better: rounds, links, calibration, autotuning, adaptation."""
