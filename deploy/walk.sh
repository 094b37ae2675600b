#!/usr/bin/env bash
# Walks as a new user does: walk.sh [STEP…], by default `readme compose chart console`. The committed state of this
# repository is cloned into an empty container (WALK_IMAGE, by default python:3.11-slim, with Debian's packages of git,
# make and curl, for the console node and Chromium) or, where docker does not answer, into an empty folder with an empty home and
# environment. Prints a line with the time for each thing that worked, and fails at the first that did not.
#   readme   `make up`, README's blocks, status, chat, an engine killed, Ctrl-C
#   compose  deploy/try_compose.sh, where docker answers
#   chart    the chart's pods as processes: from zero, every stage replaced, a node drained
#   console  the console's tests in Chromium
# PORT and the three ports behind it are used. TORCH_INDEX, COMPOSE and pip's own variables are passed on.
set -euo pipefail
port=${PORT:-18100} steps=("${@:-readme}")
(($#)) || steps=(readme compose chart console)
packages=(git make curl procps ca-certificates python3-venv openssl)
browser=(nodejs npm chromium)
passed_on=(PORT TORCH_INDEX COMPOSE DOCKER_HOST HEADWATER_CHROMIUM ${!PIP_*} ${!SSL_CERT_*} ${!npm_config_*})

say() { echo "$(date -u +%H:%M:%S) $*"; }
fail() { say "failed: $*"; [[ ! -e up.log ]] || tail -n 30 up.log; exit 1; }
await() {  # what, seconds, command
  for _ in $(seq "$2"); do if eval "$3" >/dev/null 2>&1; then say "$1"; return; fi; sleep 1; done
  fail "not within $2 s: $1"
}
ask() {  # prints the replica that answered
  curl -sf -m 120 "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' -H 'x-headwater-receipt: 1' \
    -d '{"model": "smollm2-135m-instruct", "max_tokens": 16, "messages": [{"role": "user", "content": "What is a headwater?"}]}' |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["receipt"]["decision"]["replica_id"].split(":")[0])'
}
descendants() { local child; for child in $(pgrep -P "$1"); do echo "$child"; descendants "$child"; done; }
blocks() {  # language: README's blocks of it that are marked as run, with the port of this walk, apart by a form feed
  python3 - "$1" "$port" <<'PYTHON'
import re, sys
text = open("README.md").read()
found = re.findall(r"<!-- run: deployment -->\n```" + sys.argv[1] + r"\n(.*?)^```", text, re.S | re.M)
assert found, f"README has no {sys.argv[1]} block that is run"
print("\f".join(each.replace("127.0.0.1:8000", f"127.0.0.1:{sys.argv[2]}") for each in found))
PYTHON
}

readme() {
  local up answered engine ended
  make up PORT="$port" GRPC_PORT=$((port + 1)) >up.log 2>&1 &
  up=$!
  trap 'kill -INT -'"$up"' 2>/dev/null || true' EXIT
  # It says so when engines are there; before, /ready allows requests, which wait for them.
  await "make up is ready and names its page" 1800 "kill -0 $up && grep -q 'http://127.0.0.1:$port/' up.log"
  curl -sf "http://127.0.0.1:$port/" | grep -q '<title>' || fail "no page is at /"
  bash -euc "$(blocks sh)" >answer.txt 2>curl.txt && grep -q '^data: ' answer.txt || fail "README's curl block"
  say "README's curl block is answered"
  python3 -m venv client && client/bin/python -m pip install -q openai
  client/bin/python -c "$(blocks python)" >answer.txt || fail "README's openai block"
  say "README's openai block is answered: $(tail -n 1 answer.txt)"
  .venv/bin/headwater status | tee status.txt | grep -q engine-1 || fail "status shows no engine-1"
  .venv/bin/headwater doctor >doctor.txt || fail "doctor"
  printf 'What is a river?\n/quit\n' | .venv/bin/headwater chat --max-tokens 16 >chat.txt || fail "chat"
  say "status, doctor and chat work"
  answered=$(ask) || fail "a chat"
  engine=$(descendants "$up" | xargs -r ps -o pid=,args= -p | grep -E "services\.engine .*--replica-id=$answered( |\$)" | awk '{print $1}' | head -n 1)
  kill -KILL "$engine" || fail "no process of $answered"
  ask >answer.txt || fail "a chat after $answered was killed"
  say "$answered was killed; $(cat answer.txt) answers"
  await "both engines serve again" 300 ".venv/bin/headwater status --json | grep -q '\"$answered\"'"
  kill -INT -"$up"
  ended=0
  wait "$up" || ended=$?
  # 130 is make's own status after Ctrl-C, whatever it ran.
  ((ended == 0 || ended == 130)) || fail "up ended with $ended"
  trap - EXIT
  ! pgrep -g "$up" >/dev/null || fail "processes of up are left: $(pgrep -a -g "$up")"
  ! curl -sf -m 3 "http://127.0.0.1:$port/ready" >/dev/null || fail "something still answers"
  say "Ctrl-C ends everything"
}
tested() {  # what, arguments of pytest
  make -s .venv-dev/.clients types >install.log 2>&1 || { tail install.log; fail "the environment of tests"; }
  .venv-dev/bin/python -m pytest -q -rs "${@:2}" || fail "$1"
  say "$1"
}
chart() { tested "the chart's pods start from zero, are replaced and drained" tests/deploy/test_chart_run.py -m "not long"; }
console() { tested "the console works in a browser" tests/line/test_line_console.py -m "not long"; }
compose() {  # repository: in a clone, beside docker
  cd "$(mktemp -d)"
  git clone -q "file://$1" headwater && cd headwater
  say "cloned $(git rev-parse --short HEAD)"
  deploy/try_compose.sh && say "compose with two gateways works"
}

inside() {  # repository: the steps, in a clone in an empty folder
  cd "$(mktemp -d)"
  export HOME=$PWD/home
  mkdir "$HOME"
  set -m  # each job is a group of its own, as in a terminal
  git clone -q "file://$1" headwater && cd headwater
  say "cloned $(git rev-parse --short HEAD); $(uname -sm), $(nproc) cores, load$(uptime | sed 's/.*load average:/ /'), $(python3 --version)"
  for step in "${steps[@]}"; do "$step"; done
}
in_container() {
  local repository=$1 env=()
  for name in "${passed_on[@]}"; do [[ -z ${!name:-} || $name == DOCKER_HOST ]] || env+=(-e "$name=${!name}"); done
  # A clone of its own: a worktree's files point elsewhere, and nothing of this folder is shown but what is committed.
  local bundle; bundle=$(mktemp -d)
  git clone -q --bare "$repository" "$bundle/headwater.git"
  [[ ${steps[*]} != console ]] || packages+=("${browser[@]}")
  docker run --rm --init --network host --shm-size 2g "${env[@]}" -v "$bundle/headwater.git:/headwater.git:ro" -v "$repository/deploy/walk.sh:/walk.sh:ro" \
    "${WALK_IMAGE:-python:3.11-slim}" bash -c "
      apt-get update -qq && apt-get install -y -qq --no-install-recommends ${packages[*]} >/dev/null 2>&1
      git config --system --add safe.directory '*'
      WALK_INSIDE=/headwater.git exec bash /walk.sh $(printf '%q ' "${steps[@]}")"
  rm -rf "$bundle"
}

{ # read as a whole: the file may change while it runs
repository=$(cd "$(dirname "$0")/.." && pwd)
if [[ -n ${WALK_INSIDE:-} ]]; then
  inside "$WALK_INSIDE"
elif docker info >/dev/null 2>&1; then
  say "in empty containers"
  for step in "${steps[@]}"; do
    if [[ $step == compose ]]; then (compose "$repository"); else (steps=("$step"); in_container "$repository"); fi
  done
else
  say "in an empty folder, without docker"
  remaining=()
  for step in "${steps[@]}"; do if [[ $step == compose ]]; then say "left out: compose"; else remaining+=("$step"); fi; done
  keep=()
  for name in "${passed_on[@]}"; do [[ -z ${!name:-} ]] || keep+=("$name=${!name}"); done
  exec env -i PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "${keep[@]}" WALK_INSIDE="$repository" bash "$0" "${remaining[@]}"
fi
exit
}
