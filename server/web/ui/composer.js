// The box: the text, images and files of the next message. What is in it is kept per conversation, in this browser.

import { button, byId, chooseFiles, h, isSent } from "./dom.js";
import { readAttachment } from "./attach.js";
import { fileNode, imageOf } from "./messages.js";
import * as store from "./store.js";

const PAUSE = 400;  // milliseconds without typing, after which the draft is kept

export class Composer {
  /** `chat`: send(), stop(), editLast(), say(), server. */
  constructor(chat) {
    Object.assign(this, {chat, input: byId("input"), images: [], files: [], id: null});
    const {input} = this;
    byId("composer").addEventListener("submit", event => { event.preventDefault(); chat.send(); });
    byId("stop").addEventListener("click", () => chat.stop());
    byId("attach").addEventListener("click", async () => this.attach(await chooseFiles("image/*,text/*,.pdf,.md,.json,.csv,.py,.js,.log,.yaml,.toml", true)));
    byId("camera").addEventListener("click", async () => this.attach(await chooseFiles("image/*", true, "environment")));
    input.addEventListener("input", () => this.changed());
    input.addEventListener("keydown", event => this.key(event));
    input.addEventListener("paste", event => {
      const files = [...event.clipboardData.files];
      if (files.length) event.preventDefault();
      this.attach(files);
    });
    this.listenForDrops(byId("conversation"));
    addEventListener("pagehide", () => this.keep());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.keep(); });
  }

  listenForDrops(target) {
    target.addEventListener("dragover", event => { event.preventDefault(); target.classList.add("drop"); });
    target.addEventListener("dragleave", event => { if (!target.contains(event.relatedTarget)) target.classList.remove("drop"); });
    target.addEventListener("drop", event => {
      event.preventDefault();
      target.classList.remove("drop");
      this.attach([...event.dataTransfer.files]);
    });
  }

  key(event) {
    if (isSent(event)) {
      event.preventDefault();
      this.chat.send();
    } else if (event.key === "ArrowUp" && !this.input.value) this.chat.editLast();
  }

  get empty() { return !this.input.value.trim() && !this.images.length && !this.files.length; }

  /** Take out what is in the box, as the fields of a message. */
  take() {
    const {images, files} = this, content = this.input.value;
    this.fill({content: "", images: [], files: []});
    this.keep();
    return {content, ...(images.length && {images}), ...(files.length && {files})};
  }

  fill({content = "", images = [], files = []}) {
    Object.assign(this, {images: [...images], files: [...files]});
    this.input.value = content;
    this.fit();
    this.showAttached();
  }

  /** Show the draft of another conversation; that of the one before is kept. */
  async open(id) {
    this.keep();
    this.id = id;
    this.fill({});
    const draft = await store.draftOf(id).catch(() => null);
    if (draft && this.id === id && this.empty) this.fill(draft);
  }

  /** Keep what is in the box; with `id` null there is no conversation yet. */
  async keep() {
    clearTimeout(this.timer);
    if (this.id === null) return;
    const {id, images, files} = this, content = this.input.value;
    try {
      await (this.empty ? store.removeDraft(id) : store.putDraft({id, content, images, files}));
    } catch (error) {
      this.chat.say(store.storeProblem(error));
    }
  }

  /** Add text at the cursor. */
  insert(text) {
    const {input} = this, {selectionStart: at} = input, space = at > 0 && !/\s/.test(input.value[at - 1]) ? " " : "";
    input.setRangeText(space + text, at, input.selectionEnd, "end");
    this.changed();
    input.focus();
  }

  changed() {
    this.fit();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.keep(), PAUSE);
  }

  async attach(files) {
    for (const file of files) {
      try {
        const found = await readAttachment(file, this.chat.server.images(this.chat.model));
        (found.image ? this.images : this.files).push(found.image ?? found.file);
      } catch (error) {
        this.chat.say(error.message);
      }
    }
    this.showAttached();
    if (files.length) this.keep();
  }

  showAttached() {
    const remove = (list, i, label) => button("×", () => {
      list.splice(i, 1);
      this.showAttached();
      this.keep();
      byId("attach").focus();
    }, {"aria-label": `Remove ${label}`});
    byId("attached").replaceChildren(
      ...this.images.map((url, i) => h("span", {class: "attached"}, imageOf(url, i), remove(this.images, i, `image ${i + 1}`))),
      ...this.files.map((file, i) => h("span", {class: "attached"}, fileNode(file), remove(this.files, i, file.name))));
  }

  fit() {
    const {style} = this.input;
    style.height = "auto";
    style.height = `${Math.min(this.input.scrollHeight + 2, 220)}px`;
  }

  /** Show Stop while an answer arrives, else Send. */
  busy(busy) {
    const [send, stop] = [byId("send"), byId("stop")], focused = document.activeElement;
    send.hidden = busy;
    stop.hidden = !busy;
    if (focused === send && busy) stop.focus();
    if (focused === stop && !busy) send.focus();
  }
}
