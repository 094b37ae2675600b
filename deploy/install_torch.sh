#!/usr/bin/env bash
# Installs torch: install_torch.sh PYTHON. Where no NVIDIA GPU is seen, the release whose CPU build package indexes
# offer; TORCH_INDEX names an index of CPU builds to prefer, since the default build on Linux carries CUDA's libraries.
set -euo pipefail
python=$1
if "$python" -c 'import torch' 2>/dev/null; then exit 0; fi
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  "$python" -m pip install 'torch>=2.11'
else
  "$python" -m pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} 'torch==2.13.0'
fi
