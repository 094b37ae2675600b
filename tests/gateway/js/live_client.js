// The console's stream of snapshots without its page: node live_client.js ERROR prints the states that its reader is told
// when a first stream ends with this error, until it gives up or a second stream is live.
import { LiveSource } from "../../../gateway/console/live_source.js";

const streams = [{ error: JSON.parse(process.argv[2]) }, { at: 1 }].map((told) => `data: ${JSON.stringify(told)}\n\n`);
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async () => new Response(streams.shift());
const source = new LiveSource(
  () => {},
  (state) => {
    console.log(state);
    if (state === "live") source.stop();
  },
);
source.start();
