#!/usr/bin/env bash
# Walks as a new user does: walk.sh [STEP…], by default `readme tutorial compose chart console`. All steps walk the same commit: the
# one that is checked out when the walk begins, cloned into an empty container each (WALK_IMAGE, by default python:3.11-slim,
# with Debian's packages of git, make and curl, for the console also npm) or, where docker does not answer, into
# an empty folder with an empty home and environment.
#   readme   `make up`, README's blocks, status, chat, an engine killed, Ctrl-C
#   tutorial each command of docs/tutorial.md, in the order of the page, with a port of its own
#   compose  deploy/try_compose.sh, where docker answers; in a clone beside docker
#   chart    the chart's pods as processes: from zero, every stage replaced, a node drained
#   console  the console's tests in Chromium
# Prints a line with the time for each thing that worked. A step ends at the first that did not; the others are walked all
# the same. At the end it prints a summary: what each step printed of this kind, its result and how long it took; into
# WALK_SUMMARY too, if that names a file. The status is 0 when no step failed.
# PORT and the three ports behind it are used. TORCH_INDEX and the variables of pip are passed on, and to compose all others.
set -euo pipefail
port=${PORT:-18100} steps=("${@:-readme}")
(($#)) || steps=(readme tutorial compose chart console)
packages=(git make curl procps ca-certificates python3-venv openssl)
browser=(nodejs npm)
passed_on=(PORT TORCH_INDEX HEADWATER_CHROMIUM ${!PIP_*} ${!SSL_CERT_*} ${!npm_config_*})

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
blocks() {  # page, mark, language: blocks of it that are so marked, with the port of this walk, apart by a form feed
  python3 - "$@" "$port" <<'PYTHON'
import re, sys
page, mark, language, port = sys.argv[1:]
found = re.findall(rf"<!-- run: {mark} -->\n```{language}\n(.*?)^```", open(page).read(), re.S | re.M)
assert found, f"{page} has no {language} block that is run"
print("\f".join(each.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for each in found))
PYTHON
}
begin() {  # starts the deployment, its process in $up
  make up PORT="$port" GRPC_PORT=$((port + 1)) >up.log 2>&1 &
  up=$!
  trap 'kill -INT -'"$up"' 2>/dev/null || true' EXIT
  await "make up is ready and names its page" 1800 "kill -0 $up && grep -q 'http://127.0.0.1:$port/' up.log"
}
finish() {  # ends it as Ctrl-C does
  local ended=0
  kill -INT -"$up"
  wait "$up" || ended=$?
  # 130 is make's own status after Ctrl-C, whatever it ran.
  ((ended == 0 || ended == 130)) || fail "up ended with $ended"
  trap - EXIT
  ! pgrep -g "$up" >/dev/null || fail "processes of up are left: $(pgrep -a -g "$up")"
}

readme() {
  local up answered engine
  begin
  curl -sf "http://127.0.0.1:$port/" | grep -q '<title>' || fail "no page is at /"
  bash -euc "$(blocks README.md deployment sh)" >answer.txt 2>curl.txt && grep -q '^data: ' answer.txt || fail "README's curl block"
  say "README's curl block is answered"
  python3 -m venv client && client/bin/python -m pip install -q openai
  client/bin/python -c "$(blocks README.md deployment python)" >answer.txt || fail "README's openai block"
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
  finish
  ! curl -sf -m 3 "http://127.0.0.1:$port/ready" >/dev/null || fail "something still answers"
  say "Ctrl-C ends everything"
}
tutorial() {
  local up began=$SECONDS
  export HEADWATER_ADMIN_KEY
  HEADWATER_ADMIN_KEY=$(openssl rand -hex 24)
  begin
  # As `source .venv/bin/activate` does.
  export PATH=$PWD/.venv/bin:$PATH
  headwater status | tee status.txt | grep -q engine-1 || fail "status shows no engine-1"
  curl -sf "http://127.0.0.1:$port/" | grep -q '<title>' || fail "no page is at /"
  bash -euo pipefail -c "$(blocks docs/tutorial.md tutorial sh | tr '\f' '\n')" >tutorial.txt 2>&1 ||
    { tail -n 20 tutorial.txt; fail "a command of the tutorial"; }
  grep -q "four answers, the same bytes" tutorial.txt || fail "an engine's death changed an answer"
  printf 'What is a headwater?\n/quit\n' | headwater chat --api-key "$(cat ada.key)" --max-tokens 16 >chat.txt || fail "chat"
  say "status, a tenant, chats, a killed engine whose answers are whole, and an explanation"
  python -c "$(blocks docs/tutorial.md tutorial python)" >rag.txt || fail "the tutorial's program"
  say "the program answers from documents: $(tail -n 1 rag.txt)"
  finish
  say "the tutorial took $((SECONDS - began)) s, installation included"
}
tested() {  # what, arguments of pytest
  make -s .venv-dev/.clients .venv-dev/.browser types >install.log 2>&1 || { tail install.log; fail "the environment of tests"; }
  .venv-dev/bin/python -m pytest -q -rs "${@:2}" || fail "$1"
  say "$1"
}
chart() { tested "the chart's pods start from zero, are replaced and drained" tests/deploy/test_chart_run.py -k "processes and (first_request or replaced or drained)"; }
console() { tested "the console works in a browser" tests/line/test_line_console.py; }
compose() { deploy/try_compose.sh && say "compose with two gateways works"; }

inside() {  # repository, step: the step, in a clone in an empty folder
  cd "$(mktemp -d)"
  if [[ $2 != compose ]]; then  # which needs docker's own settings, and its containers are empty anyway
    export HOME=$PWD/home
    mkdir "$HOME"
    set -m  # each job is a group of its own, as in a terminal
  fi
  git clone -q "file://$1" headwater && cd headwater
  say "$2: cloned $(git rev-parse --short HEAD); $(uname -sm), $(nproc) cores, load$(uptime | sed 's/.*load average:/ /'), $(python3 --version)"
  "$2"
}
has_docker() { docker info >/dev/null 2>&1; }
alone() {  # folder, step: the step in a process that sees the clone in the folder, and nothing else of this repository
  local env=() more=("${packages[@]}")
  if [[ $2 == compose ]]; then
    WALK_INSIDE=$1/headwater.git TMPDIR=$1 bash "$1/walk.sh" compose
    return
  fi
  for name in "${passed_on[@]}"; do [[ -z ${!name:-} ]] || env+=("$name=${!name}"); done
  if ! has_docker; then
    env -i PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 TMPDIR="$1" "${env[@]}" WALK_INSIDE="$1/headwater.git" bash "$1/walk.sh" "$2"
    return
  fi
  [[ $2 != console ]] || more+=("${browser[@]}")
  docker run --rm --init --network host --shm-size 2g "${env[@]/#/-e}" \
    -v "$1/headwater.git:/headwater.git:ro" -v "$1/walk.sh:/walk.sh:ro" "${WALK_IMAGE:-python:3.11-slim}" bash -c "
      apt-get update -qq && apt-get install -y -qq --no-install-recommends ${more[*]} >/dev/null 2>&1
      git config --system --add safe.directory '*'
      WALK_INSIDE=/headwater.git exec bash /walk.sh $2"
}
walk() {  # repository, step…: each in turn, then the summary
  local folder began result failed=0 where="empty containers"
  folder=$(mktemp -d)
  trap 'rm -rf "'"$folder"'"' EXIT
  # A bare clone stays at this commit, whatever is committed meanwhile, and holds nothing that is not.
  git clone -q --bare "$1" "$folder/headwater.git"
  cp "$0" "$folder/walk.sh"
  has_docker || where="empty folders, without docker"
  printf '%-8s  %-8s  %s\n' step result time >"$folder/results"
  for step in "${@:2}"; do
    began=$SECONDS result=passed
    if [[ $step == compose ]] && ! has_docker; then
      result="left out"
    else
      alone "$folder" "$step" 2>&1 | tee -a "$folder/log" || { result=failed failed=1; }
    fi
    printf '%-8s  %-8s  %d min %02d s\n' "$step" "$result" $(((SECONDS - began) / 60)) $(((SECONDS - began) % 60)) >>"$folder/results"
  done
  {
    grep -E '^([0-9]{2}:){2}[0-9]{2} |^[0-9]+ (passed|failed)|^FAILED' "$folder/log" || true
    echo
    echo "$(date -u +%F): walked $(git -C "$folder/headwater.git" rev-parse --short HEAD) in $where, $((SECONDS / 60)) min $((SECONDS % 60)) s in all"
    cat "$folder/results"
  } | tee "${WALK_SUMMARY:-/dev/null}"
  return "$failed"
}

{ # read as a whole: the file may change while it runs
for step in "${steps[@]}"; do
  [[ $step =~ ^(readme|tutorial|compose|chart|console)$ ]] || { echo "no step '$step': readme, tutorial, compose, chart or console" >&2; exit 2; }
done
if [[ -n ${WALK_INSIDE:-} ]]; then inside "$WALK_INSIDE" "${steps[0]}"; else walk "$(cd "$(dirname "$0")/.." && pwd)" "${steps[@]}"; fi
exit
}
