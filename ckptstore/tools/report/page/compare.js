// What changed between the two checkpoints that were chosen in the table.

/** Whether two digests speak of the same bytes of a tensor: "PLACE/CONTENT" is of a place that both must have. */
function areComparable(one, other) {
  if (one === null || other === null) return false;
  const place = (text) => text.slice(0, text.lastIndexOf("/") + 1);
  return place(one) === place(other);
}

/** The tensors of both, told apart: added, removed, changed, not known; equal ones are counted. */
function treeChanges(store, before, after) {
  const [oldTree, newTree] = [before, after].map((one) => own(store.trees, String(one.number)));
  if (!oldTree || !newTree) return null;
  const [oldLayout, newLayout] = [store.layouts[oldTree.layout], store.layouts[newTree.layout]];
  const places = new Map(oldLayout.keys.map((key, index) => [key, index]));
  const rows = [];
  let equal = 0;
  const typeOf = (layout, index) => `${store.dtype_names[layout.dtypes[index]]} [${layout.shapes[index].join(", ")}]`;
  newLayout.keys.forEach((key, index) => {
    const place = places.get(key);
    const type = typeOf(newLayout, index);
    if (place === undefined) {
      rows.push({ key, change: "added", was: "", is: type, bytes: newLayout.size_bytes[index] });
      return;
    }
    places.delete(key);
    const was = typeOf(oldLayout, place);
    const digests = [oldTree.digests?.[place] ?? null, newTree.digests?.[index] ?? null];
    const bytes = newLayout.size_bytes[index] - oldLayout.size_bytes[place];
    if (was !== type) rows.push({ key, change: "dtype or shape", was, is: type, bytes });
    else if (digests[0] !== null && digests[0] === digests[1]) equal += 1;
    else rows.push({ key, change: areComparable(...digests) ? "changed" : "not known", was, is: type, bytes });
  });
  for (const [key, place] of places) rows.push({ key, change: "removed", was: typeOf(oldLayout, place), is: "", bytes: -oldLayout.size_bytes[place] });
  return { rows, equal };
}

function metricChanges(before, after) {
  const names = [...new Set([...Object.keys(before.metrics), ...Object.keys(after.metrics)])];
  const row = (name) => {
    const [was, is] = [metricOf(before, name), metricOf(after, name)];
    const by = Number.isFinite(was) && Number.isFinite(is) ? is - was : null;
    return el("tr", {}, ...[name, metricText(was), metricText(is), by === null ? "" : `${by > 0 ? "+" : ""}${short(by)}`].map((cell) => el("td", {}, cell)));
  };
  if (!names.length) return el("p", { class: "small" }, "Neither has metrics.");
  const head = ["metric", `step ${before.step}`, `step ${after.step}`, "difference"].map((text) => el("th", { scope: "col" }, text));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Metrics of both", "data-key": "compare/metrics" }, el("table", { id: "metric-changes" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...names.map(row))));
}

const signedBytes = (value) => (value === 0 ? "" : `${value > 0 ? "+" : "−"}${bytesText(Math.abs(value))}`);

function drawCompare(store, view) {
  const host = document.getElementById("compare-body");
  const chosen = store.checkpoints.filter((one) => view.chosen.includes(one.number));
  if (chosen.length < 2) {
    const lacking = chosen.length ? "one more checkpoint" : "two checkpoints";
    host.replaceChildren(el("p", { class: "small" }, `Choose ${lacking} in the first column of the table.`));
    return;
  }
  const [before, after] = chosen;
  const heading = `From step ${before.step} (number ${before.number}) to step ${after.step} (number ${after.number})`;
  const changes = treeChanges(store, before, after);
  const parts = [el("h3", {}, heading), metricChanges(before, after)];
  if (!changes) {
    const lacking = chosen.filter((one) => !own(store.trees, String(one.number))).map((one) => `step ${one.step}`);
    parts.push(el("p", { class: "small" }, `The page does not have the tensors of ${lacking.join(" and ")}: it has those of ${Object.keys(store.trees).length} live checkpoints.`));
  } else {
    const counts = new Map();
    for (const row of changes.rows) counts.set(row.change, (counts.get(row.change) ?? 0) + 1);
    const told = [...counts].map(([change, count]) => `${count.toLocaleString("en")} ${change}`);
    parts.push(el("p", { id: "tensor-changes" }, `Tensors: ${[...told, `${changes.equal.toLocaleString("en")} equal`].join(", ")}.`));
    if (counts.has("not known")) parts.push(el("p", { class: "small" }, "Not known: a checkpoint has no digest of its own for the tensor, the digests are by different algorithms, or the ranks had divided it in another way."));
    const plain = (key, label, text = true) => ({ key, label, value: (row) => row[key], cell: (row) => row[key], text });
    const columns = [plain("change", "Change"), plain("key", "Tensor"), plain("was", "Was"), plain("is", "Is"), { key: "bytes", label: "Bytes", value: (row) => row.bytes, cell: (row) => signedBytes(row.bytes) }];
    const again = () => redraw(() => drawCompare(store, view));
    if (changes.rows.length) parts.push(pagedTable({ key: "changes", caption: "Tensors that differ", columns, rows: changes.rows, view: view.changes, redraw: again }));
  }
  host.replaceChildren(...parts);
}
