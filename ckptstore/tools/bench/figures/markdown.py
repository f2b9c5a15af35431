"""Write a report as one table in Markdown: a row for each contender, with its figures or the reason for none."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from ckptstore.tools.bench.figures.report import Report, Workload, WorkloadOutcome
from ckptstore.tools.bench.figures.text import label, report_lines

_HEADERS = ("measured", "ranks", "contender", "seconds", "min - max", "GB/s", "ratio", "of limit", "besides")
_LEGEND = (
    "Seconds are medians, of turns in another order each round. A ratio above 1 means that ckptstore is faster; 'of "
    "limit' is the limit's time over its own."
)
_REHEARSAL = "A rehearsal with tensors of the CPU: nothing is locked, and no figure says anything about a GPU."


def markdown(report: Report) -> str:
    """Return the circumstances of the run, and the table."""
    when = datetime.fromtimestamp(report.created_at, UTC).strftime("%Y-%m-%d")
    lines = [f"- `{report.command}`, {when}", *(f"- {line}" for line in report_lines(report))]
    if report.asked.get("device") == "cpu":
        lines.append(f"- {_REHEARSAL}")
    rows = [row for workload in report.workloads for row in _rows(workload)]
    table = [_line(_HEADERS), _line(["---"] * len(_HEADERS)), *map(_line, rows)]
    return "\n".join([*lines, "", *table, "", _LEGEND, ""])


def _rows(workload: Workload) -> list[list[str]]:
    best = workload.best("limit")
    limit_seconds = statistics.median(workload.figures(best)) if best else None
    size = f", {workload.size_bytes / 1e9:.3g} GB" if workload.size_bytes else ""
    return [
        [f"{workload.title}{size}", str(workload.ranks), label(one), *_figures(workload, one, limit_seconds)]
        for one in workload.outcomes
    ]


def _figures(workload: Workload, one: WorkloadOutcome, limit_seconds: float | None) -> list[str]:
    if one.status != "measured":
        why = "left out" if one.status == "skipped" else "failed"
        return [f"{why}: {one.reason}", *[""] * 5]
    figures = workload.figures(one)
    median, ratio = statistics.median(figures), workload.ratio(one)
    moves = workload.size_bytes and median and "steps" not in workload.name
    return [
        f"{median:.4f}",
        f"{min(figures):.4f} - {max(figures):.4f}",
        f"{workload.size_bytes / 1e9 / median:.2f}" if moves else "",
        "" if ratio is None else f"{ratio:.2f}",
        "" if limit_seconds is None or not median else f"{limit_seconds / median:.2f}",
        _besides(one.facts),
    ]


def _besides(facts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_bytes', '').replace('_', ' ')} {_value(name, facts[name])}" for name in facts)


def _value(name: str, value: float) -> str:
    return f"{value / (1 << 20):.0f} MiB" if "_bytes" in name else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
