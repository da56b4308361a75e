"""What is in flight, and who drives it: engine, progress, control messages, handshakes, faults, communicators."""
