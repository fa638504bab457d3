// The tokens of an answer with their probabilities: the likelier, the paler; each shows its alternatives.

import { button, h } from "./dom.js";

const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = token => token.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
const kind = logprob => { const p = Math.exp(logprob); return p >= 0.8 ? "sure" : p >= 0.4 ? "likely" : p >= 0.1 ? "unsure" : "unlikely"; };

const SHOWN = 2000;  // tokens at once

/** The text of `pieces` (JSON lists of tokens), token by token; hovering or focusing one shows what else was likely. */
export function logprobsNode(pieces) {
  const tokens = pieces.flatMap(piece => typeof piece === "string" ? JSON.parse(piece) : piece);  // older pages kept tokens as they are
  const shown = h("div", {class: "alternatives", role: "status"}, h("p", {class: "note"}, "Point at a token."));
  const tell = ({token, logprob, top = []}) => shown.replaceChildren(h("table", {}, h("tbody", {},
    [{token, logprob}, ...top.filter(one => one.token !== token)].map((one, i) =>
      h("tr", {class: i ? "" : "chosen"}, h("td", {class: "mono"}, visible(one.token)), h("td", {}, percent(one.logprob)))))));
  const node = one => h("button", {type: "button", class: `token ${kind(one.logprob)}`, title: percent(one.logprob),
    onmouseenter: () => tell(one), onfocus: () => tell(one)}, visible(one.token));
  const text = h("p", {class: "tokens"}), more = button("More tokens", () => add());
  const add = () => {
    text.append(...tokens.splice(0, SHOWN).map(node));
    more.hidden = !tokens.length;
  };
  add();
  return h("div", {class: "logprobs"}, text, more, shown);
}
