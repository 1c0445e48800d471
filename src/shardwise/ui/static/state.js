// The job on the page: keywords of the Python API, kept in the address after #, so that a link is the job.

let keywords = {};
let kept = null; // the job that is pinned, to compare
const followers = [];

export const state = () => keywords;
export const pinned = () => kept;

/** Called with the new keywords after every change. */
export const follow = (follower) => followers.push(follower);

/** Sets some keywords; null goes back to the default. */
export function change(set) {
  const next = { ...keywords };
  for (const [name, value] of Object.entries(set)) {
    if (value === null || value === "") delete next[name];
    else next[name] = value;
  }
  replace(next);
}

/** Another job altogether; each is an entry of the browser's history, so that Back is undo. */
export function replace(next) {
  keywords = next;
  remember();
  for (const follower of followers) follower(keywords);
}

/** Keeps a job beside the one on the page; null lets it go. */
export function pin(job) {
  kept = job;
  remember();
}

function remember() {
  const beside = kept ? `&pin=${encodeURIComponent(written(kept))}` : "";
  const address = `#${written(keywords)}${beside}`;
  if (address !== location.hash) history.pushState(null, "", address);
}

/** Takes the job of the address, or this one where it names none. */
export function take(otherwise) {
  const text = location.hash.slice(1);
  const { pin: beside, ...job } = text.includes("=") ? read(text) : otherwise;
  kept = typeof beside === "string" ? read(beside) : null;
  keywords = job;
  for (const follower of followers) follower(keywords);
}

function written(job) {
  return Object.entries(job)
    .map(([name, value]) => {
      const text = typeof value === "string" ? value : JSON.stringify(value);
      return `${encodeURIComponent(name)}=${encodeURIComponent(text).replaceAll("%3A", ":").replaceAll("%2C", ",")}`;
    })
    .join("&");
}

function read(text) {
  const job = {};
  for (const part of text.split("&")) {
    const [name, ...rest] = part.split("=");
    if (!name) continue;
    try {
      job[decodeURIComponent(name)] = value(decodeURIComponent(rest.join("=")));
    } catch {
      job[name] = rest.join("=");
    }
  }
  return job;
}

function value(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
