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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => announce());
}

const current = () => document.documentElement.dataset.theme ?? "auto";

function apply(theme) {
  if (theme === "auto" || !THEMES.includes(theme)) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `◐ ${current()}`;
  byId("theme").setAttribute("aria-label", `Theme: ${current()}`);
  announce();
}

/** Pictures that were drawn in the other colours are drawn again. */
const announce = () => dispatchEvent(new CustomEvent("themed"));
