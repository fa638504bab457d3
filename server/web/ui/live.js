// A Markdown text that grows: finished blocks stay as they are, only the last one is made anew, and what is equal in it
// keeps its nodes, so that selected text, scrolling and opened parts survive.

import { h } from "./dom.js";
import { blocksFrom, linesOf } from "./markdown.js";

export class LiveMarkdown {
  /** `finished(node)` is told of each block that will not change. */
  constructor(properties, finished = () => {}) {
    this.node = h("div", properties);
    this.finished = finished;
    this.reset();
  }

  reset() {
    this.node.replaceChildren();
    this.text = "";
    this.ended = false;
    this.items = 0;  // of a list that is the first of them, those that will not change
    this.begin = 0;  // where the blocks that will not change end in the text
    this.open = [];  // the nodes of later blocks
  }

  /** Show `text`, which begins with the text before or replaces it; `ended`: nothing will follow. */
  update(text, ended) {
    if (text === this.text && (this.ended || !ended)) return;
    if (this.ended || !text.startsWith(this.text)) this.reset();
    Object.assign(this, {text, ended});
    const rest = text.slice(this.begin), lines = linesOf(rest), found = blocksFrom(lines, 0);
    const nodes = found.map(([node]) => node);
    for (const node of this.open.splice(nodes.length)) node.remove();
    this.open = nodes.map((node, i) => {
      if (i === 0 && this.items) return morphItems(this.open[0], node, this.items);
      return this.open[i] ? morph(this.open[i], node) : this.node.appendChild(node);
    });
    this.finish(rest, lines, found, ended);
    if (!ended) this.keepItems(lines, found, rest);
  }

  /** Let go of the items before the last one of a list that is the last block. */
  keepItems(lines, found, rest) {
    const list = found[0]?.[0];
    if (found.length !== 1 || !list?.lastItem || list.lastItem >= lines.length - 1) return;
    this.items = this.open[0].children.length - 1;
    this.begin += offset(rest, list.lastItem);
  }

  /** Let go of the blocks before the last one that begins in a line that is whole. */
  finish(rest, lines, found, ended) {
    const num = ended ? found.length : found.findLastIndex(([, line], i) => i > 0 && line < lines.length - 1);
    if (num <= 0) return;
    for (const node of this.open.splice(0, num)) this.finished(node);
    this.items = 0;
    const line = ended ? lines.length : found[num][1];
    this.begin += ended ? rest.length : offset(rest, line);
  }
}

/** Where line number `line`, which is not the first, begins. */
function offset(text, line) {
  for (const found of text.matchAll(/\r\n?|\n/g)) if (--line === 0) return found.index + found[0].length;
  return text.length;
}

/** Make the items of `list` after the first `count` those of `fresh`. */
function morphItems(list, fresh, count) {
  const before = [...list.children].slice(count), next = [...fresh.children];
  next.forEach((item, i) => { before[i] ? morph(before[i], item) : list.append(item); });
  for (const item of before.slice(next.length)) item.remove();
  return list;
}

/** Make `old` equal to `fresh`, with as few changes as that takes; returns the node that is shown. */
export function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.length));
    else old.data = fresh.data;
    return old;
  }
  if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE) {
    old.replaceWith(fresh);
    return fresh;
  }
  for (const {name, value} of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const before = [...old.childNodes], next = [...fresh.childNodes];
  next.forEach((child, i) => { before[i] ? morph(before[i], child) : old.append(child); });
  for (const child of before.slice(next.length)) child.remove();
  return old;
}
