// Questions to the server. A refusal is an error with the field beside which it belongs.

export class Refused extends Error {
  constructor({ field, problem, remedy, text }) {
    super(text);
    Object.assign(this, { field, problem, remedy });
  }
}

export async function ask(what, job, signal) {
  const answer = await fetch(`/api/${what}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(job),
    signal,
  }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Refused({ field: "server", text: "The server does not answer: is `shardwise ui` still running?" });
  });
  const data = await answer.json();
  if (!answer.ok) throw new Refused(data.error);
  return data;
}

/** A question that is answered by server-sent events; ``heard`` gets the name and the data of each. */
export async function listen(what, job, signal, heard) {
  const answer = await fetch(`/api/${what}`, {
    method: "POST",
    headers: { "content-type": "application/json", accept: "text/event-stream" },
    body: JSON.stringify(job),
    signal,
  });
  if (!answer.ok) throw new Refused((await answer.json()).error);
  let text = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const event = text.slice(0, end).match(/^event: (\w+)\ndata: (.*)$/s);
      text = text.slice(end + 2);
      if (!event) continue;
      const data = JSON.parse(event[2]);
      if (event[1] === "refused") throw new Refused(data.error);
      heard(event[1], data);
    }
  }
}

export async function catalogue() {
  return (await fetch("/api/catalogue")).json();
}

/** Asks one question at a time: while one is open, only the newest of the following ones is asked after it. */
export function latest(what, show, fail) {
  let next = null;
  let busy = false;
  return async function asked(job) {
    next = { job, since: performance.now() };
    if (busy) return;
    busy = true;
    while (next) {
      const { job: now, since } = next;
      next = null;
      try {
        const data = await ask(what, now);
        if (!next) show(data, since);
      } catch (error) {
        if (!next) fail(error);
      }
    }
    busy = false;
  };
}
