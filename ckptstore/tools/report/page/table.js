// Tables that sort, in pages of rows, so that ten thousand are as quick as ten.

const PAGE_ROWS = 50;

/** Numbers by size, then texts; what is missing or no number comes last, whichever way one sorts. */
function compareCells(a, b, isDescending) {
  const rank = (value) => (value === null || value === undefined || Number.isNaN(value) ? 2 : typeof value === "number" ? 0 : 1);
  const order = rank(a) - rank(b);
  if (order !== 0) return order;
  if (rank(a) === 2 || a === b) return 0;
  return (a < b ? -1 : 1) * (isDescending ? -1 : 1);
}

function sortedRows(rows, columns, view) {
  const column = columns.find((one) => one.key === view.sort);
  if (!column) return rows;
  const cells = rows.map((row, index) => ({ row, index, value: column.value(row) }));
  cells.sort((a, b) => compareCells(a.value, b.value, view.descending) || a.index - b.index);
  return cells.map((cell) => cell.row);
}

/**
 * A table of a page of rows. `view` holds what the reader chose: sort, descending and page; `redraw` is called when
 * that changes. A column is {key, label, value(row), cell(row), text}; `below(row)` gives what an open row shows.
 */
function pagedTable({ key, caption, columns, rows, view, redraw, below = () => null, rowClass = () => null, tools = null }) {
  const pages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
  view.page = Math.min(Math.max(0, view.page ?? 0), pages - 1);
  const from = view.page * PAGE_ROWS;
  const shown = sortedRows(rows, columns, view).slice(from, from + PAGE_ROWS);
  const heads = columns.map((column) => {
    if (!column.value) return el("th", { scope: "col" }, column.label);
    const isSorted = view.sort === column.key;
    const order = isSorted ? (view.descending ? "descending" : "ascending") : "none";
    const sort = () => {
      view.descending = isSorted ? !view.descending : false;
      view.sort = column.key;
      view.page = 0;
      redraw();
    };
    const arrow = isSorted ? (view.descending ? " ▼" : " ▲") : "";
    const button = el("button", { type: "button", class: "plain", click: sort, "data-key": `${key}/sort/${column.key}` }, column.label, arrow);
    return el("th", { scope: "col", "aria-sort": order, class: column.text ? "text" : null }, button);
  });
  const body = el("tbody");
  for (const row of shown) {
    body.append(el("tr", { class: rowClass(row) }, ...columns.map((column) => el("td", { class: column.text ? "text" : null }, column.cell(row)))));
    const more = below(row);
    if (more) body.append(el("tr", { class: "below" }, el("td", { colspan: columns.length }, el("div", { class: "details" }, more))));
  }
  const table = el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, el("tr", {}, ...heads)), body);
  const scroll = el("div", { class: "scroll rows", "data-scroll": key, tabindex: "0", role: "region", "aria-label": caption }, table);
  return el("div", {}, tools, scroll, rows.length > PAGE_ROWS ? pager(key, rows.length, pages, view, redraw) : null);
}

function pager(key, count, pages, view, redraw) {
  const go = (page) => () => {
    view.page = page;
    redraw();
  };
  const from = view.page * PAGE_ROWS;
  const button = (name, page, label) =>
    el("button", { type: "button", click: go(page), disabled: page < 0 || page >= pages || page === view.page, "aria-label": label, "data-key": `${key}/page/${label}` }, name);
  return el(
    "div",
    { class: "pager" },
    button("«", 0, "first page"),
    button("‹", view.page - 1, "page before"),
    el("span", { class: "small" }, `${(from + 1).toLocaleString("en")}–${Math.min(count, from + PAGE_ROWS).toLocaleString("en")} of ${count.toLocaleString("en")}`),
    button("›", view.page + 1, "next page"),
    button("»", pages - 1, "last page"),
  );
}

/** A line to copy. Where the page may not write to the clipboard, the line is selected, and the reader is told. */
function copyLine(name, line, key) {
  const code = el("code", {}, line);
  const told = el("span", { class: "small", role: "status" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(line);
      told.textContent = "copied";
      return;
    } catch {
      // No clipboard for this page: the older way, then the reader's own.
    }
    const range = document.createRange();
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    let isCopied = false;
    try {
      isCopied = document.execCommand("copy");
    } catch {
      isCopied = false;
    }
    told.textContent = isCopied ? "copied" : "selected: copy it with Ctrl+C";
  };
  return el("li", {}, el("button", { type: "button", click: copy, "data-key": key }, `copy ${name}`), " ", code, " ", told);
}
