// The live page: asks v1/state each second, remembers what it was told, and draws it. No library, no build step, and
// nothing that is not on this server.
"use strict";

const TIERS = {
  device: { title: "Device", words: "the GPU’s memory, where the model computes" },
  host: { title: "Host", words: "main memory of this machine" },
  disk: { title: "Disk", words: "local drives" },
  object: { title: "Object store", words: "a bucket that machines can share" },
};
const EMULATED = "main memory that stands in for a GPU’s";
const REASONS = {
  never_seen: "new: no earlier prompt that is remembered had it",
  evicted: "was here, and made room for others",
  capacity: "there was no room for it",
  admission: "was not thought worth the room",
  io_error: "a copy of it failed",
  corrupt: "its bytes had changed, so it was thrown away",
  unreadable: "could not be read any more",
  forgotten: "was a tenant’s that was forgotten",
  in_flight: "was still on its way",
  withdrawn: "is in a tier of which too much was wrong",
};
const FAULTS = {
  copy_io: "the medium failed at a copy",
  copy_corrupt: "a copy found changed bytes, which were thrown away",
  copy_no_space: "a copy found no space",
  copy_unavailable: "the store did not answer a copy",
  copy_timed_out: "a copy took too long",
  copy_over_budget: "a copy would have cost more than the budget",
  copy_refused: "a copy was refused",
  checksum: "bytes had changed, and were thrown away",
  shadow_wrong: "the engine computed something else than was served",
  index_write: "the index could not be written",
  directory: "a directory failed, and is not used",
  background_panic: "work in the background broke off: a defect of kvbm",
};
const PERIOD_MS = 1000;
const ANSWER_LIMIT_MS = 5000;
const REMEMBERED_S = 3600;
// A point of the chart is the mean of this number of seconds.
const MEAN_S = 10;
// Larger than any tier with slots that were counted one by one: the object tier of unlimited size.
const UNLIMITED_BLOCKS = 2 ** 29;
const RECENT_FAULT_S = 300;
const RECENT_MISS_MS = 600_000;
// Pixels of the drawn flows: between lines side by side, and from those of neighbouring tiers to those that pass one by.
const FLOW_PITCH = 7;
const FLOW_LANE = 128;

const $ = (id) => document.getElementById(id);
const samples = [];
// What the metrics said last, and tokens missed by reason as they were said in the last ten minutes.
const counted = { curves: new Map(), misses: new Map(), missed: [] };
let paused = false;
let answeredAt = null;
let pointed = null;
let shownSettings = null;
// Where the server wants a token: kept as long as the page is, and nowhere.
let token = null;

// ---- words

const count = (n) => Math.round(n).toLocaleString("en");
const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`);

function scaled(n, units, base) {
  let unit = 0;
  while (Math.abs(n) >= base && unit < units.length - 1) {
    n /= base;
    unit += 1;
  }
  const digits = unit === 0 || n >= 100 ? 0 : n >= 10 ? 1 : 2;
  return `${n.toFixed(digits)} ${units[unit]}`.trim();
}
const bytes = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const many = (n) => (n < 10000 ? count(n) : scaled(n, ["", "thousand", "million", "billion", "trillion"], 1000));
const some = (n, one, more = `${one}s`) => `${count(n)} ${n === 1 ? one : more}`;

function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}
const title = (tier) => TIERS[tier]?.title ?? tier;
const plain = (word) => String(word).replaceAll("_", " ");

// ---- elements

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function put(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

/// A figure with its unit in small.
function putFigure(id, text) {
  const [, figure, unit] = /^(\S+)\s*(.*)$/.exec(text);
  $(id).replaceChildren(figure, ...(unit ? [" ", make("small", {}, unit)] : []));
}

// ---- what is remembered

function remember(state) {
  const last = samples.at(-1);
  // Another process, whose counters begin anew.
  if (last && state.uptime_s < last.state.uptime_s) samples.length = 0;
  samples.push({ at: state.uptime_s, state });
  while (samples.length && samples[0].at < state.uptime_s - REMEMBERED_S) samples.shift();
  // Settings, peers and faults are shown as they are last: remembered for an hour they would be most of the memory.
  if (last) last.state = { ...last.state, settings: undefined, faults: undefined, peers: undefined };
}

/// The newest sample at least `seconds` older than the one at `index`, or the oldest that there is.
function before(index, seconds) {
  let found = index;
  while (found > 0 && samples[index].at - samples[found].at < seconds) found -= 1;
  return samples[found];
}

const tierOf = (state, name) => state.tiers.find((one) => one.tier === name);
const routeOf = (state, { from, to }) => state.routes.find((one) => one.from === from && one.to === to);

/// Blocks asked for, and found by tier, in the seconds before a sample; nothing if there were none.
function found(index, seconds) {
  const [now, then] = [samples[index], before(index, seconds)];
  const asked = now.state.lookups.blocks_total - then.state.lookups.blocks_total;
  if (!(asked > 0)) return null;
  const share = {};
  for (const tier of now.state.tiers) {
    const earlier = tierOf(then.state, tier.tier)?.hit_blocks_total ?? 0;
    share[tier.tier] = Math.max(0, tier.hit_blocks_total - earlier) / asked;
  }
  const all = (now.state.lookups.hit_blocks_total - then.state.lookups.hit_blocks_total) / asked;
  return { share, all: Math.min(1, all) };
}

/// What a counter grew by each second, in the seconds before a sample.
function speed(read, seconds = 3, index = samples.length - 1) {
  const [now, then] = [samples[index], before(index, seconds)];
  const passed = now.at - then.at;
  return passed > 0 ? Math.max(0, (read(now.state) - read(then.state)) / passed) : null;
}

// ---- sections

function showProcess(state) {
  put("process", `version ${state.version} · up ${duration(state.uptime_s)}`);
  const { block_tokens: tokens, block_bytes: size } = state;
  put("block-words", tokens ? ` (here ${some(tokens, "token")}, ${bytes(size)} each)` : ` (here ${bytes(size)} each)`);
}

function showGlance(state) {
  const last = samples.length - 1;
  const minute = found(last, 60);
  // The page knows of no more than it saw since it was opened.
  const seen = Math.min(60, Math.round(state.uptime_s - before(last, 60).at));
  const period = seen < 60 ? some(seen, "second") : "minute";
  const { blocks_total: asked, hit_blocks_total: hits } = state.lookups;
  putFigure("now-rate", percent(minute?.all));
  put("now-rate-words", asked > 0
    ? `${seen ? `of the prompt blocks of the last ${period} were found; ` : ""}${percent(hits / asked)} since the start. ${many(speed((one) => one.lookups.blocks_total) ?? 0)} blocks a second are asked for`
    : "nothing has been asked for yet");
  const tokens = state.block_tokens || 1;
  putFigure("saved", many(hits * tokens));
  put("saved-words", `${state.block_tokens ? "tokens" : "blocks"} since the start, of ${many(asked * tokens)} asked for`);
  const moving = speed((one) => one.routes.reduce((sum, route) => sum + route.bytes_total, 0));
  putFigure("moving", moving == null ? "–" : `${bytes(moving)}/s`);
  const waiting = state.routes.reduce((sum, route) => sum + route.queued_blocks, 0);
  put("moving-words", `between the tiers now; ${waiting ? `${some(waiting, "block")} waiting` : "nothing waits"}`);
  const recent = (state.faults ?? []).filter((fault) => state.uptime_s - fault.at_s < RECENT_FAULT_S);
  const faults = recent.reduce((sum, fault) => sum + (fault.count ?? 1), 0);
  putFigure("faults-now", faults ? count(faults) : "none");
  put("faults-words", faults ? `${faults === 1 ? "fault" : "faults"} in the last five minutes` : "in the last five minutes");
  $("faults-now").classList.toggle("bad", faults > 0);
}

function showTiers(state) {
  const list = $("tiers");
  const names = state.tiers.map((one) => one.tier);
  if (list.dataset.tiers !== names.join()) {
    list.dataset.tiers = names.join();
    list.replaceChildren(...names.map((name) => makeTier(name, state.device)));
  }
  state.tiers.forEach((tier, index) => updateTier(list.children[index], tier, state));
}

function makeTier(name, device) {
  const words = name === "device" && device === "emulated" ? EMULATED : TIERS[name]?.words ?? "";
  const bar = make("div", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `${title(name)}: how full` },
    make("i", { class: "clean" }), make("i", { class: "dirty" }), make("i", { class: "lost" }));
  return make("li", { "data-tier": name },
    make("div", { class: "tier-head" }, make("h3", {}, title(name)),
      make("span", { class: "quiet" }, words), make("b")),
    bar, make("div", { class: "facts" }));
}

function updateTier(item, tier, state) {
  const [, , full] = item.firstChild.children;
  const bar = item.children[1];
  const capacity = tier.capacity_blocks;
  const endless = capacity > UNLIMITED_BLOCKS;
  const share = (blocks) => (capacity ? Math.min(1, blocks / capacity) : 0);
  bar.classList.toggle("endless", endless && tier.resident_blocks > 0);
  const dirty = Math.min(tier.dirty_blocks, tier.resident_blocks);
  [tier.resident_blocks - dirty, dirty, tier.lost_blocks].forEach((blocks, part) => {
    // What is there stays visible, however little it is.
    bar.children[part].style.width = endless || !blocks ? "0" : `max(2px, ${100 * share(blocks)}%)`;
  });
  const used = share(tier.resident_blocks);
  full.textContent = endless
    ? `${bytes(tier.resident_blocks * state.block_bytes)}, no limit`
    : `${bytes(tier.resident_blocks * state.block_bytes)} of ${bytes(capacity * state.block_bytes)}`;
  if (endless) bar.removeAttribute("aria-valuenow");
  else bar.setAttribute("aria-valuenow", Math.round(100 * used));
  bar.setAttribute("aria-valuetext", full.textContent);
  const leaving = speed((one) => tierOf(one, tier.tier)?.evictions_total ?? 0, 10);
  const facts = [endless ? some(tier.resident_blocks, "block") : `${count(tier.resident_blocks)} of ${some(capacity, "block")}, ${used > 0.995 ? "full" : percent(used)}`];
  facts.push(tier.dirty_blocks ? `${count(tier.dirty_blocks)} to be copied down` : "", leaving >= 0.05 ? `${leaving < 10 ? leaving.toFixed(1) : count(leaving)} evicted each second` : "");
  item.lastChild.replaceChildren(...facts.filter(Boolean).map((text) => make("span", {}, text)),
    ...(tier.lost_blocks ? [make("span", { class: "bad" }, `${count(tier.lost_blocks)} lost for now`)] : []));
}

/// Routes that have ever been used, or that are in trouble.
function usedRoutes(state) {
  return state.routes.filter((one) => one.bytes_total > 0 || one.queued_blocks > 0 || one.in_flight_blocks > 0 || one.failed_total > 0 || one.breaker === "open");
}

function showFlows(state) {
  const svg = $("flows");
  const items = [...$("tiers").children];
  const { width, height, top } = svg.getBoundingClientRect();
  if (!width || !items.length) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const middle = Object.fromEntries(items.map((item) => {
    const bar = item.children[1].getBoundingClientRect();
    return [item.dataset.tier, (bar.top + bar.bottom) / 2 - top];
  }));
  const routes = usedRoutes(state).filter((route) => route.from in middle && route.to in middle);
  const ends = flowEnds(routes, Object.keys(middle), middle);
  // Animations go on where they are: paths are kept, and only changed.
  const kept = new Map([...svg.children].map((group) => [group.dataset.route, group]));
  for (const route of routes) {
    const key = `${route.from} ${route.to}`;
    const group = kept.get(key) ?? svg.appendChild(draw("g", { "data-route": key }, draw("path"), draw("path"), draw("text")));
    kept.delete(key);
    drawFlow(group, route, ends.get(route));
  }
  for (const gone of kept.values()) gone.remove();
}

/// Where each route leaves the bar of its upper tier and meets that of its lower one, and how far right it runs between:
/// brackets, the longer ones around the shorter ones, so that no line crosses another.
function flowEnds(routes, order, middle) {
  const ends = new Map(routes.map((route) => {
    const [from, to] = [order.indexOf(route.from), order.indexOf(route.to)];
    const [upper, lower, down] = [Math.min(from, to), Math.max(from, to), from < to];
    // What goes down runs inside of what goes up.
    const lane = FLOW_LANE * (lower - upper) - FLOW_LANE * 0.78 + (down ? 0 : FLOW_PITCH + 3);
    return [route, { upper, lower, down, lane }];
  }));
  order.forEach((tier, index) => {
    const here = [...ends.values()].filter(({ upper, lower }) => upper === index || lower === index);
    const place = ({ lower, lane }) => (lower === index ? lane - 1e6 : -lane);
    here.sort((a, b) => place(a) - place(b)).forEach((end, number) => {
      end[end.upper === index ? "top" : "bottom"] = middle[tier] + FLOW_PITCH * (number - (here.length - 1) / 2);
    });
  });
  return ends;
}

function drawFlow(group, route, { down, lane, top, bottom }) {
  const [line, head, label] = group.children;
  const rate = speed((state) => routeOf(state, route)?.bytes_total ?? 0) ?? 0;
  const thick = rate > 0 ? Math.min(5, 1.5 + Math.log10(1 + rate / 2 ** 20)) : 1.5;
  const open = route.breaker === "open";
  const hue = `var(--${route.from})`;
  const [tail, tip] = down ? [top, bottom] : [bottom, top];
  const bend = down ? 8 : -8;
  line.setAttribute("d", `M4,${tail} H${lane - 8} q8,0 8,${bend} V${tip - bend} q0,${bend} -8,${bend} H12`);
  line.setAttribute("class", open ? "resting" : rate > 0 ? `moving${rate < 2 ** 20 ? " slow" : ""}` : "idle");
  line.style.strokeWidth = `${thick}px`;
  line.style.stroke = rate > 0 ? hue : "";
  head.setAttribute("d", `M3,${tip} l10,-5 v10 z`);
  head.style.fill = open ? "var(--bad)" : rate > 0 ? hue : "var(--line)";
  label.setAttribute("x", lane + (down ? FLOW_PITCH + 3 : 0) + 9);
  label.setAttribute("y", (tail + tip) / 2 + (down ? -4 : 12));
  label.setAttribute("class", open ? "bad" : rate > 0 ? "live" : "");
  const state = open ? "resting" : rate > 0 ? `${bytes(rate)}/s` : "idle";
  label.textContent = `${down ? "↓" : "↑"} ${state}`;
}

function showRoutes(state) {
  const rows = usedRoutes(state).map((route) => {
    const bad = route.overdue_now > 0 || route.breaker === "open";
    const rate = speed((one) => routeOf(one, route)?.bytes_total ?? 0) ?? 0;
    const isBusy = rate > 0 || route.in_flight_blocks + route.queued_blocks > 0;
    const words = route.breaker === "open" ? "resting" : route.overdue_now > 0 ? `${count(route.overdue_now)} overdue` : isBusy ? "working" : "idle";
    const cell = (label, text, kind = "number") => make("td", { "data-label": label, class: kind }, text);
    return make("tr", {},
      make("th", { scope: "row" }, title(route.from), make("span", { class: "arrow" }, " → "), title(route.to), make("span", { class: "backend" }, route.backend ? ` by ${route.backend}` : "")),
      cell("Now", rate > 0 ? `${bytes(rate)}/s` : "0"),
      make("td", { class: "spark" }, spark(route)),
      cell("Waiting", count(route.queued_blocks)),
      cell("Under way", count(route.in_flight_blocks)),
      cell("Copied", bytes(route.bytes_total)),
      cell("Failed", count(route.failed_total), `number${route.failed_total ? " bad" : ""}`),
      cell("State", words, bad ? "bad" : ""));
  });
  $("routes").tBodies[0].replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", { colspan: 8, class: "empty" }, "Nothing has been copied yet."))]));
}

function spark(route) {
  const seconds = 120;
  const newest = samples.at(-1).at;
  const points = [];
  for (let index = 1; index < samples.length; index += 1) {
    if (samples[index].at < newest - seconds) continue;
    points.push([samples[index].at, speed((state) => routeOf(state, route)?.bytes_total ?? 0, 2, index) ?? 0]);
  }
  const most = Math.max(1, ...points.map(([, rate]) => rate));
  const path = points.map(([at, rate], index) => `${index ? "L" : "M"}${(138 * (at - newest + seconds) / seconds).toFixed(1)},${(22 - 20 * rate / most).toFixed(1)}`).join("");
  return draw("svg", { viewBox: "0 0 138 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    draw("path", { d: "M0,22.5H138", stroke: "var(--line)" }),
    draw("path", { d: path || "M0,22", fill: "none", stroke: `var(--${route.from})`, "stroke-width": "1.6", "vector-effect": "non-scaling-stroke" }));
}

// ---- hit rate over time

const chosenPeriod = () => Number(document.querySelector("[name=period]:checked").value);

function showRate() {
  const svg = $("rate");
  const { width, height } = svg.getBoundingClientRect();
  const box = { left: 42, right: width - 8, top: 8, bottom: height - 22 };
  const newest = samples.at(-1).at;
  // As long as little is remembered, little is shown, instead of mostly nothing.
  const seconds = Math.min(chosenPeriod(), Math.max(60, newest - samples[0].at));
  const x = (at) => box.right - (newest - at) / seconds * (box.right - box.left);
  const y = (share) => box.bottom - Math.min(1, share) * (box.bottom - box.top);
  const tiers = samples.at(-1).state.tiers.map((one) => one.tier);
  const points = ratePoints(newest - seconds, Math.max(1, Math.floor(seconds / 600)));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(rateAxes(box, x, y, newest, seconds), ...areas(points, tiers, x, y));
  svg.chart = { points, x, box, newest };
  put("rate-span", seconds < chosenPeriod() ? `${duration(seconds)} so far` : "");
  $("rate-empty").hidden = points.some((point) => point.found);
  showPointed(svg);
  showRateLegend(tiers);
}

/// A point for each `stride` samples of the period, without a share where nothing was asked for.
function ratePoints(from, stride) {
  const points = [];
  for (let index = 1; index < samples.length; index += 1) {
    if (samples[index].at < from || (samples.length - 1 - index) % stride) continue;
    // Where this page was asleep nothing is known of what happened between.
    const asleep = samples[index].at - samples[index - 1].at > MEAN_S;
    points.push({ at: samples[index].at, found: asleep ? null : found(index, MEAN_S * Math.max(1, stride / 2)) });
  }
  return points;
}

function rateAxes(box, x, y, newest, seconds) {
  const axis = draw("g", { class: "axis" });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    axis.append(draw("line", { x1: box.left, x2: box.right, y1: y(share), y2: y(share) }),
      draw("text", { x: box.left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`));
  }
  for (const part of [1, 0.75, 0.5, 0.25, 0]) {
    const at = newest - seconds * part;
    const text = part === 0 ? "now" : seconds * part >= 120 ? `${+(seconds * part / 60).toFixed(1)} min ago` : `${Math.round(seconds * part)} s ago`;
    // Five words do not fit a narrow screen.
    if (box.right - box.left < 420 && (part === 0.25 || part === 0.75)) continue;
    axis.append(draw("text", { x: x(at), y: box.bottom + 17, "text-anchor": part === 0 ? "end" : part === 1 ? "start" : "middle" }, text));
  }
  return axis;
}

/// An area for each tier, on top of those of faster ones; a gap where nothing was asked for.
function areas(points, tiers, x, y) {
  const stretches = [];
  let open = null;
  for (const point of points) {
    if (!point.found) open = null;
    else if (open) open.push(point);
    else stretches.push(open = [point]);
  }
  const paths = tiers.map(() => "");
  for (const stretch of stretches) {
    const base = stretch.map(() => 0);
    tiers.forEach((tier, index) => {
      const lower = stretch.map((point, at) => `${x(point.at).toFixed(1)},${y(base[at]).toFixed(1)}`);
      stretch.forEach((point, at) => { base[at] += point.found.share[tier] ?? 0; });
      const upper = stretch.map((point, at) => `${x(point.at).toFixed(1)},${y(base[at]).toFixed(1)}`);
      paths[index] += `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
    });
  }
  return tiers.map((tier, index) => draw("path", { d: paths[index], fill: `var(--${tier})`, stroke: "var(--card)", "stroke-width": 0.75 }));
}

function showPointed(svg) {
  svg.querySelector(".cross")?.remove();
  const { points, x, box, newest } = svg.chart;
  if (!points.length) return void put("rate-now", "");
  // What is pointed at is a time, so that it stays where it is while the chart moves on.
  const at = pointed == null ? null : points.reduce((best, point) => (Math.abs(point.at - pointed) < Math.abs(best.at - pointed) ? point : best));
  if (at) svg.append(draw("line", { class: "cross", x1: x(at.at), x2: x(at.at), y1: box.top, y2: box.bottom }));
  const shown = at ?? points.at(-1);
  const when = at && newest - at.at >= 1 ? `${duration(newest - shown.at)} ago` : "Now";
  put("rate-now", shown.found
    ? `${when}: ${percent(shown.found.all)} found (${Object.entries(shown.found.share).map(([tier, share]) => `${title(tier).toLowerCase()} ${percent(share)}`).join(", ")}), ${percent(1 - shown.found.all)} to be computed`
    : `${when}: nothing was asked for`);
}

function showRateLegend(tiers) {
  const now = found(samples.length - 1, MEAN_S);
  $("rate-legend").replaceChildren(...tiers.map((tier) => make("li", { "data-tier": tier }, make("i", { class: "swatch" }), title(tier), make("b", {}, percent(now?.share[tier])))));
}

function pointAt(event) {
  const { points, x } = $("rate").chart ?? { points: [] };
  if (!points.length) return;
  const at = event.clientX - $("rate").getBoundingClientRect().left;
  pointed = points.reduce((best, point) => (Math.abs(x(point.at) - at) < Math.abs(x(best.at) - at) ? point : best)).at;
  showPointed($("rate"));
}

function stepAlong(event) {
  const { points, newest } = $("rate").chart ?? { points: [] };
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === "Escape") pointed = null;
  else if (!steps || !points.length) return;
  else {
    const from = points.findLastIndex((point) => point.at <= (pointed ?? newest));
    pointed = points[Math.min(points.length - 1, Math.max(0, from + steps))].at;
  }
  event.preventDefault();
  // Read out only what was asked for with a key, not each second.
  $("rate-now").setAttribute("aria-live", "polite");
  showPointed($("rate"));
}

// ---- the rest

function showCurves() {
  const place = ({ tier }) => Object.keys(TIERS).indexOf(tier);
  const curves = [...counted.curves].map(([tier, points]) => ({ tier, points })).sort((a, b) => place(a) - place(b));
  $("curves").replaceChildren(...(curves.length ? curves.map(drawCurve) : [make("p", { class: "empty" }, "Not enough requests yet.")]));
}

function drawCurve({ tier, points }) {
  const sorted = [...points].sort((a, b) => a.scale - b.scale);
  const miss = (point) => 1 - point.hit_rate;
  const [width, height] = [220, 110];
  const box = { left: 34, right: 210, top: 8, bottom: 88 };
  const low = Math.log2(sorted[0].scale);
  const span = Math.log2(sorted.at(-1).scale) - low || 1;
  const x = (scale) => box.left + (Math.log2(scale) - low) / span * (box.right - box.left);
  const y = (share) => box.bottom - share * (box.bottom - box.top);
  const axis = draw("g", { class: "axis" });
  for (const share of [0, 0.5, 1]) {
    axis.append(draw("line", { x1: box.left, x2: box.right, y1: y(share), y2: y(share) }),
      draw("text", { x: box.left - 5, y: y(share) + 4, "text-anchor": "end" }, percent(share).replace(" ", "")));
  }
  for (const { scale } of sorted) axis.append(draw("text", { x: x(scale), y: box.bottom + 16, "text-anchor": "middle" }, { 0.25: "¼×", 0.5: "½×", 1: "now" }[scale] ?? `${scale}×`));
  const line = sorted.map((point, index) => `${index ? "L" : "M"}${x(point.scale)},${y(miss(point))}`).join("");
  const dots = sorted.map((point) => draw("circle", { cx: x(point.scale), cy: y(miss(point)), r: point.scale === 1 ? 5 : 3, fill: `var(--${tier})`, stroke: "var(--card)", "stroke-width": 1.5 },
    draw("title", {}, `${point.scale} times the size: ${percent(miss(point))} missed`)));
  const [now, more] = [sorted.find((point) => point.scale === 1), sorted.at(-1)];
  const gain = now ? now && more.hit_rate - now.hit_rate : 0;
  const words = gain >= 0.005 ? `${more.scale}×: ${(100 * gain).toFixed(gain < 0.0995 ? 1 : 0)} of 100 more` : "no gain from more";
  return make("figure", {}, make("figcaption", {}, make("b", {}, title(tier)), make("span", { class: "quiet" }, words)),
    draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title(tier)}: ${sorted.map((point) => `${point.scale} times the size, ${percent(miss(point))} missed`).join("; ")}` },
      axis, draw("path", { d: line, fill: "none", stroke: `var(--${tier})`, "stroke-width": 2 }), ...dots));
}

/// Tokens missed of late, by reason; since the start, if this page has seen none be missed.
function recentMisses() {
  const first = counted.missed[0];
  const recent = [...counted.misses].map(([reason, tokens]) => ({ reason, tokens: tokens - (first?.misses.get(reason) ?? 0) }));
  if (!recent.some((miss) => miss.tokens > 0)) return { since: "since the start", all: counted.misses };
  return { since: `in the last ${duration(Math.max(1, (Date.now() - first.at) / 1000))}`, all: recent.map(({ reason, tokens }) => [reason, tokens]) };
}

function showMisses() {
  const { since, all: counts } = recentMisses();
  put("misses-words", `Tokens not found ${since}, by what became of the first block that was missing.`);
  const reasons = [...counts].map(([reason, tokens]) => ({ reason, tokens })).filter((miss) => miss.tokens > 0).sort((a, b) => b.tokens - a.tokens);
  const all = reasons.reduce((sum, miss) => sum + miss.tokens, 0);
  if (!reasons.length) return void $("misses").replaceChildren(make("li", { class: "empty" }, "Nothing has been missed yet."));
  $("misses").replaceChildren(...reasons.map((miss) => {
    const part = make("i");
    part.style.width = `${100 * miss.tokens / all}%`;
    return make("li", {}, make("span", {}, REASONS[miss.reason] ?? plain(miss.reason)), make("b", {}, `${percent(miss.tokens / all)}`), make("span", { class: "share" }, part));
  }));
}

function showPeers(state) {
  const { peers } = state;
  $("peers-section").hidden = !peers;
  if (!peers) return;
  const more = peers.known - peers.peers.filter((peer) => peer.address).length;
  put("peers-words", `It is ${peers.name}, at ${peers.address}, and knows of ${some(peers.known, "peer")}${more > 0 ? `; ${count(more)} more are not shown` : ""}.`);
  const cell = (label, text, kind = "number") => make("td", { "data-label": label, class: kind }, text);
  const rows = peers.peers.map((peer) => {
    const links = Object.entries(peer.links).map(([way, number]) => `${count(number)} by ${plain(way)}`);
    const { fault } = peer;
    return make("tr", {},
      make("th", { scope: "row" }, peer.name, make("span", { class: "backend" }, peer.address ? ` at ${peer.address}` : " only reads here")),
      cell("Connections to it", links.join(", ") || "none", ""),
      cell("From it", count(peer.readers)),
      cell("Blocks leased there", count(peer.leased_in_blocks)),
      cell("Leased here", count(peer.leased_out_blocks)),
      cell("Last fault", fault ? `${duration(Math.max(0, state.uptime_s - fault.at_s))} ago: ${fault.why}` : "none", fault && state.uptime_s - fault.at_s < RECENT_FAULT_S ? "bad" : ""));
  });
  $("peers").tBodies[0].replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", { colspan: 6, class: "empty" }, "No peer is known yet."))]));
}

function showFaults(state) {
  const faults = [...(state.faults ?? [])].sort((a, b) => b.at_s - a.at_s);
  if (!faults.length) return void $("faults").replaceChildren(make("li", { class: "empty" }, "Nothing went wrong."));
  $("faults").replaceChildren(...faults.map((fault) => make("li", {},
    make("time", {}, `${duration(Math.max(0, state.uptime_s - fault.at_s))} ago`),
    make("span", {}, FAULTS[fault.what] ?? plain(fault.what), (fault.count ?? 1) > 1 ? ` (${count(fault.count)} times)` : ""),
    make("span", { class: "where" }, (fault.where ?? "").replace(">", " → ")))));
}

function showSettings(state) {
  const text = JSON.stringify(state.settings);
  if (text === shownSettings) return;
  shownSettings = text;
  $("settings").tBodies[0].replaceChildren(...Object.entries(state.settings).map(([key, value]) => make("tr", {}, make("th", { scope: "row" }, key), make("td", {}, value))));
  filterSettings();
}

function filterSettings() {
  const wanted = $("settings-filter").value.toLowerCase();
  for (const row of $("settings").tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
}

// ---- health

function showHealth(ready) {
  const pill = $("health");
  const trouble = $("trouble");
  const degraded = ready?.degraded ?? [];
  const [kind, text] = !ready ? ["bad", "no answer"] : !ready.ready ? ["bad", "not ready"] : degraded.length ? ["warn", "degraded"] : ["good", "working"];
  pill.className = `pill ${kind}`;
  put("health", text);
  const words = !ready
    ? `No answer ${answeredAt ? `for ${duration((Date.now() - answeredAt) / 1000)}` : "yet"}. What you see is the last that is known; asking on.`
    : degraded.map(({ what, why }) => `${what}: ${why}`).join("; ");
  trouble.classList.toggle("warn", Boolean(ready?.ready));
  put("trouble", words);
  trouble.hidden = !words;
  document.body.classList.toggle("stale", !ready && samples.length > 0);
}

// ---- why

async function ask(event) {
  event.preventDefault();
  const kind = $("why-kind").value;
  const what = $("why-what").value.trim();
  const answer = $("why-answer");
  try {
    const response = await get(`v1/why?${kind}=${encodeURIComponent(kind === "chain" ? what.replaceAll(/\s+/g, "") : what)}`);
    const told = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(told.error?.message ?? told.error ?? told.message ?? `the server answered ${response.status}`);
    answer.replaceChildren(...whyWords(told));
  } catch (error) {
    answer.replaceChildren(make("p", { class: "bad" }, `No answer: ${error.message}`));
  }
}

function whyWords({ found: parts, next, from_peer: taken }) {
  const total = (parts ?? []).reduce((most, part) => Math.max(most, part.blocks), 0);
  const words = [make("p", {}, total
    ? `Found: ${parts.filter((part) => part.blocks).map((part) => `${some(part.blocks, "block")} in ${title(part.tier).toLowerCase()}`).join(", ")}.`
    : "Nothing of it was found.")];
  if (!next) words.push(make("p", {}, "Nothing was missing."));
  else {
    const facts = [next.tier && `last in ${title(next.tier).toLowerCase()}`, next.age_s != null && `gone for ${duration(next.age_s)}`, next.policy].filter(Boolean);
    words.push(make("p", {}, `The next block ${REASONS[next.reason] ?? plain(next.reason)}${facts.length ? ` (${facts.join(", ")})` : ""}.`),
      make("p", { class: "quiet" }, `Block ${next.block}`));
  }
  if (taken) {
    const came = taken.way ? `${count(taken.copied_blocks)} of ${some(taken.leased_blocks, "leased block")} came from the peer ${taken.peer} by ${plain(taken.way)}` : `The peer ${taken.peer} gave no lease`;
    words.push(make("p", {}, `${came}${taken.why ? `: ${taken.why}` : ""}.`));
  }
  return words;
}

// ---- asking, each second

async function get(path) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { cache: "no-store", headers, signal: AbortSignal.timeout(ANSWER_LIMIT_MS) });
  if (response.status === 401) throw new Error("the server wants a token");
  return response;
}

async function fetchJson(path) {
  const response = await get(path);
  // A process that is not ready says so with 503, and in its body why.
  if (!response.ok && response.status !== 503) throw new Error(`${path}: ${response.status}`);
  return response.json();
}

/// What the state does not have, from the metrics: estimates for other sizes of a tier, and reasons of misses.
async function pollMetrics() {
  try {
    const response = await get("metrics");
    if (response.ok) readMetrics(await response.text());
    if (!paused) {
      showCurves();
      showMisses();
    }
  } catch (error) {
    // A process that does not answer is shown by what asks for the state.
    console.warn(error);
  }
  // They change slowly, and the text is long.
  setTimeout(pollMetrics, 5 * PERIOD_MS);
}

function readMetrics(text) {
  counted.curves.clear();
  counted.misses.clear();
  for (const [, name, labels, value] of text.matchAll(/^(kvbm_estimated_hit_rate|kvbm_missed_tokens_total)\{([^}]*)\} (\S+)$/gm)) {
    const label = Object.fromEntries([...labels.matchAll(/(\w+)="([^"]*)"/g)].map(([, key, word]) => [key, word]));
    // A hybrid model has a table for each of its cache groups. Full attention's has the chains.
    if (label.group && label.group !== "full") continue;
    if (name === "kvbm_missed_tokens_total") counted.misses.set(label.reason, Number(value));
    else counted.curves.set(label.tier, [...(counted.curves.get(label.tier) ?? []), { scale: Number(label.scale), hit_rate: Number(value) }]);
  }
  rememberMisses();
}

function rememberMisses() {
  const last = counted.missed.at(-1);
  // Another process, whose counters begin anew.
  if (last && [...last.misses].some(([reason, tokens]) => (counted.misses.get(reason) ?? 0) < tokens)) counted.missed.length = 0;
  counted.missed.push({ at: Date.now(), misses: new Map(counted.misses) });
  while (counted.missed[0].at < Date.now() - RECENT_MISS_MS) counted.missed.shift();
}

function show() {
  const { state } = samples.at(-1);
  showProcess(state);
  showGlance(state);
  showTiers(state);
  showFlows(state);
  showRate();
  showRoutes(state);
  showPeers(state);
  showFaults(state);
  showSettings(state);
}

async function poll() {
  const began = Date.now();
  try {
    const [state, ready] = await Promise.all([fetchJson("v1/state"), fetchJson("readyz")]);
    answeredAt = Date.now();
    $("token-form").hidden = true;
    remember(state);
    if (!paused) {
      showHealth(ready);
      show();
    }
  } catch (error) {
    console.warn(error);
    showHealth(null);
    if (error.message.includes("wants a token")) {
      $("token-form").hidden = false;
      put("health", "locked");
      put("trouble", token ? "The server does not know this token." : "The server shows its figures to those who have its token.");
    }
  }
  setTimeout(poll, Math.max(100, PERIOD_MS - (Date.now() - began)));
}

// ---- theme and keys

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  put("theme", `Theme: ${theme}`);
  // Where a browser keeps nothing, the choice lasts as long as the page.
  try { localStorage.setItem("kvbm-theme", theme); } catch { /* see above */ }
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}

function togglePause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  put("pause", paused ? "Go on" : "Pause");
  if (!paused && samples.length) show();
}

function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "p" || event.key === "P") togglePause();
  if (event.key === "t" || event.key === "T") nextTheme();
}

function start() {
  let theme = null;
  try { theme = localStorage.getItem("kvbm-theme"); } catch { /* see setTheme */ }
  if (THEMES.includes(theme)) setTheme(theme);
  $("theme").addEventListener("click", nextTheme);
  $("pause").addEventListener("click", togglePause);
  document.addEventListener("keydown", shortcut);
  const chart = $("rate");
  chart.addEventListener("pointermove", pointAt);
  chart.addEventListener("pointerleave", () => { pointed = null; if (chart.chart) showPointed(chart); });
  chart.addEventListener("keydown", stepAlong);
  chart.addEventListener("blur", () => { pointed = null; $("rate-now").setAttribute("aria-live", "off"); });
  const redraw = () => samples.length && (showRate(), showFlows(samples.at(-1).state));
  for (const choice of document.querySelectorAll("[name=period]")) choice.addEventListener("change", redraw);
  window.addEventListener("resize", redraw);
  $("why").addEventListener("submit", ask);
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    token = $("token").value.trim();
    put("trouble", "Asking with this token.");
  });
  $("why-kind").addEventListener("change", () => { $("why-what").placeholder = $("why-kind").value === "chain" ? "hash, hash, …" : "request id"; });
  $("settings-filter").addEventListener("input", filterSettings);
  poll();
  pollMetrics();
}

start();
