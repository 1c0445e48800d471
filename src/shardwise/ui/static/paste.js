// A file, pasted, chosen or dropped: the server says what it is, and which job it makes of the one on the page.

import { byId, el, toast } from "./dom.js";
import { ask } from "./server.js";
import { forget, origin, replace, state } from "./state.js";

const MOST_CHARACTERS = 500_000;
const CONFIG = "config.json"; // a model alone: the rest of the job stays what it is
let name = ""; // of the file whose text is in the dialog

export function preparePaste() {
  const dialog = byId("paste-dialog");
  byId("paste").addEventListener("click", () => {
    problem("");
    dialog.showModal();
    byId("config").focus();
  });
  byId("config-cancel").addEventListener("click", () => dialog.close());
  byId("config-use").addEventListener("click", use);
  byId("config").addEventListener("input", () => { name = ""; });
  byId("config-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) await load(file);
  });
  byId("origin-forget").addEventListener("click", forget);
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", async (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    const [file] = event.dataTransfer.files;
    if (!file) return;
    if (!((await load(file)) && (await use())) && !dialog.open) dialog.showModal();
  });
}

async function load(file) {
  const fits = file.size <= MOST_CHARACTERS;
  byId("config").value = fits ? await file.text() : "";
  name = file.name;
  problem(fits ? "" : `${file.name} is too large: a configuration has a few thousand characters`);
  return fits;
}

async function use() {
  problem("");
  try {
    const { job, kind, ...read } = await ask("import", { text: byId("config").value, name, job: state() });
    byId("paste-dialog").close();
    replace(job, kind === CONFIG ? origin() : read);
    toast(`Read: ${read.words}`);
    return true;
  } catch (error) {
    problem(error.message);
    return false;
  }
}

function problem(words) {
  byId("config-problem").textContent = words;
  byId("config-problem").hidden = !words;
}

/** The file that the job was read from, with what was not used of it, or assumed, when it was read. */
export function showOrigin() {
  const read = origin();
  byId("origin").hidden = read === null;
  if (read === null) return;
  const open = read.of_page.length ? `, with the ${read.of_page.join(" and the ")} of the page` : "";
  byId("origin-words").replaceChildren("Read from ", el("b", {}, read.name), ` (${read.words}${open})`);
  byId("origin-notes").replaceChildren(...read.notes.map((note) => el("li", {}, note)));
  byId("origin-notes").hidden = read.notes.length === 0;
}
