"""What would happen on a machine: machines, the event walk, the digital twin, lower bounds, fits."""
