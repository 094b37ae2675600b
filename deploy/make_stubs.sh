#!/usr/bin/env bash
# Generates the gRPC stubs: make_stubs.sh PYTHON OUT; they land in OUT/headwater/proto.
set -euo pipefail
python=$1 out=$2
mkdir -p "$out/headwater"
PATH=$(dirname "$(realpath -s "$python")"):$PATH "$python" -m grpc_tools.protoc -I headwater/proto=proto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" proto/*.proto
