"""Writes the table of `docs/reference/dcp.md` from the cases: `python tests/dcp/page.py`. A test sees that it was."""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "state")]

import cases_ranks  # noqa: E402, F401 - enters its cases
import cases_single  # noqa: E402, F401
from trials import CASES, SAME, Case  # noqa: E402

PAGE = HERE.parents[1] / "docs/reference/dcp.md"
_SECTION = re.compile(r"(<!-- table of tests/dcp -->\n).*?(<!-- end of table -->)", re.DOTALL)
_STOCK = {SAME: "same bits", "raises": "raises", "silent": "wrong, and silent", "any": "depends on the class"}


def rendered(text: str) -> str:
    """The page with its table made anew."""
    return _SECTION.sub(lambda match: f"{match[1]}\n{_table()}\n\n{match[2]}", text)


def _table() -> str:
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in CASES.values():
        rows.setdefault((one.group, _STOCK[one.stock], _ours(one)), []).append(one.feature)
    lines = ["| | torch's classes | ckptstore's | cases |", "| --- | --- | --- | --- |"]
    for (group, stock, ours), features in sorted(rows.items(), key=lambda row: list(rows).index(row[0])):
        lines.append(f"| {group} | {stock} | {ours} | {'; '.join(dict.fromkeys(features))} |")
    return "\n".join(lines)


def _ours(one: Case) -> str:
    if one.ours == SAME:
        return "same bits"
    return "torch refuses" if one.by_torch else f"refused at the {one.refused_at}"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
