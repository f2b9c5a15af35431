"""Format a report as rows of text, and as one table in Markdown with the reasons for missing figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ckptstore.tools.bench.figures.report import Report, Workload, WorkloadOutcome, summary

HEADERS = ("contender", "seconds", "min - max", "GB/s", "CPU s/GiB", "peak MiB", "requests", "ratio", "of limit")
CLAIM_HEADERS = ("workload", "beside the best peer", "beside the limit of the machine")
_LEGEND = (
    "Seconds are medians{}, GB/s those of the time until everything is stored or loaded. A ratio above 1 means that "
    "ckptstore is faster; 'of limit' is the limit's time over its own."
)
LEGEND = _LEGEND.format("")
_MARKDOWN_HEADERS = (
    "measured",
    "ranks",
    "contender",
    "seconds",
    "min - max",
    "GB/s",
    "CPU s/GiB",
    "ratio",
    "of limit",
    "besides",
)
_REHEARSAL = "A rehearsal with tensors of the CPU: nothing is locked, and no figure says anything about a GPU."


def heading(workload: Workload) -> str:
    """Return the workload's heading."""
    figure = "" if workload.figure == "total_seconds" else ", seconds until the call returned"
    size = f", {workload.size_bytes / (1 << 20):.1f} MiB" if workload.size_bytes else ""
    ranks = f"{workload.ranks} rank" + ("s" if workload.ranks > 1 else "")
    return f"{workload.title} ({workload.name}): {ranks}{size}{figure}"


def rows(workload: Workload) -> list[list[str]]:
    """Return one row for each measured contender."""
    limit = workload.best("limit")
    limit_seconds = statistics.median(workload.figures(limit)) if limit else None
    return [_row(workload, one, limit_seconds) for one in workload.outcomes if one.status == "measured"]


def _row(workload: Workload, one: WorkloadOutcome, limit_seconds: float | None) -> list[str]:
    figures = workload.figures(one)
    median = statistics.median(figures)
    spread = summary(one, workload.moved_bytes) or {}
    ratio = workload.ratio(one)
    return [
        label(one),
        f"{median:.4f}",
        f"{min(figures):.4f} - {max(figures):.4f}",
        _number(spread["gigabytes_per_second"], "{:.2f}"),
        _number(spread["cpu_seconds_per_gib"], "{:.2f}"),
        _number(spread["peak_bytes"] and spread["peak_bytes"]["median"] / (1 << 20), "{:.1f}"),
        _number(spread["requests"] and spread["requests"]["median"], "{:.0f}"),
        _number(ratio, "{:.2f}"),
        _number(limit_seconds and limit_seconds / median, "{:.2f}"),
    ]


def label(one: WorkloadOutcome) -> str:
    """Return its name with its settings."""
    settings = settings_text(one.settings)
    return f"{one.name} ({settings})" if settings else one.name


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings in words."""
    tried = {name: value for name, value in settings.items() if name not in ("seconds", "failed")}
    return ", ".join(text for name, value in tried.items() if (text := _setting(name, value)))


def _setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name.replace("_", " ") if value else ""
    if name.endswith("bytes"):
        return f"{value / (1 << 20):g} MiB"
    if "thread" in name:
        return f"{value} threads" if value > 1 else "1 thread"
    return value if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"


def facts(workload: Workload) -> list[str]:
    """Return the facts of a workload besides its contenders, one line each."""
    return [f"{name}: {value}" for name, value in workload.facts.items() if value is not None]


def absent(workload: Workload) -> list[str]:
    """Return the skipped and failed contenders, and the failed settings of measured ones, with the reasons."""
    return [
        f"{one.status}: {one.name}: {one.reason}"
        for one in workload.outcomes
        # A limit of another medium is not worth a line.
        if one.status == "failed" or (one.status == "skipped" and one.role != "limit")
    ] + [
        f"failed: {one.name} with {settings_text(tried)}: {tried['failed']}"
        for one in workload.outcomes
        if one.status == "measured"
        for tried in one.sweep
        if "failed" in tried
    ]


def claim(workload: Workload) -> list[str]:
    """Return the workload's line in the table of the README: ratios to the best peer and to the limit."""
    peer, limit = workload.best("peer"), workload.best("limit")
    to_peer = workload.ratio(peer) if peer else None
    return [
        f"{workload.name} ({workload.size_bytes / (1 << 20):.0f} MiB)",
        f"{to_peer:.2f} times {peer.name}" if peer and to_peer is not None else "not measured",
        (_number(workload.ratio(limit), "{:.2f}") if limit else "") or "not measured",
    ]


def scaling_lines(scaling: Mapping[str, Any]) -> list[str]:
    """Return the laws of growth, and the points that they come from."""
    lines: list[str] = []
    for name, points in scaling.get("real", {}).items():
        for point in points:
            seconds = ", ".join(f"{who} {spread['median']:.4f} s" for who, spread in point["seconds"].items())
            lines.append(f"{name} = {point['at']}: {seconds}")
        lines += dict.fromkeys(f"{name}: {line}" for point in points for line in point["absent"])
    simulated = scaling.get("simulated", {})
    for point in simulated.get("points", ()):
        peak = f"{point['peak_bytes'] / (1 << 20):.0f} MiB" if point["peak_bytes"] is not None else "?"
        lines.append(
            f"{point['ranks']} simulated ranks: commit {point['seconds']:.2f} s, {point['requests']} requests, leader "
            f"{point['cpu_seconds']:.2f} s of CPU, {peak}"
        )
    lines += _law_lines(simulated)
    sharded = scaling.get("sharded", {})
    lines += [_sharded_line(point) for point in sharded.get("points", ())]
    return [*lines, *_law_lines(sharded), *(line for one in (simulated, sharded) for line in one.get("absent", ()))]


def _sharded_line(point: Mapping[str, Any]) -> str:
    peak = f"{point['peak_bytes'] / (1 << 20):.0f} MiB"
    sent, agreed = point["told_bytes"] / (1 << 20), point["agree_bytes"] / (1 << 20)
    return (
        f"{point['ranks']} simulated ranks, {point['tensors']} tensors over all of them: {point['seconds']:.2f} s from "
        f"the last answer to the commit, {point['cpu_seconds']:.2f} s of CPU, {peak}; agreed in "
        f"{point['agree_seconds']:.2f} s from {agreed:.1f} MiB; heard {sent:.1f} MiB; outline "
        f"{point['outline_bytes'] / 1000:.0f} kB, manifest {point['manifest_bytes'] / 1000:.0f} kB; opened as saved in "
        f"{point['open_own_seconds']:.2f} s from {point['open_own_bytes'] / 1000:.0f} kB, by a quarter of the ranks in "
        f"{point['open_quarter_seconds']:.2f} s"
    )


def _law_lines(growth: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} over ranks n: {law['text']}; between the two largest it grows by n^{law['exponent']:.2f}"
        for name, law in growth.get("laws", {}).items()
    ]


def report_lines(report: Report) -> Sequence[str]:
    """Return the machine and the versions, one line each."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    found = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    return [f"machine: {machine}", f"versions: {found}"]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def markdown(report: Report) -> str:
    """Return the circumstances of the run, and the table."""
    when = datetime.fromtimestamp(report.created_at, UTC).strftime("%Y-%m-%d")
    lines = [f"- `{report.command}`, {when}", *(f"- {line}" for line in report_lines(report))]
    if report.asked.get("device") == "cpu":
        lines.append(f"- {_REHEARSAL}")
    rows = [row for workload in report.workloads for row in _markdown_rows(workload)]
    table = [_line(_MARKDOWN_HEADERS), _line(["---"] * len(_MARKDOWN_HEADERS)), *map(_line, rows)]
    return "\n".join([*lines, "", *table, "", _LEGEND.format(", of turns in another order each round"), ""])


def _markdown_rows(workload: Workload) -> list[list[str]]:
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
        return [f"{why}: {one.reason}", *[""] * 6]
    figures = workload.figures(one)
    median, ratio = statistics.median(figures), workload.ratio(one)
    rates = summary(one, workload.moved_bytes) or {}
    return [
        f"{median:.4f}",
        f"{min(figures):.4f} - {max(figures):.4f}",
        _number(rates["gigabytes_per_second"], "{:.2f}"),
        _number(rates["cpu_seconds_per_gib"], "{:.2f}"),
        "" if ratio is None else f"{ratio:.2f}",
        "" if limit_seconds is None or not median else f"{limit_seconds / median:.2f}",
        ", ".join(
            f"{name.replace('_bytes', '').replace('_', ' ')} {_value(name, value)}" for name, value in one.facts.items()
        ),
    ]


def _value(name: str, value: float) -> str:
    return f"{value / (1 << 20):.0f} MiB" if "_bytes" in name else f"{value:.4g}"


def _line(cells: Sequence[str]) -> str:
    escaped = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
