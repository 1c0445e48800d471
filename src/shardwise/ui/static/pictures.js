// Cards with a chart of the report's library: its title, what to look for, the chart, and the same in a table.

import { el } from "./dom.js";

// A chart is drawn when it comes near the window, or when nothing else is to be done: what nobody sees does not delay
// what is seen, and a page that is printed or saved has it all the same.
const waiting = new Map();
const watch = new IntersectionObserver(
  (seen) => {
    for (const { target, isIntersecting } of seen) {
      near.set(target, isIntersecting);
      if (isIntersecting) waiting.get(target)?.();
    }
  },
  { rootMargin: "300px" },
);
const near = new WeakMap();

function whenNear(plot, drawing) {
  const now = () => {
    if (waiting.get(plot) !== now) return;
    waiting.delete(plot);
    drawing();
  };
  waiting.set(plot, now);
  if (near.get(plot)) now();
  else idle(now);
}

const idle = (done) => (window.requestIdleCallback ? requestIdleCallback(done, { timeout: 1000 }) : setTimeout(done, 200));

function ended(table, atRow) {
  if (!atRow) return table;
  table.tHead.rows[0].append(el("td"));
  [...table.tBodies[0].rows].forEach((row, number) => row.append(el("td", {}, atRow(number))));
  return table;
}

/** A card for one chart; `beside` stands between the chart and its table. */
export function card(id, title, ...beside) {
  const heading = el("h2", {}, title);
  const caption = el("p", { class: "lead" });
  const plot = el("div", { class: "plot" });
  watch.observe(plot);
  const rows = el("div", { class: "scroll" });
  const table = el("details", {}, el("summary", {}, "The same as a table"), rows);
  const place = el("section", { class: "card", id }, heading, caption, plot, ...beside, table);
  return {
    place,
    /** Draws a chart, or hides the card where there is none; ``atRow(number)`` is what ends each row of its table. */
    draw(chart, onPick, atRow) {
      place.hidden = !chart;
      if (!chart) {
        waiting.delete(plot);
        ShardwiseCharts.erase(plot);
        return;
      }
      heading.textContent = chart.title;
      caption.textContent = chart.caption;
      whenNear(plot, () => ShardwiseCharts.draw(plot, chart, onPick));
      const fill = () => rows.replaceChildren(ended(ShardwiseCharts.table(chart), atRow));
      if (table.open) fill();
      table.ontoggle = () => table.open && fill();
    },
    /** Says why there is no chart. */
    say(words) {
      place.hidden = false;
      waiting.delete(plot);
      ShardwiseCharts.erase(plot);
      caption.textContent = words;
      table.hidden = true;
    },
    show() {
      table.hidden = false;
    },
  };
}
