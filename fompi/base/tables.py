"""What values print: lines and tables, as plain text, and as HTML for notebooks (`_repr_html_`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Table:
    """Columns of cells. Those named in `right` are aligned to the right. `str(table)` is plain text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Collection[str] = ()

    def __str__(self) -> str:
        columns = []
        for i, name in enumerate(self.columns):
            cells = [name, *(str(row[i]) for row in self.rows)]
            width = max(map(len, cells))
            columns.append([cell.rjust(width) if name in self.right else cell.ljust(width) for cell in cells])
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    def html(self) -> str:
        """The first column is the head of each row."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = []
        for first, *cells in self.rows:
            others = "".join(f'<td style="text-align:left;white-space:pre">{escape(str(cell))}</td>' for cell in cells)
            body.append(f"<tr><th>{escape(str(first))}</th>{others}</tr>")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def text(*parts: str | Table) -> str:
    """Lines and tables, one below the other."""
    return "\n".join(map(str, parts))


def html(*parts: str | Table) -> str:
    """The same as HTML."""
    return "".join(part.html() if isinstance(part, Table) else f"<div>{escape(part)}</div>" for part in parts)
