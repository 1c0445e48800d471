// The verdict: one sentence, its error bar, and the figures that people look for first.

import { byId, bytes, count, el, seconds, share } from "./dom.js";

let drawn = null; // what the bar shows, to be drawn again in another width
new ResizeObserver(() => drawn && byId("bar").replaceChildren(errorBar(drawn))).observe(byId("bar"));

const PILLS = { fits: "fits", tight: "tight", "does not fit": "not" };

export function showVerdict({ verdict, facts, notes }) {
  const { predicted_seconds: step, low_seconds: low, high_seconds: high } = verdict;
  byId("sentence").replaceChildren(
    el("span", { class: "subject" }, verdict.subject),
    ": ",
    el("span", { class: "step" }, seconds(step)),
    " a step, ",
    el("span", { class: "range" }, `${seconds(low)} to ${seconds(high)}`),
    ", ",
    el("span", { class: `pill ${PILLS[verdict.fit]}` }, verdict.fit_words),
  );
  document.title = `${verdict.subject}: ${seconds(step)} a step`;
  drawn = verdict;
  byId("bar").replaceChildren(errorBar(verdict));
  const words = Object.fromEntries(facts.map((fact) => [fact.name, fact.words]));
  byId("figures").replaceChildren(
    ...figure("Throughput", `${count(verdict.tokens_per_second)} tokens/s`, `MFU ${share(verdict.mfu)}`),
    ...figure("Memory of the fullest device", `${bytes(verdict.memory_bytes)}`, `of ${bytes(verdict.usable_bytes)}`),
    ...figure("Bound by", ...split(words["Bound by"])),
    ...(words["Exposed communication"] ? figure("Exposed communication", ...split(words["Exposed communication"], " of ")) : []),
  );
  byId("notes").replaceChildren(...notes.map((note) => el("li", {}, note)));
  byId("notes").hidden = notes.length === 0;
}

/** The first words as the figure, the rest below it. */
function split(words, at = ": ") {
  const place = words.indexOf(at);
  return place < 0 ? [words] : [words.slice(0, place), `${at.trim() === ":" ? "" : at.trim() + " "}${words.slice(place + at.length)}`];
}

const figure = (name, value, note) => [
  el("div", {}, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null)),
];

/** The step to scale: the floor, the predicted step, and where 80% of published runs lie. */
function errorBar(verdict) {
  const { floor_seconds: floor, predicted_seconds: step, low_seconds: low, high_seconds: high } = verdict;
  const end = 1.06 * Math.max(high, floor);
  const wide = (byId("bar").clientWidth * (high - low)) / end > 215; // room for words between the ends
  const at = (value) => (100 * value) / end;
  const rect = (kind, from, to, y, height, radius = 4) =>
    el("svg:rect", { class: kind, x: `${at(from)}%`, width: `${Math.max(0.2, at(to) - at(from))}%`, y, height, rx: radius });
  const label = (value, y, text, anchor, kind = "") =>
    el("svg:text", { x: `${at(value)}%`, y, "text-anchor": anchor, class: kind }, text);
  const words = `Predicted ${seconds(step)}; 80% of published runs lie between ${seconds(low)} and ${seconds(high)}; floor ${seconds(floor)}`;
  return el(
    "svg:svg",
    { role: "img", "aria-label": words },
    el("svg:title", {}, `${words}. ${verdict.basis}`),
    rect("bar-track", 0, end, 26, 20, 6),
    rect("bar-floor", 0, floor, 26, 20, 6),
    rect("bar-band", low, high, 26, 20),
    rect("bar-mark", step - end * 0.0018, step + end * 0.0018, 21, 30, 2),
    label(step, 13, `${seconds(step)} predicted`, at(step) > 80 ? "end" : "middle", "strong"),
    ...(wide ? [label((low + high) / 2, 64, "80% of published runs", "middle")] : []),
    label(low, 64, seconds(low), wide ? "middle" : "end"),
    label(high, 64, seconds(high), at(high) > 92 ? "end" : wide ? "middle" : "start"),
    label(Math.min(floor, low * 0.86) / 2, 64, `floor ${seconds(floor)}`, "middle"),
  );
}

export function showAdvice(data, apply) {
  const place = byId("advice");
  place.replaceChildren(el("b", {}, `${data.name}: `), data.words, " ");
  if (data.set) place.append(el("button", { type: "button", class: "link", onclick: () => apply(data.set) }, "Apply"));
  else if (data.search) place.append(el("button", { type: "button", class: "link", onclick: () => byId("find").click() }, "Search"));
  place.hidden = false;
  place.classList.remove("waiting");
}
