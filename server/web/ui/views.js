// How the blocks of a Markdown text are shown. A view's `show(block, settled)` shows a block: first as its whole lines
// make it (`settled`; what is closed then is finished), then with the beginning of the next line.

import { cellsOf } from "./blocks.js";
import { copyButton, h } from "./dom.js";
import { cutOf, inline } from "./inline.js";

const CHUNK = 80;  // lines of code that are laid out together
const PART = 40;  // blocks, items or rows, the same

/** Blocks in blocks; after the first ones, in parts that are laid out by themselves. */
class Holder {
  /** `part(number)` makes the node of a part, and the one in it that gets the blocks after the first `number`. */
  constructor(node, finished, part = () => [h("div", {class: "part"})]) {
    Object.assign(this, {node, finished, part, places: [node], fixed: 0, views: []});  // `views`: of the blocks after the first `fixed`
  }

  show({children, open}, settled) {
    const {views} = this;
    for (let i = 0; this.fixed + i < children.length; i++) {
      const block = children[this.fixed + i];
      if (views[i]?.kind !== kindOfBlock(block)) this.replace(i, block);
      views[i].show(block, settled);
    }
    if (!settled || !open) for (const view of views.splice(children.length - this.fixed)) view.node.remove();
    if (!settled) return;
    for (; views.length && children[this.fixed]?.open === false; this.fixed++) views.shift();
  }

  /** Where block `number` goes. */
  placeOf(number) {
    return this.places[Math.floor(number / PART)] ??= this.newPlace(number);
  }

  newPlace(number) {
    const [part, place = part] = this.part(number);
    this.node.append(part);
    return place;
  }

  replace(i, block) {
    const {views} = this, view = Object.assign(kindOf[block.kind](block, this.finished), {kind: kindOfBlock(block)});
    if (views[i]) views[i].node.replaceWith(view.node);
    else this.placeOf(this.fixed + i).append(view.node);
    views[i] = view;
  }
}

/** What must be equal for a view to go on with another block. */
const kindOfBlock = ({kind, level, ordered, start, language}) => [kind, level, ordered, start, language].join();

/** A paragraph or a heading; a long one in parts. */
class Prose {
  constructor(node, finished) { Object.assign(this, {node, finished, place: node, fixed: 0}); }

  show({text, open}, settled) {
    if (settled && open) return;
    if (text.length < this.fixed) {
      this.node.replaceChildren();
      Object.assign(this, {place: this.node, fixed: 0});
    }
    for (let cut; (cut = cutOf(text.slice(this.fixed))); this.fixed += cut) {
      morphChildren(this.place, inline(text.slice(this.fixed, this.fixed + cut)));
      this.finished(this.place);
      this.place = this.node.appendChild(h("span", {class: "chunk"}));
    }
    morphChildren(this.place, inline(text.slice(this.fixed)));
    if (settled) this.finished(this.place);
  }
}

/** Code: a text that is added to, and the beginning of a line. */
export class Code {
  constructor(language = "", finished = () => {}) {
    this.code = h("code");
    Object.assign(this, {finished, count: 0, place: this.code, whole: new Text(""), rest: new Text("")});
    this.place.append(this.whole, this.rest);
    this.node = h("figure", {class: "code", "data-language": language},
      h("figcaption", {}, h("span", {}, language || "code"), copyButton(event => event.target.closest("figure").querySelector("code").textContent)),
      h("pre", {tabindex: "0"}, this.code));
  }

  show({lines, open}, settled) {
    if (settled) {
      while (this.count < lines.length) this.add(lines);
      if (open) return;
      setText(this.rest, "");
      this.finished(this.node);
    } else setText(this.rest, lines.length > this.count ? `${this.count ? "\n" : ""}${lines.slice(this.count).join("\n")}` : "");
  }

  /** Show a text that begins with the one before. */
  grow(text) {
    const lines = text.split("\n");
    this.show({lines: lines.slice(0, -1), open: true}, true);
    this.show({lines, open: true}, false);
  }

  /** Add lines up to the end of a chunk. */
  add(lines) {
    if (this.count && this.count % CHUNK === 0) {
      this.whole.appendData("\n");
      this.place = this.code.appendChild(h("span", {class: "chunk"}));
      this.place.append(this.whole = new Text(""), this.rest);
    }
    const next = lines.slice(this.count, CHUNK * (Math.floor(this.count / CHUNK) + 1)), first = this.count % CHUNK === 0;
    setText(this.rest, "");
    this.whole.appendData(`${first ? "" : "\n"}${next.join("\n")}`);
    this.count += next.length;
  }
}

/** Code that is there at once. */
export function codeBlock(code, language = "") {
  const view = new Code(language);
  view.show({lines: code.split("\n"), open: false}, true);
  return view.node;
}

class Table {
  constructor({head}, finished) {
    Object.assign(this, {finished, count: 0, row: null, body: h("tbody")});
    this.table = h("table", {}, h("thead", {}, rowOf(head, "th")), this.body);
    this.node = h("div", {class: "wide", tabindex: "0"}, this.table);
    finished(this.node);
  }

  show({lines, open}, settled) {
    for (const line of lines.slice(this.count)) {
      const fresh = rowOf(line, "td");
      this.row = this.row ? morph(this.row, fresh) : this.body.appendChild(fresh);
      if (!settled) return;
      this.finished(this.row);
      this.row = null;
      if (++this.count % PART === 0) this.body = this.table.appendChild(h("tbody"));
    }
    if ((settled && open) || !this.row) return;
    this.row.remove();
    this.row = null;
  }
}

const rowOf = (line, kind) => h("tr", {}, cellsOf(line).map(cell => h(kind, kind === "th" ? {scope: "col"} : {}, inline(cell.trim().replaceAll("\\|", "|")))));

/** A block that is there at once. */
class Whole {
  constructor(node, finished) { Object.assign(this, {node, finished}); }

  show(block, settled) { if (settled) this.finished(this.node); }
}

const listNode = (ordered, start) => ordered ? h("ol", {start, dir: "auto"}) : h("ul", {dir: "auto"});
const displayed = ({source, text}) => h("div", {class: "math", "data-display": true, "data-tex": text, tabindex: "0"}, source);

/** Makes the view of a block, by its kind. */
export const kindOf = {
  root: (block, finished, node) => new Holder(node, finished),
  quote: (block, finished) => new Holder(h("blockquote", {dir: "auto"}), finished),
  list: ({ordered, start}, finished) => new Holder(listNode(ordered, start), finished, number => {
    const more = listNode(ordered, start + number);
    return [h("li", {class: "part"}, more), more];
  }),
  item: (block, finished) => new Holder(h("li"), finished),
  paragraph: (block, finished) => new Prose(h("p"), finished),
  heading: ({level}, finished) => new Prose(h(`h${Math.min(level + 2, 6)}`), finished),
  code: ({language}, finished) => new Code(language, finished),
  table: (block, finished) => new Table(block, finished),
  formula: (block, finished) => new Whole(displayed(block), finished),
  rule: (block, finished) => new Whole(h("hr"), finished),
};

// ---- nodes

function setText(node, text) {
  if (text.length > node.length && text.startsWith(node.data)) node.appendData(text.slice(node.length));
  else if (node.data !== text) node.data = text;
}

/** Make `old` equal to `fresh`, with as few changes as that takes; returns the node that is shown. */
function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    setText(old, fresh.data);
    return old;
  }
  if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE) {
    old.replaceWith(fresh);
    return fresh;
  }
  for (const {name, value} of fresh.attributes) if (old.getAttribute(name) !== value) setAttribute(old, name, value);
  morphChildren(old, [...fresh.childNodes]);
  return old;
}

/** Set an attribute; the page's policy takes no style from one. */
function setAttribute(node, name, value) {
  if (name === "style") node.style.cssText = value;
  else node.setAttribute(name, value);
}

/** Make the children of `parent` equal to nodes and texts. Listeners of nodes that stay are not changed. */
export function morphChildren(parent, fresh) {
  const before = [...parent.childNodes];
  fresh.map(one => typeof one === "string" ? document.createTextNode(one) : one).forEach((child, i) => {
    if (before[i]) morph(before[i], child);
    else parent.append(child);
  });
  for (const child of before.slice(fresh.length)) child.remove();
}
