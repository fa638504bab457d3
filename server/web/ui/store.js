// Conversations, in this browser's IndexedDB and nowhere else.
// {id, title, created, updated, system, settings: {field: value}, messages: [{role, content, images, ...}]}

const NAME = `quire ${location.pathname}`;  // one store per server below a host
let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", {keyPath: "id"});
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function run(mode, act) {
  const transaction = (await open()).transaction("conversations", mode);
  const asked = act(transaction.objectStore("conversations"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

/** All, the newest first. */
export async function all() {
  return (await run("readonly", store => store.getAll())).sort((a, b) => b.updated - a.updated);
}

export const put = conversation => run("readwrite", store => store.put(conversation));
export const remove = id => run("readwrite", store => store.delete(id));
export const removeAll = () => run("readwrite", store => store.clear());

export function fresh(settings = {}, system = "") {
  const now = Date.now();
  return {id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "New conversation", created: now, updated: now,
    system, settings: {...settings}, messages: []};
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
    && Array.isArray(value.messages) && value.messages.every(isMessage);
}

function isMessage(value) {
  const others = [value?.reasoning, value?.callId, value?.finish, value?.failed];
  return ["user", "assistant", "tool"].includes(value?.role) && isText(value.content)
    && others.every(text => text === undefined || text === null || isText(text))
    && isListOf(value.images, image => isText(image) && image.startsWith("data:image/")) && isListOf(value.calls, isCall);
}

const isCall = value => [value?.id, value?.function?.name, value?.function?.arguments].every(isText);

export const exported = conversations => JSON.stringify({format: "quire conversations", conversations}, null, 1);
