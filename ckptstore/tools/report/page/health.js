// Whether a person has to do something, and the log with all attempts.

function card(name, value, under = "", isBad = false) {
  return el("div", { class: isBad ? "card bad" : "card" }, el("span", { class: "small" }, name), el("b", {}, value), el("span", { class: "small" }, under));
}

/** The lines to copy for the whole store, and what they need besides. */
function storeLines(store, view) {
  const lines = Object.entries(store.commands).map(([name, line]) => copyLine(name, line, `copy/store/${name}`));
  if (!lines.length) return [];
  const needs = store.needs_options.length ? el("p", { class: "small" }, `They need the storage options that the report was called with: ${store.needs_options.join(", ")}.`) : "";
  return [el("details", { open: view.lines, toggle: (event) => (view.lines = event.target.open) }, el("summary", { "data-key": "lines" }, "Lines to copy for the store"), el("ul", { class: "copies", "aria-label": "Lines to copy for the store" }, ...lines), needs)];
}

/** Of a page that lies in a file, ages are those of the moment at which it was made. */
const nowOf = (report) => (report.live ? Math.max(report.created_at, Date.now() / 1000) : report.created_at);

/** The growth and the price of a store, as far as they are known. */
function usageText({ bytes_per_day: growth, price_per_month: price }) {
  const grows = growth === null ? "" : `${growth < 0 ? "shrinks" : "grows"} by ${bytesText(Math.abs(growth))} a day`;
  return [grows, price === null ? "" : `${price.toFixed(2)} a month`].filter(Boolean).join(", ");
}

function drawHealth(store, view) {
  const { health } = store;
  const count = (status) => store.checkpoints.filter((one) => one.status === status);
  const bytes = (list) => bytesText(store.sizes.length ? list : 0);
  const last = store.sizes[store.sizes.length - 1];
  const age = health.last_durable_at === null ? "" : `${secondsText(Math.max(0, nowOf(report) - health.last_durable_at))} ${report.live ? "ago" : "before this page was made"}`;
  const flying = store.torn.filter((one) => one.in_flight).length;
  const torn = store.torn.length - flying;
  const cards = [
    health.last_durable_at === null ? card("Last durable save", "none", "", true) : card("Last durable save", `step ${health.last_durable_step}`, `${age}, ${momentText(health.last_durable_at)}`),
    ...fastCards(store),
    card("Live", counted(count("live").length, "checkpoint"), bytes(last?.live_bytes ?? 0)),
    card("In the trash", counted(count("trash").length, "checkpoint"), bytes(last?.trash_bytes ?? 0)),
    card("Takes", bytes(store.usage.live_bytes + store.usage.trash_bytes), usageText(store.usage)),
    card("Freed for good", bytes(last?.freed_bytes ?? 0), counted(count("deleted").length, "checkpoint")),
    card("Attempts without a commit", String(torn), flying ? `and ${flying} in flight` : "", torn > 0),
    card("Garbage", bytesText(health.garbage_bytes), counted(health.garbage_files, "file"), health.garbage_bytes > 0),
    card("Gaps in the log", health.gaps.length ? String(health.gaps.length) : "none", "", health.gaps.length > 0),
    card("On the storage", health.stored_bytes === null ? "not listed" : bytesText(health.stored_bytes), "files of checkpoints and attempts"),
    card("Who reads now", health.leases.length ? counted(health.leases.length, "lease") : "nobody", ""),
  ];
  const list = (title, lines, kind) => (lines.length ? [el("h3", { class: kind }, title), el("ul", { class: "plain" }, ...lines.map((line) => el("li", {}, line)))] : []);
  document.getElementById("health-body").replaceChildren(
    el("p", { class: "small" }, store.uri, store.store_id ? ` · store ${store.store_id}` : ""),
    el("div", { class: "cards" }, ...cards),
    ...list("Trouble", health.trouble, "absent"),
    ...list("Gaps", health.gaps, "absent"),
    ...storeLines(store, view),
    ...list("Leases", health.leases.map((lease) => `${lease.holder} reads number ${lease.number}; renewed ${secondsText(lease.age_seconds)} before`), null),
  );
}

function drawLog(store, view) {
  const again = () => redraw(() => drawLog(store, view));
  const changes = [
    { key: "number", label: "Record", value: (one) => one.number, cell: (one) => one.number },
    { key: "at", label: "Written", value: (one) => one.at, cell: (one) => momentText(one.at) },
    { key: "epoch", label: "Job", value: (one) => one.epoch, cell: (one) => one.epoch ?? "" },
    { key: "kind", label: "Kind", value: (one) => one.kind, cell: (one) => el("span", { class: `badge ${one.kind === "unreadable" ? "bad" : ""}` }, one.kind), text: true },
    { key: "text", label: "Change", value: (one) => one.text, cell: (one) => el("span", { title: one.text }, one.text), text: true },
  ];
  const attempts = [
    { key: "step", label: "Step", value: (one) => one.step, cell: (one) => one.step ?? "" },
    { key: "epoch", label: "Job", value: (one) => one.epoch, cell: (one) => one.epoch ?? "" },
    { key: "state", label: "State", value: (one) => String(one.in_flight), cell: (one) => el("span", { class: `badge ${one.in_flight ? "" : "bad"}` }, one.in_flight ? "in flight" : "no commit"), text: true },
    { key: "attempt", label: "Attempt", value: (one) => one.attempt, cell: (one) => one.attempt, text: true },
    { key: "size", label: "Size", value: (one) => one.size_bytes, cell: (one) => bytesText(one.size_bytes) },
    { key: "at", label: "Last written", value: (one) => one.modified_at, cell: (one) => (one.modified_at === null ? "" : momentText(one.modified_at)) },
    { key: "why", label: "Why", value: (one) => one.why, cell: (one) => el("span", { title: one.why }, one.why), text: true },
  ];
  const parts = [];
  if (store.torn.length) {
    parts.push(el("h3", {}, "Attempts without a commit"), pagedTable({ key: "torn", caption: "Attempts without a commit", columns: attempts, rows: store.torn, view: view.torn, redraw: again }));
    parts.push(el("h3", {}, "Records"));
  }
  parts.push(pagedTable({ key: "log", caption: "Records of the log", columns: changes, rows: store.changes, view: view.log, redraw: again }));
  const { timings, trees, tree_tensors: tensors, listed_files: files } = store.bounds;
  const known = [`timings of the ${counted(timings, "newest live checkpoint")}`, `tensors of ${counted(trees, "live checkpoint")}, ${counted(tensors, "tensor")} in all`, `a listing of ${counted(files, "file")}`];
  parts.push(el("p", { class: "small" }, `So that a large store stays quick, the page has at most ${known.join("; ")}.`));
  document.getElementById("log-body").replaceChildren(...parts);
}
