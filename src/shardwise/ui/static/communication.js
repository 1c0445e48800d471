// What every dimension sends: hidden and exposed, and which level of the network it keeps busy.

import { el } from "./dom.js";
import { card } from "./pictures.js";

const sent = card("communication", "Communication of each dimension");
const levels = card("levels", "Which level of the network it keeps busy");

export const communication = {
  prepare: () => el("div", { class: "two" }, sent.place, levels.place),
  show({ charts }) {
    sent.draw(charts.communication);
    levels.draw(charts.levels);
  },
};
