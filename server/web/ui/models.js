// The models of a server of several, which an administrator can load and unload.

import { getJson, postJson } from "./api.js";
import { button, h, setChildren } from "./dom.js";

const HEADS = ["model", "state", "memory", "context", ""];
const GIB = 2 ** 30, MIB = 2 ** 20;

const bytes = size => size === null ? "" : size >= GIB ? `${(size / GIB).toFixed(1)} GiB` : `${Math.round(size / MIB)} MiB`;

function stateOf({value, failed, phase, progress}, pinned) {
  if (failed) return "failed";
  if (value === "loading") return phase ? `loading: ${phase} ${Math.round(100 * progress)} %` : "loading";
  return pinned ? `${value} (pinned)` : value;
}

export class Models {
  constructor() {
    this.body = h("tbody");
    const heads = HEADS.map(head => h(head ? "th" : "td", head ? {scope: "col"} : {}, head));
    this.node = h("section", {class: "card", id: "models", hidden: true}, h("h2", {}, "Models"),
      h("div", {class: "wide", tabindex: "0"}, h("table", {}, h("thead", {}, h("tr", {}, heads)), this.body)));
    this.rows = new Map();  // id -> row
  }

  /** Show the models, if the server has several; with `privileged`, the buttons. */
  async read(privileged) {
    const {data} = await getJson("v1/models");
    const listed = data.filter(one => one.status && !one.parent);
    this.node.hidden = listed.length === 0;
    this.rows = new Map(listed.map(one => [one.id, this.rowOf(one, this.rows.get(one.id), privileged)]));
    setChildren(this.body, [...this.rows.values()]);
  }

  rowOf(one, last, privileged) {
    const loaded = one.status.value === "loaded", idle = loaded || one.status.value === "unloaded";
    const row = last ?? h("tr", {}, HEADS.slice(1).map(() => h("td")), h("td", {}, button("", () => this.change(row))));
    [one.id, stateOf(one.status, one.pinned), bytes(one.size), one.max_model_len?.toLocaleString("en") ?? ""]
      .forEach((text, i) => { row.cells[i].textContent = text; });
    row.cells[1].title = one.status.error ?? "";
    const node = row.cells[4].firstChild, what = loaded ? "Unload" : "Load";
    node.hidden = !privileged || !idle;
    if (node.textContent !== what) node.textContent = what;
    node.setAttribute("aria-label", `${what} ${one.id}`);
    return row;
  }

  async change(row) {
    const node = row.cells[4].firstChild, path = node.textContent === "Load" ? "models/load" : "models/unload";
    node.disabled = true;
    await postJson(path, {model: row.cells[0].textContent}).catch(error => { row.cells[1].textContent = error.message; });
    node.disabled = false;
  }
}
