// A against B: a job that was pinned, and the one on the page, with the reason for the difference.

import { bytes, count, el, seconds, share } from "./dom.js";
import { latest } from "./server.js";
import { pin, pinned, state, swap as swapJobs, unpin as unpinJob } from "./state.js";

const keep = el("button", { type: "button", class: "quiet", id: "pin", onclick: pinNow }, "Pin this as A");
const drop = el("button", { type: "button", class: "quiet", id: "unpin", hidden: true, onclick: unpin }, "Unpin");
const swap = el("button", { type: "button", class: "quiet", id: "swap", hidden: true, onclick: swapJobs }, "Swap A and B");
const lead = el("p", { class: "lead" }, "Pin a layout as A, then change the job: B is what is on the page.");
const body = el("div", {});
const ask = latest("compare", draw, (error) => body.replaceChildren(el("p", { class: "problem" }, error.message)));

export const comparison = {
  prepare: () =>
    el(
      "section",
      { class: "card", id: "compare" },
      el("div", { class: "heading" }, el("h2", {}, "A against B"), el("div", { class: "row" }, swap, drop, keep)),
      lead,
      body,
    ),
  follow(job) {
    buttons();
    if (pinned()) ask({ a: pinned(), b: job });
    else body.replaceChildren();
  },
};

function pinNow() {
  pin();
  comparison.follow(state());
}

function unpin() {
  unpinJob();
  comparison.follow(state());
}

function buttons() {
  drop.hidden = swap.hidden = pinned() === null;
  keep.textContent = pinned() ? "Pin this instead" : "Pin this as A";
  lead.hidden = pinned() !== null;
}

function draw(data) {
  if (!pinned()) return;
  const worse = data.loss > 0 || data.b.fit === "does not fit";
  const rows = [
    ["Step", (one) => seconds(one.predicted_seconds)],
    ["80% of published runs", (one) => `${seconds(one.low_seconds)} to ${seconds(one.high_seconds)}`],
    ["Throughput", (one) => `${count(one.tokens_per_second)} tokens/s`],
    ["MFU", (one) => share(one.mfu)],
    ["Memory", (one) => `${bytes(one.memory_bytes)}, ${one.fit_words}`],
  ];
  const side = (letter, one) => el("th", { scope: "col" }, el("span", { class: "letter" }, letter), ` ${one.subject}`, el("small", {}, one.layout));
  body.replaceChildren(
    el("p", { class: `reason-line ${worse ? "worse" : "better"}`, id: "reason" }, data.reason),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "sides" },
        el("thead", {}, el("tr", {}, el("td", {}), side("A", data.a), side("B", data.b))),
        el("tbody", {}, ...rows.map(([name, words]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, words(data.a)), el("td", {}, words(data.b))))),
      ),
    ),
    el("ul", { class: "deltas" }, ...data.parts.filter((one) => Math.abs(one.share) >= 0.0005).slice(0, 8).map(delta)),
  );
}

/** How much longer or shorter B is in one part, as a share of A's step. */
function delta(one) {
  const width = `${Math.min(50, Math.abs(one.share) * 200)}%`;
  const words = `${one.share > 0 ? "+" : "−"}${share(Math.abs(one.share))}`;
  const bar = el("span", { class: `delta ${one.share > 0 ? "longer" : "shorter"}`, style: { width, [one.share > 0 ? "left" : "right"]: "50%" } });
  return el("li", {}, el("span", {}, one.words), el("span", { class: "track" }, bar), el("b", {}, words));
}
