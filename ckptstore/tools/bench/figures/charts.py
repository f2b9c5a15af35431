"""Charts as SVG, in the colours of the theme: bars with their spread, and curves on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 900
_LABEL = 300
_ROW = 26
_NUM_COLOURS = 8
_ROLES = {"ckptstore": "fill-0", "peer": "fill-1", "limit": "fill-6"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a bar chart."""

    label: str
    role: str
    median: float
    figures: Sequence[float]
    note: str = ""


def bars(rows: Sequence[Bar], *, unit: str, limit: float | None) -> str:
    """Draw horizontal bars; a whisker from the least to the most, and a line at the limit."""
    scale = (WIDTH - _LABEL - 130) / (max([*(max(row.figures) for row in rows), limit or 0.0]) or 1.0)
    height = _ROW * len(rows) + 30
    parts = [_open(height)]
    for index, row in enumerate(rows):
        y = index * _ROW + 4
        width = max(1.0, row.median * scale)
        title = f"{row.label}: median {row.median:.4g} {unit}, {min(row.figures):.4g} to {max(row.figures):.4g}"
        low, high = (_LABEL + value * scale for value in (min(row.figures), max(row.figures)))
        parts += [
            f'<g class="bar"><title>{escape(title)}</title>',
            _text(_LABEL - 8, y + 14, row.label, anchor="end", size=12),
            f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="18" class="{_ROLES[row.role]}"/>',
            _line(low, y + 9, high, y + 9, "edge"),
            *(_line(x, y + 5, x, y + 13, "edge") for x in (low, high)),
            _text(max(high, _LABEL + width) + 8, y + 14, f"{row.median:.4g} {unit}{row.note}", size=12),
            "</g>",
        ]
    if limit:
        x = _LABEL + limit * scale
        parts.append(_line(x, 0, x, _ROW * len(rows), "limit", dash="4 3"))
        parts.append(_text(x, height - 8, f"limit {limit:.4g} {unit}", anchor="middle", kind="limit"))
    return "".join([*parts, "</svg></div>"])


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
        parts.append(_line(left, y, WIDTH - right, y, "grid"))
        parts.append(_text(left - 8, y + 4, _short(10.0**power), anchor="end"))
    for x in sorted(set(xs)):
        across, _ = place(x, 10.0**y_low)
        parts.append(_text(across, height - bottom + 18, _short(x), anchor="middle"))
    parts.append(_text(left + (WIDTH - left - right) / 2, height - 8, x_title, anchor="middle", size=12))
    parts.append(_text(left, 9, y_title, size=11))
    for index, one in enumerate(lines):
        colour, dash = index % _NUM_COLOURS, "5 4" if one.dashed else ""
        placed = [(*place(x, y), x, y) for x, y in one.points if x > 0 and y > 0]
        path = " ".join(f"{across:.1f},{up:.1f}" for across, up, _, _ in placed)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline points="{path}" class="stroke-{colour}" fill="none" stroke-width="2"{dashes}/>')
        for across, up, x, y in placed:
            title = escape(f"{one.label}: {_short(x)}: {y:.4g}")
            circle = f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4" class="fill-{colour}">'
            parts.append(f"{circle}<title>{title}</title></circle>")
        key, x = 24 + index * 20, WIDTH - right
        parts.append(_line(x + 16, key - 4, x + 40, key - 4, f"stroke-{colour}", dash=dash))
        parts.append(_text(x + 46, key, one.label, size=12))
    return "".join([*parts, "</svg></div>"])


def _open(height: int) -> str:
    return f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" class="{kind}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, *, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"{dashes}/>'


def _short(value: float) -> str:
    """Format a number for an axis: "16384", "16 Mi", "0.01"."""
    if value >= 1 << 20 and value == int(value):
        return f"{value / (1 << 20):.0f} Mi"
    return f"{value:g}"
