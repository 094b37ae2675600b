// The console's phases of a request, without its page: node phases_client.js ROW prints the phases that took time, as JSON.
import { PHASES, phases } from "../../../gateway/console/phases.js";

const told = phases(JSON.parse(process.argv[2]));
console.log(JSON.stringify(Object.fromEntries(PHASES.map((phase, i) => [phase, told[i]]).filter(([, each]) => each > 0))));
