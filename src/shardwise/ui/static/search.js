// The search in place: progress while it goes on, the ranking, why the first wins, and time against memory.

import { byId, bytes, count, el, seconds, share } from "./dom.js";
import { card } from "./pictures.js";
import { listen } from "./server.js";
import { replace, state } from "./state.js";

const TOP = 8;

const button = el("button", { type: "button", class: "primary", onclick: () => (running ? stop() : start()) }, "Search");
const status = el("p", { class: "status", role: "status" });
const meter = el("div", { class: "meter", hidden: true }, el("i"));
const found = el("div", { class: "found" });
const pareto = card("pareto", "Time against memory");
let running = null;
let varied = []; // keywords of the layout, which are the answer of a search

export const search = {
  prepare(known) {
    varied = known.varied;
    byId("find").addEventListener("click", () => {
      byId("search").scrollIntoView();
      if (!running) start();
    });
    return el(
      "section",
      { class: "card", id: "search" },
      el("div", { class: "heading" }, el("h2", {}, "The best layout"), button),
      el("p", { class: "lead" }, "Prices every way to split this model, batch and cluster, as `shardwise plan` does. The simplest within noise of the fastest comes first."),
      meter,
      status,
      found,
    );
  },
};

async function start() {
  const job = without(varied, state());
  running = new AbortController();
  button.textContent = "Cancel";
  meter.hidden = false;
  status.className = "status";
  status.textContent = "Starting the search";
  const since = performance.now();
  try {
    let picture = null;
    await listen("plan", isMixed(job.cluster) ? job : { ...job, pareto: "memory" }, running.signal, (event, data) => {
      if (event === "progress") status.textContent = `${data.words} · ${Math.round((performance.now() - since) / 1000)} s`;
      else if (event === "picture") picture = data;
      else if (data.ranking) draw(data, picture, job);
      else drawMixed(data, job);
    });
  } catch (error) {
    status.className = error.name === "AbortError" ? "status" : "status problem";
    status.textContent = error.name === "AbortError" ? "Cancelled." : error.message;
  }
  running = null;
  button.textContent = "Search";
  meter.hidden = true;
}

const stop = () => running?.abort();
const isMixed = (cluster) => (typeof cluster === "string" ? cluster.includes("+") : Boolean(cluster?.kinds));
const without = (names, job) => Object.fromEntries(Object.entries(job).filter(([name]) => !names.includes(name)));

function draw(plan, picture, job) {
  const { search: result, layouts, ranking, explanation } = plan;
  status.textContent = `${count(result.priced)} strategies priced: ${count(result.fitting)} run and fit, ${count(result.too_large)} do not fit, ${count(result.unsupported)} are not run.`;
  const rows = ranking.slice(0, TOP).map((row) => ({ ...row, ...layouts.find((one) => one.words === row.words) }));
  const body = el("tbody", {}, ...rows.map((one) => layoutRow(one, plan.fastest, job)));
  found.replaceChildren(
    listed(["", "Layout", "Step", "Time", "MFU", "Memory", "Fits", ""], body),
    el("p", { class: "why" }, el("b", {}, "Why 1 wins. "), explanation.sentence),
    pareto.place,
  );
  // The series of the picture: all that were simulated, the front, the first.
  const points = [plan.candidates, plan.pareto, [plan.candidates[0]]];
  pareto.draw(picture, (series, index) => use(points[series][index], job), (row) => useButton(plan.pareto[row], job));
}

/** A plan over several kinds of nodes: a layout says also in which order the kinds follow each other. */
function drawMixed(plan, job) {
  const [first] = plan.candidates;
  status.textContent = `${count(plan.strategies)} strategies tried${plan.was_stopped ? ", stopped after a minute" : ""}.`;
  const rows = plan.candidates.slice(0, TOP).map((one, index) =>
    el(
      "tr",
      { class: index ? null : "own" },
      el("td", {}, String(index + 1)),
      el("th", { scope: "row" }, one.words, el("small", {}, one.kinds.map((kind) => `${kind.cluster}: ${kind.layers.reduce((sum, more) => sum + more, 0)} layers`).join(", "))),
      cell(seconds(one.predicted_seconds)),
      cell(index ? signed(one.predicted_seconds / first.predicted_seconds - 1) : ""),
      cell(share(one.mfu)),
      el("td", {}, useButton(one, { ...job, cluster: one.cluster })),
    ));
  const gain = plan.gain === null ? "No kind holds the model alone." : `${plan.gain.toFixed(2)} times as fast as the better kind alone.`;
  found.replaceChildren(listed(["", "Layout", "Step", "Time", "MFU", ""], el("tbody", {}, ...rows)), el("p", { class: "why" }, gain));
}

const cell = (text) => el("td", { class: "number" }, text);
const signed = (part) => `${part >= 0 ? "+" : "−"}${share(Math.abs(part))}`;

function listed(names, body) {
  const head = names.map((name, index) => el("th", { class: index > 1 && index < names.length - 1 ? "number" : null, scope: "col" }, name));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), body));
}

function layoutRow(one, fastest, job) {
  return el(
    "tr",
    { class: one.rank === 1 ? "own" : null },
    el("td", {}, String(one.rank)),
    el("th", { scope: "row" }, one.words, one.group === "within noise" ? null : el("small", {}, "slower by more than noise")),
    cell(seconds(one.predicted_seconds)),
    cell(one.words === fastest ? "fastest" : signed(one.loss)),
    cell(share(one.mfu)),
    cell(bytes(one.memory.total_bytes)),
    cell(share(one.fit_probability, 0)),
    el("td", {}, useButton(one, job)),
  );
}

const useButton = (one, job) =>
  el("button", { type: "button", class: "quiet small", "aria-label": `Use ${one.words}`, onclick: () => use(one, job) }, "Use");

/** Puts a layout of the search on the page. */
function use(one, job) {
  replace({ ...job, ...one.strategy });
  byId("verdict").scrollIntoView();
}
