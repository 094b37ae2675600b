// What Vercel's ai makes of a gateway: node vercel_client.mjs URL MODEL prints one JSON object.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, streamText, tool } from "ai";
import { readFileSync } from "node:fs";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: "any" });
const weather = tool({ description: "The weather in a city.", inputSchema: z.object({ city: z.string().max(8) }) });
const told = {};
for (const [name, kind] of [["chat", openai.chat(model)], ["responses", openai.responses(model)]]) {
  const streamed = streamText({
    model: kind,
    prompt: "What is the weather in Ulm?",
    tools: { weather },
    toolChoice: "required",
    temperature: 0,
    maxOutputTokens: 200,
  });
  const content = (await streamed.content).map((part) => part.type);
  const trip = z.object({ city: z.string().max(8), days: z.number().int() });
  const made = await generateObject({ model: kind, schema: trip, prompt: "A trip.", temperature: 0 });
  told[name] = { content, object: made.object };
}
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
console.log(JSON.stringify({ version: version("ai"), provider: version("@ai-sdk/openai"), ...told }));
