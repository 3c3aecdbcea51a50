// The recent requests: one row each with the waterfall of its stages, and a table of them when it is opened.

import { bytes, count, duration, element } from "./figures.js";

const NUM_ROWS = 30;
const STAGES = {
  admission: "admission",
  router_queue: "router queue",
  reserve: "wait for blocks",
  prefill_queue: "prefill queue",
  prefill: "prefill",
  transfer: "KV transfer",
  decode_queue: "decode queue",
  first_decode: "first decode",
  decode: "decode",
};

export function showLegend(at) {
  at.replaceChildren(...Object.entries(STAGES).map(([stage, name]) => {
    const item = element("li");
    item.append(swatch(stage), name);
    return item;
  }));
}

export class Requests {
  constructor(at, none) {
    this.at = at;
    this.none = none;
    this.rows = new Map(); // by number, newest last
    this.isWhole = false;
  }

  add(requests, nowMs) {
    for (const request of requests) {
      const row = rowOf(request);
      this.rows.set(request.number, { request, row, endedMs: nowMs - 1000 * request.age_s });
      this.at.prepend(row.item);
    }
    for (const number of [...this.rows.keys()].slice(0, -NUM_ROWS)) {
      this.rows.get(number).row.item.remove();
      this.rows.delete(number);
    }
    this.none.hidden = this.rows.size > 0;
    if (requests.length) this.draw();
  }

  forget() {
    this.at.replaceChildren();
    this.rows.clear();
  }

  get all() {
    return [...this.rows.values()].map((entry) => entry.request);
  }

  tick(nowMs) {
    for (const { row, endedMs } of this.rows.values()) row.age.textContent = ago((nowMs - endedMs) / 1000);
  }

  // All bars have one scale: the longest that is shown fills the width.
  draw() {
    const spans = [...this.rows.values()].map(({ request }) => span(request, this.isWhole));
    const longest = Math.max(...spans, 1e-6);
    for (const { request, row } of this.rows.values()) drawWaterfall(row.waterfall, request, longest, this.isWhole);
  }
}

function rowOf(request) {
  const item = element("li");
  const details = element("details");
  const summary = element("summary");
  const age = element("span", "age");
  const waterfall = element("span", "waterfall");
  summary.append(age, routeOf(request), element("span", "lens", lengths(request)), ttftOf(request), waterfall);
  details.append(summary);
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(more(request));
  });
  item.append(details);
  return { item, age, waterfall };
}

function drawWaterfall(at, request, longest, isWhole) {
  const stages = isWhole ? withDecode(request) : request.stages;
  at.replaceChildren(...stages.map(([stage, node, seconds]) => {
    const part = element("i");
    part.dataset.stage = stage;
    part.style.width = `${(100 * seconds) / longest}%`;
    part.title = `${STAGES[stage] ?? stage}, ${node}: ${duration(seconds)}`;
    return part;
  }));
}

function routeOf(request) {
  if (request.error) return element("span", "route failed", request.error.replace(/_error$/, "").replaceAll("_", " "));
  const made = element("span", "route");
  made.append(element("i", `dot ${request.route ?? ""}`), request.route ?? "aborted"); // its client left
  return made;
}

function ttftOf(request) {
  const made = element("span", "ttft", duration(request.ttft_s));
  made.title = "to the first token, as the router saw it";
  return made;
}

function lengths(request) {
  const choices = request.choices > 1 ? ` (${request.choices} choices)` : "";
  return `${count(request.prompt_tokens)} → ${count(request.output_tokens)} tok${choices}`;
}

function more(request) {
  const made = element("div", "more");
  const table = element("table");
  for (const [stage, node, seconds] of withDecode(request)) {
    const row = table.insertRow();
    const name = element("th");
    name.scope = "row";
    name.append(swatch(stage), STAGES[stage] ?? stage);
    row.append(name, element("td", "number", duration(seconds)), element("td", "", node));
  }
  const facts = [
    `first token ${duration(request.ttft_s)}`,
    `in all ${duration(request.latency_s)}`,
    ...(request.kv_bytes ? [`${bytes(request.kv_bytes)} of KV over ${request.transport}`] : []),
    ...(request.cached_tokens ? [`${count(request.cached_tokens)} prompt tokens cached`] : []),
    ...(request.planned && request.planned !== request.route ? [`planned ${request.planned}`] : []),
    ...(request.attempts > 1 ? [`${request.attempts} attempts`] : []),
    ...(request.preemptions ? [`preempted ${request.preemptions} times`] : []),
  ];
  made.append(table, element("p", "", facts.join(" · ")), element("p", "id", `request ${request.id}`));
  return made;
}

function withDecode(request) {
  const rest = request.latency_s - span(request, false);
  if (!request.stages.length || rest <= 0) return request.stages;
  const last = request.stages.at(-1)[1];
  return [...request.stages, ["decode", last, rest]];
}

function span(request, isWhole) {
  if (isWhole) return request.latency_s;
  return request.stages.reduce((sum, [, , seconds]) => sum + seconds, 0);
}

function swatch(stage) {
  const made = element("i", "dot");
  made.dataset.stage = stage;
  return made;
}

function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ago` : `${Math.floor(seconds / 3600)} h ago`;
}
