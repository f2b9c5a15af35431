"""Draw the demo with a fast tier as a page: when each step was complete on the nodes, and when in the bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from string import Template

from ckptstore.tools.pages.shell import html_page

Moments = Sequence[tuple[float, int]]
"""Times in seconds, each with the step reached then."""

_BODY = Template("""<header>
<div class="bar-top"><h1>A node is lost with its disk</h1><button id="theme" type="button"></button></div>
$facts</header>
<main><div class="scroll" id="timeline">$chart$key</div>
<h2>In numbers</h2><div class="scroll">$table</div></main>""")
_STYLE = """
#timeline { margin-top: .8rem; }
svg .only { fill: var(--c0); fill-opacity: .13; }
svg .stair { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
svg .lost { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3; }
svg text.lost { fill: var(--bad); stroke: none; font-weight: 600; }
svg text.inside { fill: var(--bg); font-weight: 600; }
svg .span { stroke: var(--text); stroke-width: 1.2; fill: none; }
svg .resumed { fill: var(--c2); stroke: var(--bg); }
.key i.only { background: var(--c0); opacity: .25; }
.key i.fast { background: var(--c0); }
.key i.durable { background: var(--c1); }
.key i.resumed { background: var(--c2); transform: rotate(45deg) scale(.8); }
"""
_SCRIPT = """
themeSwitch(document.getElementById("theme"));
drawn();
"""
_WIDTH, _LEFT, _RIGHT = 1000, 74, 24
_LANE, _TOP, _HEIGHT = 26, 30, 300


@dataclass(slots=True, kw_only=True)
class Timeline:
    """The events of a run of two jobs. Times are in seconds, by one clock."""

    nodes: tuple[str, str, str]
    """The node that stays, the one that is lost, and its replacement."""
    num_steps: int
    jobs: list[float] = field(default_factory=list)
    """Start of each job's training."""
    fast: list[tuple[float, int]] = field(default_factory=list)
    """Times at which steps were complete on the nodes."""
    durable: list[tuple[float, int]] = field(default_factory=list)
    """Times at which steps were in the bucket."""
    lost_at: float = 0.0
    fast_at_loss: int = 0
    durable_at_loss: int = 0
    """0 if the bucket had none."""
    resumed_at: float = 0.0
    ended_at: float = 0.0

    @property
    def repeated(self) -> int:
        """The steps that would have been trained twice without the tier."""
        return self.fast_at_loss - self.durable_at_loss


def page(timeline: Timeline) -> str:
    """Return the whole HTML file. It needs no network."""
    facts = "".join(f"<p>{escape(text)}</p>" for text in _facts(timeline))
    body = _BODY.substitute(facts=facts, chart=_Chart(timeline).draw(), key=_key(), table=_table(timeline))
    return html_page(title="ckptstore demo: a lost node", body=body, document={}, styles=[_STYLE], scripts=[_SCRIPT])


def _facts(timeline: Timeline) -> tuple[str, str]:
    stays, lost, _ = timeline.nodes
    bucket = f"step {timeline.durable_at_loss}" if timeline.durable_at_loss else "nothing yet"
    fast, repeated = timeline.fast_at_loss, timeline.repeated
    loss = f"When {lost} was lost, the newest checkpoint on the nodes was step {fast}. The bucket had {bucket}."
    resume = f"The job went on from step {fast}, because {stays} held a copy of the files of {lost}."
    return loss, f"{resume} Without the fast tier, {repeated} steps would have been trained again."


def _key() -> str:
    words = {
        "fast": "complete on the nodes",
        "durable": "durable: in the bucket",
        "only": "on the nodes alone",
        "resumed": "the job goes on from here",
    }
    return f'<ul class="key">{"".join(f"<li><i class={kind!r}></i>{text}</li>" for kind, text in words.items())}</ul>'


def _table(timeline: Timeline) -> str:
    """List every checkpoint; those of the second job come after those that it resumed from."""
    start = timeline.jobs[0]
    durable = {step: at - start for at, step in timeline.durable}
    rows = []
    for at, step in timeline.fast:
        job = 2 if at > timeline.lost_at else 1
        since = f"{durable[step]:.1f} s" if step in durable else "a newer one was"
        rows.append(f"<tr><td>{step}</td><td>{job}</td><td>{at - start:.1f} s</td><td>{since}</td></tr>")
    head = "<th>Step</th><th>Job</th><th>Complete on the nodes</th><th>In the bucket</th>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


class _Chart:
    """Nodes as bars, and below them steps over time."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.start, self.end = timeline.jobs[0], timeline.ended_at
        self.plot_top = _TOP + 3 * _LANE + 18
        self.plot_bottom = self.plot_top + _HEIGHT

    def x(self, at: float) -> float:
        """Return the position of a time."""
        share = (at - self.start) / max(self.end - self.start, 1e-9)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, step: int) -> float:
        """Return the position of a step."""
        return round(self.plot_bottom - step / self.timeline.num_steps * _HEIGHT, 1)

    def draw(self) -> str:
        """Return the SVG element."""
        height = self.plot_bottom + 44
        label = f"Steps over time: {' '.join(_facts(self.timeline))}"
        parts = [*self._grid(), *self._curves(), *self._nodes(), *self._loss()]
        return (
            f'<svg width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
        )

    def _grid(self) -> list[str]:
        parts = []
        every = max(1, round(self.timeline.num_steps / 6))
        for step in range(0, self.timeline.num_steps + 1, every):
            y = self.y(step)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(_text(_LEFT - 8, y + 4, str(step), kind="dim", anchor="end"))
        seconds = self.end - self.start
        tick = next(tick for tick in (1, 2, 5, 10, 20, 60, 300, 1e9) if seconds / tick <= 10)
        for number in range(int(seconds / tick) + 1):
            x = self.x(self.start + number * tick)
            parts.append(_text(x, self.plot_bottom + 16, f"{number * tick:g} s", kind="dim", anchor="middle"))
        parts.append(_text(_LEFT - 8, self.plot_top - 10, "step", kind="dim", anchor="end"))
        return parts

    def _stair(self, moments: Moments) -> list[tuple[float, float]]:
        """Return a line that rises when a step is reached."""
        points = [(self.x(self.start), self.y(0))]
        for at, step in moments:
            points += [(self.x(at), points[-1][1]), (self.x(at), self.y(step))]
        return [*points, (self.x(self.end), points[-1][1])]

    def _curves(self) -> list[str]:
        fast, durable = self._stair(self.timeline.fast), self._stair(self.timeline.durable)
        resumed = self.x(self.timeline.resumed_at), self.y(self.timeline.fast_at_loss)
        return [
            f'<path class="only" d="{_path([*fast, *reversed(durable)])}z"/>',
            f'<path class="stair stroke-1" d="{_path(durable)}"/>',
            f'<path class="stair stroke-0" d="{_path(fast)}"/>',
            *(
                f'<circle class="fill-1" r="4" cx="{self.x(at)}" cy="{self.y(step)}"/>'
                for at, step in self.timeline.durable
            ),
            f'<path class="resumed" d="M{resumed[0]} {resumed[1] - 8}l8 8l-8 8l-8 -8z"/>',
        ]

    def _nodes(self) -> list[str]:
        """Draw the times in which each node worked."""
        timeline = self.timeline
        began, again = timeline.jobs[0], timeline.jobs[-1]
        spans = [[(began, timeline.lost_at), (again, self.end)], [(began, timeline.lost_at)], [(again, self.end)]]
        parts = []
        for number, (name, worked) in enumerate(zip(timeline.nodes, spans, strict=True)):
            y = _TOP + number * _LANE
            parts.append(_text(_LEFT - 8, y + 13, name, anchor="end"))
            for job, (first, last) in enumerate(worked):
                width = round(self.x(last) - self.x(first), 1)
                colour = "fill-2" if number == 1 else "fill-6"
                place = f'x="{self.x(first)}" y="{y}" width="{width}" height="18" rx="3"'
                parts.append(f'<rect class="{colour}" {place}/>')
                word = f"job {2 if number == 2 or job else 1}"
                parts.append(_text(self.x(first) + 8, y + 13, word, kind="inside"))
        return parts

    def _loss(self) -> list[str]:
        """Draw the moment of the loss, and the steps that the bucket lacked then."""
        timeline = self.timeline
        x, lane = self.x(timeline.lost_at), _TOP + _LANE + 13
        top, bottom = self.y(timeline.fast_at_loss), self.y(timeline.durable_at_loss)
        middle = round((x + self.x(timeline.resumed_at)) / 2, 1)
        up, down = f"M{middle - 4} {top + 7}l4 -6l4 6", f"M{middle - 4} {bottom - 7}l4 6l4 -6"
        arrow = f"{up}M{middle} {top + 2}V{bottom - 2}{down}"
        return [
            f'<line class="lost" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{self.plot_bottom}"/>',
            _text(x + 8, lane, f"{timeline.nodes[1]} is lost with its disk", kind="lost"),
            _text(self.x(timeline.jobs[-1]) - 8, lane + _LANE, "comes in its place", kind="dim", anchor="end"),
            f'<path class="span" d="{arrow}"/>',
            _text(middle + 10, (top + bottom) / 2 - 2, f"{timeline.repeated} steps"),
            _text(middle + 10, (top + bottom) / 2 + 13, "that the bucket lacks"),
        ]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def _text(x: float, y: float, text: str, *, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
