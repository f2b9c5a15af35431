// One chart: lines, areas and marks over one axis, and a cursor for pointer and keyboard.

const STEPS = {
  plain: (rough) => [1, 2, 5, 10].map((part) => part * 10 ** Math.floor(Math.log10(rough))),
  bytes: (rough) => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].map((part) => part * 1024 ** Math.max(0, Math.floor(Math.log2(rough) / 10))),
  seconds: (rough) => (rough < 60 ? STEPS.plain(rough) : [60, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400].concat(STEPS.plain(rough / 86400).map((days) => days * 86400))),
};

/**
 * The ends of an axis and its ticks, whose `steps` fit the unit and begin at `zero`. Halves are computed with, so that
 * the largest floats do not overflow.
 */
function axis(low, high, most, steps = "plain", zero = 0) {
  if (!(low <= high)) [low, high] = [0, 1];
  if (low === high) {
    const around = Math.abs(low) * 0.1 || 1;
    [low, high] = [Math.max(low - around, -Number.MAX_VALUE), Math.min(high + around, Number.MAX_VALUE)];
  }
  const span = high - low;
  const ticks = [];
  if (!Number.isFinite(span)) ticks.push(low, 0, high);
  else {
    const rough = span / most;
    const step = STEPS[steps](rough).find((part) => part >= rough) ?? rough;
    for (let part = Math.ceil((low - zero) / step); part * step <= high - zero + step * 1e-9 && ticks.length < 30; part += 1) {
      ticks.push(zero + Number((part * step).toPrecision(12)));
    }
  }
  const at = (value) => (value / 2 - low / 2) / (high / 2 - low / 2);
  return { low, high, ticks, at };
}

const SHAPES = {
  dot: (x, y) => `M${x - 2.5} ${y}a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0z`,
  speck: (x, y) => `M${x - 0.5} ${y - 0.5}h1v1h-1z`,
  ring: (x, y) => `M${x - 6} ${y}a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z`,
  square: (x, y) => `M${x - 4.5} ${y - 4.5}h9v9h-9z`,
  diamond: (x, y) => `M${x} ${y - 6}l6 6l-6 6l-6 -6z`,
  cross: (x, y) => `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`,
  up: (x, y) => `M${x} ${y - 4}l4.5 8h-9z`,
  down: (x, y) => `M${x} ${y + 4}l4.5 -8h-9z`,
  glass: (x, y) => `M${x - 4} ${y - 4}h8l-8 8h8z`,
  star: (x, y) => {
    const corners = Array.from({ length: 10 }, (_, corner) => {
      const radius = corner % 2 ? 2.8 : 6.5;
      const turn = (Math.PI * corner) / 5 - Math.PI / 2;
      return `${(x + radius * Math.cos(turn)).toFixed(1)} ${(y + radius * Math.sin(turn)).toFixed(1)}`;
    });
    return `M${corners.join("L")}z`;
  },
};

/** What a mark looks like and means. Those that come first lie under those that come last. */
const MARKS = {
  deleted: ["dot", "deleted"],
  trash: ["dot", "in the trash"],
  live: ["dot", "live"],
  fast: ["diamond", "on this node, not in the store"],
  latest: ["ring", "latest"],
  pinned: ["square", "pinned"],
  best: ["star", "best by this metric"],
  resumed: ["diamond", "a job went on from it"],
  torn: ["cross", "attempt without a commit"],
  flight: ["cross", "attempt in flight"],
  infinite: ["up", "infinite"],
  nan: ["glass", "not a number"],
};

const markPath = (kind, d) => svg("path", { class: `mark mark-${kind}`, d });

function markKey(kinds) {
  const items = Object.entries(MARKS).filter(([kind]) => kinds.has(kind));
  const glyph = (kind, shape) => svg("svg", { width: 16, height: 16, "aria-hidden": "true" }, markPath(kind, SHAPES[shape](8, 8)));
  return items.map(([kind, [shape, text]]) => el("li", {}, glyph(kind, shape), text));
}

/** A line in pixels with at most four points in a column, which draws the same as all of them. */
function thinned(points) {
  if (points.length < 2000) return points;
  const kept = [];
  let column = [];
  const close = () => {
    if (column.length > 4) {
      const order = [...column].sort((a, b) => a[1] - b[1]);
      const wanted = new Set([column[0], order[0], order[order.length - 1], column[column.length - 1]]);
      column = column.filter((point) => wanted.has(point));
    }
    kept.push(...column);
    column = [];
  };
  for (const point of points) {
    if (column.length && Math.round(point[0]) !== Math.round(column[0][0])) close();
    column.push(point);
  }
  close();
  return kept;
}

const pathOf = (points) => thinned(points).map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/**
 * `points` are what the cursor goes over: {x, y, lines, open}; a y of null has no place on the axis. `lines` are
 * {xy, kind}, `areas` {top, base, kind}, `marks` {kind, x, y} with the names of MARKS, `rules` {x, text}.
 */
function chart({ key, title, width, height = 190, points, lines = [], areas = [], marks = [], rules = [], lowest = null, yText, xText, xTitle, ySteps = "plain", xSteps = "plain", xZero = 0 }) {
  const left = 74, right = 26, top = 18;
  const lanes = ["torn", "nan"].filter((lane) => marks.some((mark) => laneOf(mark.kind) === lane));
  const plotBottom = height - 34;
  const bottom = plotBottom + lanes.length * 15 + (lanes.length ? 4 : 0);
  const [first, last] = extent([points, marks, rules], "x");
  const aside = marks.length ? ((last - first) * 8) / width : 0;
  const across = axis(first - aside, last + aside, Math.max(2, Math.floor((width - left) / 110)), xSteps, xZero);
  const [low, high] = extent(lowest === null ? [points] : [points, [{ y: lowest }, { y: lowest + 1 }]], "y");
  const room = Number.isFinite(high - low) ? (high - low) * 0.06 : 0;
  const upward = axis(lowest === null ? low - room : low, high + room, 4, ySteps);
  const placeX = (x) => left + across.at(x) * (width - left - right);
  const placeY = (y) => plotBottom - upward.at(y) * (plotBottom - top);
  const laneY = (lane) => plotBottom + 13 + lanes.indexOf(lane) * 15;
  const place = ([x, y]) => [placeX(x), placeY(y)];

  const picture = svg("svg", { width, height: bottom + 34, viewBox: `0 0 ${width} ${bottom + 34}`, "aria-hidden": "true" });
  for (const tick of upward.ticks) {
    const y = placeY(tick);
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }));
    picture.append(svg("text", { class: "dim", x: left - 6, y: y + 4, "text-anchor": "end" }, yText(tick)));
  }
  for (const tick of across.ticks) {
    picture.append(svg("text", { class: "dim", x: placeX(tick), y: bottom + 16, "text-anchor": "middle" }, xText(tick)));
  }
  picture.append(svg("text", { class: "dim", x: (left + width - right) / 2, y: bottom + 31, "text-anchor": "middle" }, xTitle));
  for (const lane of lanes) {
    picture.append(svg("text", { class: "dim", x: left - 6, y: laneY(lane) + 4, "text-anchor": "end" }, lane === "torn" ? "no commit" : "NaN"));
  }
  let named = -Infinity;
  for (const rule of thinnedRules(rules, placeX)) {
    const x = placeX(rule.x);
    picture.append(svg("line", { class: "rule", x1: x, x2: x, y1: top - 4, y2: bottom }));
    if (x - named < 44 || x > width - 40) continue;
    picture.append(svg("text", { class: "rule", x: x + 3, y: 11 }, rule.text));
    named = x;
  }
  for (const area of areas) {
    const path = pathOf(area.top.map(place));
    const back = pathOf([...area.base].reverse().map(place)).replace(/^M/, "L");
    picture.append(svg("path", { class: `area-${area.kind}`, d: path ? `${path}${back}z` : "" }));
  }
  for (const line of lines) picture.append(svg("path", { class: `curve curve-${line.kind}`, d: pathOf(line.xy.map(place)) }));
  const kinds = Map.groupBy(marks, (mark) => mark.kind);
  for (const kind of Object.keys(MARKS)) {
    const d = markShapes(kinds.get(kind) ?? [], (mark) => {
      const lane = laneOf(kind);
      if (lane) return [placeX(mark.x), laneY(lane)];
      if (kind === "infinite") return [placeX(mark.x), mark.y > 0 ? top : plotBottom];
      return place([mark.x, mark.y]);
    });
    if (d) picture.append(markPath(kind, d));
  }
  return cursorOver({ key, title, picture, points, placeX, placeY, plotBottom, width, top });
}

/** The least and the greatest of what is finite. */
function extent(lists, name) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    for (const one of list) {
      const value = one[name];
      if (value === null || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

const laneOf = (kind) => (kind === "torn" || kind === "flight" ? "torn" : kind === "nan" ? "nan" : null);

function thinnedRules(rules, placeX) {
  const columns = new Map();
  for (const rule of rules) columns.set(Math.round(placeX(rule.x) / 2), rule);
  return [...columns.values()].sort((a, b) => a.x - b.x);
}

const MANY_MARKS = 200;

/** All marks of a kind as one path; those that would lie on each other are drawn once, and those of many are specks. */
function markShapes(marks, placed) {
  const areMany = marks.length > MANY_MARKS;
  const seen = new Set();
  let d = "";
  for (const mark of marks) {
    const [x, y] = placed(mark);
    if (!Number.isFinite(x) || !Number.isFinite(y)) continue;
    const cell = Math.round(x / 2) * 10000 + Math.round(y / 2);
    if (seen.has(cell)) continue;
    seen.add(cell);
    const shape = mark.kind === "infinite" && mark.y < 0 ? "down" : MARKS[mark.kind][0];
    d += SHAPES[areMany && shape === "dot" ? "speck" : shape](Number(x.toFixed(1)), Number(y.toFixed(1)));
  }
  return d;
}

function cursorOver({ key, title, picture, points, placeX, placeY, plotBottom, width, top }) {
  const line = svg("line", { class: "cursor", y1: top, y2: plotBottom, visibility: "hidden" });
  const spot = svg("circle", { class: "cursor", r: 5, visibility: "hidden" });
  picture.append(line, spot);
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  const label = `${title}: ${points.length} points. Arrow keys go from one to the next, Home and End to the ends, Enter opens.`;
  const host = el("div", { class: "chart", tabindex: "0", role: "group", "aria-label": label, "data-key": key }, picture, tip);
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const point = points[at];
    if (!point) return;
    const x = placeX(point.x);
    const hasPlace = point.y !== null && Number.isFinite(point.y);
    const y = hasPlace ? placeY(point.y) : plotBottom;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    spot.setAttribute("cx", x);
    spot.setAttribute("cy", y);
    line.setAttribute("visibility", "visible");
    spot.setAttribute("visibility", hasPlace ? "visible" : "hidden");
    tip.hidden = false;
    tip.replaceChildren(...point.lines().map((text) => el("div", {}, text)));
    const room = tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(width - room, x + (x > width / 2 ? -room - 12 : 12)))}px`;
  };
  const hide = () => {
    at = -1;
    tip.hidden = true;
    line.setAttribute("visibility", "hidden");
    spot.setAttribute("visibility", "hidden");
  };
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = -1;
    let least = Infinity;
    points.forEach((point, index) => {
      const away = Math.abs(placeX(point.x) - x) * 4 + (Number.isFinite(point.y) ? Math.abs(placeY(point.y) - y) : 0);
      if (away < least) [best, least] = [index, away];
    });
    return best;
  };
  const open = () => points[at]?.open?.();
  host.addEventListener("pointermove", (event) => show(nearest(event)));
  host.addEventListener("pointerleave", () => document.activeElement !== host && hide());
  host.addEventListener("click", open);
  host.addEventListener("blur", hide);
  host.addEventListener("focus", () => at < 0 && host.matches(":focus-visible") && show(points.length - 1));
  host.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(points.length / 10));
    const steps = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - far, PageDown: at + far, Home: 0, End: points.length - 1 };
    if (event.key === "Enter") {
      event.preventDefault(); // or the button that now gets the focus would be pressed by the same key
      open();
    } else if (event.key === "Escape") hide();
    else if (event.key in steps) {
      event.preventDefault();
      show(steps[event.key]);
    }
  });
  host.showAt = show;
  host.shownAt = () => at;
  return host;
}
