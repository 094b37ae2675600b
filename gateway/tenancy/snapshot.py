"""The tenants as last read, in a file of this machine, for a gateway that starts while NATS is away.

It holds what the bucket holds: digests of keys, no keys; only its owner may read it. Gateways may share it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from headwater.gateway.tenancy.records import TenantRecord

OWNER_ONLY = 0o600
_records = msgspec.json.Decoder(list[TenantRecord])


class Snapshot:
    """Of nothing where `path` is empty."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._kept = b""

    def save(self, records: Sequence[TenantRecord]) -> None:
        """Readers see the old list or the new one. A file that cannot be written costs only what it is for."""
        text = msgspec.json.encode(records)
        if self._path is None or text == self._kept:
            return
        partial = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except OSError as failure:
            partial.unlink(missing_ok=True)
            structlog.get_logger().warning("tenants cannot be kept in their file", error=str(failure))
            return
        self._kept = text

    def load(self) -> list[TenantRecord] | None:
        """None where there is no list that can be read."""
        if self._path is None or not self._path.exists():
            return None
        try:
            return _records.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError) as failure:
            structlog.get_logger().warning("the file of tenants cannot be read", error=str(failure))
            return None
