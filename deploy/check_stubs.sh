#!/usr/bin/env bash
# Fails when the committed stubs are not what the .proto files generate: check_stubs.sh PYTHON.
set -euo pipefail
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
deploy/make_stubs.sh "$1" "$fresh"
for stub in "$fresh"/headwater/proto/*; do
  cmp -s "$stub" "proto/$(basename "$stub")" || { echo "stale stub: proto/$(basename "$stub") (run: make proto)" >&2; exit 1; }
done
for stub in proto/*_pb2*; do
  [[ -e $fresh/headwater/proto/$(basename "$stub") ]] || { echo "stub without .proto: $stub" >&2; exit 1; }
done
