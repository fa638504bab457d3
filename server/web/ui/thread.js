// The messages of the open conversation, as they are on the page.

import { button, byId, h, isSent } from "./dom.js";
import { context } from "./figures.js";
import { MessageView } from "./messages.js";

const AT_END = 80;  // pixels from the end within which the page follows an answer

export class Thread {
  constructor(actions) {
    this.actions = actions;
    this.views = [];
    this.box = byId("messages");
  }

  /** Show `messages` anew and go to their end, or, with `keep`, those whose view is not there yet, and go to the end if
   *  the person was there. `welcome`: nodes for an empty one. */
  show(messages, busy, welcome, keep = false) {
    const {scrollTop} = this.box, follow = !keep || this.atEnd, focused = this.focused();
    const same = (view, i) => keep && view.message === messages[i] && !view.editing;
    const first = this.views.findIndex((view, i) => !same(view, i));
    for (const view of this.views.splice(first < 0 ? this.views.length : first)) view.node.remove();
    if (!this.views.length) this.box.replaceChildren(...(messages.length ? [] : welcome));
    for (let i = this.views.length; i < messages.length; i++) {
      this.views.push(new MessageView(messages[i], i, this.actions));
      this.box.append(this.views[i].node);
    }
    this.views.forEach((view, i) => { if (!view.editing) view.update(busy && i === messages.length - 1, !busy); });
    if (follow) this.toEnd();
    else this.box.scrollTop = scrollTop;
    this.focusAgain(focused);
  }

  /** What has the focus in a message: {node, index, label}. */
  focused() {
    const node = document.activeElement, index = this.views.findIndex(view => view.node.contains(node));
    return index < 0 ? null : {node, index, label: labelOf(node)};
  }

  /** Focus what stands for a node that had the focus and is gone: the same button of the message that is there now,
   *  another one beside it, or all messages. */
  focusAgain(focused) {
    if (!focused || focused.node.isConnected) return;
    const found = [...this.views[focused.index]?.node.querySelectorAll("footer button:enabled") ?? []];
    const same = found.find(node => labelOf(node) === focused.label) ?? found.find(node => node.closest(".versions"));
    (same ?? this.box).focus({preventScroll: true});
  }

  get atEnd() {
    const {scrollHeight, scrollTop, clientHeight} = this.box;
    return scrollHeight - scrollTop - clientHeight < AT_END;
  }

  get editing() { return this.views.some(view => view.editing); }

  toEnd() { this.box.scrollTop = this.box.scrollHeight; }

  /** Show news of the last message. */
  showLast() {
    const {atEnd} = this;
    this.views.at(-1)?.update(true, false);
    if (atEnd) this.toEnd();
  }

  /** Put an editor in the place of message `index`; `save(text)` is called with another text. */
  edit(index, labels, save) {
    const view = this.views[index], {content} = view.message;
    const text = h("textarea", {rows: Math.min(content.split("\n").length + 1, 16), "aria-label": "Edit the message", value: content});
    const close = () => {
      view.editing = false;
      view.node.replaceChildren();
      view.update(false, true);
      [...view.node.querySelectorAll("footer button")].find(node => node.textContent === "Edit")?.focus();
    };
    const buttons = labels.map(([label, act], i) => button(label, () => { view.editing = false; act(text.value); }, {class: i === labels.length - 1 ? "main" : ""}));
    text.addEventListener("keydown", event => {
      if (isSent(event) && view.message.role === "user") { event.preventDefault(); buttons.at(-1).click(); }
      if (event.key === "Escape") { event.stopPropagation(); close(); }
    });
    view.editing = true;
    view.node.replaceChildren(h("h3", {}, "Edit"), text, h("div", {class: "row end"}, button("Cancel", close), ...buttons));
    text.focus();
  }
}

const labelOf = node => node.ariaLabel ?? node.textContent;

/** Show how full the context is. */
export function showContext(messages, limit) {
  const found = context(messages, limit), node = byId("context");
  node.hidden = found === null;
  if (!found) return;
  node.classList.toggle("near", found.near);
  node.replaceChildren(h("meter", {min: 0, max: found.limit, high: 0.85 * found.limit, value: found.used, "aria-label": found.words}), h("span", {}, found.words));
}
