"""Where an engine's processes keep compiled kernels: under keys of their source, the GPU or CPU, and the compiler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..models.store import default_cache_dir

VARIABLES = ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")


def with_kernel_cache(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the compilers' folders; those that it names stay. Models may lie where an engine cannot
    write; then it is the user's own cache."""
    for folder in (default_cache_dir(env) / "kernels", Path.home() / ".cache/headwater/kernels"):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return {name: str(folder) for name in VARIABLES} | dict(env)
    return dict(env)
