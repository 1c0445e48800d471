// Light, dark, or as the system says; kept in this browser.

import { byId } from "./dom.js";

const THEMES = ["auto", "light", "dark"];
const KEY = "shardwise-theme";

export function prepareTheme() {
  apply(localStorage.getItem(KEY) ?? "auto");
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
    localStorage.setItem(KEY, next);
    apply(next);
  });
}

const current = () => document.documentElement.dataset.theme ?? "auto";

function apply(theme) {
  if (theme === "auto" || !THEMES.includes(theme)) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `◐ ${current()}`;
  byId("theme").setAttribute("aria-label", `Theme: ${current()}`);
  ShardwiseCharts.redraw(); // what was drawn in the other colours
}
