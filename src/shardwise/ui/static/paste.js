// A config.json: pasted, chosen or dropped. It is checked by the server like everything else.

import { byId } from "./dom.js";
import { change } from "./state.js";

const MOST_CHARACTERS = 500_000;

export function preparePaste() {
  const dialog = byId("paste-dialog");
  byId("paste").addEventListener("click", () => {
    problem("");
    dialog.showModal();
    byId("config").focus();
  });
  byId("config-cancel").addEventListener("click", () => dialog.close());
  byId("config-use").addEventListener("click", () => use(byId("config").value));
  byId("config-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (file) byId("config").value = await text(file);
  });
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
    byId("config").value = await text(file);
    if (!use(byId("config").value) && !dialog.open) dialog.showModal();
  });
}

const text = (file) => (file.size > MOST_CHARACTERS ? `(${file.name} is too large for a config.json)` : file.text());

function use(content) {
  try {
    const model = JSON.parse(content);
    if (typeof model !== "object" || model === null || Array.isArray(model)) throw new Error("it is not an object");
    byId("paste-dialog").close();
    change({ model });
    return true;
  } catch (error) {
    problem(`Not a config.json: ${error.message}`);
    return false;
  }
}

function problem(words) {
  byId("config-problem").textContent = words;
  byId("config-problem").hidden = !words;
}
