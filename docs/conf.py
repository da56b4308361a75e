"""Sphinx: the documentation as HTML. `make docs` builds it; a warning is an error."""

from __future__ import annotations

from typing import Any

import fompi

project = "fompi"
release = fompi.__version__
html_title = f"fompi {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False


def as_rst(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with indented code. Sphinx wants `::` before such code."""
    source = list(lines)
    is_operation = isinstance(value, type(fompi.all_gather))
    if is_operation and source:  # its docstring opens with its meaning as code
        source[0] = f"    {source[0]}"
    lines[:] = []
    inside = False
    for line in source:
        is_code = line.startswith("    ")
        if is_code and not inside and not (lines and lines[-1]):
            lines.extend(["::", ""])
        inside = is_code or (inside and not line)
        lines.append(line)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_rst)
