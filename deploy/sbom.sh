#!/usr/bin/env bash
# Writes what is in each image (CycloneDX, JSON), from the locks that it installs: sbom.sh PYTHON FOLDER.
set -euo pipefail
python=$1
mkdir -p "$2"
folder=$(realpath "$2")
cd "$(dirname "$0")/.."
locks=$PWD/deploy/locks
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

bill() {  # image, lines of its requirements
  printf '%s\n' "${@:2}" >"$work/$1.txt"
  "$python" -m cyclonedx_py requirements --output-reproducible --output-format JSON --pyproject pyproject.toml \
    --output-file "$folder/headwater-$1.json" "$work/$1.txt"
}
cpu_torch=$(sed -nE 's/^release=(torch==.*)$/\1/p' deploy/install.sh)
bill front "-r $locks/front.txt"
bill engine "-r $locks/engine.txt" "-r $locks/torch.txt"
bill engine-cpu "-r $locks/engine.txt" "$cpu_torch"
