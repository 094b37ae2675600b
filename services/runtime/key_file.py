"""Files of keys: a name and its key a line. The gateway reads them; `headwater up` refuses one that
it could not read before anything starts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from .owner_file import read_secrets
from .settings import SettingError

OPEN_TENANT = "open"
ADMIN_TENANT = "admin"
RESERVED = (OPEN_TENANT, ADMIN_TENANT)
"""Names that no tenant may have: data of callers without keys and of administrators is kept under
them."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def tenants_by_key(path: Path) -> dict[bytes, str]:
    """Names of tenants by the digest of their key. Raises `SettingError`, `OSError`."""
    return _names_by_key("api_key_file", path, "tenant", RESERVED)


def admins_by_key(path: Path) -> dict[bytes, str]:
    """Names of administrators by the digest of their key. Raises `SettingError`, `OSError`."""
    return _names_by_key("admin_key_file", path, "name", ())


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _names_by_key(
    setting: str, path: Path, owner: str, reserved: Collection[str]
) -> dict[bytes, str]:
    """Lines that are empty, or begin with #, are skipped."""
    names = {}
    for number, line in enumerate(read_secrets(setting, path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or NAME.fullmatch(words[0]) is None:
            raise SettingError(setting, f"{path}:{number}", f"lines of the form `{owner} key`")
        names[digest_of(words[1])] = words[0]
    if not names:
        raise SettingError(setting, str(path), "a file with at least one key")
    if taken := sorted(set(reserved) & set(names.values())):
        allowed = f"names of tenants but {' and '.join(reserved)}"
        raise SettingError(setting, f"{path}: {taken[0]}", allowed)
    return names
