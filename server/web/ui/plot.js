// A card with one quantity over time, as an SVG of lines.

import { h, svg } from "./dom.js";

const WIDTH = 300, HEIGHT = 80;

/** `series`: {label: css class}; `format` shows a value. */
export class Plot {
  constructor(title, series, format, {top = 0} = {}) {
    this.series = series;
    this.format = format;
    this.top = top;  // the scale's least upper end
    this.lines = {};
    this.values = {};
    const legend = Object.entries(series).map(([label, kind]) => {
      this.lines[label] = svg("polyline", {class: kind});
      this.values[label] = h("output", {}, "–");
      return h("span", {class: kind}, label, " ", this.values[label]);
    });
    this.scale = h("span", {class: "note"});
    this.node = h("section", {class: "card plot", "aria-label": title}, h("h2", {}, title, " ", this.scale),
      svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true"},
        svg("path", {class: "grid", d: `M0 ${HEIGHT / 2}H${WIDTH}M0 1H${WIDTH}M0 ${HEIGHT - 1}H${WIDTH}`}), ...Object.values(this.lines)),
      h("p", {class: "legend"}, legend));
  }

  /** `history`: one object {label: value or null} per reading, `capacity` at most; the newest is at the right. */
  draw(history, capacity) {
    const values = history.flatMap(row => Object.keys(this.series).map(label => row[label] ?? 0));
    const top = Math.max(this.top, ...values) || 1;
    const x = i => WIDTH * (capacity - history.length + i) / (capacity - 1);
    for (const [label, line] of Object.entries(this.lines)) {
      const points = history.map((row, i) => row[label] === null ? null
        : `${x(i).toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 6) * row[label] / top).toFixed(1)}`);
      line.setAttribute("points", points.filter(point => point !== null).join(" "));
      const last = history.at(-1)?.[label] ?? null;
      this.values[label].textContent = last === null ? "–" : this.format(last);
    }
    this.scale.textContent = `up to ${this.format(top)}`;
  }
}
