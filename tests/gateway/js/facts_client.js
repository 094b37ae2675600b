// The chat page's line below an answer, without its page: node facts_client.js EVENT prints it; the answer took a second.
import { facts } from "../../../gateway/console/facts.js";

console.log(facts(JSON.parse(process.argv[2]), 1200, 1000, 2200));
