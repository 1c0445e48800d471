// A list with a search box, by the ARIA pattern of a combobox (www.w3.org/WAI/ARIA/apg/patterns/combobox).

import { el } from "./dom.js";

const MOVES = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 };
const letters = (text) => text.toLowerCase().replace(/[-_]/g, "");

/**
 * Makes one of a text field and the list below it. What is typed leaves the options with every word in their name; a
 * text that is in none may be chosen too, in `other` words. Returns how to show what is chosen.
 */
export function combobox(field, list, options, other, choose) {
  let shown = "";
  let active = null;
  const items = options.map(({ name, words }, number) => {
    const item = el("li", { id: `${list.id}-${number}`, role: "option", "data-value": name }, el("span", {}, name), el("small", {}, words));
    return { item, name: letters(name) };
  });
  const unknown = el("li", { id: `${list.id}-other`, role: "option" });
  list.append(...items.map(({ item }) => item), unknown);

  const offered = () => [...list.children].filter((item) => !item.hidden);

  function activate(item) {
    active?.setAttribute("aria-selected", "false");
    active = item ?? null;
    active?.setAttribute("aria-selected", "true");
    active?.scrollIntoView({ block: "nearest" });
    if (active) field.setAttribute("aria-activedescendant", active.id);
    else field.removeAttribute("aria-activedescendant");
  }

  function open(text) {
    const words = letters(text).split(/\s+/);
    for (const { item, name } of items) item.hidden = !words.every((word) => name.includes(word));
    unknown.hidden = items.some(({ item }) => !item.hidden);
    unknown.dataset.value = text.trim();
    unknown.textContent = other(text.trim());
    list.hidden = false;
    field.setAttribute("aria-expanded", "true");
    const all = offered();
    const exact = items.find(({ name }) => name === letters(text.trim()))?.item;
    activate(exact ?? all.find((item) => item.dataset.value === shown) ?? all[0]);
  }

  function close() {
    list.hidden = true;
    field.setAttribute("aria-expanded", "false");
    activate(null);
    field.value = shown;
  }

  function take(item) {
    const value = item.dataset.value;
    const changed = value !== shown;
    if (changed) shown = value;
    close();
    if (changed) choose(value);
  }

  field.addEventListener("focus", () => field.select());
  field.addEventListener("click", () => list.hidden && open(""));
  field.addEventListener("input", () => open(field.value));
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && active) take(active);
    else if (event.key === "Escape" && !list.hidden) close();
    else if (event.key in MOVES) {
      event.preventDefault();
      if (list.hidden) return open("");
      const all = offered();
      activate(all[Math.max(0, Math.min(all.length - 1, all.indexOf(active) + MOVES[event.key]))]);
    }
  });
  list.addEventListener("mousedown", (event) => event.preventDefault()); // the field keeps the focus
  list.addEventListener("click", (event) => take(event.target.closest("li")));

  return (text) => {
    shown = text;
    if (list.hidden) field.value = text;
  };
}
