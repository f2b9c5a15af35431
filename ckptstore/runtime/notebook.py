"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(title: str, rows: Iterable[Iterable[object]]) -> str:
    """Return rows of cells below a title as HTML, with all markup in them escaped."""
    lines = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<p>{escape(title)}</p><table>{lines}</table>"
