// What is loaded only when a text needs it: colours of code (highlight.js) and formulas (KaTeX).

import { h } from "./dom.js";

const MAX_CODE = 20_000, MAX_FORMULA = 5_000;  // characters; longer ones stay plain
const TURN = 8;  // milliseconds
const loaded = {};  // promises of the libraries, by name

const LOADERS = {
  highlight: async () => (await import("./vendor/highlight/highlight.min.js")).default,
  katex: async () => {
    const href = new URL("vendor/katex/katex.min.css", import.meta.url).href;
    const styled = new Promise((resolve, reject) => {
      document.head.append(h("link", {rel: "stylesheet", href, onload: resolve, onerror: reject}));
    });
    await Promise.all([styled, import("./vendor/katex/katex.min.js")]);
    return window.katex;
  },
};

const library = name => loaded[name] ??= LOADERS[name]();

/** Colour the code and set the formulas in a block that will not change. */
export function decorate(block) {
  const all = selector => block.matches(selector) ? [block] : [...block.querySelectorAll(selector)];
  const codes = all("figure.code[data-language]").filter(node => node.dataset.language && node.textContent.length <= MAX_CODE);
  const formulas = all(".math").filter(node => node.textContent.length <= MAX_FORMULA);
  if (codes.length) library("highlight").then(found => codes.forEach(node => soon(() => colour(found, node))));
  if (formulas.length) library("katex").then(found => formulas.forEach(node => soon(() => typeset(found, node))));
}

const waiting = [];  // work that may take a while, done in turns between which the page answers

function soon(work) {
  if (waiting.push(work) === 1) setTimeout(turn);
}

function turn() {
  try {
    for (const end = performance.now() + TURN; waiting.length && performance.now() < end;) waiting.shift()();
  } finally {
    if (waiting.length) setTimeout(turn);
  }
}

/** Whether selected text is in `node`, which would be lost if the node got others. */
function isSelected(node) {
  const selection = getSelection();  // its ranges need no layout, unlike its own questions
  const range = selection.rangeCount ? selection.getRangeAt(0) : null;
  return range !== null && !range.collapsed && range.intersectsNode(node);
}

function colour(highlight, figure) {
  const code = figure.querySelector("code"), {language} = figure.dataset;
  if (!highlight.getLanguage(language) || isSelected(code)) return;
  const builder = new Builder();
  highlight.highlight(code.textContent, {language, ignoreIllegals: true})._emitter.walk(builder);
  code.replaceChildren(builder.root);
}

/** Makes nodes of what highlight.js finds; its own form is text of HTML. */
class Builder {
  constructor() { this.root = document.createDocumentFragment(); this.stack = [this.root]; }

  addText(text) { this.stack.at(-1).append(text); }

  openNode({scope, children}) {
    const node = scope ? h("span", {class: `hl-${scope.split(".")[0]}`}) : this.stack.at(-1);
    if (scope && children) this.stack.at(-1).append(node);
    this.stack.push(node);
  }

  closeNode() { this.stack.pop(); }
}

function typeset(katex, node) {
  if (isSelected(node)) return;
  const tex = node.dataset.tex, place = h("span");
  try {
    katex.render(tex, place, {displayMode: "display" in node.dataset, throwOnError: true, maxExpand: 200, maxSize: 50, trust: false, strict: "ignore"});
  } catch {  // no TeX that KaTeX knows: the source stays
    return;
  }
  node.replaceChildren(...place.childNodes);
}
