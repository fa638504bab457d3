// Markdown to DOM nodes, for what models write: paragraphs, headings, lists, quotes, code, tables, emphasis, links.
// HTML in the text stays text. Images are shown as links, so that no request goes to another host.

import { copyButton, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const CLOSING = {"$$": "$$", "\\[": "\\]"};
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s/;
const DASHES = /^\s*:?-+:?$/;
const CHUNK = 80;  // lines
const MAX_DEPTH = 12;  // of lists and quotes; deeper ones are paragraphs

/** The nodes of a text. */
export function markdown(text) {
  return blocks(linesOf(text), 0);
}

export const linesOf = text => text.replace(/\r\n?/g, "\n").split("\n");

function blocks(lines, depth) {
  return blocksFrom(lines, 0, depth).map(([node]) => node);
}

/** The blocks from line `i` on, each as [node, its first line]. */
export function blocksFrom(lines, i, depth = 0) {
  const found = [];
  while (i < lines.length) {
    const [node, next] = block(lines, i, depth);
    if (node) found.push([node, i]);
    i = next;
  }
  return found;
}

/** The node that begins at line `i`, and the line after it. */
function block(lines, i, depth) {
  const line = lines[i];
  if (!line.trim()) return [null, i + 1];
  let match, end;
  if ((match = FENCE.exec(line))) return fenced(lines, i, match);
  if ((match = FORMULA.exec(line)) && (end = formulaEnd(lines, i, match[1])) >= 0) return [formula(lines, i, end, match[1]), end + 1];
  if ((match = HEADING.exec(line))) return [heading(line, match), i + 1];
  if (RULE.test(line)) return [h("hr"), i + 1];
  if (line.includes("|") && i + 1 < lines.length && isTableLine(lines[i + 1])) return table(lines, i);
  if (depth < MAX_DEPTH && /^ {0,3}>/.test(line)) return quote(lines, i, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, i, depth);
  return paragraph(lines, i, depth);
}

function heading(line, match) {
  const text = line.slice(match[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return h(`h${Math.min(match[1].length + 2, 6)}`, {}, inline(text.slice(0, end).trimEnd()));
}

const cellsOf = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);

/** Whether a line of dashes is between the head of a table and its rows. */
const isTableLine = line => line.includes("-") && cellsOf(line).every(cell => DASHES.test(cell.trimEnd()));

function fenced(lines, i, match) {
  const end = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}\\s*$`);
  const code = [];
  let next = i + 1;
  while (next < lines.length && !end.test(lines[next])) code.push(lines[next++]);
  return [codeBlock(code.join("\n"), match[2]), next + 1];
}

/** The line that ends a displayed formula, before the next empty line; -1 if there is none. */
function formulaEnd(lines, i, opening) {
  for (let at = i; at < lines.length && lines[at].trim(); at++) {
    const text = at === i ? lines[at].trim().slice(opening.length) : lines[at].trim();
    if (text.endsWith(CLOSING[opening])) return at;
  }
  return -1;
}

function formula(lines, i, end, opening) {
  const text = lines.slice(i, end + 1).join("\n").trim();
  return h("div", {class: "math", "data-display": true, "data-tex": text.slice(opening.length, -opening.length).trim(), tabindex: "0"}, text);
}

/** Long code in parts, of which only the last is laid out anew while it grows. */
function chunksOf(code) {
  const lines = code.split("\n");
  if (lines.length <= CHUNK) return code;
  const chunks = [];
  for (let i = 0; i < lines.length; i += CHUNK) {
    const end = i + CHUNK < lines.length ? "\n" : "";
    chunks.push(h("span", {class: "chunk"}, lines.slice(i, i + CHUNK).join("\n") + end));
  }
  return chunks;
}

export function codeBlock(code, language = "") {
  const node = h("code", {}, chunksOf(code));
  return h("figure", {class: "code", "data-language": language},
    h("figcaption", {}, h("span", {}, language || "code"), copyButton(event => event.target.closest("figure").querySelector("code").textContent)),
    h("pre", {tabindex: "0"}, node));
}

function quote(lines, i, depth) {
  const inside = [];
  while (i < lines.length && /^ {0,3}>/.test(lines[i])) inside.push(lines[i++].replace(/^ {0,3}> ?/, ""));
  return [h("blockquote", {}, blocks(inside, depth + 1)), i];
}

function list(lines, i, depth) {
  const [, indent, mark] = ITEM.exec(lines[i]);
  const ordered = /\d/.test(mark);
  const node = h(ordered ? "ol" : "ul", ordered ? {start: parseInt(mark, 10)} : {});
  let match;
  while (i < lines.length && (match = ITEM.exec(lines[i])) && match[1].length === indent.length
      && /\d/.test(match[2]) === ordered && !RULE.test(lines[i])) {
    const width = match[0].length, first = i;
    const inside = [lines[i].slice(width)];
    for (i++; i < lines.length; i++) {
      const spaces = /^\s*/.exec(lines[i])[0].length;
      if (lines[i].trim() && spaces <= indent.length) {
        if (ITEM.test(lines[i]) || !inside.at(-1).trim() || FENCE.test(lines[i]) || HEADING.test(lines[i])) break;
      }
      inside.push(lines[i].slice(Math.min(spaces, width)));
    }
    node.lastItem = first;  // the line in which it begins
    node.append(h("li", {}, loosen(blocks(inside, depth + 1))));
    while (i < lines.length && !lines[i].trim()) i++;
  }
  return [node, i];
}

/** An item of one paragraph has its text directly. */
function loosen(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function table(lines, i) {
  const cells = line => cellsOf(line).map(cell => cell.trim().replaceAll("\\|", "|"));
  const row = (line, kind) => h("tr", {}, cells(line).map(cell => h(kind, kind === "th" ? {scope: "col"} : {}, inline(cell))));
  const head = h("thead", {}, row(lines[i], "th"));
  const body = h("tbody");
  for (i += 2; i < lines.length && lines[i].includes("|"); i++) body.append(row(lines[i], "td"));
  return [h("div", {class: "wide", tabindex: "0"}, h("table", {}, head, body)), i];
}

function paragraph(lines, i, depth) {
  const text = [lines[i++]];
  while (i < lines.length && lines[i].trim() && !FENCE.test(lines[i]) && !HEADING.test(lines[i]) && !RULE.test(lines[i])
      && !(depth < MAX_DEPTH && (ITEM.test(lines[i]) || /^ {0,3}>/.test(lines[i])))) text.push(lines[i++]);
  return [h("p", {}, inline(text.map(line => line.replace(/^\s+/, "")).join("\n"))), i];
}

// One alternative per inline form, tried at each position; each is linear in the text, and begins no run of characters
// in the middle.
const INLINE = new RegExp([
  "(?<code>`+)",
  "\\$\\$(?<shown>[^$]{1,2000})\\$\\$",
  "\\\\\\((?<round>(?:[^\\\\]|\\\\(?!\\))){1,2000})\\\\\\)",
  "(?<![\\w$\\\\])\\$(?<math>(?![\\s$])[^$\\n]{0,500}[^\\s$\\\\])\\$(?![\\w$])",
  "(?<escape>\\\\[!-/:-@\\[-`{-~])",
  "!?\\[(?<label>[^\\[\\]]{0,500})\\]\\((?<target>[^()\\s]{1,2000})(?:\\s+\"[^\"]{0,200}\")?\\)",
  "(?<url>https?://[^\\s<>\"'`]{1,2000}[^\\s<>\"'`.,;:!?)\\]*_])",
  "\\*\\*(?<strong>(?!\\s)(?:[^*]|\\*(?!\\*)){1,2000})\\*\\*",
  "(?<![\\w*])\\*(?<em>(?![\\s*])[^*]{0,2000}[^*\\s])\\*",
  "(?<![\\w_])_(?<under>(?![\\s_])[^_]{0,2000}[^_\\s])_(?!\\w)",
  "~~(?<deleted>[^~]{1,2000})~~",
  "(?<br>(?<! ) {2,}\\n|\\\\\\n)",
].join("|"), "g");

/** Nodes and texts of one paragraph. */
export function inline(text, depth = 0) {
  const found = [];
  const pattern = new RegExp(INLINE);
  let done = 0, match;
  while ((match = pattern.exec(text))) {
    const [node, end] = formOf(text, match, depth);
    if (!node) continue;
    found.push(text.slice(done, match.index), node);
    done = pattern.lastIndex = end;
  }
  found.push(text.slice(done));
  return found;
}

function formOf(text, match, depth) {
  const {code, shown, round, math, escape, label, target, url, strong, em, under, deleted, br} = match.groups;
  const end = match.index + match[0].length;
  if (code) return codeSpan(text, end, code);
  const tex = shown ?? round ?? math;
  if (tex) return [h("span", {class: "math", "data-display": shown !== undefined, "data-tex": tex}, match[0]), end];
  if (escape) return [escape[1], end];
  if (br) return [h("br"), end];
  if (url) return [link(url, [url]), end];
  if (depth >= MAX_DEPTH) return [null, end];
  if (target) return [link(target, inline(label || target, depth + 1)), end];
  const [name, inside] = strong ? ["strong", strong] : em || under ? ["em", em || under] : ["del", deleted];
  return [h(name, {}, inline(inside, depth + 1)), end];
}

function codeSpan(text, begin, ticks) {
  const end = new RegExp(`(?<!\`)\`{${ticks.length}}(?!\`)`, "g");
  end.lastIndex = begin;
  const match = end.exec(text);
  return match ? [h("code", {}, text.slice(begin, match.index).trim()), end.lastIndex] : [null, begin];
}

/** A link, if it goes to the web or to a mailbox; else its text. */
function link(target, label) {
  if (!/^(https?:|mailto:)/i.test(target)) return h("span", {}, label);
  return h("a", {href: target, target: "_blank", rel: "noopener noreferrer"}, label);
}
