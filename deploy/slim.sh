#!/usr/bin/env bash
# Takes out of an environment what serving has no use for: slim.sh FOLDER LAYER, where LAYER is front, engine or engine-cpu.
# Images are made so, and the environment of `make up` on a machine without a GPU.
set -euo pipefail
folder=$1 layer=$2
site=$(echo "$folder"/lib/python3.*/site-packages)
cd "$site"

# Tests and declarations of types of libraries. Sources and headers stay: Triton compiles with its own.
find . -type d \( -name tests -o -name test \) -path '*/*/*' -prune -exec rm -rf {} +
find . -name '*.pyi' -delete
if [[ $layer == front ]]; then
  # What built the wheel, and a faster way to download models, which no front stage does.
  rm -rf pip setuptools pkg_resources _distutils_hack distutils-precedence.pth hf_xet
  rm -rf {pip,setuptools,hf_xet}-*.dist-info "$folder"/bin/pip*
fi
if [[ $layer == engine-cpu ]]; then
  # Assemblers for GPUs, and what other programs are built with.
  rm -rf triton/backends/*/{bin,lib} triton/{instrumentation,FileCheck} torch/{include,share}
  find torch/bin -type f ! -name torch_shm_manager -delete
fi
# Symbols for debuggers. Not of all libraries: what auditwheel has patched does not load afterwards.
if command -v strip >/dev/null; then
  for library in triton/_C/libtriton.so torch/lib/libtorch_cpu.so llvmlite/binding/libllvmlite.so uvloop/loop.*.so yaml/_yaml.*.so tokenizers/tokenizers.*.so; do
    [[ ! -e $library ]] || strip --strip-unneeded "$library"
  done
fi
