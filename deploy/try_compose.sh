#!/usr/bin/env bash
# Proves compose.yaml on this machine: up, healthy, a chat, a stream, strangers turned away, the engine that served the
# chat killed, the chat again, the engine back. Leaves nothing but named volumes and images. COMPOSE names the command
# where it is not `docker compose`.
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
stream() {  # prints a streamed answer's last event
  curl -sfN -m 60 "$base/v1/chat/completions" -H "authorization: Bearer $key" -H 'content-type: application/json' \
    -d '{"model": "'"$model"'", "max_tokens": 8, "stream": true, "messages": [{"role": "user", "content": "Hello"}]}' |
    grep '^data: ' | tail -n 1
}
strangers() {  # what a container without secrets gets from the planes behind the gateway
  local network
  network=$(docker inspect -f '{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}' "$(container redis)")
  docker run --rm -i --network "$network" --entrypoint python3 headwater-front - "$@" <deploy/try_stranger.py
}
leftovers() {  # containers and networks of the project, and all volumes without a name
  docker ps -aq --filter "label=com.docker.compose.project=$1"
  docker network ls -q --filter "label=com.docker.compose.project=$1"
  docker volume ls -q | grep -E '^[0-9a-f]{64}$' || true
}
container() { "${compose[@]}" ps -q "$1"; }
healthy() { [[ $(docker inspect -f '{{.State.Health.Status}}' "$(container "$1")") == healthy ]]; }

trap '"${compose[@]}" down' EXIT
before=$(leftovers none)
"${compose[@]}" up --build -d
project=$(docker inspect -f '{{index .Config.Labels "com.docker.compose.project"}}' "$(container redis)")
for service in redis engine-0 engine-1 processor output-processor gateway; do
  await "$service is healthy" 600 "healthy $service"
done
curl -sf "$base/v1/models" -H "authorization: Bearer $key" | grep -o '"id":"[^"]*"'
ask
answer=$(ask); echo "$answer"
stream
strangers engine-0 engine-1
engine=${answer%%:*}
echo "killing $engine"
"${compose[@]}" kill "$engine"
ask
"${compose[@]}" start "$engine"
await "$engine is healthy again" 600 "healthy $engine"
ask
"${compose[@]}" down
trap - EXIT
[[ $(leftovers "$project") == "$before" ]] || { echo "left behind: $(leftovers "$project")" >&2; exit 1; }
echo "the line answered throughout, and left nothing behind"
