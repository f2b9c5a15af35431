// The metrics over steps with what became of each checkpoint, and the size of the store over time.

const CURVES_AT_FIRST = 6;

/** A value by name, where names come from a store: never one that all objects have. */
const own = (values, name) => (values && Object.hasOwn(values, name) ? values[name] : undefined);

const NOT_FINITE = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

/** A metric as a number; undefined where the checkpoint has none. */
function metricOf(checkpoint, name) {
  const value = own(checkpoint.metrics, name);
  return typeof value === "string" ? own(NOT_FINITE, value) : value;
}

const metricText = (value) => (value === undefined || value === null ? "" : Number.isFinite(value) ? short(value) : String(value));

function describe(checkpoint, ...more) {
  const lines = [`step ${checkpoint.step} · number ${checkpoint.number} · ${checkpoint.status}`, ...more];
  if (checkpoint.kept_because.length) lines.push(`kept: ${checkpoint.kept_because.join("; ")}`);
  if (checkpoint.removed_because) lines.push(`removed: ${checkpoint.removed_because}`);
  if (checkpoint.resumed_by.length) lines.push(`resumed by job ${checkpoint.resumed_by.join(", ")}`);
  lines.push(momentText(checkpoint.created_at));
  return lines;
}

/** Where jobs took the store over: at the step that was the latest then. */
function claimRules(store) {
  const rules = [];
  let step = null;
  let next = 0;
  for (const change of store.changes) {
    while (next < store.checkpoints.length && store.checkpoints[next].number < change.number) {
      step = store.checkpoints[next].step;
      next += 1;
    }
    if (change.kind !== "claim") continue;
    rules.push({ x: step ?? store.checkpoints[0]?.step ?? 0, text: `job ${change.epoch ?? "?"}` });
  }
  return rules;
}

/** A line for each job, and a dashed one from the checkpoint that it went on from to its first one. */
function linesOf(checkpoints, name) {
  const jobs = new Map();
  const starts = new Map();
  for (const checkpoint of checkpoints) {
    const value = metricOf(checkpoint, name);
    if (Number.isFinite(value)) {
      if (!jobs.has(checkpoint.epoch)) jobs.set(checkpoint.epoch, []);
      jobs.get(checkpoint.epoch).push([checkpoint.step, value]);
    }
    for (const epoch of checkpoint.resumed_by) if (Number.isFinite(value)) starts.set(epoch, [checkpoint.step, value]);
  }
  const lines = [...jobs.values()].map((xy) => ({ kind: "value", xy }));
  for (const [epoch, start] of starts) if (jobs.has(epoch)) lines.push({ kind: "between", xy: [start, jobs.get(epoch)[0]] });
  return lines;
}

function marksOf(store, name) {
  const marks = [];
  for (const checkpoint of store.checkpoints) {
    const y = metricOf(checkpoint, name);
    if (y === undefined) continue;
    const at = (kind) => marks.push({ kind, x: checkpoint.step, y });
    if (Number.isNaN(y)) at("nan");
    else if (!Number.isFinite(y)) at("infinite");
    else {
      at(checkpoint.status);
      if (checkpoint.is_latest) at("latest");
      if (checkpoint.is_pinned) at("pinned");
      if (checkpoint.best_of.includes(name)) at("best");
      if (checkpoint.resumed_by.length) at("resumed");
    }
  }
  for (const one of onlyFast(store)) {
    const y = metricOf(one, name);
    if (Number.isFinite(y)) marks.push({ kind: "fast", x: one.step, y });
  }
  for (const attempt of store.torn) if (attempt.step !== null) marks.push({ kind: attempt.in_flight ? "flight" : "torn", x: attempt.step, y: null });
  return marks.filter((mark) => mark.kind in MARKS);
}

function metricChart(store, name, width) {
  const points = [];
  for (const checkpoint of store.checkpoints) {
    const y = metricOf(checkpoint, name);
    if (y === undefined) continue;
    points.push({ x: checkpoint.step, y, lines: () => describe(checkpoint, `${name}: ${metricText(y)}`), open: () => openCheckpoint(checkpoint.number) });
  }
  for (const one of onlyFast(store)) {
    const y = metricOf(one, name);
    if (Number.isFinite(y)) points.push({ x: one.step, y, lines: () => fastLines(one, `${name}: ${metricText(y)}`) });
  }
  for (const attempt of store.torn) {
    if (attempt.step === null) continue;
    const lines = () => [`step ${attempt.step}: ${attempt.in_flight ? "attempt in flight" : "attempt without a commit"}`, attempt.why, bytesText(attempt.size_bytes)];
    points.push({ x: attempt.step, y: null, lines });
  }
  points.sort((a, b) => a.x - b.x);
  const marks = marksOf(store, name);
  const picture = chart({
    key: `chart/${name}`,
    title: `${name} over steps`,
    width,
    points,
    marks,
    lines: linesOf(store.checkpoints, name),
    rules: claimRules(store),
    yText: short,
    xText: (value) => value.toLocaleString("en"),
    xTitle: "step",
  });
  return { picture, kinds: new Set(marks.map((mark) => mark.kind)), name };
}

function drawCurves(store, view) {
  const host = document.getElementById("curves-body");
  if (!store.metrics.length) {
    host.replaceChildren(el("p", { class: "small" }, "No checkpoint has metrics."));
    return;
  }
  const names = view.allCurves ? store.metrics : store.metrics.slice(0, CURVES_AT_FIRST);
  const columns = host.clientWidth >= 940 && names.length > 1 ? 2 : 1;
  const width = Math.max(260, Math.floor((host.clientWidth - (columns - 1) * 20) / columns));
  const charts = names.map((name) => metricChart(store, name, width));
  const kinds = new Set(charts.flatMap((one) => [...one.kinds]));
  const key = el("ul", { class: "key", "aria-label": "Legend" }, ...markKey(kinds));
  const dashed = (kind, text) => el("li", {}, svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, svg("path", { class: kind, d: "M1 6h20" })), text);
  if (store.changes.some((change) => change.kind === "claim")) {
    key.append(el("li", {}, svg("svg", { width: 8, height: 14, "aria-hidden": "true" }, svg("line", { class: "rule", x1: 4, x2: 4, y1: 0, y2: 14 })), "a job claimed the store"));
  }
  if (store.checkpoints.some((checkpoint) => checkpoint.resumed_by.length)) key.append(dashed("curve curve-between", "from the resume source"));
  const rest = store.metrics.length - names.length;
  const showAll = () => {
    view.allCurves = true;
    redraw(() => drawCurves(store, view));
  };
  host.replaceChildren(
    key,
    el("div", { class: "charts" }, ...charts.map((one) => el("div", {}, el("h3", {}, one.name), one.picture))),
    rest > 0 ? el("button", { type: "button", click: showAll, "data-key": "all-curves" }, `show ${rest} more metrics`) : "",
  );
}

/** A line in steps: a value holds until the next record. */
function stepped(points) {
  return points.flatMap(([x, y], index) => (index ? [[x, points[index - 1][1]], [x, y]] : [[x, y]]));
}

function drawSizes(store) {
  const host = document.getElementById("size-body");
  const sizes = store.sizes;
  if (!sizes.length) {
    host.replaceChildren(el("p", { class: "small" }, "The store has held no checkpoint yet."));
    return;
  }
  const width = Math.max(260, host.clientWidth);
  const isOrdered = sizes.every((one, index) => !index || one.at >= sizes[index - 1].at) && sizes[sizes.length - 1].at > sizes[0].at;
  const x = isOrdered ? (one) => one.at : (one) => one.number;
  const begin = sizes[0].at;
  const curve = (value) => stepped(sizes.map((one) => [x(one), value(one)]));
  const points = sizes.map((one) => ({
    x: x(one),
    y: one.live_bytes + one.trash_bytes,
    lines: () => [`record ${one.number} · ${momentText(one.at)}`, `live ${bytesText(one.live_bytes)}`, `in the trash ${bytesText(one.trash_bytes)}`, `freed until then ${bytesText(one.freed_bytes)}`],
  }));
  const axes = { width, points, lowest: 0, yText: bytesText, xText: isOrdered ? (at) => secondsText(at - begin) : (value) => value.toLocaleString("en") };
  Object.assign(axes, { ySteps: "bytes", xSteps: isOrdered ? "seconds" : "plain", xZero: isOrdered ? begin : 0 });
  axes.xTitle = isOrdered ? `after ${momentText(begin)}` : "number of the record, because the clocks of the writers disagree";
  const live = curve((one) => one.live_bytes);
  const both = curve((one) => one.live_bytes + one.trash_bytes);
  const freed = curve((one) => one.freed_bytes);
  const zero = live.map(([at]) => [at, 0]);
  const held = chart({ key: "chart/size", title: "Bytes in the store", ...axes, areas: [{ top: live, base: zero, kind: "live" }, { top: both, base: live, kind: "trash" }] });
  const gone = chart({ key: "chart/freed", title: "Bytes freed", ...axes, height: 130, points: points.map((one, index) => ({ ...one, y: sizes[index].freed_bytes })), areas: [{ top: freed, base: zero, kind: "freed" }] });
  const key = el("ul", { class: "key" }, ...[["live", "live"], ["trash", "in the trash"], ["freed", "freed by retention and prune, in all"]].map(([kind, text]) => el("li", {}, el("i", { class: `area-${kind}` }), text)));
  host.replaceChildren(key, held, el("h3", {}, "Freed for good"), gone);
}
