"""Write a report as one HTML file that needs no network: tables, bar charts, curves and the timelines of saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from string import Template
from typing import Any

from ckptstore.tools.bench.figures import text
from ckptstore.tools.bench.figures.charts import Bar, Curve, bars, curves
from ckptstore.tools.bench.figures.report import Report, Workload
from ckptstore.tools.pages.shell import html_page

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
    limit = workload.best("limit")
    rows = []
    for one in workload.all_measured():
        figures, ratio = workload.figures(one), workload.ratio(one)
        note = f", ratio {ratio:.2f}" if ratio is not None and one.role != "ckptstore" else ""
        rows.append(Bar(label=text.label(one), role=one.role, median=workload.median(one), figures=figures, note=note))
    parts = [f"<h2>{escape(text.heading(workload))}</h2>"]
    if rows:
        parts += [bars(rows, unit="s", limit=workload.median(limit) if limit else None), _table(workload)]
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
