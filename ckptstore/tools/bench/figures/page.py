"""Write a report as one HTML file that needs no network: tables, bars with their spread, curves, timelines of saves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from string import Template
from typing import Any

from ckptstore.tools.bench.figures import text
from ckptstore.tools.bench.figures.report import Report, Workload
from ckptstore.tools.pages.shell import html_page

WIDTH = 900
_LABEL = 300
_ROW = 26
_NUM_COLOURS = 8
_ROLES = {"ckptstore": "fill-0", "peer": "fill-1", "limit": "fill-6"}


def _bars(workload: Workload) -> str:
    """Draw horizontal bars; a whisker from the least to the most, and a line at the limit."""
    measured, best = workload.all_measured(), workload.best("limit")
    limit = workload.median(best) if best else 0.0
    scale = (WIDTH - _LABEL - 130) / (max([*(max(workload.figures(one)) for one in measured), limit]) or 1.0)
    height = _ROW * len(measured) + 30
    parts = [_open(height)]
    for index, one in enumerate(measured):
        figures, median, ratio = workload.figures(one), workload.median(one), workload.ratio(one)
        note = f", ratio {ratio:.2f}" if ratio is not None and one.role != "ckptstore" else ""
        label, y, width = text.label(one), index * _ROW + 4, max(1.0, median * scale)
        low, high = (_LABEL + value * scale for value in (min(figures), max(figures)))
        title = f"{label}: median {median:.4g} s, {min(figures):.4g} to {max(figures):.4g}"
        parts += [
            f'<g class="bar"><title>{escape(title)}</title>',
            _text(_LABEL - 8, y + 14, label, anchor="end", size=12),
            f'<rect x="{_LABEL}" y="{y}" width="{width:.1f}" height="18" class="{_ROLES[one.role]}"/>',
            _line(low, y + 9, high, y + 9, "edge"),
            *(_line(x, y + 5, x, y + 13, "edge") for x in (low, high)),
            _text(max(high, _LABEL + width) + 8, y + 14, f"{median:.4g} s{note}", size=12),
            "</g>",
        ]
    if limit:
        x = _LABEL + limit * scale
        parts.append(_line(x, 0, x, _ROW * len(measured), "limit", dash="4 3"))
        parts.append(_text(x, height - 8, f"limit {limit:.4g} s", anchor="middle", kind="limit"))
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


_BODY = Template("""<header>
<div class="bar-top"><h1>ckptstore bench</h1><button id="theme" type="button"></button></div>
<p class="small">$created &middot; <code>$command</code></p></header>
<main>$facts
<p class="small">$legend Bars are medians, whiskers go from the fastest to the slowest turn.</p>
$body</main>""")
_STYLE = """
tr.ckptstore td { font-weight: 600; color: var(--accent); }
tr.limit td { color: var(--dim); }
"""
_SCRIPT = """
themeSwitch(document.getElementById("theme"));
const saves = readDocument().saves;
const hosts = [...document.querySelectorAll("[data-save]")];
const draw = () => hosts.forEach((host) => {
  host.replaceChildren(timeline(saves[Number(host.dataset.save)], Math.max(320, host.clientWidth)));
});
draw();
addEventListener("resize", draw);
drawn();
"""


def page(report: Report) -> str:
    """Return the whole page."""
    created = datetime.fromtimestamp(report.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    saves: list[list[dict[str, Any]]] = []
    sections = [_section(workload, saves) for workload in report.workloads if workload.name != "ls"]
    finding = [workload for workload in report.workloads if workload.name == "ls"]
    if finding:
        sections.append(_finding(finding))
    if report.scaling:
        sections.append(_growth(report.scaling))
    body = _BODY.substitute(
        created=created,
        command=escape(report.command),
        facts="".join(f'<p class="small">{escape(line)}</p>' for line in text.report_lines(report)),
        legend=escape(text.LEGEND),
        body="\n".join(sections),
    )
    return html_page(title="ckptstore bench", body=body, document={"saves": saves}, styles=[_STYLE], scripts=[_SCRIPT])


def _section(workload: Workload, saves: list[list[dict[str, Any]]]) -> str:
    """Return a workload's section; the ranks of its timeline, if any, are added to `saves`, for the page to draw."""
    parts = [f"<h2>{escape(text.heading(workload))}</h2>"]
    if workload.all_measured():
        parts += [_bars(workload), _table(workload)]
    parts += _absent(text.absent(workload))
    if workload.timeline:
        late = workload.facts.get("straggler") or {"rank": None}
        sentence = (
            ""
            if late["rank"] is None
            else f"rank {late['rank']} had stored its files {late['seconds']:.3f} s after the median rank."
        )
        parts.append(f"<h3>One save, rank by rank</h3><p class='small'>A lane for each thread. {escape(sentence)}</p>")
        parts.append(f'<div data-save="{len(saves)}"></div>')
        saves.append(
            [
                {"label": f"rank {rank['rank']}", "late": rank["rank"] == late["rank"], "spans": rank["spans"]}
                for rank in workload.timeline
            ]
        )
    return "\n".join(parts)


def _absent(lines: Iterable[str]) -> list[str]:
    return [f'<p class="absent">{"<br>".join(found)}</p>'] if (found := [*map(escape, lines)]) else []


def _table(workload: Workload) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in text.HEADERS)
    body = "".join(
        f'<tr class="{one.role}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for one, row in zip(workload.all_measured(), text.rows(workload), strict=True)
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _finding(workloads: Sequence[Workload]) -> str:
    lines = [
        Curve(
            label=name,
            points=[
                (float(workload.facts["checkpoints"]), workload.median(one))
                for workload in workloads
                if (one := workload.measured(name)) is not None
            ],
        )
        for name in (one.name for one in workloads[0].outcomes)
    ]
    chart = curves(lines, x_title="checkpoints in the store", y_title="seconds")
    tables = "".join(f"<h3>{escape(workload.title)}</h3>{_table(workload)}" for workload in workloads)
    return f"<h2>Finding checkpoints as a store grows</h2>{chart}{tables}"


def _growth(scaling: Mapping[str, Any]) -> str:
    parts = ["<h2>Growth</h2>"]
    titles = {"ranks": "real processes, the same bytes in all", "bytes": "bytes of the state", "files": "files"}
    for name, points in scaling.get("real", {}).items():
        title = titles.get(name, name)
        lines = [
            Curve(
                label=who,
                points=[(point["at"], point["seconds"][who]["median"]) for point in points if who in point["seconds"]],
            )
            for who in dict.fromkeys(who for point in points for who in point["seconds"])
        ]
        parts += [f"<h3>Seconds over {escape(title)}</h3>", curves(lines, x_title=title, y_title="seconds")]
        parts += _absent(dict.fromkeys(line for point in points for line in point["absent"]))
    simulations = {name: scaling.get(name, {}) for name in ("simulated", "sharded")}
    simulated, sharded = simulations.values()
    if points := simulated.get("points", ()):
        latency = simulated["latency_seconds"] * 1000
        parts.append(f"<h3>A commit through the storage alone, {latency:g} ms for each request</h3>")
        for figure, title in (("seconds", "seconds to the commit"), ("requests", "requests of the leader")):
            lines = [_measured(points, figure)]
            if law := simulated["laws"].get(figure):
                fitted = [(point["ranks"], law["base"] + law["slope"] * point["ranks"]) for point in points]
                lines.append(Curve(label=f"n^{law['exponent']:.2f} at the end", points=fitted, dashed=True))
            parts.append(curves(lines, x_title="simulated ranks", y_title=title))
    if points := sharded.get("points", ()):
        parts.append(f"<h3>A commit of {sharded['tensors']} tensors, each divided over all ranks</h3>")
        lines = [_measured(points, "seconds")]
        parts.append(curves(lines, x_title="simulated ranks", y_title="seconds to the commit"))
    parts += [f'<p class="small">{escape(line)}</p>' for line in text.scaling_lines(simulations)]
    return "\n".join(parts)


def _measured(points: Sequence[Mapping[str, Any]], figure: str) -> Curve:
    return Curve(label="measured", points=[(point["ranks"], point[figure]) for point in points])
