#!/usr/bin/env bash
# Proves compose.yaml on this machine: up, healthy, a chat, the engine that served it killed, the chat again, the engine
# back. Leaves nothing running. COMPOSE names the command where it is not `docker compose`.
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra compose <<<"${COMPOSE:-docker compose}"
base=http://127.0.0.1:${PORT:-8000} key=${HEADWATER_KEY:-local}
model=${SERVED_MODEL:-smollm2-135m-instruct}

ask() {  # prints the replica that answered, and the answer
  curl -sf -m 60 "$base/v1/chat/completions" -H "authorization: Bearer $key" -H 'content-type: application/json' \
    -H 'x-headwater-receipt: 1' -d '{"model": "'"$model"'", "max_tokens": 12, "temperature": 0,
      "messages": [{"role": "user", "content": "Where does a river begin, and where does it end?"}]}' |
    python3 -c 'import json, sys; answer = json.load(sys.stdin)
print(answer["receipt"]["decision"]["replica_id"], answer["usage"]["prompt_tokens_details"]["cached_tokens"],
      "cached:", answer["choices"][0]["message"]["content"])'
}
await() {  # what, seconds, command
  echo "waiting: $1"
  for _ in $(seq "$2"); do if eval "$3"; then return; fi; sleep 1; done
  echo "not within $2 s: $1" >&2
  exit 1
}
healthy() { [[ $(docker inspect -f '{{.State.Health.Status}}' "$("${compose[@]}" ps -q "$1")") == healthy ]]; }

trap '"${compose[@]}" down' EXIT
"${compose[@]}" up --build -d
for service in redis engine-0 engine-1 processor output-processor gateway; do
  await "$service is healthy" 180 "healthy $service"
done
ask
answer=$(ask); echo "$answer"
engine=${answer%%:*}
echo "killing $engine"
"${compose[@]}" kill "$engine"
ask
"${compose[@]}" start "$engine"
await "$engine is healthy again" 180 "healthy $engine"
ask
echo "the line answered throughout"
