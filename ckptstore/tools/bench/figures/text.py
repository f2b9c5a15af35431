"""Format a report as rows of text, and as one table in Markdown with the reasons for missing figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ckptstore.tools.bench.figures.report import Report, Workload, WorkloadOutcome, summary

HEADERS = ("contender", "seconds", "min - max", "GB/s", "CPU s/GiB", "peak MiB", "requests", "ratio", "of limit")
CLAIM_HEADERS = ("workload", "beside the best peer", "beside the limit of the machine")
_MARKDOWN = ("contender", "seconds", "min - max", "GB/s", "CPU s/GiB", "ratio", "of limit", "besides")
_LEGEND = (
    "Seconds are medians{}, GB/s those of the time until everything is stored or loaded. A ratio above 1 means that "
    "ckptstore is faster; 'of limit' is the limit's time over its own."
)
LEGEND = _LEGEND.format("")
_REHEARSAL = "A rehearsal with tensors of the CPU: nothing is locked, and no figure says anything about a GPU."


def heading(workload: Workload) -> str:
    """Return the workload's heading."""
    figure = "" if workload.figure == "total_seconds" else ", seconds until the call returned"
    size = f", {workload.size_bytes / (1 << 20):.1f} MiB" if workload.size_bytes else ""
    ranks = f"{workload.ranks} rank" + ("s" if workload.ranks > 1 else "")
    return f"{workload.title} ({workload.name}): {ranks}{size}{figure}"


def rows(workload: Workload) -> list[list[str]]:
    """Return one row for each measured contender."""
    return [[_cells(workload, one)[name] for name in HEADERS] for one in workload.all_measured()]


def _cells(workload: Workload, one: WorkloadOutcome) -> Mapping[str, str]:
    """Return the figures of a measured contender, by their headers."""
    figures, median, limit = workload.figures(one), workload.median(one), workload.best("limit")
    spread = summary(one, workload.moved_bytes) or {}
    return {
        "contender": label(one),
        "seconds": f"{median:.4f}",
        "min - max": f"{min(figures):.4f} - {max(figures):.4f}",
        "GB/s": _number(spread["gigabytes_per_second"], "{:.2f}"),
        "CPU s/GiB": _number(spread["cpu_seconds_per_gib"], "{:.2f}"),
        "peak MiB": _number(spread["peak_bytes"] and spread["peak_bytes"]["median"] / (1 << 20), "{:.1f}"),
        "requests": _number(spread["requests"] and spread["requests"]["median"], "{:.0f}"),
        "ratio": _number(workload.ratio(one), "{:.2f}"),
        "of limit": _number(workload.median(limit) / median if limit and median else None, "{:.2f}"),
        "besides": ", ".join(
            f"{name.replace('_bytes', '').replace('_', ' ')} "
            + (f"{value / (1 << 20):.0f} MiB" if "_bytes" in name else f"{value:.4g}")
            for name, value in one.facts.items()
        ),
    }


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
        for one in workload.all_measured()
        for tried in one.sweep
        if "failed" in tried
    ]


def claim(workload: Workload) -> list[str]:
    """Return the workload's line in the table of the README: ratios to the best peer and to the limit."""
    peer, limit = workload.best("peer"), workload.best("limit")
    to_peer, to_limit = workload.ratio(peer), workload.ratio(limit)
    return [
        f"{workload.name} ({workload.size_bytes / (1 << 20):.0f} MiB)",
        f"{to_peer:.2f} times {peer.name}" if peer and to_peer is not None else "not measured",
        _number(to_limit, "{:.2f}") or "not measured",
    ]


def scaling_lines(scaling: Mapping[str, Any]) -> list[str]:
    """Return the laws of growth, and the points that they come from."""
    lines: list[str] = []
    for name, points in scaling.get("real", {}).items():
        for point in points:
            seconds = ", ".join(f"{who} {spread['median']:.4f} s" for who, spread in point["seconds"].items())
            lines.append(f"{name} = {point['at']}: {seconds}")
        lines += dict.fromkeys(f"{name}: {line}" for point in points for line in point["absent"])
    for kind, form in (("simulated", _simulated_line), ("sharded", _sharded_line)):
        growth = scaling.get(kind, {})
        lines += [f"{point['ranks']} simulated ranks{form(point)}" for point in growth.get("points", ())]
        lines += [
            f"{name} over ranks n: {law['text']}; between the two largest it grows by n^{law['exponent']:.2f}"
            for name, law in growth.get("laws", {}).items()
        ]
    return [*lines, *(line for kind in ("simulated", "sharded") for line in scaling.get(kind, {}).get("absent", ()))]


def _simulated_line(point: Mapping[str, Any]) -> str:
    peak = f"{point['peak_bytes'] / (1 << 20):.0f} MiB" if point["peak_bytes"] is not None else "?"
    return (
        f": commit {point['seconds']:.2f} s, {point['requests']} requests, leader {point['cpu_seconds']:.2f} s of CPU, "
        f"{peak}"
    )


def _sharded_line(point: Mapping[str, Any]) -> str:
    sent, agreed, peak = (point[f"{name}_bytes"] / (1 << 20) for name in ("told", "agree", "peak"))
    return (
        f", {point['tensors']} tensors over all of them: {point['seconds']:.2f} s from the last answer to the commit, "
        f"{point['cpu_seconds']:.2f} s of CPU, {peak:.0f} MiB; agreed in {point['agree_seconds']:.2f} s from "
        f"{agreed:.1f} MiB; heard {sent:.1f} MiB; outline {point['outline_bytes'] / 1000:.0f} kB, manifest "
        f"{point['manifest_bytes'] / 1000:.0f} kB; opened as saved in {point['open_own_seconds']:.2f} s from "
        f"{point['open_own_bytes'] / 1000:.0f} kB, by a quarter of the ranks in {point['open_quarter_seconds']:.2f} s"
    )


def report_lines(report: Report) -> Sequence[str]:
    """Return the machine and the versions, one line each."""
    return [
        f"{what}: " + ", ".join(f"{name} {value}" for name, value in values.items())
        for what, values in (("machine", report.machine), ("versions", report.versions))
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def markdown(report: Report) -> str:
    """Return the circumstances of the run, and the table."""
    when = datetime.fromtimestamp(report.created_at, UTC).strftime("%Y-%m-%d")
    lines = [f"- `{report.command}`, {when}", *(f"- {line}" for line in report_lines(report))]
    if report.asked.get("device") == "cpu":
        lines.append(f"- {_REHEARSAL}")
    table: list[Sequence[str]] = [("measured", "ranks", *_MARKDOWN), ["---"] * (2 + len(_MARKDOWN))]
    for workload in report.workloads:
        size = f", {workload.size_bytes / 1e9:.3g} GB" if workload.size_bytes else ""
        for one in workload.outcomes:
            why = f"{'left out' if one.status == 'skipped' else 'failed'}: {one.reason}"
            cells = _cells(workload, one) if one.status == "measured" else {"contender": label(one), "seconds": why}
            row = (cells.get(name, "") for name in _MARKDOWN)
            table.append([f"{workload.title}{size}", str(workload.ranks), *row])
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in table)
    lines += ["", *(f"| {' | '.join(row)} |" for row in escaped)]
    return "\n".join([*lines, "", _LEGEND.format(", of turns in another order each round"), ""])
