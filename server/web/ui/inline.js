// The forms within a line of Markdown: emphasis, code, links, formulas. HTML stays text, and images are links, so that
// no request goes to another host.

import { h } from "./dom.js";

const MAX_DEPTH = 12, MAX_CODE = 2_000, MAX_TICKS = 100;
const DECIDED = 3_000;  // characters: more than a form has, so that no text can change what begins this far before its end
const LONG = 2 * DECIDED;

export const parsed = {characters: 0};  // in all, for tests of how often a text is read

// One alternative per form, tried at each position; each is linear in the text, has less than `DECIDED` characters, and
// begins no run of characters in the middle.
const INLINE = new RegExp([
  "(?<code>`+)",
  "\\$\\$(?<shown>[^$]{1,2000})\\$\\$",
  "\\\\\\((?<round>(?:[^\\\\]|\\\\(?!\\))){1,2000})\\\\\\)",
  "(?<![\\w$\\\\])\\$(?<math>(?![\\s$])[^$\\n]{0,500}[^\\s$\\\\])\\$(?![\\w$])",
  "(?<escape>\\\\[!-/:-@\\[-`{-~])",
  "!?\\[(?<label>[^\\[\\]]{0,500})\\]\\((?<target>[^()\\s]{1,2000})(?:\\s{1,9}\"[^\"]{0,200}\")?\\)",
  "(?<url>https?://[^\\s<>\"'`]{1,2000}[^\\s<>\"'`.,;:!?)\\]*_])",
  "\\*\\*(?<strong>(?!\\s)(?:[^*]|\\*(?!\\*)){1,2000})\\*\\*",
  "(?<![\\w*])\\*(?<em>(?![\\s*])[^*]{0,2000}[^*\\s])\\*",
  "(?<![\\w_])_(?<under>(?![\\s_])[^_]{0,2000}[^_\\s])_(?!\\w)",
  "~~(?<deleted>[^~]{1,2000})~~",
  "(?<br>(?<! ) {2,}\\n|\\\\\\n|<br {0,9}/?>)",
].join("|"), "g");

/** Nodes and texts of one paragraph. */
export function inline(text, depth = 0) {
  const found = [];
  let done = 0;
  if (depth === 0) parsed.characters += text.length;
  for (const [node, begin, end] of forms(text, depth)) {
    found.push(text.slice(done, begin), node);
    done = end;
  }
  found.push(text.slice(done));
  return found.filter(part => part !== "");
}

/** The forms of a text, each as [node, begin, end]. */
function* forms(text, depth) {
  const pattern = new RegExp(INLINE);
  for (let match; (match = pattern.exec(text));) {
    const [node, end] = formOf(text, match, depth);
    if (!node) continue;
    yield [node, match.index, end];
    pattern.lastIndex = end;
  }
}

/** Where to cut a long text, so that each part can be read by itself whatever follows; 0 if it is short or has no such
 *  place. Ends of sentences and lines come first. */
export function cutOf(text) {
  if (text.length <= LONG) return 0;
  const window = text.slice(0, LONG), taken = [...forms(window, MAX_DEPTH)];
  parsed.characters += window.length;
  for (const pattern of [/(?<=[.!?:;]\s|\n|[。！？])[^\s$*_`]/g, /(?<=\s)[^\s$*_`]/g, /(?<=[^\\\ud800-\udbff])[^\s$*_`~!()[\]\\\udc00-\udfff]/g]) {
    const places = [...window.slice(0, LONG - DECIDED).matchAll(pattern)].map(match => match.index).filter(at => at >= DECIDED / 2);
    const place = places.findLast(at => !taken.some(([, begin, end]) => begin < at && at < end));
    if (place) return place;
  }
  return 0;
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
  if (depth > MAX_DEPTH) return [null, end];
  if (target) return [link(target, inline(label || target, depth + 1)), end];
  const [name, inside] = strong ? ["strong", strong] : em || under ? ["em", em || under] : ["del", deleted];
  return [h(name, {}, inline(inside, depth + 1)), end];
}

function codeSpan(text, begin, ticks) {
  if (ticks.length > MAX_TICKS) return [null, begin];
  const end = new RegExp(`(?<!\`)\`{${ticks.length}}(?!\`)`, "g");
  end.lastIndex = begin;
  const match = end.exec(text.slice(0, begin + MAX_CODE + MAX_TICKS));
  return match && match.index < begin + MAX_CODE - MAX_TICKS ? [h("code", {}, text.slice(begin, match.index).trim()), end.lastIndex] : [null, begin];
}

/** A link, if it goes to the web or to a mailbox; else its text. */
function link(target, label) {
  if (!/^(https?:|mailto:)/i.test(target)) return h("span", {}, label);
  return h("a", {href: target, target: "_blank", rel: "noopener noreferrer"}, label);
}
