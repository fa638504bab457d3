// Markdown as a tree of blocks, which takes lines one by one: quotes and lists hold blocks, paragraphs, headings and
// formulas a text, code and tables lines. Each line is read once; the beginning of a line is taken back with the next one.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const CLOSING = {"$$": "$$", "\\[": "\\]"};
const QUOTE = /^ {0,3}>/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const DASHES = /^\s*:?-+:?$/;
const MAX_DEPTH = 12;  // of lists and quotes; deeper ones are paragraphs
const MAX_FORMULA = 40;  // lines

const holder = (kind, depth, fields = {}) => ({kind, depth, open: true, children: [], ...fields});

export class Blocks {
  constructor() {
    this.root = holder("root", 0);
    this.taken = null;  // what the open blocks were before the last beginning of a line
  }

  /** Take lines that are whole. */
  add(lines) {
    this.takeBack();
    for (const line of lines) put(this.root, line);
  }

  /** Take the beginning of the next line. */
  begin(line) {
    this.takeBack();
    this.taken = [];
    for (let node = this.root; node?.open; node = node.children?.at(-1)) {
      this.taken.push([node, {...node}, node.children && [node.children.length, node.children.at(-1)], node.lines?.length]);
    }
    put(this.root, line);
  }

  /** Nothing follows. */
  end() {
    this.taken = null;
    close(this.root);
  }

  takeBack() {
    for (const [node, fields, children, lines] of this.taken ?? []) {
      Object.assign(node, fields);
      if (lines !== undefined) node.lines.length = lines;
      if (!children) continue;
      node.children.length = children[0];
      if (children[1]) node.children[children[0] - 1] = children[1];
    }
    this.taken = null;
  }
}

const openOf = node => node.children?.at(-1)?.open ? node.children.at(-1) : null;

/** Put a line into a root, quote or item. */
function put(node, line) {
  const open = openOf(node);
  if (!open || !ON[open.kind](open, line, node)) start(node, line);
}

function close(node) {
  if (openOf(node)?.lead) giveUp(node);
  const open = openOf(node);
  if (open) close(open);
  node.open = false;
}

/** Close a block that does not go on. */
function ended(node) {
  close(node);
  return false;
}

/** How each kind of open block takes the next line: whether it does. */
const ON = {
  quote(node, line) {
    if (!QUOTE.test(line)) return ended(node);
    put(node, line.replace(/^ {0,3}> ?/, ""));
    return true;
  },
  list(node, line) {
    const item = node.children.at(-1), spaces = /^\s*/.exec(line)[0].length, blank = spaces === line.length;
    if (blank || spaces > node.indent || !(item.blank || ITEM.test(line) || FENCE.test(line) || HEADING.test(line))) {
      item.blank = blank;
      put(item, line.slice(Math.min(spaces, item.width)));
      return true;
    }
    const match = ITEM.exec(line);
    if (!match || match[1].length !== node.indent || isOrdered(match) !== node.ordered || RULE.test(line)) return ended(node);
    addItem(node, line, match);
    return true;
  },
  code(node, line) {
    if (node.end.test(line)) node.open = false;
    else node.lines.push(line);
    return true;
  },
  table(node, line) {
    if (!line.includes("|")) return ended(node);
    node.lines.push(line);
    return true;
  },
  paragraph(node, line, parent) {
    const text = line.trim();
    if (node.lead) return formulaLine(node, line, parent);
    if (!text) node.open = false;
    else if (node.count === 1 && node.text.includes("|") && isTableLine(line)) {
      parent.children[parent.children.length - 1] = {kind: "table", open: true, head: node.text, lines: []};
    } else if (interrupts(line, parent)) return ended(node);
    else Object.assign(node, {text: `${node.text}\n${line.trimStart()}`, count: node.count + 1});
    return true;
  },
};

const interrupts = (line, parent) => FENCE.test(line) || HEADING.test(line) || RULE.test(line)
  || (parent.depth < MAX_DEPTH && (ITEM.test(line) || QUOTE.test(line)));

export const cellsOf = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);

/** Whether a line of dashes is between the head of a table and its rows. */
const isTableLine = line => line.includes("-") && cellsOf(line).every(cell => DASHES.test(cell.trimEnd()));

const isOrdered = match => /\d/.test(match[2]);

function addItem(list, line, match) {
  if (openOf(list)) close(openOf(list));
  const width = match[0].length, text = line.slice(width);
  const item = holder("item", list.depth + 1, {width, blank: !text.trim()});
  list.children.push(item);
  put(item, text);
}

/** Begin a block with a line. */
function start(parent, line, formulas = true) {
  const {children, depth} = parent;
  if (!line.trim()) return;
  let match;
  if ((match = FENCE.exec(line))) {
    children.push({kind: "code", open: true, language: match[2], lines: [], end: new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}\\s*$`)});
  } else if ((match = FORMULA.exec(line)) && closes(line.trim().slice(match[1].length), match[1])) {
    children.push(formula([line], match[1]));
  } else if (match && formulas) {
    children.push({...paragraph(line), lead: match[1], raw: [line]});
  } else if ((match = HEADING.exec(line))) {
    children.push({kind: "heading", open: false, level: match[1].length, text: headingText(line, match)});
  } else if (RULE.test(line)) {
    children.push({kind: "rule", open: false});
  } else if (depth < MAX_DEPTH && QUOTE.test(line)) {
    children.push(holder("quote", depth + 1));
    put(parent, line);
  } else if (depth < MAX_DEPTH && (match = ITEM.exec(line))) {
    const list = holder("list", depth, {indent: match[1].length, ordered: isOrdered(match), start: parseInt(match[2], 10)});
    children.push(list);
    addItem(list, line, match);
  } else children.push(paragraph(line));
}

const paragraph = line => ({kind: "paragraph", open: true, text: line.trimStart(), count: 1});

function headingText(line, match) {
  const text = line.slice(match[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return text.slice(0, end).trimEnd();
}

// ---- displayed formulas: paragraphs until a line ends them

const closes = (text, lead) => text.trim().endsWith(CLOSING[lead]);

function formula(lines, lead) {
  const text = lines.join("\n").trim();
  return {kind: "formula", open: false, source: text, text: text.slice(lead.length, -lead.length).trim()};
}

function formulaLine(node, line, parent) {
  const {raw, lead} = node;
  if (line.trim() && closes(line, lead)) {
    parent.children[parent.children.length - 1] = formula([...raw, line], lead);
  } else if (line.trim() && raw.length < MAX_FORMULA) {
    Object.assign(node, {text: `${node.text}\n${line.trimStart()}`, raw: [...raw, line]});
  } else {
    giveUp(parent);
    put(parent, line);
  }
  return true;
}

/** Read the lines of a formula that does not end as other text. */
function giveUp(parent) {
  const {raw} = parent.children.pop();
  for (const [i, line] of raw.entries()) {
    const open = i > 0 && openOf(parent);
    if (i === 0) parent.children.push(paragraph(line));
    else if (!open || !ON[open.kind](open, line, parent)) start(parent, line, false);
  }
}
