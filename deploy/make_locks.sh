#!/usr/bin/env bash
# Writes deploy/locks from pyproject.toml: make_locks.sh PYTHON [--upgrade]. One resolution for all Pythons and
# platforms, split into layers that include one another (front, engine, up, dev, clients), `torch`, torch's default build
# with the libraries that only this build needs, `helm`, what tests of the chart need beside `dev`, and `docs`, what builds
# the site. A release that is locked stays unless pyproject.toml or --upgrade moves it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1; shift
locks=deploy/locks
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'uv>=0.9'

# A wheel of the project is built with these, from the lock as well.
"$python" - >"$work/build.in" <<'PY'
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
PY
# The release that GPU kernels are measured with; it needs the release of triton in the extra `dev`.
echo "torch==2.11.0" >"$work/torch.in"

resolve() {
  "$work/venv/bin/uv" pip compile --quiet --universal --python-version "${oldest_python:-3.11}" --fork-strategy fewest \
    --generate-hashes --no-header --no-annotate "$@"
}
# Not those that a layer has for Windows alone: another layer may want them everywhere.
names() { sed -nE "/sys_platform == 'win32'/!s/^([a-z0-9._-]+)==.*/\1/p" "$@"; }
without() { sed 's/^/--no-emit-package=/'; }
repeated_nowhere() {  # file, earlier files: leaves the entries of the first that none of the others has word for word
  "$python" - "$@" <<'PY'
import re
import sys
from pathlib import Path

entries = {path: re.findall(r"^\S.*\n(?: .*\n)*", Path(path).read_text(), re.M) for path in sys.argv[1:]}
first, *earlier = entries.values()
had = {entry for each in earlier for entry in each if "==" in entry}
Path(sys.argv[1]).write_text("".join(entry for entry in first if entry not in had))
PY
}
layer() {  # file, the layer it includes (or -), arguments of resolve: the packages that neither this nor torch's has
  local file=$work/$1.txt includes=$2
  shift 2
  {
    echo "# Written by \`make lock\`."
    [[ $includes == - ]] || echo "-r $includes.txt"
    resolve --constraint "$work/all.txt" $(cat "$work/done" | without) "$@"
  } >"$file"
  repeated_nowhere "$file" $written
  written+=" $file"
  names "$file" >>"$work/done"
}

sed '/^-r /d' "$locks"/*.txt >"$work/all.txt" 2>/dev/null || true
resolve pyproject.toml "$work/build.in" --extra dev --extra clients --extra calibration --extra docs --constraint "$work/torch.in" --output-file "$work/all.txt" "$@" >/dev/null
names "$work/all.txt" | grep -E '^(torch|nvidia-.*|cuda-.*)$' >"$work/of-torch"
cp "$work/of-torch" "$work/done"
written=
# Spans are a setting of stages that run in images, which nobody can install anything in.
layer front - pyproject.toml "$work/build.in" --extra tracing
layer engine front pyproject.toml --extra engine
layer up engine pyproject.toml --extra engine --extra embedded
layer dev up pyproject.toml --extra dev
layer clients dev pyproject.toml --extra dev --extra clients --extra calibration
oldest_python=3.12 layer helm - pyproject.toml --extra helm
# The site is built without the project, in an environment of its own.
"$python" - >"$work/docs.in" <<'PY'
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
PY
{
  echo "# Written by \`make lock\`."
  resolve --constraint "$work/all.txt" "$work/docs.in"
} >"$work/docs.txt"
grep -vxFf "$work/of-torch" "$work/done" >"$work/others" && mv "$work/others" "$work/done"
layer torch - "$work/torch.in"
mkdir -p "$locks"
mv "$work"/{front,engine,up,dev,clients,docs,helm,torch}.txt "$locks"
