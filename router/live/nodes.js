// The pools: each node's state, what its KV cache holds, what it does; and the queues at the router.

import { bytes, count, element } from "./figures.js";

const WORDS = { ready: "good", draining: "warn", starting: "warn", switching: "warn", lost: "bad", "not ready": "bad" };
const FULL = 0.95;

export function showNodes(at, nodes, headroom) {
  at.replaceChildren(...nodes.map((node) => nodeCard(node, headroom[node.name])));
  if (!nodes.length) at.append(element("p", "muted", "None. Decode nodes prefill everything themselves."));
}

export function showLanes(at, queues) {
  at.replaceChildren(...queues.map(lane));
}

function nodeCard(node, headroom) {
  const made = element("article", "node");
  const head = element("div", "head");
  head.append(element("span", "name", node.name), element("span", `word ${WORDS[node.state] ?? "warn"}`, node.state));
  made.append(head);
  if (node.total_blocks) made.append(blocksBar(node));
  const facts = element("dl");
  for (const [name, value] of factsOf(node, headroom)) {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    facts.append(pair);
  }
  made.append(facts);
  if (node.reason) made.append(element("p", "trouble warn", node.reason));
  if (node.breaker !== "closed") made.append(element("p", "trouble", `breaker ${node.breaker}: left alone for a while`));
  for (const trouble of node.troubles) {
    made.append(element("p", "trouble", `with ${trouble.node}, ${trouble.stage} ${trouble.state}: ${trouble.reason}`));
  }
  return made;
}

function blocksBar(node) {
  const used = node.total_blocks - node.free_blocks;
  const share = used / node.total_blocks;
  const bar = element("div", "bar");
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-label", `KV cache of ${node.name}`);
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", "100");
  bar.setAttribute("aria-valuenow", Math.round(100 * share));
  const draining = Math.min(node.draining_blocks, used);
  for (const [name, number] of [[share >= FULL ? "full" : "used", used - draining], ["draining", draining]]) {
    const part = element("i", name);
    part.style.width = `${(100 * number) / node.total_blocks}%`;
    bar.append(part);
  }
  return bar;
}

function factsOf(node, headroom) {
  if (node.total_blocks === null) return [];
  const share = Math.round((100 * (node.total_blocks - node.free_blocks)) / node.total_blocks);
  const facts = [
    ["KV in use", `${share} %`],
    ["running", count(node.running)],
    ["waiting", count(node.waiting)],
    ["queued tok", count(node.queued_prefill_tokens)],
    ["KV moved", bytes(node.kv_bytes_moved)],
    ["prefix hits", node.prefix_cache_queries ? `${Math.round((100 * node.prefix_cache_hits) / node.prefix_cache_queries)} %` : "–"],
  ];
  if (headroom !== undefined) facts.push(["room, tok", count(headroom * node.block_size)]);
  if (node.num_preemptions) facts.push(["preemptions", count(node.num_preemptions)]);
  if (node.ranks.length > 1) facts.push(["ranks", count(node.ranks.length)]);
  return facts;
}

function lane(queue) {
  const made = element("div", "lane");
  const bar = element("div", "bar");
  const part = element("i");
  part.style.width = `${Math.min(100, (100 * queue.num_waiting) / (queue.max_queued ?? 50))}%`;
  bar.append(part);
  const bound = queue.max_queued === null ? "" : ` of ${count(queue.max_queued)}`;
  const oldest = queue.num_waiting ? `, oldest ${queue.oldest_s.toFixed(1)} s` : "";
  made.append(element("span", "", queue.prompt_class), bar, element("span", "muted", `${count(queue.num_waiting)}${bound}${oldest}`));
  return made;
}
