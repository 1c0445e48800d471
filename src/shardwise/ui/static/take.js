// What is taken away: the command, job.yaml, other frameworks' configurations, the step as a trace.

import { bytes, copy, download, el, seconds, toast } from "./dom.js";
import { ask } from "./server.js";
import { state } from "./state.js";

const PERFETTO = "https://ui.perfetto.dev";
const command = el("code", { id: "command" });
const yaml = el("pre", { id: "yaml", tabindex: "0" });
const losses = el("div", { class: "losses" });
const problem = el("p", { class: "problem", role: "alert", hidden: true });

export const taking = {
  prepare: ({ frameworks }) =>
    el(
      "section",
      { class: "card", id: "take" },
      el("h2", {}, "Take it with you"),
      el("p", { class: "lead" }, "The same job as a command, as the file that `shardwise train` runs, as other frameworks' configuration, and as a trace of one step."),
      el("div", { class: "command" }, command, el("button", { type: "button", class: "quiet small", id: "copy-command", onclick: () => copy(command.textContent, "Command copied") }, "Copy")),
      el(
        "div",
        { class: "row wrap" },
        el("button", { type: "button", class: "quiet", id: "save-yaml", onclick: () => download("job.yaml", yaml.textContent) }, "Save job.yaml"),
        el("button", { type: "button", class: "quiet", id: "save-json", onclick: attempt(saveJson) }, "Save analysis.json"),
        el("button", { type: "button", class: "quiet", id: "save-trace", onclick: attempt(saveTrace) }, "Save trace.json"),
        el("button", { type: "button", class: "quiet", id: "perfetto", onclick: attempt(openPerfetto) }, "Open the step in Perfetto"),
      ),
      el("div", { class: "row wrap", id: "exports" }, el("span", { class: "soft" }, "Export to"), ...frameworks.map((name) => el("button", { type: "button", class: "quiet small", "data-to": name, onclick: attempt(() => exportTo(name)) }, name))),
      problem,
      losses,
      el("details", {}, el("summary", {}, "job.yaml"), yaml),
    ),
  show(data) {
    command.textContent = data.command;
    yaml.textContent = data.yaml;
    losses.replaceChildren();
    problem.hidden = true;
  },
};

/** What may be refused says so in its place. */
function attempt(action) {
  return async () => {
    problem.hidden = true;
    try {
      await action();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
  };
}

async function saveJson() {
  download("analysis.json", JSON.stringify(await ask("analyze", state()), null, 2), "application/json");
}

async function saveTrace() {
  download("trace.json", JSON.stringify(await ask("trace", state())), "application/json");
}

/** Hands the trace to Perfetto's page in this browser (perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui). */
async function openPerfetto() {
  const job = state();
  const opened = window.open(PERFETTO);
  if (!opened) throw new Error("The browser did not open a window: allow it, or save the trace and open it there.");
  const trace = new TextEncoder().encode(JSON.stringify(await ask("trace", job))).buffer;
  const asking = setInterval(() => opened.postMessage("PING", PERFETTO), 100);
  setTimeout(() => clearInterval(asking), 60_000);
  addEventListener("message", function heard(event) {
    if (event.origin !== PERFETTO || event.data !== "PONG") return;
    clearInterval(asking);
    removeEventListener("message", heard);
    opened.postMessage({ perfetto: { buffer: trace, title: "shardwise: one predicted step", fileName: "trace.json" } }, PERFETTO);
  });
}

async function exportTo(name) {
  const data = await ask("export", { ...state(), to: name });
  for (const [file, text] of Object.entries(data.files)) download(file, text);
  toast(`${Object.keys(data.files).join(", ")} saved`);
  const there = data.priced.exported;
  const ways = data.priced.differs.join(", ") || "as exported";
  const memory = there && `${there.fit}${there.fit === "fits" ? "" : ` (${bytes(there.memory_bytes)} a device)`}`;
  const price = there ? `As ${name} runs it: ${memory}, ${seconds(there.predicted_seconds)} a step (${ways}).` : `What ${name} would run of it cannot be priced.`;
  losses.replaceChildren(
    el("p", {}, el("b", {}, price)),
    el("ul", {}, ...data.lost.map((one) => el("li", {}, Object.values(one).filter((part) => typeof part === "string").join(": "))), ...data.notes.map((note) => el("li", {}, note))),
  );
}
