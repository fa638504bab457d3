// The requests in the engines, which an administrator can end.

import { getPrivileged, postJson } from "./api.js";
import { button, h, setChildren } from "./dom.js";

const HEADS = ["who", "phase", "age", "prompt", "cached", "output", "tokens/s", ""];

export class Running {
  constructor() {
    this.known = new Map();  // id -> {row, tokens, time}
    this.body = h("tbody");
    this.none = h("p", {class: "note"}, "None.");
    this.table = h("div", {class: "wide", tabindex: "0"}, h("table", {}, h("thead", {}, h("tr", {}, HEADS.map(head => h(head ? "th" : "td", head ? {scope: "col"} : {}, head)))), this.body));
    this.node = h("section", {class: "card", id: "running", hidden: true}, h("h2", {}, "Requests now"), this.none, this.table);
  }

  async read() {
    const found = await getPrivileged("requests");
    this.node.hidden = found === null;
    if (!found) return;
    const now = performance.now(), before = this.known;
    this.known = new Map(found.requests.map(one => [one.engine_request_id, this.rowOf(one, before.get(one.engine_request_id), now)]));
    setChildren(this.body, [...this.known.values()].map(({row}) => row));
    this.none.hidden = found.requests.length > 0;
    this.table.hidden = !this.none.hidden;
  }

  rowOf(one, last, now) {
    const speed = last ? 1000 * (one.num_output_tokens - last.tokens) / (now - last.time) : one.num_output_tokens / Math.max(one.age, 0.001);
    const prompt = one.phase === "prefill" ? `${one.num_computed_tokens} of ${one.num_prompt_tokens}` : one.num_prompt_tokens;
    const cells = [one.key, one.background ? `${one.phase} (background)` : one.phase, `${one.age.toFixed(1)} s`, prompt, one.num_cached_tokens,
      one.num_output_tokens, speed.toFixed(1)];
    const row = last?.row ?? h("tr", {}, cells.map(() => h("td")), h("td", {}, button("Abort", event => this.abort(one, event.target), {"aria-label": `Abort ${one.request_id}`})));
    cells.forEach((cell, i) => { row.cells[i].textContent = cell; });
    return {row, tokens: one.num_output_tokens, time: now};
  }

  async abort({request_id: id}, node) {
    node.disabled = true;
    await postJson("abort_requests", {request_ids: [id]}).catch(error => { node.disabled = false; node.textContent = error.message; });
  }
}
