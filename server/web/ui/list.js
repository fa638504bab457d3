// The list of conversations beside the open one: search, open, pin, rename, delete, export and import.

import { button, byId, chooseFiles, download, h, setChildren, showDialog } from "./dom.js";
import { downloadMarkdown } from "./export.js";
import * as store from "./store.js";
import { everyMessage } from "./tree.js";

let search = null;  // keeps its text and focus while the list changes

document.addEventListener("click", event => {
  for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(event.target)) menu.open = false;
});

export function showList(chat) {
  search ??= h("input", {id: "search", type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => showList(chat)});
  const found = chat.conversations.filter(one => contains(one, search.value)), some = chat.conversations.length > 0;
  setChildren(byId("list"), [h("h2", {}, "Conversations"), button("New conversation", () => chat.fresh(), {id: "new", class: "main"}), search,
    h("ul", {}, found.map(one => row(chat, one)), some && !found.length && h("li", {class: "note"}, "None has these words.")),
    h("div", {class: "row"},
      button("Export", () => exportAll(chat), {disabled: !some}), button("Import", () => importFile(chat)),
      button("Delete all", () => confirmRemoval(chat, chat.conversations), {disabled: !some}))]);
}

/** Whether all words are in the title or the messages, also those of other versions. */
function contains(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const texts = [conversation.title, ...[...everyMessage(conversation.messages)].map(message => message.content)].join("\n").toLowerCase();
  return words.every(word => texts.includes(word));
}

function row(chat, one) {
  const isOpen = one === chat.open, pin = one.pinned ? "Unpin" : "Pin";
  return h("li", {class: isOpen ? "open" : ""},
    button([one.pinned ? "📌 " : "", one.title].join(""), () => chat.select(one), {class: "title", "aria-current": isOpen ? "true" : null}),
    h("details", {class: "menu"}, h("summary", {class: "icon", "aria-label": `More for: ${one.title}`, title: "More"}, "⋯"), h("div", {class: "menu-items"},
      button(pin, () => { one.pinned = !one.pinned; store.sorted(chat.conversations); chat.list(); chat.save(one, false); }),
      button("Rename", () => rename(chat, one)),
      button("Markdown", () => downloadMarkdown(one)),
      button("Print", () => { chat.select(one); print(); }),
      button("Delete", () => confirmRemoval(chat, [one]), {"aria-label": `Delete: ${one.title}`}))));
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
    await chat.start();
  } catch (error) {
    chat.say(error instanceof SyntaxError ? "This file is no JSON." : error.message);
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
  };
  showDialog("Delete", h("p", {}, `Delete ${what}? No copy is kept anywhere.`),
    h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), button("Delete", remove, {id: "confirm", class: "main"})));
}
