// The view of conversations: one is open, and at most one answer arrives.

import { emptyAnswer, receive, requestBody } from "./answer.js";
import { button, byId, chooseFiles, h } from "./dom.js";
import { showList } from "./list.js";
import { imageOf, messageNode } from "./messages.js";
import { settingsForm } from "./settings.js";
import * as store from "./store.js";

const MAX_IMAGE = 20 * 2 ** 20;  // bytes; the server has limits of its own

export class Chat {
  /** `server`: {model, models, bounds, images} of /server_info and openapi.json. */
  constructor(server) {
    this.server = server;
    this.open = store.fresh();
    this.images = [];  // attached to the next message
    this.stopper = null;  // of the answer that arrives
    this.actions = {
      edit: index => this.edit(index),
      regenerate: index => this.regenerate(index),
      answerCall: (index, id, text) => this.answerCall(index, id, text),
      answered: id => this.open.messages.some(message => message.callId === id),
      bodyOf: index => this.body(index),
    };
    this.listen();
  }

  async start() {
    this.conversations = await store.all();
    this.select(this.conversations[0] ?? this.open);
  }

  listen() {
    const input = byId("input");
    byId("composer").addEventListener("submit", event => { event.preventDefault(); this.send(); });
    byId("stop").addEventListener("click", () => this.stop());
    byId("attach").addEventListener("click", async () => this.attach(await chooseFiles("image/*", true)));
    input.addEventListener("input", () => fit(input));
    input.addEventListener("keydown", event => this.key(event));
    input.addEventListener("paste", event => {
      const files = [...event.clipboardData.files];
      if (files.length) event.preventDefault();
      this.attach(files);
    });
    const target = byId("conversation");
    target.addEventListener("dragover", event => { event.preventDefault(); target.classList.add("drop"); });
    target.addEventListener("dragleave", () => target.classList.remove("drop"));
    target.addEventListener("drop", event => {
      event.preventDefault();
      target.classList.remove("drop");
      this.attach([...event.dataTransfer.files]);
    });
    document.addEventListener("keydown", event => { if (event.key === "Escape" && !byId("dialog").open) this.stop(); });
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !byId("input").value && !this.stopper) {
      const last = this.open.messages.findLastIndex(message => message.role === "user");
      if (last >= 0) this.edit(last);
    }
  }

  say(text) { byId("notice").textContent = text; }

  // ---- conversations

  select(conversation) {
    this.stop();
    this.open = conversation;
    this.say("");
    byId("settings").replaceChildren(...settingsForm(conversation, this.server.bounds, this.server.models, () => this.save()).filter(Boolean));
    this.showAll();
    this.list();
  }

  list() { showList(this); }

  fresh() {
    this.select(store.fresh(this.open.settings, this.open.system));
    byId("input").focus();
  }

  /** Keep the open conversation in the browser, once it has a message. */
  async save(conversation = this.open) {
    if (!conversation.messages.length) return;
    conversation.updated = Date.now();
    const first = conversation.messages[0].content.trim();
    conversation.title = first.slice(0, 60) || "Images";
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.list();
    try {
      await store.put(conversation);
    } catch (error) {
      this.say(`The browser does not keep this conversation: ${error.message}`);
    }
  }

  // ---- images

  async attach(files) {
    const {accepted, reason} = this.server.images;
    for (const file of files) {
      if (!accepted) this.say(`This model takes no images: ${reason}.`);
      else if (!file.type.startsWith("image/")) this.say(`${file.name} is no image.`);
      else if (file.size > MAX_IMAGE) this.say(`${file.name} is larger than 20 MiB.`);
      else this.images.push(await dataUrl(file));
    }
    this.showAttached();
  }

  showAttached() {
    byId("attached").replaceChildren(...this.images.map((url, i) => h("span", {class: "attached"}, imageOf(url, i),
      button("×", () => { this.images.splice(i, 1); this.showAttached(); }, {"aria-label": `Remove image ${i + 1}`}))));
  }

  // ---- messages

  body(count) {
    return requestBody(this.open, this.open.settings.model || this.server.model, count);
  }

  async send() {
    const input = byId("input"), content = input.value;
    if (this.stopper || (!content.trim() && !this.images.length)) return;
    this.open.messages.push({role: "user", content, images: this.images});
    input.value = "";
    fit(input);
    this.images = [];
    this.showAttached();
    await this.answer();
  }

  /** Put message `index` into the box again, and drop it and what follows once it is sent. */
  edit(index) {
    if (this.stopper) return;
    const message = this.open.messages[index];
    const text = h("textarea", {rows: Math.min(message.content.split("\n").length + 1, 12), "aria-label": "Edit your message", value: message.content});
    const resend = async () => {
      this.open.messages.splice(index, Infinity, {...message, content: text.value});
      await this.answer();
    };
    text.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); resend(); }
      if (event.key === "Escape") this.showAll();
    });
    const node = byId("messages").querySelector(`[data-index="${index}"]`);
    node.replaceChildren(h("h3", {}, "Edit"), text, h("div", {class: "row end"}, button("Cancel", () => this.showAll()), button("Send again", resend, {class: "main"})));
    text.focus();
  }

  async regenerate(index) {
    if (this.stopper) return;
    this.open.messages.splice(index);
    await this.answer();
  }

  async answerCall(index, callId, content) {
    if (this.stopper) return;
    this.open.messages.push({role: "tool", callId, content});
    const open = this.open.messages.flatMap(message => message.calls ?? []).filter(call => !this.actions.answered(call.id));
    if (open.length) {
      this.save();
      this.showAll();
    } else await this.answer();
  }

  /** Ask for the answer to the messages, and show it as it arrives. */
  async answer() {
    const conversation = this.open, answer = emptyAnswer();
    let body;
    try {
      body = this.body();
    } catch (error) {
      this.say(error.message);
      return;
    }
    this.say("");
    const stopper = this.stopper = new AbortController();
    conversation.messages.push(answer);
    this.save();
    this.showAll();
    const painter = new Painter(() => { if (this.open === conversation) this.showLast(); });
    await receive(answer, body, stopper.signal, () => painter.request());
    painter.end();
    if (this.stopper === stopper) this.stopper = null;
    await this.save(conversation);
    if (this.open === conversation) this.showAll();
  }

  stop() {
    this.stopper?.abort();
    this.stopper = null;
  }

  // ---- showing

  node(index) {
    const {messages} = this.open;
    return messageNode(messages[index], index, this.actions, this.stopper !== null && index === messages.length - 1);
  }

  showAll() {
    const {messages} = this.open, box = byId("messages");
    const welcome = h("div", {class: "welcome"}, h("p", {}, `Ask ${this.server.model} something.`),
      h("p", {class: "note"}, "Conversations stay in this browser."));
    box.replaceChildren(...(messages.length ? messages.map((_, index) => this.node(index)) : [welcome]));
    box.scrollTop = box.scrollHeight;
    byId("send").hidden = this.stopper !== null;
    byId("stop").hidden = this.stopper === null;
  }

  showLast() {
    const box = byId("messages");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
    box.lastElementChild.replaceWith(this.node(this.open.messages.length - 1));
    if (atEnd) box.scrollTop = box.scrollHeight;
  }
}

/** Paints after changes, at most for a quarter of the time: long answers take longer to paint. */
class Painter {
  constructor(paint) { this.paint = paint; this.timer = null; this.pause = 30; }

  request() {
    this.timer ??= setTimeout(() => {
      const started = performance.now();
      this.timer = null;
      this.paint();
      this.pause = Math.max(30, 3 * (performance.now() - started));
    }, this.pause);
  }

  end() { clearTimeout(this.timer); }
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 220)}px`;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
