// The controls: what is picked or typed, and the values of the layout as chips, the impossible ones with their reason.

import { combobox } from "./combobox.js";
import { byId, count, el } from "./dom.js";
import { change } from "./state.js";

const LAYOUT = {
  tp: "Tensor parallel",
  pp: "Pipeline stages",
  cp: "Context parallel",
  ep: "Expert parallel",
  dp: "Data parallel (adds or removes nodes)",
  zero: "ZeRO stage",
  microbatch: "Microbatch",
  recompute: "Recompute",
  schedule: "Pipeline schedule",
  interleave: "Chunks per rank",
  context_method: "Context attention",
};
const MORE = {
  precision: "Precision",
  optimizer: "Optimizer",
  sequence_parallel: "Sequence parallel",
  shard_group: "ZeRO shards over",
  offload: "Offload",
};
const SHOWN = new Set([...Object.keys(LAYOUT), ...Object.keys(MORE), "model", "cluster", "gpus", "global_batch", "seq", "stack"]);
let catalogue;
let showModel;

/** Fills the lists, and listens to what is typed. */
export function prepare(known) {
  catalogue = known;
  const ask = (name) => (name.includes("/") ? `Ask for ${name}` : `No model has ${name} in its name`);
  showModel = combobox(byId("model"), byId("model-list"), known.models.map(({ name, words }) => ({ name, words: words.replace(" parameters", "") })), ask, (model) => change({ model }));
  byId("cluster").append(...known.clusters.map((one) => el("option", { value: one.name }, one.name)));
  byId("stack").append(...known.stacks.map((name) => el("option", { value: name }, name)));
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("cluster").addEventListener("change", (event) => {
    if (event.target.value !== "own") change({ cluster: named(event.target.value), gpus: null, dp: null });
  });
  typed("size", () => change({ cluster: sized(byId("cluster").value, byId("size").value), gpus: null, dp: null }));
  typed("global_batch", () => change({ global_batch: number(byId("global_batch").value) }));
  typed("seq", () => change({ seq: number(byId("seq").value) }));
  byId("stack").addEventListener("change", (event) => change({ stack: event.target.value }));
  byId("plain").addEventListener("click", () => change(Object.fromEntries(known.varied.map((name) => [name, null]))));
  for (const [place, fields] of [["layout-chips", LAYOUT], ["more-chips", MORE]]) {
    byId(place).append(...Object.entries(fields).map(([name, words]) => group(name, words)));
  }
}

/** A change of a text field counts when it is left or Enter is pressed, and while typing after a short rest. */
function typed(id, done) {
  let waiting;
  byId(id).addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(done, 350);
  });
  byId(id).addEventListener("change", () => {
    clearTimeout(waiting);
    done();
  });
}

const number = (text) => (/^\d+$/.test(text.trim()) ? Number(text.trim()) : text.trim());
const sized = (name, size) => (size.trim() ? `${name}:${size.trim()}` : name);

function named(name) {
  const known = catalogue.clusters.find((one) => one.name === name);
  const size = byId("size").value.trim();
  const fits = known.shape ? /^\d+(x\d+)+$/.test(size) : /^\d+$/.test(size);
  return sized(name, fits && known.shape?.length === (size.includes("x") ? size.split("x").length : undefined) ? size : "");
}

/** The lists and fields as the job has them. */
export function showJob(job) {
  const own = job.model?.model_type || job.model?.text_config ? "pasted config.json" : String(job.model?.name ?? "own model");
  showModel(typeof job.model === "string" || !job.model ? job.model ?? "" : own);
  const known = catalogue.models.find((one) => one.name === job.model);
  byId("model-words").textContent = known ? known.words : "";
  showCluster(job.cluster);
  quietly("global_batch", job.global_batch ?? "");
  quietly("seq", job.seq ?? "");
  byId("stack").value = typeof job.stack === "string" ? job.stack : "shardwise";
  showOthers(job);
}

/** A preset with its size; or what was written out, or has several kinds of nodes, as a value of its own. */
function showCluster(cluster) {
  const list = byId("cluster");
  const own = cluster !== undefined && (typeof cluster !== "string" || cluster.includes("+"));
  list.querySelector("[value=own]")?.remove();
  if (own) list.append(el("option", { value: "own" }, typeof cluster === "string" ? cluster : cluster.kinds?.join(" + ") ?? cluster.name ?? "own cluster"));
  const [name, size = ""] = own ? ["own"] : (cluster ?? "").split(":");
  list.value = name;
  byId("size").disabled = own;
  quietly("size", size);
}

/** What the job has set and no control shows, to be seen and to be left out again. */
function showOthers(job) {
  const names = Object.keys(job).filter((name) => !SHOWN.has(name));
  byId("others").hidden = names.length === 0;
  byId("others").querySelector(".chips").replaceChildren(
    ...names.map((name) => {
      const value = typeof job[name] === "string" ? job[name] : JSON.stringify(job[name]);
      const words = `${name} ${value.length > 40 ? `${value.slice(0, 40)}…` : value}`;
      return el("button", { type: "button", class: "chip", "aria-label": `Leave out ${words}`, onclick: () => change({ [name]: null }) }, words, el("span", { class: "cross", "aria-hidden": "true" }, " ×"));
    }),
  );
}

/** Does not take the text from under somebody who is typing. */
function quietly(id, value) {
  const input = byId(id);
  if (document.activeElement !== input) input.value = String(value);
}

export function showMachine(job) {
  byId("cluster-words").textContent = `${count(job.devices)} devices on ${count(job.nodes)} ${job.nodes === 1 ? "node" : "nodes"}, dp ${count(job.dp)}`;
}

// -- chips -----------------------------------------------------------------------------------------------------

function group(name, words) {
  const id = `label-${name}`;
  return el(
    "div",
    { class: "field", "data-field": name, id: `field-${name}`, hidden: true },
    el("span", { class: "label", id }, words),
    el("div", { class: "chips", role: "radiogroup", "aria-labelledby": id, onkeydown: moved }),
    el("p", { class: "reason", id: `reason-${name}`, "aria-live": "polite" }),
    el("p", { class: "problem", hidden: true }),
  );
}

/** Draws the values that the server offers. */
export function showChoices(controls) {
  for (const name of [...Object.keys(LAYOUT), ...Object.keys(MORE)]) {
    const values = controls[name] ?? [];
    const field = byId(`field-${name}`);
    field.hidden = values.length === 0;
    const chips = field.querySelector(".chips");
    const focused = chips.contains(document.activeElement) ? document.activeElement.dataset.value : null;
    chips.replaceChildren(...values.map((one) => chip(field, one)));
    (chips.querySelector("[aria-checked=true]") ?? chips.firstElementChild)?.setAttribute("tabindex", "0");
    if (focused !== null) {
      [...chips.children].find((one) => one.dataset.value === focused)?.focus({ preventScroll: true });
    } else say(field, null);
  }
}

function chip(field, one) {
  const refused = Boolean(one.refused);
  return el(
    "button",
    {
      type: "button",
      class: one.priced_only ? "chip priced" : "chip",
      role: "radio",
      "aria-checked": String(Boolean(one.chosen)),
      "aria-disabled": refused ? "true" : null,
      "data-value": String(one.value),
      tabindex: "-1",
      "aria-describedby": refused || one.priced_only ? `reason-${field.dataset.field}` : null,
      onclick: () => (refused ? say(field, one) : change(one.set)),
      onfocus: () => say(field, one),
      onmouseenter: () => say(field, one),
      onmouseleave: () => say(field, null),
    },
    one.label,
  );
}

/** The reason of a value, below its control; of the chosen one where none is pointed at. */
function say(field, one) {
  const line = field.querySelector(".reason");
  const refused = one?.refused ?? "";
  const priced = one?.priced_only ?? "";
  line.className = refused ? "reason refused" : priced ? "reason priced" : "reason";
  line.textContent = refused ? `${one.label}: ${refused}` : priced ? `${one.label}, priced only: ${priced}` : "";
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Arrow keys move between the values, also to impossible ones to read why; Space and Enter choose; Escape hides it. */
function moved(event) {
  if (event.key === "Escape") say(event.currentTarget.closest(".field"), null);
  const chips = [...event.currentTarget.children];
  const at = chips.indexOf(document.activeElement);
  const to = event.key === "Home" ? 0 : event.key === "End" ? chips.length - 1 : at + (STEPS[event.key] ?? NaN);
  if (!chips[to]) return;
  event.preventDefault();
  for (const one of chips) one.setAttribute("tabindex", "-1");
  chips[to].setAttribute("tabindex", "0");
  chips[to].focus();
}

// -- what is wrong ---------------------------------------------------------------------------------------------

/** Puts the line of a refusal beside its field and returns it; null where the page has no place for it. */
export function showProblem(error) {
  clearProblem();
  const path = (error.field ?? "").replace(/^(strategy|training)\./, "");
  const name = path.split(/[.[]/)[0];
  const place = document.querySelector(`[data-field="${CSS.escape(name || "strategy")}"]`);
  if (!place || place.hidden === true && place.classList.contains("field")) return null;
  const line = place.classList.contains("problem") ? place : place.querySelector(".problem");
  line.textContent = error.problem ? `${error.problem}${error.remedy ? `; ${error.remedy}` : ""}` : error.message;
  line.hidden = false;
  place.classList.add("wrong");
  return line;
}

export function clearProblem() {
  for (const line of document.querySelectorAll(".controls .problem")) line.hidden = true;
  for (const place of document.querySelectorAll(".wrong")) place.classList.remove("wrong");
}
