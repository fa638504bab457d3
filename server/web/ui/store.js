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

function isConversation(value) {
  return typeof value?.id === "string" && typeof value.title === "string" && typeof value.system === "string"
    && Number.isFinite(value.updated) && value.settings !== null && typeof value.settings === "object"
    && Array.isArray(value.messages) && value.messages.every(isMessage);
}

function isMessage(value) {
  return ["user", "assistant", "tool"].includes(value?.role) && typeof (value.content ?? "") === "string"
    && (value.images ?? []).every(image => typeof image === "string" && image.startsWith("data:image/"));
}

export const exported = conversations => JSON.stringify({format: "quire conversations", conversations}, null, 1);
