"""What is in flight in a process, and what drives it. One engine serves all communicators of the process."""
