// The published runs that are nearest to the job, with their source, beside its own prediction.

import { count, el, seconds, share } from "./dom.js";
import { latest } from "./server.js";

const COLUMNS = ["Run", "Machine and layout", "Step", "MFU", "Tokens/s a device", "Our prediction"];
const body = el("tbody");
const head = el("tr", {}, ...COLUMNS.map((name, index) => el("th", { class: index > 1 ? "number" : null, scope: "col" }, name)));
const table = el("table", { class: "runs" }, el("thead", {}, head), body);
const note = el("p", { class: "hint" });
const ask = latest("published", draw, () => {});

export const runs = {
  prepare: () =>
    el(
      "section",
      { class: "card", id: "runs" },
      el("h2", {}, "Nearest published runs"),
      el("p", { class: "lead" }, "Measured by others, each with its source. The last column is how far our prediction of that run is off, with its source left out of the fit."),
      el("div", { class: "scroll" }, table),
      note,
    ),
  follow: ask,
};

function draw(data) {
  body.replaceChildren(row(data.own, true), ...data.runs.map((one) => row(one, false)));
  note.textContent = `Near by ${data.near}. Error bar: ${data.basis}.`;
}

function row(one, own) {
  const cell = (column, ...parts) => el("td", { class: "number", "data-label": COLUMNS[column] }, ...parts);
  const small = (text) => el("small", {}, text);
  const batch = own ? "" : ` · ${count(one.sequences)} × ${count(one.seq)}`;
  return el(
    "tr",
    { class: own ? "own" : null },
    el("th", { scope: "row" }, own ? "This job, predicted" : one.model, small(own ? one.model : `${one.source}, ${one.locator}`)),
    el("td", {}, one.machine, small(`${one.layout}${batch}`), own || !one.differs.length ? null : el("small", { class: "differs" }, one.differs.join(", "))),
    cell(2, seconds(one.seconds), own ? null : small(one.reported_from)),
    cell(3, share(one.mfu)),
    cell(4, count(one.tokens_per_second_per_device)),
    cell(5, own ? "" : one.error_words || "not scored"),
  );
}
