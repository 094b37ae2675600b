"""Folders of the cache that a child process fills: whole or not at all, also after a kill or a power failure."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..runtime.kept_child import kept_child
from ..runtime.progress import Report, word_of


class ChildFailed(Exception):
    """The process failed; carries its last output."""


def fill_folder(
    folder: Path, module: str, flags: Sequence[str], progress: Report, *, env: Mapping[str, str] = os.environ
) -> None:
    """Runs `python -m module --folder=… flags` on a folder beside this one, and renames it. The caller holds the lock
    of the parent folder: what killed processes left there is removed. Raises `ChildFailed`."""
    for leftover in folder.parent.glob(".partial-*"):
        shutil.rmtree(leftover)
    partial = folder.with_name(f".partial-{folder.name}")
    partial.mkdir()
    last_words = "it said nothing"
    with kept_child([sys.executable, "-m", module, f"--folder={partial}", *flags], env=env) as child:
        for line in child:
            if (word := word_of(line)) is not None:
                progress(word["what"], word["done"], word["total"])
            elif line:
                last_words = line
    if child.returncode != 0:
        shutil.rmtree(partial)
        raise ChildFailed(last_words)
    _keep(partial, as_=folder)


def _keep(partial: Path, *, as_: Path) -> None:
    """Renames, so that the folder is there whole or not at all also after a power failure."""
    for each in (*partial.iterdir(), partial):
        _sync(each)
    partial.rename(as_)
    _sync(as_.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
