// Starts the page: the job of the address or the first one, then a question to the server after every change.

import { clearProblem, prepare, showChoices, showJob, showMachine, showProblem } from "./controls.js";
import { byId, copy, el } from "./dom.js";
import { preparePaste, showOrigin } from "./paste.js";
import { panels } from "./panels.js";
import { ask, catalogue, latest } from "./server.js";
import { asked, change, follow, replace, settle, state, take } from "./state.js";
import { prepareTheme } from "./theme.js";
import { showAdvice, showVerdict } from "./verdict.js";

const known = await catalogue();
let advising;

function show(data, since) {
  document.body.classList.remove("stale", "unpriced");
  byId("banner").hidden = true;
  clearProblem();
  byId("advice").classList.add("waiting");
  showVerdict(data);
  showMachine(data.job);
  showChoices(data.controls);
  panels.show(data);
  requestAnimationFrame(() => requestAnimationFrame(() => {
    performance.measure("repaint", { start: since });
    document.documentElement.dataset.answered = String(Number(document.documentElement.dataset.answered ?? 0) + 1);
  }));
  clearTimeout(advising);
  advising = setTimeout(() => {
    askAdvice(state());
    panels.follow(state());
  }, 60);
}

/** A layout that the model or the cluster refuses gives way to the nearest that suits them; only else is it an error. */
async function fail(error) {
  const job = state();
  const { before, names } = asked();
  const near = error.field === "server" ? null : await ask("adapt", { job, keep: names }).catch(() => null);
  if (job !== state()) return;
  if (!near?.set) return refuse(error);
  settle(near.set);
  const undo = el("button", { type: "button", class: "link", onclick: () => replace(before) }, "Undo");
  byId("adapted").replaceChildren(`The layout was adapted: ${near.words}`, ...(before ? [" ", undo] : []));
  byId("adapted").hidden = false;
}

function refuse(error) {
  document.body.classList.add("stale");
  if (document.body.classList.contains("unpriced")) byId("sentence").textContent = "This job cannot be priced: change it, reset the layout, or find the best one";
  byId("advice").hidden = true;
  const line = error.field === undefined ? null : showProblem(error);
  byId("banner").textContent = error.message;
  byId("banner").hidden = line !== null;
  if (error.field?.startsWith("strategy")) (line ?? byId("banner")).append(" ", resetting());
  document.documentElement.dataset.refused = error.message;
}

/** The way out of a layout that the model or the cluster refuses. */
const resetting = () => el("button", { type: "button", class: "link", onclick: () => byId("plain").click() }, "Reset the layout");

const askAnswer = latest("answer", show, fail);
const askAdvice = latest("advice", (data) => showAdvice(data, change), () => { byId("advice").hidden = true; });

follow((job) => {
  delete document.documentElement.dataset.refused;
  byId("adapted").hidden = true;
  showJob(job);
  showOrigin();
  askAnswer(job);
});

prepareTheme();
prepare(known);
preparePaste();
panels.prepare(byId("panels"), known);
byId("copy-link").addEventListener("click", () => copy(location.href, "Link copied"));
addEventListener("popstate", () => take(known.first));
take(known.first);
