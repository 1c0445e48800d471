// The job on the page: keywords of the Python API, kept in the address after #, so that a link is the job.

let keywords = {};
let before = null; // the job that the last change was made to; null where the job came with the address
let source = null; // the file that the job was read from, and the notes on it
let kept = null; // the job that is pinned, to compare
let keptSource = null;
const followers = [];

export const state = () => keywords;
export const origin = () => source;
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

/** Another job, of the same file unless one is given; each is an entry of the browser's history: Back is undo. */
export function replace(next, from = source) {
  before = keywords;
  keywords = next;
  source = from;
  remember();
  for (const follower of followers) follower(keywords);
}

/** The job that the last change was made to, or null, and the keywords that it changed. */
export const asked = () => ({
  before,
  names: before === null ? [] : Object.keys({ ...before, ...keywords }).filter((name) => JSON.stringify(before[name]) !== JSON.stringify(keywords[name])),
});

/** Completes the last change by what has to follow from it: one entry of the history for both. */
export function settle(set) {
  const next = Object.fromEntries(Object.entries({ ...keywords, ...set }).filter(([, value]) => value !== null));
  keywords = next;
  history.replaceState(history.state, "", address());
  for (const follower of followers) follower(keywords);
}

/** Keeps the job of the page beside it. */
export function pin() {
  [kept, keptSource] = [{ ...keywords }, source];
  remember();
}

export function unpin() {
  [kept, keptSource] = [null, null];
  remember();
}

export function swap() {
  const [job, from] = [kept, keptSource];
  [kept, keptSource] = [{ ...keywords }, source];
  replace(job, from);
}

/** Lets the notes on the file go; the job stays. */
export function forget() {
  replace(keywords, null);
}

/** The address has the job; what was said of its file goes along in the history of this tab. */
function remember() {
  const said = { source, keptSource };
  if (address() !== location.hash) history.pushState(said, "", address());
  else history.replaceState(said, "", address());
}

const address = () => `#${written(keywords)}${kept ? `&pin=${encodeURIComponent(written(kept))}` : ""}`;

/** Takes the job of the address, or this one where it names none. */
export function take(otherwise) {
  const text = location.hash.slice(1);
  const { pin: beside, ...job } = text.includes("=") ? read(text) : otherwise;
  kept = typeof beside === "string" ? read(beside) : null;
  source = history.state?.source ?? null;
  keptSource = history.state?.keptSource ?? null;
  [before, keywords] = [null, job];
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
