// The server this page came from. URLs are relative, so that a path prefix of a proxy does not matter.

import { button, byId, h, showDialog } from "./dom.js";

let key = "";  // in memory only: a reload asks again
let asking = null;  // the open question for the key, which all requests share
let declined = false;  // the user closed the question: the page asks no more until it is reloaded

export class ApiError extends Error {
  constructor(status, body) {
    const message = body?.error?.message;
    super(message && typeof message === "string" ? message : `The server answered HTTP ${status}.`);
    this.status = status;
    this.body = body;
  }
}

/** No answer at all: no server, no network, or a connection that was cut. */
export class Unreachable extends Error {
  constructor(message = "The server cannot be reached.") { super(message); }
}

/** An answer that no server of this page gives: a page of a proxy, or of another program. */
export class Unreadable extends Error {
  constructor(path) { super(`The answer of ${path} cannot be read. Another program may answer in the server's place.`); }
}

export const hasKey = () => key !== "";

/** Ask for a key again when the next request needs one, though the person has closed the question. */
export function askAgain() { declined = false; }

const WHY = {
  missing: "The server wants an API key.",
  refused: "The server does not accept this key.",
  admin: "The configuration and the errors are for administrators: enter such a key.",
};

/** Ask for a key because of `why`; resolves when the user has answered. */
export function askKey(why) {
  asking ??= (async () => {
    const dialog = byId("dialog");
    if (dialog.open) await new Promise(resolve => { dialog.addEventListener("close", resolve, {once: true}); });  // what is written in it stays
    const input = h("input", {type: "password", id: "key", autocomplete: "off", required: true});
    const form = h("form", {onsubmit: event => {
      event.preventDefault();
      key = input.value.trim();
      byId("dialog").close();
    }},
    h("p", {}, WHY[why]),
    h("label", {for: "key"}, "API key"), input,
    h("p", {class: "note"}, "It stays in this page's memory: a reload asks again."),
    h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), h("button", {type: "submit"}, "Use")));
    const closed = showDialog("Key", form);
    input.focus();
    const before = key;
    key = "";
    await closed;
    input.value = "";
    asking = null;
    declined = !key;
    if (declined) key = before;
  })();
  return asking;
}

/** The response, if its status is 2xx. Asks for the key after 401; for what the page reads by itself only until the user
 *  has refused. Throws ApiError. */
export async function request(path, options = {}, ask = true) {
  for (;;) {
    const used = key;
    const headers = {...options.headers, ...(used && {Authorization: `Bearer ${used}`})};
    const response = await fetch(path, {...options, headers}).catch(error => {
      throw options.signal?.aborted ? error : new Unreachable();
    });
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    if (response.status !== 401) throw new ApiError(response.status, body);
    if (key === used) {
      if ((declined && !options.method) || !ask) throw new ApiError(response.status, body);
      await askKey(used ? "refused" : "missing");
      if (key === used) throw new ApiError(response.status, body);
    }
  }
}

async function jsonOf(path, response) {
  try {
    return await response.json();
  } catch (error) {
    throw error instanceof SyntaxError ? new Unreadable(path) : new Unreachable("The connection was lost.");
  }
}

export const getJson = async (path, ask = true) => jsonOf(path, await request(path, {}, ask));

/** What administrators may read, or null for others. */
export async function getPrivileged(path) {
  try {
    return await getJson(path, false);
  } catch (error) {
    if (error.status === 401 || error.status === 403) return null;
    throw error;
  }
}

const TURN = 8;  // milliseconds of events after which others have their turn: a fast stream must not hold a click up
const PREFILL = /^: prefill (\d+)\/(\d+)$/;
const JSON_TYPE = {"Content-Type": "application/json"};

export const postJson = async (path, body) => jsonOf(path, await request(path, {method: "POST", body: JSON.stringify(body), headers: JSON_TYPE}));

/** The events of a POST; the server keeps them as stream `name`, whose rest can be read after a lost connection. */
export async function post(path, body, name, signal) {
  return stream(path, {method: "POST", body: JSON.stringify(body), signal, headers: {...JSON_TYPE, "X-Resumable-Stream": name}});
}

/** The events of stream `name` after number `after`. */
export const resume = (name, after, signal) => stream(`v1/streams/${name}`, {signal, headers: {"Last-Event-ID": String(after)}});

async function stream(path, options) {
  const response = await request(path, options);
  if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) throw new Unreadable(path);
  return response;
}

/** End stream `name`, whose connection this page gives up. */
export async function endStream(name) {
  await request(`v1/streams/${name}`, {method: "DELETE", keepalive: true}, false);
}

/** The events of a response, as {id, event}, {prefill: [done, total]} for a comment on the prompt, and {done: true}.
 *  Throws ApiError for an error midway, Unreachable if the connection is lost, Unreadable for what is no event. */
export async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", id = 0, turn = performance.now();
  for (;;) {
    if (performance.now() - turn > TURN) {
      await new Promise(resolve => { setTimeout(resolve); });
      turn = performance.now();
    }
    const part = await reader.read().catch(error => { throw signal.aborted ? error : new Unreachable("The connection was lost."); });
    if (part.done) return;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const match = PREFILL.exec(line);
      if (match) yield {prefill: [Number(match[1]), Number(match[2])]};
      else if (line.startsWith("id: ")) id = Number(line.slice(4));
      else if (line === "data: [DONE]") yield {id, done: true};
      else if (line.startsWith("data: ")) yield {id, event: eventOf(line.slice(6))};
    }
  }
}

function eventOf(text) {
  let event = null;
  try {
    event = JSON.parse(text);
  } catch { /* told below */ }
  if (event?.error) throw new ApiError(500, event);
  if (!Array.isArray(event?.choices) || !event.choices.every(choice => choice?.delta)) throw new Unreadable("v1/chat/completions");
  return event;
}
