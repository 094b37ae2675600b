// Where a request's time went, in the phases that its explanation has. Knows nothing about the page.
export const PHASES = ["prepare", "engine start", "queue", "route", "engine queue", "prefill", "decode"];

// Seconds of each phase, of a request that has ended or is on its way: the phase that it is in has lasted until now.
export function phases({ seconds, state }) {
  const total = seconds.total ?? 0;
  const prepare = seconds.prepare ?? (state === "preparing" ? total : 0);
  const start = seconds.replica ?? (state === "waiting for an engine" ? total - prepare : 0);
  const queue = seconds.queue ?? (state === "queued" ? total - prepare - start : 0);
  const route = seconds.route ?? 0;
  const before = prepare + start + queue + route;
  const first = seconds.to_first_token;
  const atEngine = first === null ? (state === "prefill" ? total - before : 0) : first - before;
  const waiting = Math.min(seconds.engine_queue ?? 0, Math.max(0, atEngine));
  const decode = first === null ? 0 : total - first;
  return [prepare, start, queue, route, waiting, atEngine - waiting, decode].map((each) => Math.max(0, each));
}
