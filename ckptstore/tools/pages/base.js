// What all pages share: elements, units, the switch between dark and light, the timeline of a save.
// Text of a document reaches the page only as text nodes and attribute values, never as markup.

const SVG = "http://www.w3.org/2000/svg";

const readDocument = () => JSON.parse(document.getElementById("document").textContent);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/** An element. An attribute that is a function listens to the event of its name. */
const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Three digits that tell, without an exponent where that is readable. */
function short(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function bytesText(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : Number(value.toPrecision(value >= 1000 ? 4 : 3))} ${units[unit]}`;
}

function secondsText(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1) return `${Number((value * 1000).toPrecision(3))} ms`;
  if (size < 120) return `${Number(value.toPrecision(3))} s`;
  const [unit, name] = size < 7200 ? [60, "min"] : size < 172800 ? [3600, "h"] : [86400, "days"];
  return `${Number((value / unit).toFixed(1))} ${name}`;
}

const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** A moment in UTC, so that everybody who has the file reads the same. */
function momentText(at) {
  const moment = new Date(at * 1000);
  if (Number.isNaN(moment.getTime())) return "not a time";
  return `${moment.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** A button that goes from the system's choice to light and to dark; the choice stays where a browser stores it. */
function themeSwitch(button) {
  const themes = ["auto", "light", "dark"];
  let stored = null;
  try {
    stored = localStorage.getItem("ckptstore-theme");
  } catch {
    // A page from a mail may have no storage. The switch works all the same.
  }
  let index = Math.max(0, themes.indexOf(stored));
  const show = () => {
    if (index === 0) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = themes[index];
    button.textContent = `theme: ${themes[index]}`;
  };
  button.addEventListener("click", () => {
    index = (index + 1) % themes.length;
    show();
    try {
      localStorage.setItem("ckptstore-theme", themes[index]);
    } catch {
      // As above.
    }
  });
  show();
}

/** Marks the moment at which all that a page draws at first can be seen. */
const drawn = () => requestAnimationFrame(() => setTimeout(() => performance.mark("ckptstore-drawn")));

const LANES = new Set(["upload", "hash", "flush"]);

/**
 * A save as a picture: a row for each rank, in it a lane for each of its threads, in the colours of what they did.
 * A rank is {label, late, spans: [{phase, lane, start, end, what}]}, its times in seconds from the begin of the save.
 */
function timeline(ranks, width) {
  const spans = ranks.flatMap((rank) => rank.spans);
  const whole = spans.reduce((most, span) => Math.max(most, span.end), 1e-9);
  const names = ranks.map((rank) => rank.label + (rank.late ? " (late)" : ""));
  const longest = names.reduce((most, name) => Math.max(most, name.length), 0);
  const left = Math.min(width * 0.35, longest * 7 + 14);
  const room = Math.max(80, width - left - 34);
  const laneHeight = ranks.length > 24 ? 7 : 13;
  const parts = [];
  let y = 8;
  for (const [index, rank] of ranks.entries()) {
    const lanes = 1 + Math.max(0, ...rank.spans.map((span) => span.lane ?? 0));
    const height = Math.max(lanes * laneHeight, 12);
    const name = names[index];
    const most = Math.floor(left / 6.5);
    const label = svg("text", { x: left - 8, y: y + height / 2 + 4, "text-anchor": "end", class: rank.late ? "late" : null });
    label.append(name.length > most ? `${name.slice(0, most - 1)}…` : name, svg("title", {}, name));
    parts.push(label);
    for (const span of rank.spans) {
      const own = LANES.has(span.phase) && lanes > 1;
      const bar = svg("rect", {
        class: `phase-${span.phase}`,
        x: (left + (span.start / whole) * room).toFixed(2),
        y: (y + (own ? span.lane * laneHeight : 0)).toFixed(1),
        width: Math.max(0.6, ((span.end - span.start) / whole) * room).toFixed(2),
        height: own ? laneHeight - 1 : height,
      });
      bar.append(svg("title", {}, `${span.phase}: ${secondsText(span.end - span.start)}${span.what ? `, ${span.what}` : ""}`));
      parts.push(bar);
    }
    y += height + (ranks.length > 24 ? 4 : 10);
  }
  const ticks = room > 500 ? 5 : 2;
  const under = [];
  for (let part = 0; part <= ticks; part += 1) {
    const x = left + (part / ticks) * room;
    under.push(svg("line", { class: "grid", x1: x, x2: x, y1: 4, y2: y }));
    parts.push(svg("text", { class: "dim", x, y: y + 14, "text-anchor": "middle" }, secondsText((whole * part) / ticks)));
  }
  const picture = svg("svg", { width, height: y + 22, viewBox: `0 0 ${width} ${y + 22}`, role: "img" });
  picture.setAttribute("aria-label", `One save, ${ranks.length} ranks, ${secondsText(whole)}`);
  picture.append(...under, ...parts);
  const phases = [...new Set(spans.map((span) => span.phase))];
  const key = el("ul", { class: "key" }, ...phases.map((phase) => el("li", {}, el("i", { class: `phase-${phase}` }), phase)));
  return el("div", { class: "timeline" }, key, picture);
}
