"""Where an engine's processes keep compiled kernels: under keys of their source, the GPU or CPU,
and the compiler.

An image holds kernels in a folder of its installation, which its engines copy from: they cannot
write there.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...models.store import default_cache_dir
from .variables import COSTS_VARIABLE

VARIABLES = ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")
INSTALLED = Path(sys.prefix) / "kernels"
"""Kernels that came with the installation (deploy/Dockerfile)."""


def with_kernel_cache(env: Mapping[str, str], *, installed: Path = INSTALLED) -> dict[str, str]:
    """The environment with cache folders for the compilers, unless it names them. If the models'
    folder is read-only, they are in the user's own cache. Installed kernels are copied there."""
    known = dict(env)
    for folder in (default_cache_dir(env) / "kernels", Path.home() / ".cache/headwater/kernels"):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            known = (
                {name: str(folder) for name in VARIABLES}
                | {COSTS_VARIABLE: str(folder / "step-costs")}
                | known
            )
            break
    for folder in {Path(known[name]) for name in VARIABLES if known.get(name)}:
        # Without a copy they are compiled: a start takes longer.
        with suppress(OSError):
            _copy_missing(installed, folder)
    return known


def _copy_missing(installed: Path, folder: Path) -> None:
    """Copies entries that the folder lacks. Each entry appears complete, also to engines that start
    at the same time. Raises `OSError`."""
    if not installed.is_dir() or (folder.is_dir() and installed.samefile(folder)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for entry in installed.iterdir():
        if (folder / entry.name).exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".copying-") as partial:
            shutil.copytree(entry, Path(partial) / entry.name)
            # NOTE: fails where another engine was faster; then the folder has the same.
            with suppress(OSError):
                (Path(partial) / entry.name).rename(folder / entry.name)
