// One streamed answer, gone on with where its connection breaks: through this gateway, or whichever answers instead.
// Knows nothing about the page.
import { refusal, root } from "./session.js";

const PATIENCE_MS = 20_000; // With a server that is out of reach; it keeps a stream that nobody reads a little shorter.
const PAUSE_MS = 250;

// What the server says in one response, until its end mark; `position` keeps which event was the last.
async function* events(response, position) {
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let number = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("id: ")) number = Number(line.slice(4));
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw Object.assign(new Error(event.error.message), { passes: event.error.code === "draining" });
      Object.assign(position, { id: event.id, last: number, brokeAt: null });
      yield event;
    }
  }
}

const pause = () => new Promise((resolve) => setTimeout(resolve, PAUSE_MS));

// Events of a chat completion. `signal` stops it, and then the server need not keep it.
export async function* answer(body, headers, signal, base = root) {
  const position = { id: "", last: 0, brokeAt: null };
  const options = { include_usage: true, resumable: true };
  const asked = JSON.stringify({ ...body, stream: true, stream_options: options });
  let open = () => fetch(`${base}/v1/chat/completions`, { method: "POST", headers, signal, body: asked });
  const again = () =>
    fetch(`${base}/v1/streams/${position.id}`, { headers: { ...headers, "last-event-id": String(position.last) }, signal });
  for (;;) {
    try {
      yield* events(await open(), position);
      return;
    } catch (error) {
      if (signal.aborted && position.last) {
        fetch(`${base}/v1/streams/${position.id}`, { method: "DELETE", headers }).catch(() => {});
      }
      position.brokeAt ??= performance.now();
      // What a connection raises when it breaks is a TypeError.
      const passes = error.passes || error instanceof TypeError;
      if (signal.aborted || !position.last || !passes || performance.now() - position.brokeAt > PATIENCE_MS) throw error;
    }
    await pause();
    open = again;
  }
}
