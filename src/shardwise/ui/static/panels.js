// The cards below the verdict, in their order; each is drawn from the answer, or follows with a question of its own.

import { communication } from "./communication.js";
import { comparison } from "./compare.js";
import { demo } from "./demo.js";
import { memory } from "./memory.js";
import { runs } from "./runs.js";
import { search } from "./search.js";
import { taking } from "./take.js";
import { timeline } from "./timeline.js";
import { where } from "./where.js";

const ALL = [where, memory, timeline, communication, runs, comparison, search, taking, demo];

export const panels = {
  prepare(place, known) {
    place.append(...ALL.map((one) => one.prepare(known)));
  },
  show(data) {
    for (const one of ALL) one.show?.(data);
  },
  follow(job) {
    for (const one of ALL) one.follow?.(job);
  },
};
