// Where the predicted step goes: one bar to scale, and its parts below it.

import { el, seconds, share } from "./dom.js";

const bar = el("div", { class: "stack", role: "img" });
const list = el("ul", { class: "legend" });

export const where = {
  prepare: () => el("section", { class: "card", id: "where" }, el("h2", {}, "Where the step goes"), bar, list),
  show({ parts, verdict }) {
    bar.setAttribute("aria-label", parts.map((one) => `${one.words} ${share(one.share)}`).join(", "));
    bar.replaceChildren(
      ...parts.map((one) => el("span", { class: `part ${one.name}`, title: `${one.words}: ${seconds(one.seconds)}, ${share(one.share)}`, style: { flexGrow: String(Math.max(0, one.share)) } })),
    );
    list.replaceChildren(
      ...parts.map((one) =>
        el("li", {}, el("i", { class: `part ${one.name}` }), el("span", {}, one.words), el("b", {}, seconds(one.seconds)), el("em", {}, share(one.seconds / verdict.predicted_seconds)))),
    );
  },
};
