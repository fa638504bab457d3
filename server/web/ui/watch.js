// The view of the running server: plots from /metrics, which is read from the first time on that the view is shown, as
// long as the page is visible, and facts of /server_info.

import { askKey, getJson, getPrivileged, hasKey, request } from "./api.js";
import { button, byId, h } from "./dom.js";
import { factsOf, locked } from "./facts.js";
import { Models } from "./models.js";
import { Plot } from "./plot.js";
import { mean, parse, quantile, sum } from "./prometheus.js";
import { Running } from "./running.js";
import { morphChildren } from "./views.js";

const PERIOD = 2000, CAPACITY = 150, HOUR_PAUSE = 20_000;  // milliseconds between readings; readings shown: five minutes
const SHARED = "quire:num_requests_running";  // of all requests
const WINDOW = 30;  // readings over which percentiles are taken: one minute

const seconds = value => value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(1)} s`;
const count = value => value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
const percent = value => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;

const PARTS = {p50: "one", p95: "two", p99: "three"};
const PLOTS = [
  {title: "Requests", series: {running: "one", waiting: "two"}, format: count, top: 4, read: now => ({
    running: sum(now, "quire:num_requests_running"), waiting: sum(now, "quire:num_requests_waiting")})},
  {title: "Throughput, tokens/s", series: {generated: "one", prompts: "two"}, format: count, read: (now, last, elapsed) => ({
    generated: rate(now, last, "quire:generation_tokens_total", elapsed), prompts: rate(now, last, "quire:prompt_tokens_total", elapsed)})},
  {title: "KV cache in use", series: {used: "one"}, format: percent, top: 0.01, read: now => ({used: mean(now, "quire:kv_cache_usage_perc")})},
  {title: "Prefix cache hits", series: {"last minute": "one", "since start": "two"}, format: percent, top: 1, read: (now, last, elapsed, old) => ({
    "last minute": hits(now, old), "since start": hits(now, null)})},
  {title: "Drafts accepted", series: {accepted: "one"}, format: percent, top: 1, read: (now, last) => ({accepted: accepted(now, last)})},
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

function accepted(now, last) {
  const since = name => sum(now, name) - (last ? sum(last, name) : 0);
  const drafted = since("quire:spec_decode_num_draft_tokens_total");
  return drafted > 0 ? since("quire:spec_decode_num_accepted_tokens_total") / drafted : null;
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
    this.running = new Running();
    this.models = new Models();
    this.range = h("select", {id: "range", "aria-label": "Time shown"}, h("option", {value: "now"}, "Last five minutes"), h("option", {value: "hour"}, "Last hour"));
    this.range.addEventListener("change", () => this.draw());
    byId("watch").append(this.message, h("div", {class: "row"}, this.range), this.figures, this.models.node, this.running.node, this.facts);
  }

  show() {
    this.timer ??= setInterval(() => { if (!document.hidden) this.read(); }, PERIOD);
    this.read();
  }

  async read() {
    if (this.reading) return;
    this.reading = true;
    try {
      const values = parse(await (await request("metrics", {}, !byId("watch").hidden)).text());
      this.figures.hidden = this.range.hidden = !(SHARED in values);  // a client's key, of several, sees its own counts only
      if (!this.figures.hidden) this.add(values);
      if (!byId("watch").hidden) this.showFacts(this.unlocked ? await getPrivileged("server_info") : null);
      if (!byId("watch").hidden) await this.models.read(this.unlocked);
      if (this.unlocked && !byId("watch").hidden) await this.running.read();
      this.message.textContent = "";
    } catch (error) {
      this.message.textContent = `The server cannot be read: ${error.message}`;
    } finally {
      this.reading = false;
    }
  }

  showFacts(info) {
    this.unlocked = info !== null;
    if (!info && byId("admin")) return;
    const cards = info ? factsOf(info) : [locked(() => this.unlock())];
    if (info && cards.length === this.facts.childElementCount) morphChildren(this.facts, cards);  // focus, selected text and scrolling stay
    else this.facts.replaceChildren(...cards);
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
    const time = performance.now();
    this.readings = [...this.readings, {time, values}].slice(-WINDOW - 1);
    const rows = readRows(this.readings, this.readings.length - 1, WINDOW);
    this.plots.forEach((plot, i) => { plot.history = [...plot.history, rows[i]].slice(-CAPACITY); });
    this.draw();
  }

  /** Draw the time that is chosen. The hour is the server's own record, which it reads again every 20 seconds. */
  async draw() {
    if (this.range.value === "now") {
      this.plots.forEach(plot => plot.card.draw(plot.history, CAPACITY));
      return;
    }
    if (performance.now() - (this.hourRead ?? -Infinity) > HOUR_PAUSE) {
      this.hourRead = performance.now();
      try {
        this.hour = hourOf(await getJson("metrics/history"));
      } catch (error) {
        this.range.value = "now";
        this.message.textContent = `The last hour cannot be read: ${error.message}`;
        return;
      }
    }
    this.plots.forEach((plot, i) => plot.card.draw(this.hour.rows.map(row => row[i]), this.hour.capacity));
  }
}

/** What each plot shows of reading `at`, of which earlier ones are in the list; percentiles are over `window` readings. */
function readRows(readings, at, window) {
  const {time, values} = readings[at], last = readings[at - 1], old = at > 0 ? readings[Math.max(at - window, 0)].values : null;
  const elapsed = last ? (time - last.time) / 1000 : 1;
  return PLOTS.map(plot => plot.read(values, last?.values, elapsed, old));
}

function hourOf({period, readings}) {
  const found = readings.map(({time, metrics}) => ({time: 1000 * time, values: parse(metrics)}));
  const capacity = Math.round(3600 / period), window = Math.round(60 / period);
  return {capacity, rows: found.map((_, at) => readRows(found, at, window)).slice(1)};
}
