// Fine-tuning, shown on this machine: a tiny model learns while its loss is drawn, and answers before and after.

import { el } from "./dom.js";
import { listen } from "./server.js";

const button = el("button", { type: "button", class: "quiet", onclick: () => (running ? running.abort() : start()) }, "Start");
const status = el("p", { class: "status", role: "status" });
const meter = el("div", { class: "meter", hidden: true }, el("i"));
const lessons = el("div", { class: "two" });
let running = null;
let lesson = null; // the one that is being given

export const demo = {
  prepare: () =>
    el(
      "section",
      { class: "card", id: "demo" },
      el("div", { class: "heading" }, el("h2", {}, "Fine-tuning, shown here"), button),
      el("p", { class: "lead" }, "Trains on this machine, which needs no GPU: in about a minute a tiny model with random weights learns to chat, then an adapter over it learns a habit that is planted in its data. The loss is that of answers alone. What is written goes when the demo ends."),
      meter,
      status,
      lessons,
    ),
};

async function start() {
  running = new AbortController();
  button.textContent = "Cancel";
  meter.hidden = false;
  status.className = "status";
  status.textContent = "Starting";
  clear();
  const since = performance.now();
  const after = () => `${Math.round((performance.now() - since) / 1000)} s`;
  try {
    await listen("demo", {}, running.signal, (event, data) => {
      if (event === "progress") status.textContent = `${data.words} · ${after()}`;
      else if (event === "lesson") begin(data);
      else if (event === "loss") ShardwiseCharts.draw(lesson.plot, data);
      else if (event === "sample") answered(data);
      else status.textContent = `Done after ${after()}.`;
    });
  } catch (error) {
    status.className = error.name === "AbortError" ? "status" : "status problem";
    status.textContent = error.name === "AbortError" ? "Cancelled." : error.message;
  }
  running = null;
  button.textContent = "Start";
  meter.hidden = true;
}

function clear() {
  for (const plot of lessons.querySelectorAll(".plot")) ShardwiseCharts.erase(plot);
  lessons.replaceChildren();
}

function begin({ title, command }) {
  lesson = { plot: el("div", { class: "plot" }), sample: el("dl", { class: "sample" }) };
  lessons.append(el("div", { class: "lesson" }, el("h3", {}, title), el("p", { class: "hint" }, el("code", {}, command)), lesson.plot, lesson.sample));
}

function answered({ prompt, before, after }) {
  const row = (name, text) => [el("dt", {}, name), el("dd", {}, text)];
  lesson.sample.replaceChildren(...row("Held out", prompt), ...row("Before", before), ...row("After", after));
}
