#!/usr/bin/env bash
# Installs the packages of a lock and refuses files whose hashes differ: install.sh PYTHON LAYER [TORCH].
# LAYER is front, engine, up, dev, clients or docs (deploy/make_locks.sh); all but `front` and `docs` bring torch, unless it is there. TORCH_INDEX names
# an index of CPU builds of torch to install from. Without it TORCH says which build: `default`, that of the lock, or `auto`,
# a CPU build where no NVIDIA GPU is seen and pip's own indexes or PyTorch's offer one. Beside a CPU build `up` keeps nothing
# that only a GPU needs (deploy/slim.sh).
set -euo pipefail
python=$1 layer=$2 torch=${3:-auto}
cd "$(dirname "$0")/.."

# Byte code of all packages for tests is a minute of a core (2026-11-22), and what is imported is compiled then.
compile=--compile
[[ $layer != dev && $layer != clients && $layer != docs ]] || compile=--no-compile
locked() { "$python" -m pip install --require-hashes --only-binary :all: $compile "$@"; }
# CPU builds are in no lock, since default indexes do not serve them: an exact release, without dependencies.
cpu_build() { "$python" -m pip install --no-deps --only-binary :all: $compile "$@"; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
release=torch==2.13.0
pytorch_index=https://download.pytorch.org/whl/cpu

# pip says nothing while it unpacks and compiles, which takes minutes: the environment's size says how far it is.
# About 2.0 GB with a CPU build of torch (x86-64, 2026-11-30), of which 1.5 GB stay, and 1.1 GB where `strip` is installed;
# CUDA's libraries are several GB more.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
show_size() {
  while sleep 10 >/dev/null 2>&1; do
    echo "${step}: $(du -sm "$packages" | cut -f1) MB of packages are there$about"
  done
}
step="installing $layer" about=
if [[ $layer == up ]]; then
  step="2 of 4"
  has_gpu || about=", of about 1950 MB"
  echo "2 of 4: packages of deploy/locks$about"
fi
show_size &
size=$!
trap 'kill "$size" 2>/dev/null' EXIT

locks=(-r "deploy/locks/$layer.txt")
beside=
if [[ $layer != front && $layer != docs ]] && ! "$python" -c 'import torch' 2>/dev/null; then
  if [[ -n ${TORCH_INDEX:-} ]]; then
    cpu_build --index-url "$TORCH_INDEX" "$release"
  elif [[ $torch == default || $(uname) != Linux ]] || has_gpu; then
    locks+=(-r deploy/locks/torch.txt)
  else
    # The largest file of all, which none of the others waits for: a second core unpacks it beside them.
    { cpu_build "$release+cpu" || cpu_build --retries 0 --timeout 15 --index-url "$pytorch_index" "$release+cpu"; } &
    beside=$!
    trap 'kill "$size" 2>/dev/null; [[ -z $beside ]] || kill "$beside" 2>/dev/null' EXIT
  fi
fi
locked "${locks[@]}"
if [[ -n $beside ]]; then
  is_offered=1
  wait "$beside" || is_offered=
  beside=
  if [[ -z $is_offered ]]; then
    echo "no CPU build of torch is offered here, so its default build is installed (TORCH_INDEX names an index of CPU builds)"
    locked -r deploy/locks/torch.txt
  fi
fi
if [[ $layer == up && $(uname) == Linux ]] && "$python" -c 'import torch; raise SystemExit(torch.version.cuda is not None)'; then
  deploy/slim.sh "$("$python" -c 'import sys; print(sys.prefix)')" engine-cpu
fi
# The library is a build for this platform, and says that it wants Python 3.12, which it does not (pyproject.toml).
if [[ $layer == dev && $(uname -sm) == "Linux x86_64" ]]; then
  locked --no-deps --ignore-requires-python -r deploy/locks/helm.txt
fi
