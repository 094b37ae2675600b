// Snapshots of the gateway by one streamed fetch that is opened again where it breaks. Knows nothing about the page.
import { headers, refusal, root } from "./session.js";

const PAUSE_MS = 1000;

// Calls `onSnapshot` with each snapshot and `onState` with "live", "waiting" or "refused" and a sentence, until stopped.
export class LiveSource {
  constructor(onSnapshot, onState) {
    Object.assign(this, { onSnapshot, onState, controller: null, life: 0 });
  }

  start() {
    this.stop();
    const life = (this.life += 1);
    this.run(() => life === this.life);
  }

  stop() {
    this.life += 1;
    this.controller?.abort();
  }

  async run(lives) {
    while (lives()) {
      this.controller = new AbortController();
      try {
        await this.read(lives);
        if (lives()) this.onState("waiting", "the gateway ended the stream; trying again");
      } catch (error) {
        if (!lives()) return;
        const isFinal = error.status === 401 || error.status === 403;
        this.onState(isFinal ? "refused" : "waiting", error.status ? error.message : "no answer; trying again");
        if (isFinal) return;
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }

  async read(lives) {
    const response = await fetch(`${root}/console/live`, { headers: headers(), signal: this.controller.signal });
    if (!response.ok) throw await refusal(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((each) => each.startsWith("data: "));
        if (!line || !lives()) continue;
        const snapshot = JSON.parse(line.slice(6));
        // Of what ends a stream, only a key that is gone keeps another one from being opened.
        const status = snapshot.error?.type === "authentication_error" ? 401 : 503;
        if (snapshot.error) throw Object.assign(new Error(snapshot.error.message), { status });
        this.onState("live", "");
        this.onSnapshot(snapshot);
      }
    }
  }
}
