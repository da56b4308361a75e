"""Calls in C (docs/inside/native.md). `_native` is missing where no compiler was: then the Python engine does all."""
