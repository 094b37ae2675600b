// The chat page's stream without its page: node console_client.js BASE_URL BODY prints each event's text as JSON, a line each.
import { answer } from "../../../gateway/console/stream.js";

const [base, body] = process.argv.slice(2);
const headers = { "content-type": "application/json" };
for await (const event of answer(JSON.parse(body), headers, new AbortController().signal, base)) {
  console.log(JSON.stringify(event.choices[0]?.delta?.content ?? ""));
}
