// Memory per pipeline rank; every part opens its formula with the numbers put in.

import { bytes, el } from "./dom.js";
import { card } from "./pictures.js";

const ranks = el("div", { class: "chips", role: "group", "aria-label": "Pipeline rank" });
const parts = el("div", { class: "parts" });
const one = card("memory", "Memory of one device", el("div", { class: "formulas" }, el("p", { class: "soft" }, "Every part with its formula"), ranks, parts));
let rank = null; // by its name, so that it stays chosen while values change
let opened = null;

export const memory = {
  prepare: () => one.place,
  show({ charts }) {
    const chart = charts.memory;
    one.draw(chart, (series, category) => {
      opened = chart.series[series].name;
      list(chart, category);
    });
    const fullest = chart.categories.findIndex((name) => name.includes("fullest"));
    const kept = chart.categories.indexOf(rank);
    list(chart, kept >= 0 ? kept : Math.max(0, fullest));
  },
};

function list(chart, category) {
  rank = chart.categories[category];
  ranks.hidden = chart.categories.length === 1;
  const focused = ranks.contains(document.activeElement);
  ranks.replaceChildren(
    ...chart.categories.map((name, index) =>
      el("button", { type: "button", class: "chip", "aria-pressed": String(index === category), onclick: () => list(chart, index) }, name)),
  );
  if (focused) ranks.children[category].focus({ preventScroll: true });
  parts.replaceChildren(...chart.series.filter((series) => series.values[category]).map((series) => part(series, category)));
}

function part(series, category) {
  const lines = series.details[category] ?? [];
  const made = el(
    "details",
    { open: series.name === opened, class: lines.length ? null : "plain" },
    el("summary", {}, el("i", { style: { background: `var(--tone-${series.tone})` } }), el("span", {}, series.name), el("b", {}, bytes(series.values[category]))),
    ...lines.map((line) => el("p", { class: "formula" }, line)),
  );
  made.addEventListener("toggle", () => {
    if (made.open) opened = series.name;
    else if (opened === series.name) opened = null;
  });
  return made;
}
