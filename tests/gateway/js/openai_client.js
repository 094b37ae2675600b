// What OpenAI's own JavaScript client sees of a gateway: node openai_client.js URL MODEL   prints one JSON object.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "Name a river." }], temperature: 0, max_tokens: 12 };

const whole = await client.chat.completions.create(asked);
const pieces = [];
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  if (chunk.choices.length) pieces.push(chunk.choices[0].delta.content ?? "");
  usage = chunk.usage ?? usage;
}
const tools = [
  { type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string", maxLength: 8 } } } } },
];
const runner = client.chat.completions.stream({ ...asked, max_tokens: 200, tools, tool_choice: "required" });
const deltas = [];
runner.on("tool_calls.function.arguments.delta", (event) => deltas.push(event.arguments_delta));
const called = await runner.finalChatCompletion();
const response = await client.responses.create({ model, input: "Name a river.", temperature: 0, max_output_tokens: 12 });
const kinds = [];
for await (const event of await client.responses.create({
  model,
  input: "Name a river.",
  temperature: 0,
  max_output_tokens: 12,
  stream: true,
})) {
  kinds.push(event.type);
}
const embedded = await client.embeddings.create({ model, input: ["A river.", "A lake."] });
const refused = await client.chat.completions.create({ ...asked, temperature: 7 }).catch((error) => error);

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed: pieces.join(""),
    usage: usage.completion_tokens,
    call: called.choices[0].message.tool_calls[0].function,
    deltas: deltas.join(""),
    finish: called.choices[0].finish_reason,
    response: response.output_text,
    kinds: [kinds[0], kinds.at(-1)],
    vectors: embedded.data.map((entry) => entry.embedding.length),
    refused: { status: refused.status, param: refused.param },
  }),
);
