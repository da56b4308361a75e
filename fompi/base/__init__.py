"""Definitions that every other room uses.

- `errors`: the exceptions and warnings of fompi.
- `layout`: where the rows of a tensor are: layouts, shapes, blocks and their sizes.
- `kept`: what was measured, kept on disk.
- `file_checks`: checks of values that are read from JSON files.
- `version`: the version number.

This room may import nothing but Python's standard library.
"""
