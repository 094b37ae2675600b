"""Folders of the cache that a child process fills: whole or not at all, also after a kill or a
power failure."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..runtime.hardware import thread_variables
from ..runtime.kept_child import kept_child
from ..runtime.progress import Report, word_of

SIGNAL_STATUS = 128
"""Added to the number of the signal that ended a process."""


class ChildFailed(Exception):
    """The process failed; carries its last output, or the signal that ended it."""


def fill_folder(
    folder: Path,
    module: str,
    flags: Sequence[str],
    progress: Report,
    *,
    last: str,
    env: Mapping[str, str] = os.environ,
) -> None:
    """Runs `python -m module --folder=… flags` on a folder beside this one, and renames it. `last`
    names the file that the module writes last. The caller holds the lock of the parent folder: what
    killed processes left there is removed. Raises `ChildFailed`."""
    for leftover in folder.parent.glob(".partial-*"):
        shutil.rmtree(leftover)
    partial = folder.with_name(f".partial-{folder.name}")
    partial.mkdir()
    last_words = ""
    env = {**env, **thread_variables(0, env)}
    with kept_child(
        [sys.executable, "-m", module, f"--folder={partial}", *flags], env=env
    ) as child:
        for line in child:
            if (word := word_of(line)) is not None:
                progress(word["what"], word["done"], word["total"])
            elif line:
                last_words = line
    # The keeper's status is 0 where a signal ended the keeper, and with it the module.
    if child.returncode != 0 or not (partial / last).is_file():
        shutil.rmtree(partial)
        raise ChildFailed(_reason(child.returncode, last_words))
    _keep(partial, as_=folder)


def _reason(status: int, last_words: str) -> str:
    """`status`: the exit status, as a shell has it for a child that a signal ended."""
    try:
        ended_by = signal.Signals(status - SIGNAL_STATUS)
    except ValueError:
        return last_words or "it printed nothing"
    return f"{ended_by.name} ended it" + (
        ", as when memory runs out" if ended_by is signal.SIGKILL else ""
    )


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
