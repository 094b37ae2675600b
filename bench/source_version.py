"""Version of the measured sources: a commit in a checkout, a hash in a copy without git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from headwater.engine_core.platforms.numerics_id import source_digest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("bench", "engine_core", "gateway", "kernels", "proto", "services", "tests")
"""Folders whose files are hashed, as far as they exist."""


def source_version(root: Path = ROOT) -> str:
    """`git rev-parse --short HEAD` of the checkout that `root` is, with `+dirty` where it has
    changes; else `tree:HASH`, the same in every copy."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # A copy may lie inside another project's checkout.
    if top is not None and Path(top).resolve() == root.resolve():
        commit = _git(root, "rev-parse", "--short", "HEAD")
        changes = _git(root, "status", "--porcelain")
        if commit is not None and changes is not None:
            return commit + ("+dirty" if changes else "")
    return f"tree:{source_digest(root / part for part in PARTS if (root / part).is_dir()).hex()}"


def _git(root: Path, *arguments: str) -> str | None:
    """Output of git; None if there is no git, no commit, or a checkout that git does not trust."""
    try:
        done = subprocess.run(
            ["git", "-C", root, *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
