// Where the predicted step goes: one bar to scale, and its parts below it.

import { el, seconds, share } from "./dom.js";

const bar = el("div", { class: "stack", role: "img" });
const list = el("ul", { class: "legend" });
const title = el("h2", {});

export const where = {
  prepare: () => el("section", { class: "card", id: "where" }, title, bar, list),
  show({ charts, verdict }) {
    const parts = charts.step.series.map(({ name, tone, values }) => ({ name, tone, seconds: Math.max(...values) }));
    const part = (one) => share(one.seconds / verdict.predicted_seconds);
    title.textContent = charts.step.title;
    bar.setAttribute("aria-label", parts.map((one) => `${one.name} ${part(one)}`).join(", "));
    bar.replaceChildren(
      ...parts.map((one) => el("span", { title: `${one.name}: ${seconds(one.seconds)}, ${part(one)}`, style: { flexGrow: String(one.seconds / verdict.predicted_seconds), background: `var(--tone-${one.tone})` } })),
    );
    list.replaceChildren(
      ...parts.map((one) => el("li", {}, el("i", { style: { background: `var(--tone-${one.tone})` } }), el("span", {}, one.name), el("b", {}, seconds(one.seconds)), el("em", {}, part(one)))),
    );
  },
};
