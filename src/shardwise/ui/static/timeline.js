// The pipeline of one step: it is asked for after the rest, because it takes as long to draw.

import { card } from "./pictures.js";
import { latest } from "./server.js";

const one = card("timeline", "Pipeline of one step");
const ask = latest(
  "timeline",
  ({ chart, why_not: words }) => {
    if (!chart) one.say(words);
    else {
      one.show();
      one.draw(chart);
    }
  },
  (error) => one.say(error.message),
);

export const timeline = { prepare: () => one.place, follow: ask };
