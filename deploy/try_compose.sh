#!/usr/bin/env bash
# Proves compose.yaml on this machine, with two gateways: up, healthy, a chat, a stream, strangers turned away; a chat and a
# conversation through each gateway, one gateway killed while the other goes on with both; the engine that served a chat
# killed, the chat again, the engine back. Leaves nothing but named volumes and images. COMPOSE names the command where it
# is not `docker compose`; BUILD=0 takes the images that are there.
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra compose <<<"${COMPOSE:-docker compose}"
export COMPOSE_PROFILES=${COMPOSE_PROFILES:-cpu,two-gateways}
first=http://127.0.0.1:${PORT:-8000} second=http://127.0.0.1:${SECOND_PORT:-8002} key=${HEADWATER_KEY:-local}
model=${SERVED_MODEL:-smollm2-135m-instruct}

call() {  # address and path, body: what curl prints
  curl -sf -m 60 "$1" -H "authorization: Bearer $key" -H 'content-type: application/json' -H 'x-headwater-receipt: 1' -d "$2"
}
ask() {  # gateway: prints the replica that answered, and the answer
  call "$1/v1/chat/completions" '{"model": "'"$model"'", "max_tokens": 12, "temperature": 0,
      "messages": [{"role": "user", "content": "Where does a river begin, and where does it end?"}]}' |
    python3 -c 'import json, sys; answer = json.load(sys.stdin)
print(answer["receipt"]["decision"]["replica_id"], answer["usage"]["prompt_tokens_details"]["cached_tokens"],
      "cached:", answer["choices"][0]["message"]["content"])'
}
respond() {  # gateway, text, the response before or nothing: prints the id of the response and its number of prompt tokens
  call "$1/v1/responses" '{"model": "'"$model"'", "max_output_tokens": 8, "temperature": 0, "input": "'"$2"'",
      "previous_response_id": '"${3:+\"}${3:-null}${3:+\"}"'}' |
    python3 -c 'import json, sys; answer = json.load(sys.stdin); print(answer["id"], answer["usage"]["input_tokens"])'
}
conversation() {  # gateway, gateway: a turn through each; the second has to know the first
  local id length next longer
  read -r id length < <(respond "$1" "A river begins in the mountains.")
  read -r next longer < <(respond "$2" "Where does it end?" "$id")
  echo "a conversation: $length prompt tokens through ${1##*:}, $longer through ${2##*:}"
  ((longer > length + 8)) || { echo "the second gateway does not know the first turn" >&2; exit 1; }
  previous=$next
}
await() {  # what, seconds, command
  echo "waiting: $1"
  for _ in $(seq "$2"); do if eval "$3"; then return; fi; sleep 1; done
  echo "not within $2 s: $1" >&2
  exit 1
}
stream() {  # prints a streamed answer's last event
  curl -sfN -m 60 "$1/v1/chat/completions" -H "authorization: Bearer $key" -H 'content-type: application/json' \
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
build=(--build)
[[ ${BUILD:-1} != 0 ]] || build=()
"${compose[@]}" up "${build[@]}" -d
project=$(docker inspect -f '{{index .Config.Labels "com.docker.compose.project"}}' "$(container redis)")
for service in redis engine-0 engine-1 processor output-processor gateway gateway-1; do
  await "$service is healthy" 600 "healthy $service"
done
curl -sf "$first/v1/models" -H "authorization: Bearer $key" | grep -o '"id":"[^"]*"'
ask "$first"
# The prefix is found by a gateway that did not compute it: both have one master key.
answer=$(ask "$second"); echo "$answer"
[[ $answer != *" 0 cached:"* ]] || { echo "the second gateway does not find the prefix of the first" >&2; exit 1; }
stream "$second"
conversation "$first" "$second"
strangers engine-0 engine-1
echo "killing gateway"
"${compose[@]}" kill gateway
curl -s -m 5 -o /dev/null "$first/ready" && { echo "the killed gateway answers" >&2; exit 1; }
respond "$second" "And where does it begin?" "$previous"
ask "$second"
"${compose[@]}" start gateway
await "gateway is healthy again" 600 "healthy gateway"
conversation "$second" "$first"
engine=${answer%%:*}
echo "killing $engine"
"${compose[@]}" kill "$engine"
ask "$first"
ask "$second"
"${compose[@]}" start "$engine"
await "$engine is healthy again" 600 "healthy $engine"
ask "$first"
"${compose[@]}" down
trap - EXIT
[[ $(leftovers "$project") == "$before" ]] || { echo "left behind: $(leftovers "$project")" >&2; exit 1; }
echo "both gateways answered, and nothing is left behind"
