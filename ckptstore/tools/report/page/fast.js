// With a fast tier: when saves were complete on nodes and in the store, what lies on this node, where jobs went on.

const STANDINGS = {
  durable: "in the store",
  superseded: "the store has a newer one",
  "only-here": "on nodes alone",
  void: "void",
  unfinished: "unfinished",
  damaged: "damaged",
  foreign: "of another store",
  unknown: "not known",
};

const standingText = (fast) => own(STANDINGS, fast.standing) ?? fast.standing;

const hasFast = (store) => Boolean(store.fast_directory || store.resumes.length);

/** Of those on this node, what the store does not have: the others are drawn as checkpoints. */
const onlyFast = (store) => store.fast.filter((one) => one.is_usable && one.standing !== "durable" && one.created_at !== null);

function fastLines(fast, ...more) {
  const save = fast.save_number === null ? "" : ` · save ${fast.save_number} of job ${fast.epoch}`;
  return [`step ${fast.step}${save} · ${standingText(fast)}`, ...more, fast.reason, momentText(fast.created_at)];
}

/** When it was complete on the nodes is when it was saved; when it was durable is when its record was written. */
function timesOf(store, width) {
  const marks = [];
  const points = [];
  for (const one of store.checkpoints) {
    const x = one.committed_at;
    marks.push({ kind: one.status, x, y: one.step });
    if (one.is_latest) marks.push({ kind: "latest", x, y: one.step });
    const before = one.saves_before ? [`${counted(one.saves_before, "save")} before it not in the store`] : [];
    const lag = `in the store ${secondsText(Math.max(0, x - one.created_at))} after it was saved`;
    points.push({ x, y: one.step, lines: () => describe(one, lag, ...before), open: () => openCheckpoint(one.number) });
  }
  for (const one of onlyFast(store)) {
    marks.push({ kind: "fast", x: one.created_at, y: one.step });
    points.push({ x: one.created_at, y: one.step, lines: () => fastLines(one) });
  }
  points.sort((a, b) => a.x - b.x);
  if (!points.length) return null;
  const begin = points[0].x;
  const rules = store.resumes.map((one) => ({ x: one.at, text: `job ${one.epoch}` }));
  const xText = (at) => secondsText(Math.max(0, at - begin));
  const picture = chart({
    key: "chart/fast",
    title: "Steps over time",
    width,
    points,
    marks: marks.filter((mark) => mark.kind in MARKS),
    rules,
    yText: short,
    xText,
    xTitle: `after ${momentText(begin)}`,
    xSteps: "seconds",
    xZero: begin,
  });
  return { picture, kinds: new Set(marks.map((mark) => mark.kind)) };
}

function fastTable(store, view, again) {
  const columns = [
    { key: "step", label: "Step", value: (one) => one.step, cell: (one) => one.step },
    { key: "epoch", label: "Job", value: (one) => one.epoch, cell: (one) => one.epoch },
    { key: "save", label: "Save", value: (one) => one.save_number, cell: (one) => one.save_number ?? "" },
    { key: "at", label: "Saved", value: (one) => one.created_at, cell: (one) => (one.created_at === null ? "" : momentText(one.created_at)) },
    { key: "state", label: "State", value: standingText, cell: (one) => el("span", { class: `badge ${one.standing === "damaged" || one.num_missing ? "bad" : ""}` }, one.num_missing ? counted(one.num_missing, "file") + " missing" : standingText(one)), text: true },
    { key: "why", label: "Why", value: (one) => one.reason, cell: (one) => el("span", { title: one.reason }, one.reason), text: true },
    { key: "size", label: "Size", value: (one) => one.size_bytes, cell: (one) => bytesText(one.size_bytes) },
    { key: "here", label: "On this node", value: (one) => one.here_bytes, cell: (one) => bytesText(one.here_bytes) },
    { key: "nodes", label: "Nodes", value: (one) => one.nodes.join(", "), cell: (one) => el("span", { title: one.nodes.join(", ") }, one.nodes.join(", ")), text: true },
    { key: "attempt", label: "Attempt", value: (one) => one.attempt, cell: (one) => one.attempt, text: true },
  ];
  return pagedTable({ key: "fast", caption: "Fast checkpoints on this node", columns, rows: store.fast, view: view.fast, redraw: again });
}

function resumeTable(store, view, again) {
  const from = (one) => (one.step === null ? "nothing" : one.source === null ? "nodes" : "store");
  const columns = [
    { key: "number", label: "Record", value: (one) => one.number, cell: (one) => one.number },
    { key: "at", label: "Written", value: (one) => one.at, cell: (one) => momentText(one.at) },
    { key: "epoch", label: "Job", value: (one) => one.epoch, cell: (one) => one.epoch },
    { key: "step", label: "From step", value: (one) => one.step, cell: (one) => one.step ?? "" },
    { key: "from", label: "From", value: from, cell: from, text: true },
    { key: "attempt", label: "Attempt", value: (one) => one.attempt, cell: (one) => one.attempt, text: true },
  ];
  return pagedTable({ key: "resumes", caption: "Where jobs went on", columns, rows: store.resumes, view: view.resumes, redraw: again });
}

function drawFast(store, view) {
  const isShown = hasFast(store);
  for (const part of [document.getElementById("fast"), document.getElementById("to-fast")]) part.hidden = !isShown;
  if (!isShown) return;
  const again = () => redraw(() => drawFast(store, view));
  const host = document.getElementById("fast-body");
  const drawnTimes = timesOf(store, Math.max(260, host.clientWidth));
  const parts = drawnTimes ? [el("ul", { class: "key", "aria-label": "Legend of times" }, ...markKey(drawnTimes.kinds)), drawnTimes.picture] : [];
  if (store.fast_directory) {
    parts.push(el("h3", {}, "On this node"), el("p", { class: "small" }, store.fast_directory));
    parts.push(store.fast.length ? fastTable(store, view, again) : el("p", { class: "small" }, "Nothing of this store is there."));
  }
  if (store.resumes.length) parts.push(el("h3", {}, "Where jobs went on"), resumeTable(store, view, again));
  host.replaceChildren(...parts);
}

/** Cards for what an operator watches of a fast tier. */
function fastCards(store) {
  const { health } = store;
  if (!store.fast_directory) return [];
  const ago = (at) => `${secondsText(Math.max(0, nowOf(report) - at))} ${report.live ? "ago" : "before this page was made"}`;
  const isNewest = health.last_fast_at !== null;
  return [
    card("Newest on this node", isNewest ? `step ${health.last_fast_step}` : "none", isNewest ? `${ago(health.last_fast_at)}, ${momentText(health.last_fast_at)}` : ""),
    card("Not in the store yet", health.not_durable_since === null ? "nothing" : "saved", health.not_durable_since === null ? "" : `since ${ago(health.not_durable_since)}`),
  ];
}
