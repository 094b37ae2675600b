// What the last snapshots say together: rates of counters, and the past of a figure for its sparkline.
const KEPT = 60;

export class History {
  constructor() {
    this.counters = new Map();
    this.series = new Map();
  }

  // A counter's rate a second since the last snapshot; null before there are two. One that falls has begun anew.
  rate(name, value, at) {
    const before = this.counters.get(name);
    this.counters.set(name, { value, at });
    if (!before || at <= before.at) return null;
    return Math.max(0, value - before.value) / (at - before.at);
  }

  // How much a counter that each gateway has of its own has grown on all of them since the first snapshot. Gateways
  // come and go: what one counted before it was seen is not growth, and what one that is gone has counted stays.
  growth(name, gateways, read) {
    let total = this.counters.get(name) ?? 0;
    for (const { id, totals } of gateways) {
      const before = this.counters.get(`${name}/${id}`);
      if (before !== undefined) total += Math.max(0, read(totals) - before);
      this.counters.set(`${name}/${id}`, read(totals));
    }
    this.counters.set(name, total);
    return total;
  }

  // Adds a figure to its past and returns that, oldest first.
  past(name, value) {
    const series = this.series.get(name) ?? [];
    this.series.set(name, series);
    if (value !== null) series.push(value);
    if (series.length > KEPT) series.shift();
    return series;
  }

  // The growth of two counters over the kept past, as a share; null where nothing grew.
  share(name, part, whole) {
    const parts = this.past(`${name}/part`, part);
    const wholes = this.past(`${name}/whole`, whole);
    const grown = wholes.at(-1) - wholes[0];
    return grown > 0 ? Math.max(0, parts.at(-1) - parts[0]) / grown : null;
  }

  // Forgets what belongs to names that are gone.
  keepOnly(prefix, names) {
    for (const map of [this.counters, this.series]) {
      for (const name of map.keys()) {
        if (name.startsWith(prefix) && !names.some((each) => name.startsWith(`${prefix}${each}/`))) map.delete(name);
      }
    }
  }
}

// The rows of replicas with the rate of their tokens, and its past.
export function withRates(snapshot, history) {
  history.keepOnly("replica/", snapshot.replicas.map(({ id, epoch }) => `${id}:${epoch}`));
  return snapshot.replicas.map((row) => {
    const name = `replica/${row.id}:${row.epoch}/tokens`;
    const tokens = history.rate(name, row.num_generated_tokens, snapshot.at);
    return { ...row, tokens, past: history.past(`${name}/past`, tokens) };
  });
}
