// The list of conversations beside the open one: search, open, pin, rename, delete, export and import.

import { button, byId, chooseFiles, download, h, setChildren, showDialog } from "./dom.js";
import { downloadMarkdown } from "./export.js";
import * as store from "./store.js";
import { everyMessage } from "./tree.js";

let search = null;  // keeps its text and focus while the list changes
const texts = new WeakMap();  // conversation -> {state, text}
const rows = new Map();  // id -> Row, which keeps the focus and the open menu

document.addEventListener("click", event => {
  for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});

export function showList(chat) {
  search ??= h("input", {id: "search", type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => showList(chat)});
  const found = chat.conversations.filter(one => contains(one, search.value)), some = chat.conversations.length > 0;
  setChildren(byId("list"), [h("h2", {}, "Conversations"), button("New conversation", () => chat.fresh(), {id: "new", class: "main"}), search,
    listOf(chat, found, some), h("div", {class: "row"},
      button("Export", () => exportAll(chat), {disabled: !some}), button("Import", () => importFile(chat)),
      button("Delete all", () => confirmRemoval(chat, chat.conversations), {disabled: !some}))]);
}

function listOf(chat, found, some) {
  const node = byId("list").querySelector("ul") ?? h("ul"), known = new Set(chat.conversations.map(one => one.id));
  for (const id of rows.keys()) if (!known.has(id)) rows.delete(id);
  const shown = found.map(one => {
    if (!rows.has(one.id)) rows.set(one.id, new Row(chat));
    return rows.get(one.id).show(one);
  });
  setChildren(node, [...shown, some && !found.length && h("li", {class: "note"}, "None has these words.")]);
  return node;
}

/** Whether all words are in the title or the messages, also those of other versions. */
function contains(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const text = textOf(conversation);
  return words.every(word => text.includes(word));
}

/** All that is searched, made once for each state of a conversation. */
function textOf(one) {
  const state = `${one.revision} ${one.updated} ${one.title}`;
  if (texts.get(one)?.state !== state) {
    const found = [one.title, ...[...everyMessage(one.messages)].map(message => message.content)];
    texts.set(one, {state, text: found.join("\n").toLowerCase()});
  }
  return texts.get(one).text;
}

/** The title of a conversation, and a menu. */
class Row {
  constructor(chat) {
    this.chat = chat;
    this.title = button("", () => chat.select(this.one), {class: "title"});
    this.more = h("summary", {class: "icon", title: "More"}, "⋯");
    this.pin = button("", () => this.turnPin());
    this.remove = button("Delete", () => confirmRemoval(chat, [this.one]));
    this.menu = h("details", {class: "menu"}, this.more, h("div", {class: "menu-items"}, this.pin,
      button("Rename", () => rename(chat, this.one)), button("Markdown", () => downloadMarkdown(this.one)),
      button("Print", () => { chat.select(this.one); print(); }), this.remove));
    this.menu.lastChild.addEventListener("click", () => this.close(), true);  // before what was chosen, so that a dialog gives the focus back
    this.menu.addEventListener("keydown", event => {
      if (event.key !== "Escape" || !this.menu.open) return;
      event.stopPropagation();
      this.close();
    });
    this.node = h("li", {}, this.title, this.menu);
  }

  show(one) {
    const isOpen = one === this.chat.open, title = `${one.pinned ? "📌 " : ""}${one.title}`;
    this.one = one;
    this.node.className = isOpen ? "open" : "";
    this.title.ariaCurrent = isOpen ? "true" : null;
    if (this.title.textContent !== title) Object.assign(this.title, {textContent: title, title: one.title});
    this.more.ariaLabel = `More for: ${one.title}`;
    this.pin.textContent = one.pinned ? "Unpin" : "Pin";
    this.remove.setAttribute("aria-label", `Delete: ${one.title}`);
    return this.node;
  }

  close() {
    this.menu.open = false;
    this.more.focus();
  }

  turnPin() {
    const {chat, one} = this;
    one.pinned = !one.pinned;
    store.sorted(chat.conversations);
    chat.list();
    chat.save(one, false);
  }
}

function rename(chat, one) {
  const title = h("input", {id: "title", value: one.title, required: true, maxlength: 200});
  const form = h("form", {onsubmit: event => {
    event.preventDefault();
    Object.assign(one, {title: title.value.trim() || one.title, named: true});
    byId("dialog").close();
    chat.list();
    chat.save(one, false);
  }}, h("label", {for: "title"}, "Title"), title,
  h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), h("button", {type: "submit", class: "main"}, "Rename")));
  showDialog("Rename", form);
  title.select();
}

function exportAll(chat) {
  download("quire-conversations.json", store.exported(chat.conversations));
}

async function importFile(chat) {
  const [file] = await chooseFiles("application/json,.json");
  if (!file) return;
  try {
    const found = store.parseExport(await file.text()), known = new Map(chat.conversations.map(one => [one.id, one]));
    for (const conversation of found) {
      const {revision} = known.get(conversation.id) ?? await store.get(conversation.id) ?? {revision: 0};
      await store.put({...conversation, revision});
    }
    for (const {id} of found) await chat.takeOver(id);
  } catch (error) {
    chat.say(error instanceof SyntaxError ? "This file is no JSON." : error.name === "QuotaExceededError" ? store.storeProblem(error) : error.message);
  }
}

function confirmRemoval(chat, conversations) {
  const what = conversations.length === 1 ? `"${conversations[0].title}"` : `${conversations.length} conversations`;
  const remove = async () => {
    for (const one of [...conversations]) {
      one.removed = true;
      chat.arrivals.get(one.id)?.stop();
      await store.remove(one.id);
    }
    byId("dialog").close();
    const gone = new Set(conversations);
    chat.conversations = chat.conversations.filter(one => !gone.has(one));
    chat.select(gone.has(chat.open) ? store.fresh() : chat.open);
    byId("new").focus();
  };
  showDialog("Delete", h("p", {}, `Delete ${what}? No copy is kept anywhere.`),
    h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), button("Delete", remove, {id: "confirm", class: "main"})));
}
