// How long one save took, rank by rank.

const PHASES = ["agree", "stage", "upload", "wait", "commit"];
const BEFORE_WAITING = ["agree", "stage", "upload"];
const LATE_SECONDS = 0.05;

/** Until a rank had stored its files; after that it waits for the others. */
const storedSeconds = (rank) => BEFORE_WAITING.reduce((sum, phase) => sum + (own(rank.seconds, phase) ?? 0), 0);

/** The rank for which the others waited: a fifth later than the median, and long enough to matter. */
function lateRank(timings) {
  if (timings.ranks.length < 2) return null;
  const order = [...timings.ranks].sort((a, b) => storedSeconds(a) - storedSeconds(b));
  const median = storedSeconds(order[Math.floor((order.length - 1) / 2)]);
  const last = order[order.length - 1];
  const behind = storedSeconds(last) - median;
  return behind > Math.max(LATE_SECONDS, median / 5) ? { rank: last, behind } : null;
}

function ranksOf(timings, late) {
  return timings.ranks.map((rank) => {
    let at = 0;
    const spans = [];
    for (const phase of PHASES) {
      const seconds = own(rank.seconds, phase);
      if (seconds === undefined) continue;
      spans.push({ phase, lane: 0, start: at, end: at + seconds, what: `rank ${rank.rank} on ${rank.node}` });
      at += seconds;
    }
    return { label: `rank ${rank.rank}`, late: late?.rank === rank, spans };
  });
}

function saveOf(checkpoint) {
  const { timings } = checkpoint;
  if (!timings) return el("p", { class: "small" }, "Nothing is known of how long the save took.");
  const late = lateRank(timings);
  const told = [`The save took ${secondsText(timings.seconds)}: ${bytesText(timings.size_bytes)}, ${counted(timings.requests, "request")}, ${counted(timings.retries, "retry", "retries")}. The training loop waited ${secondsText(timings.stalled.median)} (median of the ranks).`];
  if (late) told.push(`Rank ${late.rank.rank} on ${late.rank.node} had stored its files ${secondsText(late.behind)} after the median rank.`);
  if (timings.ranks.length < checkpoint.world_size) told.push(`${timings.ranks.length} of ${checkpoint.world_size} ranks are shown: the quickest and the slowest of each phase.`);
  const width = Math.max(260, Math.min(760, (document.getElementById("checkpoints-body").clientWidth || 400) - 40));
  const phases = PHASES.filter((phase) => timings.ranks.some((rank) => own(rank.seconds, phase) !== undefined));
  const head = ["rank", "node", ...phases, "bytes", "requests", "retries", "stalled"];
  const row = (rank) => [
    `${rank.rank}${late?.rank === rank ? " (late)" : ""}`,
    rank.node,
    ...phases.map((phase) => (own(rank.seconds, phase) === undefined ? "" : secondsText(rank.seconds[phase]))),
    bytesText(rank.size_bytes),
    rank.requests,
    rank.retries,
    secondsText(rank.stalled_seconds),
  ];
  const numbers = el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...timings.ranks.map((rank) => el("tr", {}, ...row(rank).map((cell) => el("td", {}, cell))))),
  );
  return el(
    "div",
    { class: "save" },
    el("h3", {}, "The save, rank by rank"),
    ...told.map((line) => el("p", { class: "small" }, line)),
    timeline(ranksOf(timings, late), width),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers of the save", "data-key": `save/${checkpoint.number}` }, numbers),
  );
}
