// The console's calculator of memory, without its page: node memory_client.js prints users that fit, for each model,
// kind of weights and size of memory, as JSON. node memory_client.js VALUES prints what one choice of values needs.
import { MODELS, memoryOf } from "../../../gateway/console/memory.js";

const WEIGHTS = ["bf16", "fp8", "int4"];
const GIGABYTES = [8, 16, 24, 48, 80, 141];
const CONTEXT = 8192;
const fits = (model, weights) => GIGABYTES.map((gigabytes) => memoryOf({ ...model, weights, kvBits: 16, gigabytes, context: CONTEXT }).users);
const table = () => Object.entries(MODELS).flatMap(([name, model]) => WEIGHTS.map((weights) => [name, weights, ...fits(model, weights)]));

const [values] = process.argv.slice(2);
console.log(JSON.stringify(values ? memoryOf(JSON.parse(values)) : { gigabytes: GIGABYTES, rows: table() }));
