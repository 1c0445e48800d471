// Small ways to make elements and to write numbers. Text is always set as text, never as markup.

/** An element with attributes and children; a string child is text. */
export function el(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

const three = (number) => {
  if (number === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number))));
  return number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
};

/** Seconds as the command line prints them: three digits and a unit. */
export function seconds(value) {
  if (!value) return "0 s";
  const [factor, unit] = value >= 0.9995 ? [1, "s"] : value >= 0.9995e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${three(value / factor)} ${unit}`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  let left = Math.abs(value);
  while (left >= 999.5 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${value < 0 ? "−" : ""}${unit ? three(left) : Math.round(left)} ${units[unit]}`;
}

export const share = (value, digits = 1) => `${(100 * value).toFixed(digits)}%`;
export const count = (value) => Math.round(value).toLocaleString("en");

let hiding;
/** A short word on something that was done. */
export function toast(text) {
  const place = byId("toast");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { place.hidden = true; }, 2200);
}

export async function copy(text, said) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(said);
}

/** Saves text as a file of the browser. */
export function download(name, text, kind = "text/plain") {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
