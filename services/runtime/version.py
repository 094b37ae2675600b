"""Version of this program: its release and the commit that it was made from. Runs no program."""

from __future__ import annotations

import importlib.metadata
import os
from functools import cache
from pathlib import Path

RELEASE = importlib.metadata.version("headwater")
COMMIT_VARIABLE = "HEADWATER_COMMIT"
"""Variable that names the commit where there is no checkout, as in an image."""
_ROOT = Path(__file__).parents[2]
_SHOWN_CHARS = 9


@cache
def commit() -> str:
    """Beginning of the commit's id; empty where it is not known."""
    return (os.environ.get(COMMIT_VARIABLE) or commit_of(_ROOT))[:_SHOWN_CHARS]


def full_version() -> str:
    """Release and commit, as `0.2.0+1a2b3c4d5`."""
    return f"{RELEASE}+{commit()}" if commit() else RELEASE


def commit_of(checkout: Path) -> str:
    """Id of the commit of a git checkout; empty for a folder that is none."""
    try:
        folder = _git_folder(checkout)
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        return _commit_of_ref(folder, head.removeprefix("ref: "))
    except OSError:
        return ""


def _git_folder(checkout: Path) -> Path:
    """Folder in which git keeps HEAD. Raises `OSError`."""
    folder = checkout / ".git"
    if folder.is_file():
        # In a worktree, `.git` is a file that names the folder.
        return checkout / folder.read_text().strip().removeprefix("gitdir: ")
    return folder


def _commit_of_ref(folder: Path, ref: str) -> str:
    """Commit of a branch. Raises `OSError`."""
    shared = folder / "commondir"
    common = folder / shared.read_text().strip() if shared.exists() else folder
    if (common / ref).exists():
        return (common / ref).read_text().strip()
    packed = (common / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), "")
