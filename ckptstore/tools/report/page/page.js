// The whole: which store is shown, what the reader chose in it, and the server that keeps it up to date.

const POLL_MILLISECONDS = 3000;
const ANSWER_MILLISECONDS = 20000;

let report = readDocument();
let shown = 0;
const views = new Map();

const newView = () => ({
  filter: "",
  status: "all",
  chosen: [],
  open: null,
  allCurves: false,
  lines: false,
  table: { sort: "number", descending: true },
  changes: { sort: "key", descending: false },
  log: { sort: "number", descending: true },
  fast: { sort: "save", descending: true },
  resumes: { sort: "number", descending: true },
  torn: { sort: "at", descending: true },
  tree: { number: null, path: "", table: { sort: "size", descending: true } },
});

function current() {
  const store = report.stores[Math.min(shown, report.stores.length - 1)];
  if (!views.has(store.uri)) views.set(store.uri, newView());
  return { store, view: views.get(store.uri) };
}

/** Draws again, and gives the reader back the focus, the place in it, and where tables were scrolled to. */
function redraw(draw) {
  const active = document.activeElement;
  const key = active?.dataset?.key;
  const point = active?.shownAt?.() ?? -1;
  const scrolled = [...document.querySelectorAll("[data-scroll]")].map((one) => [one.dataset.scroll, one.scrollTop, one.scrollLeft]);
  const [x, y] = [scrollX, scrollY];
  draw();
  for (const [name, top, left] of scrolled) {
    const host = document.querySelector(`[data-scroll="${CSS.escape(name)}"]`);
    if (host) [host.scrollTop, host.scrollLeft] = [top, left];
  }
  if (key !== undefined && document.activeElement !== active) {
    const again = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
    again?.focus({ preventScroll: true });
    if (point >= 0) again?.showAt?.(point);
  }
  scrollTo(x, y);
}

function showFilter(view) {
  const filter = document.getElementById("filter");
  if (filter.value !== view.filter) filter.value = view.filter;
  document.getElementById("status").value = view.status;
}

function drawHead() {
  const one = report.stores.length === 1 ? report.stores[0].uri : `${report.stores.length} stores`;
  document.getElementById("title").textContent = one;
  document.getElementById("made").replaceChildren(`${momentText(report.created_at)} · `, el("code", {}, report.command));
  const tabs = document.getElementById("stores");
  tabs.hidden = report.stores.length < 2;
  const select = (index) => {
    shown = (index + report.stores.length) % report.stores.length;
    drawAll();
    tabs.children[shown].focus();
  };
  tabs.replaceChildren(...report.stores.map((store, index) =>
    el("button", {
      type: "button",
      role: "tab",
      "aria-selected": String(index === shown),
      tabindex: index === shown ? "0" : "-1",
      click: () => select(index),
      keydown: (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (by) select(index + by);
      },
      "data-key": `store/${index}`,
    }, store.uri)));
}

function drawCharts() {
  const { store, view } = current();
  drawCurves(store, view);
  drawFast(store, view);
  drawSizes(store);
}

function drawAll() {
  if (!report.stores.length) {
    document.getElementById("title").textContent = "no store";
    return;
  }
  shown = Math.min(shown, report.stores.length - 1);
  const { store, view } = current();
  const numbers = new Set(store.checkpoints.map((one) => one.number));
  view.chosen = view.chosen.filter((number) => numbers.has(number));
  drawHead();
  drawHealth(store, view);
  showFilter(view);
  drawCharts();
  drawCheckpoints(store, view);
  drawCompare(store, view);
  drawTensors(store, view);
  drawLog(store, view);
}

function listen() {
  themeSwitch(document.getElementById("theme"));
  const status = document.getElementById("status");
  status.append(...Object.entries(STATUSES).map(([key, [text]]) => el("option", { value: key }, text)));
  const narrow = (change) => {
    if (!report.stores.length) return;
    const { store, view } = current();
    change(view);
    view.table.page = 0;
    redraw(() => drawCheckpoints(store, view));
  };
  document.getElementById("filter").addEventListener("input", (event) => narrow((view) => (view.filter = event.target.value)));
  status.addEventListener("change", () => narrow((view) => (view.status = status.value)));
  let width = document.body.clientWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => redraw(drawAll), 120);
  });
}

/** Asks the server again and again; what it says is drawn, and that it says nothing is told. */
async function follow() {
  const told = document.getElementById("connection");
  const address = new URL("document.json", location.href);
  address.search = location.search;
  let text = "";
  const ask = async () => {
    const stop = new AbortController();
    const timer = setTimeout(() => stop.abort(), ANSWER_MILLISECONDS);
    try {
      const answer = await fetch(address, { cache: "no-store", signal: stop.signal });
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      const now = await answer.text();
      if (now !== text) {
        report = JSON.parse(now);
        text = now;
        redraw(drawAll);
      } else if (report.stores.length) redraw(() => drawHealth(current().store, current().view));
      told.hidden = true;
    } catch (error) {
      const why = error.name === "AbortError" ? "it does not answer" : error.message;
      told.textContent = `The server is lost (${why}). This is the state of ${momentText(report.created_at)}.`;
      told.hidden = false;
    } finally {
      clearTimeout(timer);
    }
  };
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MILLISECONDS));
    if (!document.hidden) await ask();
  }
}

listen();
drawAll();
drawn();
if (report.live) follow();
