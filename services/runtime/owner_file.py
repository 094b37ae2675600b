"""Files that other users may not read: secrets, state and logs. They are written whole: readers see
the old content or the new."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import BinaryIO

from .settings import SettingError

OWNER_ONLY = 0o600
OWN_FOLDER = 0o700
OWN_LOG = 0o640
OTHERS = 0o007


def read_secrets(setting: str, path: Path) -> str:
    """Text of a file that a setting names. Raises `SettingError` where users beyond owner and group
    may read or write it, `OSError`."""
    with path.open() as file:
        if os.fstat(file.fileno()).st_mode & OTHERS:
            raise SettingError(
                setting, str(path), f"a file that no other user may read: chmod o= {path}"
            )
        return file.read()


def own_folder(path: Path) -> None:
    """Makes a folder that only its owner may enter, or restricts an existing one. Raises
    `OSError`."""
    path.mkdir(parents=True, exist_ok=True, mode=OWN_FOLDER)
    if path.stat().st_mode & 0o777 != OWN_FOLDER:
        path.chmod(OWN_FOLDER)


def open_log(path: Path, *, append: bool) -> BinaryIO:
    """Opens a log that its owner writes and its group may read. Raises `OSError`."""
    how = os.O_APPEND if append else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | how, OWN_LOG), "wb")


def write_owner_file(path: Path, content: bytes) -> None:
    """Writes a file. It is on the disk when this returns, folders included. Raises `OSError`, and
    then leaves the old file."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(
            os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb"
        ) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
