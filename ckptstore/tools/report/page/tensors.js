// The tensors of a checkpoint as a tree by the dots of their keys. Only the level that is shown is computed.

const MOST_AREAS = 60;

function treeButton(number) {
  const show = () => {
    const { store, view } = current();
    view.tree = { number, path: "", table: { sort: "size", descending: true } };
    drawTensors(store, view);
    document.getElementById("tensors").scrollIntoView();
    document.querySelector('[data-key="tree/checkpoint"]')?.focus();
  };
  return el("button", { type: "button", click: show, "data-key": `tree/${number}` }, "show its tensors");
}

/** What lies directly under a path: tensors, and groups whose name ends in a dot. */
function levelOf(layout, path) {
  const found = new Map();
  let entry = null;
  for (let index = 0; index < layout.keys.length; index += 1) {
    const key = layout.keys[index];
    if (!key.startsWith(path)) continue;
    if (!entry?.isGroup || !key.startsWith(entry.name, path.length)) {
      // Keys of a group mostly follow one another, so that this is seldom.
      const dot = key.indexOf(".", path.length);
      const name = dot < 0 ? key.slice(path.length) : key.slice(path.length, dot + 1);
      entry = found.get(name);
      if (!entry) {
        entry = { name, isGroup: dot >= 0, count: 0, bytes: 0, dtypes: new Map(), index };
        found.set(name, entry);
      }
    }
    entry.count += 1;
    entry.bytes += layout.size_bytes[index];
    entry.dtypes.set(layout.dtypes[index], (entry.dtypes.get(layout.dtypes[index]) ?? 0) + layout.size_bytes[index]);
  }
  return [...found.values()].sort((a, b) => b.bytes - a.bytes || (a.name < b.name ? -1 : 1));
}

const mainDtype = (entry) => [...entry.dtypes].reduce((most, one) => (one[1] > most[1] ? one : most))[0];

/** Areas by bytes, as near to squares as rows of them can be. */
function squarified(values, width, height) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const scale = (width * height) / total;
  const boxes = [];
  let [x, y, w, h] = [0, 0, width, height];
  let from = 0;
  const worst = (row, sum, side) => Math.max((side * side * row[0]) / (sum * sum), (sum * sum) / (side * side * row[row.length - 1]));
  while (from < values.length) {
    const side = Math.max(1e-6, Math.min(w, h));
    const row = [values[from] * scale];
    let sum = row[0];
    let to = from + 1;
    while (to < values.length) {
      const area = values[to] * scale;
      if (worst([...row, area], sum + area, side) > worst(row, sum, side)) break;
      row.push(area);
      sum += area;
      to += 1;
    }
    const deep = sum / side;
    let along = 0;
    for (const area of row) {
      const long = area / deep;
      boxes.push(w < h ? { x: x + along, y, width: long, height: deep } : { x, y: y + along, width: deep, height: long });
      along += long;
    }
    if (w < h) [y, h] = [y + deep, h - deep];
    else [x, w] = [x + deep, w - deep];
    from = to;
  }
  return boxes;
}

/** A name that can be seen. */
const nameText = (entry) => (entry.name === "" || entry.name === "." ? `(empty)${entry.name}` : entry.name);

function shapeText(layout, entry) {
  if (entry.isGroup) return counted(entry.count, "tensor");
  return `[${layout.shapes[entry.index].join(", ")}]`;
}

const dtypeText = (store, entry) => [...entry.dtypes.keys()].map((index) => store.dtype_names[index]).sort().join(", ");

function treeMap(store, layout, entries, whole, go, up) {
  const host = document.getElementById("tensors-body");
  const width = Math.max(260, host.clientWidth);
  const height = width < 500 ? 260 : 340;
  const sized = entries.filter((entry) => entry.bytes > 0);
  const shown = sized.length > MOST_AREAS ? sized.slice(0, MOST_AREAS - 1) : sized;
  const rest = sized.slice(shown.length);
  const values = shown.map((entry) => entry.bytes);
  if (rest.length) values.push(rest.reduce((sum, entry) => sum + entry.bytes, 0));
  const told = el("p", { class: "small", role: "status" }, "Arrow keys go from area to area, Enter goes into one, Backspace goes back.");
  const map = el("div", { class: "map", role: "group", "aria-label": "Tensors as areas of their bytes" });
  map.style.height = `${height}px`;
  if (!values.length) return el("p", { class: "small" }, "Nothing here has bytes.");
  const boxes = squarified([...values].sort((a, b) => b - a), width, height);
  const items = [...shown.map((entry) => ({ entry, bytes: entry.bytes })), ...(rest.length ? [{ entry: null, bytes: values[values.length - 1] }] : [])].sort((a, b) => b.bytes - a.bytes);
  items.forEach(({ entry, bytes }, index) => {
    const share = `${((bytes / whole) * 100).toPrecision(3)} %`;
    const name = entry ? nameText(entry) : `${rest.length} smaller ones`;
    const facts = entry ? `${dtypeText(store, entry)} ${shapeText(layout, entry)}` : "";
    const text = `${name} · ${facts} · ${bytesText(bytes)} · ${share}`;
    const area = el(
      "button",
      {
        type: "button",
        class: `area dtype-${entry ? mainDtype(entry) % 8 : 7}${boxes[index].width < 24 || boxes[index].height < 18 ? " tiny" : ""}`,
        tabindex: index === 0 ? "0" : "-1",
        "aria-label": text,
        title: text,
        "data-key": `area/${entry ? entry.name : ""}`,
        focus: () => (told.textContent = text),
        pointerenter: () => (told.textContent = text),
        click: () => entry?.isGroup && go(entry.name),
      },
    );
    const box = boxes[index];
    Object.assign(area.style, { left: `${box.x}px`, top: `${box.y}px`, width: `${box.width}px`, height: `${box.height}px` });
    if (box.width > 44 && box.height > 18) area.append(el("span", {}, name));
    if (box.width > 70 && box.height > 36) area.append(el("span", { class: "small" }, `${bytesText(bytes)} · ${share}`));
    if (box.width > 110 && box.height > 54 && entry) area.append(el("span", { class: "small" }, facts));
    map.append(area);
  });
  map.addEventListener("keydown", (event) => {
    const areas = [...map.children];
    const at = areas.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: areas.length - 1 }[event.key];
    if (event.key === "Backspace") up();
    else if (to === undefined) return;
    else if (areas[to]) {
      areas[at]?.setAttribute("tabindex", "-1");
      areas[to].setAttribute("tabindex", "0");
      areas[to].focus();
    }
    event.preventDefault();
  });
  return el("div", {}, map, told);
}

function drawTensors(store, view) {
  const host = document.getElementById("tensors-body");
  const numbers = store.checkpoints.map((one) => one.number).filter((number) => own(store.trees, String(number))).reverse();
  if (!numbers.length) {
    host.replaceChildren(el("p", { class: "small" }, "No live checkpoint here holds a state of tensors."));
    return;
  }
  if (!numbers.includes(view.tree.number)) view.tree = { number: numbers[0], path: "", table: { sort: "size", descending: true } };
  const { tree } = view;
  const layout = store.layouts[store.trees[String(tree.number)].layout];
  const entries = levelOf(layout, tree.path);
  const whole = entries.reduce((sum, entry) => sum + entry.bytes, 0) || 1;
  const again = () => redraw(() => drawTensors(store, view));
  const move = (path) => {
    tree.path = path;
    tree.table.page = 0;
    drawTensors(store, view);
    document.querySelector("#tensors-body .area")?.focus();
  };
  const go = (name) => move(tree.path + name);
  const up = () => tree.path && move(tree.path.slice(0, tree.path.lastIndexOf(".", tree.path.length - 2) + 1));
  const choose = (event) => {
    tree.number = Number(event.target.value);
    again();
  };
  const steps = new Map(store.checkpoints.map((one) => [one.number, one.step]));
  const options = numbers.map((number) => el("option", { value: number, selected: number === tree.number }, `step ${steps.get(number)}, number ${number}`));
  const select = el("select", { change: choose, "data-key": "tree/checkpoint" }, ...options);
  const parts = tree.path.split(".").slice(0, -1);
  const crumb = (text, path) => el("button", { type: "button", click: () => move(path), disabled: path === tree.path, "data-key": `crumb/${path}` }, text);
  const crumbs = parts.map((part, index) => crumb(part || "(empty)", `${parts.slice(0, index + 1).join(".")}.`));
  const dtypes = [...new Set(entries.map(mainDtype))];
  const key = el("ul", { class: "key" }, ...dtypes.map((index) => el("li", {}, el("i", { class: `dtype dtype-${index % 8}` }), store.dtype_names[index])));
  const columns = [
    { key: "name", label: "Name", value: (one) => one.name, cell: (one) => (one.isGroup ? el("button", { type: "button", class: "plain step", click: () => go(one.name), "data-key": `group/${one.name}` }, nameText(one)) : nameText(one)), text: true },
    { key: "shape", label: "Shape", value: (one) => shapeText(layout, one), cell: (one) => shapeText(layout, one) },
    { key: "dtype", label: "Dtype", value: (one) => dtypeText(store, one), cell: (one) => dtypeText(store, one), text: true },
    { key: "size", label: "Size", value: (one) => one.bytes, cell: (one) => el("span", { title: `${one.bytes} bytes` }, bytesText(one.bytes)) },
    { key: "share", label: "Share", value: (one) => one.bytes, cell: (one) => `${((one.bytes / whole) * 100).toPrecision(3)} %` },
  ];
  const count = entries.reduce((sum, entry) => sum + entry.count, 0);
  host.replaceChildren(
    el("div", { class: "tools" }, el("label", {}, "Checkpoint ", select), el("span", { class: "small" }, `${counted(count, "tensor")}, ${bytesText(whole === 1 ? 0 : whole)}`)),
    el("div", { class: "path", role: "navigation", "aria-label": "Path in the tree" }, crumb("all", ""), ...crumbs),
    treeMap(store, layout, entries, whole, go, up),
    key,
    pagedTable({ key: "tensors", caption: "Tensors of this level", columns, rows: entries, view: tree.table, redraw: again }),
  );
}
