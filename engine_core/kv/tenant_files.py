"""Blocks of tenants in a disk folder that several engines share: lists their tenants, and deletes
them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from .disk.block_files import TENANTS, tenants_of

ATTEMPTS = 3
"""A thread may write a file while its folder is deleted."""


def tenants_below(root: Path) -> set[str]:
    """Tenants who have blocks in any engine's folder, as far as their names can be read."""
    found = set[str]()
    for folder in _namespaces(root):
        with contextlib.suppress(OSError):
            found |= tenants_of(folder)
    return found


def delete_tenants(root: Path, tenants: Collection[str]) -> int:
    """Deletes every namespace that belongs to one of these tenants, also a shared one. Running
    engines find their files missing and compute. Returns the number of namespaces; raises `OSError`
    at the end where one could not be deleted."""
    num_deleted = 0
    failure = None
    for folder in _namespaces(root):
        try:
            if not tenants_of(folder).isdisjoint(tenants):
                _delete(folder)
                num_deleted += 1
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure
    return num_deleted


def _delete(folder: Path) -> None:
    """Deletes the name files last, so that the next sweep finds the rest if this one is killed."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            for path in folder.iterdir():
                if path.name != TENANTS:
                    path.unlink(missing_ok=True)
            shutil.rmtree(folder)
        except FileNotFoundError:
            # An engine that runs deletes or renames single files too.
            if not folder.exists():
                return
        except OSError:
            if attempt == ATTEMPTS:
                raise


def _namespaces(root: Path) -> Iterator[Path]:
    return (path.parent for path in root.glob(f"*/*/*/{TENANTS}"))
