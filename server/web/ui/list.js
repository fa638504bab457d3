// The list of conversations beside the open one: open, delete, export and import.

import { button, byId, chooseFiles, download, h, showDialog } from "./dom.js";
import * as store from "./store.js";

export function showList(chat) {
  const rows = chat.conversations.map(one => h("li", {class: one === chat.open ? "open" : ""},
    button(one.title, () => chat.select(one), {class: "title", "aria-current": one === chat.open ? "true" : null}),
    button("×", () => confirmRemoval(chat, [one]), {class: "icon", "aria-label": `Delete: ${one.title}`, title: "Delete"})));
  byId("list").replaceChildren(h("h2", {}, "Conversations"), button("New conversation", () => chat.fresh(), {id: "new", class: "main"}),
    h("ul", {}, rows),
    h("div", {class: "row"},
      button("Export", () => exportAll(chat), {disabled: !rows.length}), button("Import", () => importFile(chat)),
      button("Delete all", () => confirmRemoval(chat, chat.conversations), {disabled: !rows.length})));
}

function exportAll(chat) {
  download("quire-conversations.json", store.exported(chat.conversations));
}

async function importFile(chat) {
  const [file] = await chooseFiles("application/json,.json");
  try {
    const found = store.parseExport(await file.text());
    for (const conversation of found) await store.put(conversation);
    await chat.start();
  } catch (error) {
    chat.say(error instanceof SyntaxError ? "This file is no JSON." : error.message);
  }
}

function confirmRemoval(chat, conversations) {
  const what = conversations.length === 1 ? `"${conversations[0].title}"` : `${conversations.length} conversations`;
  const remove = async () => {
    for (const {id} of [...conversations]) await store.remove(id);
    byId("dialog").close();
    if (conversations.includes(chat.open)) chat.open = store.fresh();
    const {open} = chat;
    chat.conversations = await store.all();
    chat.select(chat.conversations.find(one => one.id === open.id) ?? open);
  };
  showDialog("Delete", h("p", {}, `Delete ${what}? No copy is kept anywhere.`),
    h("div", {class: "row end"}, button("Cancel", () => byId("dialog").close()), button("Delete", remove, {id: "confirm", class: "main"})));
}
