"""Where an engine's processes keep compiled kernels: under keys of their source, the GPU or CPU, and the compiler."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.services.model_store import default_cache_dir

VARIABLES = ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")


def with_kernel_cache(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the compilers' folders; those that it names stay."""
    return {name: str(default_cache_dir(env) / "kernels") for name in VARIABLES} | dict(env)
