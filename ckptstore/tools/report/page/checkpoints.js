// The table of checkpoints: filtered, sorted, two chosen, one opened.

const METRIC_COLUMNS = 6;

const STATUSES = {
  all: ["all", () => true],
  live: ["live", (one) => one.status === "live"],
  trash: ["in the trash", (one) => one.status === "trash"],
  deleted: ["deleted", (one) => one.status === "deleted"],
  pinned: ["pinned", (one) => one.is_pinned],
  best: ["best by a metric", (one) => one.best_of.length > 0],
  resumed: ["resumed from", (one) => one.resumed_by.length > 0],
};

const searched = new WeakMap();

function searchText(checkpoint) {
  let text = searched.get(checkpoint);
  if (text === undefined) {
    const { step, number, attempt, status, kind, kept_because, removed_because, best_of } = checkpoint;
    text = [step, number, attempt, status, kind, removed_because, ...kept_because, ...best_of].join("\n").toLowerCase();
    searched.set(checkpoint, text);
  }
  return text;
}

function wanted(store, view) {
  const [, isWanted] = STATUSES[view.status];
  const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
  return store.checkpoints.filter((one) => isWanted(one) && words.every((word) => searchText(one).includes(word)));
}

function whyText(checkpoint) {
  if (checkpoint.status !== "live") return checkpoint.removed_because;
  return checkpoint.kept_because.join("; ");
}

function checkpointColumns(store, view, change) {
  const choose = (one) => {
    view.chosen = view.chosen.includes(one.number) ? view.chosen.filter((number) => number !== one.number) : [...view.chosen, one.number].slice(-2);
    change();
  };
  const open = (one) => {
    view.open = view.open === one.number ? null : one.number;
    change();
  };
  const plain = (key, label, value, cell = value, more = {}) => ({ key, label, value, cell, ...more });
  const columns = [
    {
      key: "choose",
      label: "Two",
      value: (one) => (view.chosen.includes(one.number) ? 0 : 1),
      cell: (one) => el("input", { type: "checkbox", checked: view.chosen.includes(one.number), change: () => choose(one), "aria-label": `compare step ${one.step}, number ${one.number}`, "data-key": `choose/${one.number}` }),
    },
    plain("step", "Step", (one) => one.step, (one) =>
      el("button", { type: "button", class: "plain step", "aria-expanded": String(view.open === one.number), click: () => open(one), "data-key": `open/${one.number}` }, `${view.open === one.number ? "▾" : "▸"} ${one.step}`)),
    plain("status", "Status", (one) => one.status, (one) => el("span", { class: `badge ${one.status}` }, one.status), { text: true }),
    plain("why", "Why", whyText, (one) => el("span", { title: whyText(one) }, whyText(one)), { text: true }),
  ];
  for (const name of store.metrics.slice(0, METRIC_COLUMNS)) {
    columns.push(plain(`metric/${name}`, name, (one) => metricOf(one, name), (one) => metricText(metricOf(one, name))));
  }
  columns.push(
    plain("size", "Size", (one) => one.size_bytes, (one) => el("span", { title: `${one.size_bytes} bytes` }, bytesText(one.size_bytes))),
    plain("took", "Save took", (one) => one.timings?.seconds, (one) => (one.timings ? secondsText(one.timings.seconds) : "")),
    plain("saved", "Saved (UTC)", (one) => one.created_at, (one) => momentText(one.created_at).replace(" UTC", "")),
    plain("ranks", "Ranks", (one) => one.world_size),
    plain("epoch", "Job", (one) => one.epoch),
    plain("number", "Number", (one) => one.number),
  );
  return columns;
}

function drawCheckpoints(store, view) {
  const rows = wanted(store, view);
  const again = () => redraw(() => drawCheckpoints(store, view));
  const change = () => redraw(() => {
    drawCheckpoints(store, view);
    drawCompare(store, view);
  });
  document.getElementById("count").textContent = `${rows.length.toLocaleString("en")} of ${store.checkpoints.length.toLocaleString("en")}`;
  const more = store.metrics.length - METRIC_COLUMNS;
  document.getElementById("checkpoints-body").replaceChildren(
    pagedTable({
      key: "checkpoints",
      caption: "Checkpoints",
      columns: checkpointColumns(store, view, change),
      rows,
      view: view.table,
      redraw: again,
      rowClass: (one) => (view.chosen.includes(one.number) ? "chosen" : view.open === one.number ? "open" : null),
      below: (one) => (view.open === one.number ? details(store, one) : null),
    }),
    more > 0 ? el("p", { class: "small" }, `${more} more metrics are in the details of each checkpoint.`) : "",
  );
}

/** Shows a checkpoint's details wherever it stands in the table; a filter that hides it is taken away. */
function openCheckpoint(number) {
  const { store, view } = current();
  if (!wanted(store, view).some((one) => one.number === number)) {
    view.filter = "";
    view.status = "all";
    showFilter(view);
  }
  view.open = number;
  const columns = checkpointColumns(store, view, () => {});
  const order = sortedRows(wanted(store, view), columns, view.table);
  view.table.page = Math.floor(order.findIndex((one) => one.number === number) / PAGE_ROWS);
  drawCheckpoints(store, view);
  const button = document.querySelector(`[data-key="open/${number}"]`);
  button?.scrollIntoView({ block: "center" });
  button?.focus();
}

function details(store, checkpoint) {
  const facts = el("dl", { class: "facts" });
  const say = (name, value) => value && facts.append(el("dt", {}, name), el("dd", {}, value));
  say("attempt", checkpoint.attempt);
  say("kind", checkpoint.kind);
  say("size", `${bytesText(checkpoint.size_bytes)} (${checkpoint.size_bytes} bytes)`);
  const dropped = checkpoint.dropped ?? [];
  say("dropped", dropped.length ? `${dropped.join(", ")}, of ${bytesText(checkpoint.whole_bytes)} before` : "");
  say("kept because", checkpoint.kept_because.join("; "));
  say("removed because", checkpoint.removed_because);
  say("removed", checkpoint.removed_at ? momentText(checkpoint.removed_at) : "");
  say("a prune may delete it", checkpoint.deletes_at ? `from ${momentText(checkpoint.deletes_at)}` : "");
  say("held by", (checkpoint.held_by ?? []).join("; "));
  say("resumed by job", checkpoint.resumed_by.join(", "));
  say("refers to files of", (checkpoint.bases ?? []).map((number) => `number ${number}`).join(", "));
  const { provenance } = checkpoint;
  say("commit", provenance?.commit && `${provenance.commit}${provenance.is_dirty ? ", and changes that are not in it" : ""}`);
  say("command line", provenance?.argv?.join(" "));
  say("versions", Object.entries(provenance?.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", "));
  say("hosts", provenance?.num_hosts);
  const metrics = Object.keys(checkpoint.metrics).map((name) => [name, metricOf(checkpoint, name)]);
  for (const [name, value] of metrics) say(name, `${value}${checkpoint.best_of.includes(name) ? " (best)" : ""}`);
  const lines = Object.entries(checkpoint.commands).map(([name, line]) => copyLine(name, line, `copy/${checkpoint.number}/${name}`));
  return el(
    "div",
    {},
    el("h3", {}, `Step ${checkpoint.step}, number ${checkpoint.number}`),
    facts,
    lines.length ? el("ul", { class: "copies", "aria-label": "Lines to copy" }, ...lines) : null,
    own(store.trees, String(checkpoint.number)) ? treeButton(checkpoint.number) : null,
    saveOf(checkpoint),
  );
}
