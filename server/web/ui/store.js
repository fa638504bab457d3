// Conversations, drafts and presets, in this browser's IndexedDB and nowhere else.
// A conversation: {id, title, created, updated, revision, system, settings: {field: value}, messages: [{role, content,
// images, files, versions ...}]}. Each write makes a revision; a tab that does not know the newest one gets a Conflict.

const NAME = `quire ${location.pathname}`;  // one store per server below a host
const STORES = {conversations: "id", drafts: "id", presets: "name"};
const MAX_DEPTH = 200;  // of versions within versions
let opened = null, writing = Promise.resolve();
const channel = new BroadcastChannel(NAME);

export class Conflict extends Error {
  constructor() { super("Another tab has changed this conversation."); }
}

/** A sentence for an error of the store. */
export function storeProblem(error) {
  if (error.name !== "QuotaExceededError") return `The browser does not keep this conversation: ${error.message}`;
  return "The browser's storage is full, so this conversation is not kept. Export and delete conversations to make room.";
}

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 2);
    asked.onupgradeneeded = () => {
      for (const [name, keyPath] of Object.entries(STORES)) {
        if (!asked.result.objectStoreNames.contains(name)) asked.result.createObjectStore(name, {keyPath});
      }
    };
    asked.onsuccess = () => {
      asked.result.onversionchange = () => { asked.result.close(); opened = null; };  // a newer page in another tab
      resolve(asked.result);
    };
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function run(name, mode, act) {
  const transaction = (await open()).transaction(name, mode);
  const asked = act(transaction.objectStore(name), transaction);
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Conflict());
  });
}

/** All, the newest first; pinned ones before. */
export const all = async () => sorted(await run("conversations", "readonly", store => store.getAll()));
export const get = id => run("conversations", "readonly", store => store.get(id));

export function sorted(conversations) {
  return conversations.sort((a, b) => Boolean(b.pinned) - Boolean(a.pinned) || b.updated - a.updated);
}

/** Write a conversation, unless another tab has written it since this one read it: throws Conflict then. */
export function put(conversation) {
  const work = writing.then(() => write(conversation));
  writing = work.catch(() => {});
  return work;
}

async function write(conversation) {
  const known = conversation.revision ?? 0, revision = known + 1;
  await run("conversations", "readwrite", (store, transaction) => {
    const asked = store.get(conversation.id);
    asked.onsuccess = () => {
      if (asked.result && (asked.result.revision ?? 0) !== known) transaction.abort();
      else store.put({...conversation, revision});
    };
    return asked;
  });
  conversation.revision = revision;
  channel.postMessage(conversation.id);
}

export async function remove(id) {
  await writing;
  await run("conversations", "readwrite", store => store.delete(id));
  channel.postMessage(id);
}

/** Call `changed(id)` after another tab has written or removed a conversation. */
export function onChange(changed) {
  channel.addEventListener("message", event => changed(event.data));
}

export const draftOf = id => run("drafts", "readonly", store => store.get(id));
export const putDraft = draft => run("drafts", "readwrite", store => store.put(draft));
export const removeDraft = id => run("drafts", "readwrite", store => store.delete(id));

export const presets = () => run("presets", "readonly", store => store.getAll());
export const putPreset = preset => run("presets", "readwrite", store => store.put(preset));
export const removePreset = name => run("presets", "readwrite", store => store.delete(name));

export const newId = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, "0")).join("");

export function fresh(settings = {}, system = "") {
  const now = Date.now();
  return {id: newId(), title: "New conversation", created: now, updated: now, system, settings: {...settings}, messages: []};
}

/** The conversations of an exported file. Throws for anything else. */
export function parseExport(text) {
  const found = JSON.parse(text);
  const valid = Array.isArray(found?.conversations) && found.conversations.every(isConversation);
  if (!valid) throw new Error("This file holds no conversations of this page.");
  return found.conversations;
}

const isText = value => typeof value === "string";
const isListOf = (value, check) => value === undefined || value === null || (Array.isArray(value) && value.every(check));

/** All that the page reads of a conversation: a stored one that it cannot show would keep it from starting. */
function isConversation(value) {
  return [value?.id, value?.title, value?.system].every(isText) && Number.isFinite(value.updated)
    && value.settings !== null && typeof value.settings === "object" && Object.values(value.settings).every(isText)
    && Array.isArray(value.messages) && value.messages.every(message => isMessage(message, 0));
}

function isMessage(value, depth) {
  const others = [value?.reasoning, value?.callId, value?.finish, value?.failed, value?.stream?.name];
  return ["user", "assistant", "tool"].includes(value?.role) && isText(value.content)
    && others.every(text => text === undefined || text === null || isText(text))
    && isListOf(value.images, image => isText(image) && image.startsWith("data:image/"))
    && isListOf(value.files, file => [file?.name, file?.text].every(isText))
    && isListOf(value.logprobs, isLogprobs) && isListOf(value.calls, isCall) && hasVersions(value, depth);
}

function hasVersions({versions}, depth) {
  if (versions === undefined) return true;
  return depth < MAX_DEPTH && Number.isInteger(versions?.at) && Array.isArray(versions.tails) && versions.tails.length > 1
    && versions.tails.every((tail, at) => at === versions.at ? tail === null
      : Array.isArray(tail) && tail.length > 0 && tail.every(message => isMessage(message, depth + 1)));
}

/** Tokens as JSON, or one token. */
function isLogprobs(value) {
  try {
    return isText(value) ? JSON.parse(value).every(isLogprob) : isLogprob(value);
  } catch {
    return false;
  }
}

const isLogprob = value => isText(value?.token) && Number.isFinite(value.logprob)
  && isListOf(value.top, one => isText(one?.token) && Number.isFinite(one.logprob));
const isCall = value => [value?.id, value?.function?.name, value?.function?.arguments].every(isText);

export const exported = conversations => JSON.stringify({format: "quire conversations", conversations}, null, 1);
