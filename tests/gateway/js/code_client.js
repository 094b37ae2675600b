// The console's program for gRPC, without its page: node code_client.js SCHEME BODY prints it.
import { asGrpc } from "../../../gateway/console/as_code.js";

const [scheme, body] = process.argv.slice(2);
console.log(asGrpc("llm.example:8001", JSON.parse(body), true, scheme === "https"));
