"""Values as HTML, for notebooks: what `_repr_html_` of plans, proofs, traces and explanations is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], above: Sequence[str] = ()) -> str:
    """A table with lines of text above it. Its first column is the head of each row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = []
    for first, *cells in rows:
        others = "".join(f'<td style="text-align:left;white-space:pre">{escape(str(cell))}</td>' for cell in cells)
        body.append(f"<tr><th>{escape(str(first))}</th>{others}</tr>")
    return f"{lines(above)}<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def lines(texts: Iterable[str]) -> str:
    """A line for each text."""
    return "".join(f"<div>{escape(text)}</div>" for text in texts)
