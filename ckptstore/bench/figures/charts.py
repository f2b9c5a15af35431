"""Charts as SVG: bars with their spread, curves on logarithmic axes, and the timeline of a save."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH = 900
_LABEL = 300
_ROW = 26
_COLORS = ("#0b6e4f", "#4a6fa5", "#c8553d", "#8d6a9f", "#b08900", "#3d8b9c", "#7a7a7a", "#a23b72")
PHASE_COLORS = {
    "agree": "#9aa5b1",
    "stage": "#b08900",
    "hash": "#8d6a9f",
    "upload": "#4a6fa5",
    "flush": "#3d8b9c",
    "wait": "#e3e7eb",
    "commit": "#0b6e4f",
}
ROLE_COLORS = {"ckptstore": "#0b6e4f", "peer": "#4a6fa5", "limit": "#9aa5b1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a bar chart."""

    label: str
    role: str
    median: float
    low: float
    high: float
    note: str = ""


def bars(rows: Sequence[Bar], *, unit: str, limit: float | None) -> str:
    """Horizontal bars; a whisker from the least to the most, and a line where the limit is."""
    top = max([row.high for row in rows] + ([limit] if limit else []), default=1.0) or 1.0
    room = WIDTH - _LABEL - 130
    height = _ROW * len(rows) + 30
    parts = [_open(height)]
    for index, row in enumerate(rows):
        y = index * _ROW + 4
        width = max(1.0, row.median / top * room)
        title = f"{row.label}: median {row.median:.4g} {unit}, {row.low:.4g} to {row.high:.4g}"
        parts.append(f'<g class="bar"><title>{escape(title)}</title>')
        parts.append(_text(_LABEL - 8, y + 14, row.label, anchor="end", size=12))
        parts.append(f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="18" fill="{ROLE_COLORS[row.role]}"/>')
        low, high = _LABEL + row.low / top * room, _LABEL + row.high / top * room
        parts.append(_line(low, y + 9, high, y + 9, "#222"))
        parts += [_line(x, y + 5, x, y + 13, "#222") for x in (low, high)]
        parts.append(_text(max(high, _LABEL + width) + 8, y + 14, f"{row.median:.4g} {unit}{row.note}", size=12))
        parts.append("</g>")
    if limit:
        x = _LABEL + limit / top * room
        parts.append(_line(x, 0, x, _ROW * len(rows), "#c8553d", dash="4 3"))
        parts.append(_text(x, height - 8, f"limit {limit:.4g} {unit}", anchor="middle", size=11, fill="#c8553d"))
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart: its points, lowest x first."""

    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def curves(lines: Sequence[Curve], *, x_title: str, y_title: str) -> str:
    """Lines over logarithmic axes, on which a power of x is straight."""
    points = [point for one in lines for point in one.points if point[0] > 0 and point[1] > 0]
    if not points:
        return ""
    height, left, bottom, right = 320, 80, 50, 250
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    x_low, x_high = math.log10(min(xs)), math.log10(max(xs))
    y_low, y_high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    y_high = max(y_high, y_low + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_low) / max(1e-9, x_high - x_low)
        up = (math.log10(y) - y_low) / (y_high - y_low)
        return left + across * (WIDTH - left - right), 10 + (1 - up) * (height - bottom - 10)

    parts = [_open(height)]
    for power in range(y_low, y_high + 1):
        _, y = place(min(xs), 10.0**power)
        parts += [
            _line(left, y, WIDTH - right, y, "#dde2e7"),
            _text(left - 8, y + 4, _short(10.0**power), anchor="end"),
        ]
    for x in sorted(set(xs)):
        across, _ = place(x, 10.0**y_low)
        parts.append(_text(across, height - bottom + 18, _short(x), anchor="middle"))
    parts.append(_text(left + (WIDTH - left - right) / 2, height - 8, x_title, anchor="middle", size=12))
    parts.append(_text(left, 9, y_title, size=11))
    for index, one in enumerate(lines):
        color = _COLORS[index % len(_COLORS)]
        shown = [(x, y) for x, y in one.points if x > 0 and y > 0]
        placed = [place(x, y) for x, y in shown]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        for (x, y), (at, value) in zip(placed, shown, strict=True):
            title = escape(f"{one.label}: {_short(at)}: {value:.4g}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{title}</title></circle>')
        y = 24 + index * 20
        parts.append(
            _line(WIDTH - right + 16, y - 4, WIDTH - right + 40, y - 4, color, dash="5 4" if one.dashed else "")
        )
        parts.append(_text(WIDTH - right + 46, y, one.label, size=12))
    return "".join([*parts, "</svg>"])


def timeline(ranks: Sequence[Mapping[str, Any]], *, straggler: int | None) -> str:
    """A row for each rank, in it a lane for each of its threads, in the colours of what they did."""
    whole = max(rank["end"] for rank in ranks)
    left, lane_height, gap = 110, 13, 12
    room = WIDTH - left - 40
    y = 30.0
    parts = []
    for rank in ranks:
        lanes = 1 + max((span["lane"] for span in rank["spans"]), default=0)
        is_late = rank["rank"] == straggler
        name = f"rank {rank['rank']}" + (" (late)" if is_late else "")
        fill = "#c8553d" if is_late else "#222"
        parts.append(_text(left - 10, y + lanes * lane_height / 2 + 4, name, anchor="end", size=12, fill=fill))
        for span in rank["spans"]:
            lane = span["lane"] if span["phase"] in ("upload", "hash", "flush") else 0
            all_lanes = span["phase"] in ("agree", "stage", "wait", "commit")
            x = left + span["start"] / whole * room
            width = max(0.6, (span["end"] - span["start"]) / whole * room)
            height = lanes * lane_height if all_lanes else lane_height - 1
            title = f"{span['phase']}: {(span['end'] - span['start']) * 1000:.2f} ms, {span['what']}"
            parts.append(
                f'<rect x="{x:.2f}" y="{y + lane * lane_height:.1f}" width="{width:.2f}" height="{height}" '
                f'fill="{PHASE_COLORS[span["phase"]]}"><title>{escape(title)}</title></rect>'
            )
        y += lanes * lane_height + gap
    for part in range(6):
        x = left + part / 5 * room
        parts.append(_line(x, 22, x, y, "#dde2e7"))
        parts.append(_text(x, y + 14, f"{whole * part / 5 * 1000:.1f} ms", anchor="middle"))
    x = float(left)
    for phase, color in PHASE_COLORS.items():
        parts.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{color}"/>')
        parts.append(_text(x + 16, 14, phase, size=12))
        x += 90
    return "".join([_open(int(y) + 24), *parts, "</svg>"])


def _open(height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, fill: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str, *, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dashes}/>'


def _short(value: float) -> str:
    """A number for an axis: "16384", "1.5 MiB" is for its title to say, "0.01"."""
    if value >= 1 << 20 and value == int(value):
        return f"{value / (1 << 20):.0f} Mi"
    return f"{value:g}"
