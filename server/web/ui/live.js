// A Markdown text that grows. Blocks, items, rows, lines of code and parts of a paragraph that will not change keep their
// nodes and are read once; what may change is made anew, and what is equal in it keeps its nodes, so that selected text,
// scrolling and opened parts survive.

import { Blocks } from "./blocks.js";
import { h } from "./dom.js";
import { kindOf } from "./views.js";

export class LiveMarkdown {
  /** `finished(node)` is told of each part that will not change. */
  constructor(properties, finished = () => {}) {
    this.node = h("div", properties);
    this.finished = finished;
    this.reset();
  }

  reset() {
    this.node.replaceChildren();
    Object.assign(this, {text: "", ended: false, begin: 0});  // `begin`: of the last line, which may go on
    this.blocks = new Blocks();
    this.view = kindOf.root(this.blocks.root, this.finished, this.node);
  }

  /** Show `text`, which begins with the text before or replaces it; `ended`: nothing will follow. */
  update(text, ended) {
    if (text === this.text && (this.ended || !ended)) return;
    if (this.ended || !text.startsWith(this.text)) this.reset();
    Object.assign(this, {text, ended});
    const {blocks, view} = this, lines = text.slice(this.begin).split(/\r\n|\n|\r(?!$)/), last = lines.pop();
    this.begin = text.length - last.length;
    blocks.add(lines);
    if (ended) {
      blocks.add([last.replace(/\r$/, "")]);
      blocks.end();
    }
    view.show(blocks.root, true);
    if (ended) return;
    blocks.begin(last);
    view.show(blocks.root, false);
  }
}
