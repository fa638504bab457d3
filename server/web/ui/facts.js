// What /server_info tells, as cards.

import { button, h } from "./dom.js";

const size = bytes => bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
const clock = time => new Date(1000 * time).toLocaleTimeString();

export function locked(unlock) {
  return h("section", {class: "card", id: "admin"}, h("h2", {}, "Server"), h("p", {}, "Memory, settings and errors are for administrators; so are plots, and for keys with metrics, if there are several keys."),
    button("Show them", unlock));
}

export function factsOf(info) {
  return [status(info), info.engine && memory(info.engine), info.engine && choices(info.engine), tiers(info), warnings(info), errors(info)].filter(Boolean);
}

function status(info) {
  const {restarts} = info, last = restarts.last ? `, the last at ${clock(restarts.last)}` : "";
  const rows = {server: `quire ${info.version}`, "models and adapters": info.models.join(", "), status: info.health.reason ?? info.health.status,
    "running since": new Date(1000 * restarts.since).toLocaleString(), "engine restarts": `${restarts.engine}${last}`,
    kernels: info.kernels?.status ?? "–", images: info.images.accepted ? "accepted" : `none: ${info.images.reason}`};
  return h("section", {class: "card"}, h("h2", {}, "Server"), h("dl", {}, Object.entries(rows).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

function memory({plan, num_blocks, block_size}) {
  const parts = {
    "in use by others": Math.max(plan.total - plan.available, 0), weights: plan.weights, activations: plan.activations,
    images: plan.images ?? 0, "CUDA graphs": plan.graphs ?? 0, "KV cache": plan.kv_cache, "left free": plan.reserve,
  };
  const kinds = Object.entries(parts).filter(([, bytes]) => bytes > 0);
  const bar = h("div", {class: "bar", "aria-hidden": "true"}, kinds.map(([name, bytes]) => {
    const part = h("span", {"data-part": name, title: `${name}: ${size(bytes)}`});
    part.style.flexGrow = bytes / plan.total;
    return part;
  }));
  const tokens = (num_blocks - 1) * block_size;
  return h("section", {class: "card"}, h("h2", {}, `Memory of ${plan.device}: ${size(plan.total)}`), bar,
    h("ul", {class: "legend"}, kinds.map(([name, bytes]) => h("li", {"data-part": name}, `${name}: ${size(bytes)}`))),
    h("p", {class: "note"}, `The KV cache holds ${tokens.toLocaleString("en")} tokens in ${(num_blocks - 1).toLocaleString("en")} blocks.`));
}

function rowsOf(heads, rows) {
  return h("div", {class: "wide", tabindex: "0"}, h("table", {}, h("thead", {}, h("tr", {}, heads.map(head => h("th", {scope: "col"}, head)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map(cell => h("td", {}, String(cell ?? ""))))))));
}

function choices({choices: rows}) {
  return h("section", {class: "card"}, h("h2", {}, "Chosen at start"), rowsOf(["setting", "value", "reason"], rows));
}

function errors({recent_errors: rows}) {
  const shown = rows.map(row => [clock(row.time), row.route, row.status, row.code ?? row.type, row.param, row.request_id]);
  return h("section", {class: "card"}, h("h2", {}, "Recent errors"), shown.length
    ? rowsOf(["time", "route", "status", "kind", "field", "request (see the log)"], shown)
    : h("p", {class: "note"}, "None."));
}

/** The tiers below the KV cache, of each engine. */
function tiers({kv_tiers: found}) {
  if (!found || (Array.isArray(found) && !found.length)) return null;
  const rows = Object.entries(flat(found)).filter(([, value]) => typeof value !== "object");
  return h("section", {class: "card", id: "tiers"}, h("h2", {}, "Tiers of the KV cache"),
    rowsOf(["what", "value"], rows.map(([name, value]) => [name, tierValue(name, value)])));
}

function tierValue(name, value) {
  if (typeof value !== "number") return value;
  return /bytes/.test(name) ? size(value) : value.toLocaleString("en", {maximumSignificantDigits: Number.isInteger(value) ? 21 : 3});
}

function flat(value, path = "") {
  if (value === null || typeof value !== "object") return {[path]: value};
  return Object.assign({}, ...Object.entries(value).map(([name, inner]) => flat(inner, path ? `${path} ${name}` : name)));
}

/** Warnings of the log, the newest first; steps that took long are among them. */
function warnings({log_lines: lines = []}) {
  const slow = lines.filter(line => line.message.startsWith("a step took")).length;
  const heads = slow ? `Warnings (${slow} slow steps)` : "Warnings";
  return h("section", {class: "card", id: "warnings"}, h("h2", {}, heads), lines.length
    ? rowsOf(["time", "level", "where", "message"], lines.toReversed().map(line => [clock(line.time), line.level, line.logger, line.message]))
    : h("p", {class: "note"}, "None."));
}
