// The view of the running server: plots from /metrics, which is read from the first time on that the view is shown, as
// long as the page is visible, and facts of /server_info.

import { askKey, getPrivileged, hasKey, request } from "./api.js";
import { button, byId, h } from "./dom.js";
import { Plot } from "./plot.js";
import { mean, parse, quantile, sum } from "./prometheus.js";

const PERIOD = 2000, CAPACITY = 150;  // milliseconds between readings; readings shown: five minutes
const SHARED = "quire:num_requests_running";  // of all requests
const WINDOW = 30;  // readings over which percentiles are taken: one minute

const seconds = value => value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(1)} s`;
const count = value => value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
const percent = value => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
const size = bytes => bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
const clock = time => new Date(1000 * time).toLocaleTimeString();

const PARTS = {p50: "one", p95: "two", p99: "three"};
const PLOTS = [
  {title: "Requests", series: {running: "one", waiting: "two"}, format: count, top: 4, read: now => ({
    running: sum(now, "quire:num_requests_running"), waiting: sum(now, "quire:num_requests_waiting")})},
  {title: "Throughput, tokens/s", series: {generated: "one", prompts: "two"}, format: count, read: (now, last, elapsed) => ({
    generated: rate(now, last, "quire:generation_tokens_total", elapsed), prompts: rate(now, last, "quire:prompt_tokens_total", elapsed)})},
  {title: "KV cache in use", series: {used: "one"}, format: percent, top: 0.01, read: now => ({used: mean(now, "quire:kv_cache_usage_perc")})},
  {title: "Prefix cache hits", series: {"last minute": "one", "since start": "two"}, format: percent, top: 1, read: (now, last, elapsed, old) => ({
    "last minute": hits(now, old), "since start": hits(now, null)})},
  {title: "Time to first token", series: PARTS, format: seconds, read: percentiles("quire:time_to_first_token_seconds")},
  {title: "Time between tokens", series: PARTS, format: seconds, read: percentiles("quire:inter_token_latency_seconds")},
];

function rate(now, last, name, elapsed) {
  return last ? Math.max(sum(now, name) - sum(last, name), 0) / elapsed : 0;
}

function hits(now, old) {
  const since = name => sum(now, name) - (old ? sum(old, name) : 0);
  const asked = since("quire:prefix_cache_queries_total");
  return asked > 0 ? since("quire:prefix_cache_hits_total") / asked : null;
}

function percentiles(name) {
  return (now, last, elapsed, old) => ({p50: quantile(now, old, name, 0.5), p95: quantile(now, old, name, 0.95), p99: quantile(now, old, name, 0.99)});
}

export class Watch {
  constructor() {
    this.unlocked = !hasKey();  // whether the key may read the facts; not tried unasked, as most may not
    this.readings = [];  // {time, values}
    this.plots = PLOTS.map(plot => ({...plot, history: [], card: new Plot(plot.title, plot.series, plot.format, plot)}));
    this.figures = h("div", {class: "plots"}, this.plots.map(plot => plot.card.node));
    this.facts = h("div", {class: "facts"});
    this.message = h("p", {class: "problem", role: "status"});
    byId("watch").append(this.message, this.figures, this.facts);
  }

  show() {
    this.timer ??= setInterval(() => { if (!document.hidden) this.read(); }, PERIOD);
    this.read();
  }

  async read() {
    if (this.reading) return;
    this.reading = true;
    try {
      const values = parse(await (await request("metrics")).text());
      this.figures.hidden = !(SHARED in values);  // a client's key, of several, sees its own counts only
      if (!this.figures.hidden) this.add(values);
      if (!byId("watch").hidden) this.showFacts(this.unlocked ? await getPrivileged("server_info") : null);
      this.message.textContent = "";
    } catch (error) {
      this.message.textContent = `The server cannot be read: ${error.message}`;
    } finally {
      this.reading = false;
    }
  }

  showFacts(info) {
    this.unlocked = info !== null;
    if (info) this.facts.replaceChildren(...factsOf(info));
    else if (!byId("admin")) this.facts.replaceChildren(locked(() => this.unlock()));
  }

  /** Show the facts with the key that the page has, else with another. */
  async unlock() {
    let info = await getPrivileged("server_info");
    if (!info) {
      await askKey("admin");
      info = await getPrivileged("server_info");
    }
    this.showFacts(info);
  }

  add(values) {
    const time = performance.now(), last = this.readings.at(-1);
    this.readings = [...this.readings, {time, values}].slice(-WINDOW - 1);
    const elapsed = last ? (time - last.time) / 1000 : 1;
    for (const plot of this.plots) {
      plot.history.push(plot.read(values, last?.values, elapsed, this.readings.length > 1 ? this.readings[0].values : null));
      plot.history = plot.history.slice(-CAPACITY);
      plot.card.draw(plot.history, CAPACITY);
    }
  }
}

// ---- facts

function locked(unlock) {
  return h("section", {class: "card", id: "admin"}, h("h2", {}, "Server"), h("p", {}, "Memory, settings and errors are for administrators; so are plots, and for keys with metrics, if there are several keys."),
    button("Show them", unlock));
}

function factsOf(info) {
  return [status(info), info.engine && memory(info.engine), info.engine && choices(info.engine), errors(info)].filter(Boolean);
}

function status(info) {
  const {restarts} = info, last = restarts.last ? `, the last at ${clock(restarts.last)}` : "";
  const rows = {server: `quire ${info.version}`, models: info.models.join(", "), status: info.health.reason ?? info.health.status,
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
