// A client that knows nothing but the .proto files: chats whole and in a stream, lists models, counts tokens.
// node client.js ADDRESS PROTO_ROOT MODEL   prints one JSON object.
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address, protoRoot, model] = process.argv.slice(2);
const definition = protoLoader.loadSync("headwater/proto/inference.proto", {
  includeDirs: [protoRoot],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).headwater.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

const unary = (method, request) =>
  new Promise((resolve, reject) => {
    const deadline = Date.now() + 60_000;
    client[method](request, { deadline }, (error, reply) => (error ? reject(error) : resolve(reply)));
  });

const stream = async (method, request) => {
  const chunks = [];
  for await (const chunk of client[method](request, { deadline: Date.now() + 60_000 })) chunks.push(chunk);
  return chunks;
};

const status = async (call) => {
  try {
    await call;
    return null;
  } catch (error) {
    return { code: grpc.status[error.code], message: error.details };
  }
};

const chat = {
  model,
  conversation: { messages: [{ role: "user", content: "Name a river." }] },
  sampling: { temperature: 0, max_tokens: 12 },
};
const whole = await unary("Chat", chat);
const pieces = await stream("ChatStream", chat);
const last = pieces.at(-1);
const refused = await status(unary("Chat", { ...chat, sampling: { temperature: 7 } }));
const models = await unary("ListModels", {});
const tokens = await unary("Tokenize", { model, prompt: { text: "Hello world" } });
const text = await unary("Detokenize", { model, token_ids: tokens.token_ids });
client.close();

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    finish: whole.choices[0].finish_reason,
    usage: whole.usage,
    streamed: pieces.map((piece) => piece.content).join(""),
    num_pieces: pieces.length,
    stream_usage: last.usage,
    refused,
    models: models.models.map((card) => card.id),
    num_tokens: tokens.token_ids.length,
    text: text.text,
  }),
);
