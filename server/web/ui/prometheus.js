// The text of /metrics, and what follows from two readings of it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** {name: [{labels, value}]}, of quire's own names and the server's. */
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") || line.startsWith("vllm:") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    (found[match[1]] ??= []).push({labels, value: Number(match[3])});
  }
  return found;
}

/** The sum over engines (and other labels). */
export const sum = (reading, name) => (reading[name] ?? []).reduce((total, {value}) => total + value, 0);

export function mean(reading, name) {
  const rows = reading[name] ?? [];
  return rows.length ? sum(reading, name) / rows.length : 0;
}

/** Observations per upper bound since `before`, cumulative: [[bound, count]]. */
function buckets(now, before, name) {
  const counts = new Map();
  const addAll = (reading, sign) => {
    for (const {labels, value} of reading?.[`${name}_bucket`] ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + sign * value);
    }
  };
  addAll(now, 1);
  addAll(before, -1);
  return [...counts].sort((a, b) => a[0] - b[0]);
}

/** The `part` quantile of a histogram since `before`, linear within a bucket; null without observations. */
export function quantile(now, before, name, part) {
  const rows = buckets(now, before, name), total = rows.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of rows) {
    if (count >= part * total) {
      return bound === Infinity ? low : low + (bound - low) * (part * total - below) / Math.max(count - below, 1e-9);
    }
    [low, below] = [bound, count];
  }
  return low;
}
