// A request to /v1/chat/completions as a program writes it. Knows nothing about the page.

// `base` is the gateway's address with the path of its proxy; with a key, the program reads it from its environment.
export function asCurl(base, body, hasKey) {
  const json = JSON.stringify(body).replaceAll("'", `'\\''`);
  const key = hasKey ? ` \\\n  -H "authorization: Bearer $HEADWATER_API_KEY"` : "";
  return `curl ${base}/v1/chat/completions \\\n  -H 'content-type: application/json'${key} \\\n  -d '${json}'`;
}

export function asPython(base, body, hasKey) {
  const key = hasKey ? `os.environ["HEADWATER_API_KEY"]` : `"any"`;
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value)},`);
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base}/v1", api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...fields,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

const WORDS = new Map([
  [true, "True"],
  [false, "False"],
  [null, "None"],
]);

// A JSON value as Python's literal: strings and numbers are written alike.
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    const members = Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`);
    return `{${members.join(", ")}}`;
  }
  return WORDS.get(value) ?? JSON.stringify(value);
}

// The same over gRPC, with the package's own messages; `address` is host:port of the public gRPC surface, which has a
// certificate where REST has one.
export function asGrpc(address, body, hasKey, isSecure) {
  const metadata = hasKey ? `, metadata=[("authorization", f"Bearer {os.environ['HEADWATER_API_KEY']}")]` : "";
  return [
    ...(hasKey ? ["import os", ""] : []),
    "import grpc",
    "from google.protobuf.json_format import ParseDict",
    "",
    "from headwater.proto import inference_pb2, inference_pb2_grpc",
    "",
    `request = ParseDict(${literal(grpcRequest(body))}, inference_pb2.ChatRequest())`,
    `with ${isSecure ? `grpc.secure_channel(${JSON.stringify(address)}, grpc.ssl_channel_credentials())` : `grpc.insecure_channel(${JSON.stringify(address)})`} as channel:`,
    `    answer = inference_pb2_grpc.InferenceStub(channel).Chat(request${metadata})`,
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

function grpcRequest({ model, messages, tools, response_format: format, ...sampling }) {
  const conversation = { messages: messages.map(grpcMessage) };
  if (tools) conversation.tools = tools.map(({ function: { name, description = "", parameters = {} } }) => ({ name, description, parameters_json: JSON.stringify(parameters) }));
  const structured = format && { structured_output: { json_schema: JSON.stringify(format.json_schema.schema) } };
  return { model, conversation, sampling: { ...sampling, ...structured } };
}

function grpcMessage({ tool_calls: calls, ...message }) {
  return calls ? { ...message, tool_calls: calls.map(({ id, function: called }) => ({ id, ...called })) } : message;
}
