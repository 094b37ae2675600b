"""Distributions as an installer leaves them: a module, and metadata with an entry point of the
group of platforms."""

from __future__ import annotations

from pathlib import Path

WHOLE = """
from types import SimpleNamespace
from headwater.engine_core.devices.cpu import (
    Platform, api, capabilities, environment, forward_pass, is_available, kv_cache_memory, max_ranks, prepare_kernels,
    prepare_weights, rank_variables, stored_forms,
)
"""
"""A module that offers all that a platform has to, but for its name."""


def install(
    folder: Path, name: str, source: str, *, distribution: str = "", version: str = "1.2"
) -> Path:
    """Registers the platform `name`, whose module has this source; the folder goes on the path."""
    distribution = distribution or f"platform-{name}"
    module = f"{distribution.replace('-', '_')}_module"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[headwater.platforms]\n{name} = {module}\n")
    return folder / f"{module}.py"
