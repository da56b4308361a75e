"""Definitions that every other room uses.

- `errors`: the exceptions and warnings of fompi.
- `differences`: what the ranks compare as text, and in what it differs.
- `layout`: where the rows of a tensor are: layouts, shapes, blocks and their sizes.
- `wires`: the forms in which messages carry elements in fewer bytes.
- `nested`: results that are nested in tuples.
- `doors`: functions that a lower room calls and an upper room fills in.
- `at_exit`: what runs when a process ends.
- `log`: the log, `logging.getLogger("fompi")`; `html`: values as HTML, for notebooks.
- `extras`: packages that may be missing, and the line of pip for them.
- `kept`: what was measured, kept on disk.
- `file_checks`: checks of values that are read from JSON files.
- `version`: the version number.

This room may import nothing but Python's standard library.
"""
