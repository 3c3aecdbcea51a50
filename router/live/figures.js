// The figures at the top, and the shares of the routes. Also the small ways to make elements and numbers.

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value.toLocaleString("en");
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${(seconds / 60).toFixed(1)} min`;
}

const WINDOW = 10; // samples over which a rate is taken
const SVG = "http://www.w3.org/2000/svg";

// samples: [age_s, requests, queued, ended, prompt tokens, generated tokens], oldest first.
export function showFigures(at, data, samples, requests) {
  const ttfts = requests.map((request) => request.ttft_s).filter((ttft) => ttft !== null);
  const outputs = rates(samples, 5);
  const prompts = rates(samples, 4);
  const ends = rates(samples, 3);
  at.replaceChildren(
    figure("Requests in work", count(data.requests), "", samples.map((sample) => sample[1])),
    figure("Waiting here", count(total(data.queues)), "", samples.map((sample) => sample[2])),
    figure("Output tokens", rate(outputs.at(-1)), "/s", outputs),
    figure("Prompt tokens", rate(prompts.at(-1)), "/s", prompts),
    figure("Requests ended", rate(ends.at(-1)), "/s", ends),
    figure("TTFT p50", ...split(duration(quantile(ttfts, 0.5))), ttfts, quantile(ttfts, 0.95)),
  );
}

export function showRoutes(at, note, data) {
  const routes = Object.entries(data.routes);
  const sum = routes.reduce((all, [, number]) => all + number, 0);
  note.textContent = [
    sum ? `${count(sum)} prompts` : "none yet",
    ...(data.retries ? [`${count(data.retries)} went on elsewhere`] : []),
    ...(data.refused ? [`${count(data.refused)} refused`] : []),
  ].join(" · ");
  const bar = element("div", "bar");
  const shares = element("div", "share");
  for (const [route, number] of routes) {
    const part = element("i", route);
    part.style.width = `${sum ? (100 * number) / sum : 0}%`;
    bar.append(part);
    const share = element("span");
    share.append(element("i", `dot ${route}`), `${route} `, element("b", "", count(number)));
    if (sum) share.append(element("span", "muted", ` ${Math.round((100 * number) / sum)} %`));
    shares.append(share);
  }
  at.replaceChildren(bar, shares);
}

function figure(name, value, unit, line, p95 = null) {
  const made = element("div", "card figure");
  const shown = element("p", "value", value);
  if (unit) shown.append(" ", element("span", "unit", unit));
  const label = element("p", "muted label", name);
  if (p95 !== null) label.append(element("span", "p95", `p95 ${duration(p95)}`));
  made.append(label, shown, sparkline(line));
  return made;
}

function sparkline(values) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  if (values.length > 1) {
    const top = Math.max(...values, 1e-9);
    const points = values.map((v, i) => `${((100 * i) / (values.length - 1)).toFixed(2)},${(29 - (27 * v) / top).toFixed(2)}`);
    svg.append(path("area", `M0,30 L${points.join(" L")} L100,30 Z`), path("line", `M${points.join(" L")}`));
  }
  return svg;
}

function path(className, d) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", className);
  made.setAttribute("d", d);
  return made;
}

function rates(samples, column) {
  return samples.slice(1).map((sample, i) => {
    const from = samples[Math.max(0, i + 1 - WINDOW)];
    return Math.max(0, (sample[column] - from[column]) / Math.max(from[0] - sample[0], 0.1));
  });
}

function rate(value) {
  if (value === undefined) return "–";
  return value < 10 ? value.toFixed(1) : count(Math.round(value));
}

function split(text) {
  const [value, unit = ""] = text.split(" ");
  return [value, unit];
}

function total(queues) {
  return queues.reduce((sum, queue) => sum + queue.num_waiting, 0);
}

function quantile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}
