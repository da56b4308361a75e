"""The command line: python -m fompi."""
