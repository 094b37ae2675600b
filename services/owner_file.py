"""Files that only their owner may read, written whole: readers see the old content or the new."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

OWNER_ONLY = 0o600


def write_owner_file(path: Path, content: bytes) -> None:
    """On the disk when this returns, folders included. Raises `OSError`, and then leaves what was there."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
