"""What happened when: traces, timelines, clocks, drift, and the proof of overlap."""
