"""The tenants that were read last, in a file of this machine, for a gateway that starts while NATS
is away.

It has the contents of the bucket: digests of keys, no keys. Only its owner may read it. Gateways
may share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from headwater.services.runtime.owner_file import write_owner_file

from .records import TenantRecord

_records = msgspec.json.Decoder(list[TenantRecord])


class Snapshot:
    """A file of tenants' records. It keeps nothing where `path` is empty."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._kept = b""

    def save(self, records: Sequence[TenantRecord]) -> None:
        """Writes the file; readers see the old list or the new one. Errors are logged and not
        raised."""
        text = msgspec.json.encode(records)
        if self._path is None or text == self._kept:
            return
        try:
            write_owner_file(self._path, text)
        except OSError as failure:
            structlog.get_logger().warning(
                "tenants cannot be kept in their file", error=str(failure)
            )
            return
        self._kept = text

    def load(self) -> list[TenantRecord] | None:
        """The tenants of the file; None where there is no list that can be read."""
        if self._path is None or not self._path.exists():
            return None
        try:
            return _records.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError) as failure:
            structlog.get_logger().warning("the file of tenants cannot be read", error=str(failure))
            return None
