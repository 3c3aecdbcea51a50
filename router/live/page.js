// The live page: puts what comes where it belongs.

import { showFigures, showRoutes } from "./figures.js";
import { showLanes, showNodes } from "./nodes.js";
import { Requests, showLegend } from "./requests.js";
import { Source } from "./source.js";

const NUM_SAMPLES = 300;
const STATES = { ready: "good", degraded: "warn" };

const at = (id) => document.getElementById(id);
const requests = new Requests(at("requests"), at("no-requests"));
let samples = []; // newest last; their ages grow with time
let samplesMs = 0;

const source = new Source({ data: show, refused: askForKey, lost: showLoss });

function show(data, isAnotherStart) {
  const nowMs = performance.now();
  if (isAnotherStart) {
    requests.forget();
    samples = [];
  }
  at("live").hidden = false;
  at("key-form").hidden = true;
  showState(data.state, STATES[data.state] ?? "bad", data.reason);
  at("model").textContent = data.model;
  at("version").textContent = `version ${data.version}`;
  addSamples(data.samples, nowMs);
  requests.add(data.recent, nowMs);
  requests.tick(nowMs);
  showFigures(at("figures"), data, samples, requests.all);
  showRoutes(at("routes"), at("routes-note"), data);
  for (const role of ["prefill", "decode"]) {
    const nodes = data.nodes.filter((node) => node.role === role);
    showNodes(at(`${role}-nodes`), nodes, data.headroom_blocks);
  }
  showLanes(at("lanes"), data.queues);
}

function addSamples(fresh, nowMs) {
  const passed = (nowMs - samplesMs) / 1000;
  samples = samples.map(([age, ...rest]) => [age + passed, ...rest]);
  samples = [...samples, ...fresh].slice(-NUM_SAMPLES);
  samplesMs = nowMs;
}

function showState(word, kind, reason) {
  const state = at("state");
  if (state.textContent !== word) state.textContent = word; // a screen reader is told of changes only
  state.className = `state ${kind}`;
  document.title = `${word} · pdserve`;
  showBanner(reason, kind === "bad");
}

function showLoss(message) {
  showState("no connection", "bad", message);
}

function showBanner(text, isBad) {
  const banner = at("reason");
  banner.hidden = !text;
  banner.classList.toggle("bad", isBad);
  if (banner.textContent !== (text ?? "")) banner.textContent = text ?? "";
}

function askForKey(problem) {
  at("live").hidden = true;
  at("key-form").hidden = false;
  showState("locked", "warn", problem);
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  source.useKey(at("key").value.trim());
  at("key").value = "";
});

for (const input of document.querySelectorAll("input[name=span]")) {
  input.addEventListener("change", () => {
    requests.isWhole = input.value === "whole";
    requests.draw();
  });
}

showLegend(at("legend"));
source.start();
