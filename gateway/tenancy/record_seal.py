"""Seals on records in a bucket: what a stranger writes there, a key's digest say, is nobody's.

A seal is a code of the record's key, its value and the time of writing, which for one key only grows: an older version
that somebody puts back is refused by every gateway that has seen a later one.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.services import cluster_key
from headwater.services.cluster_key import Purpose, framed
from headwater.services.freshness import now_ms
from headwater.services.refusals import Refusals

_MAGIC = b"hw1"
"""No JSON document begins with it."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A record that is believed."""

    value: bytes
    is_current: bool
    """Its seal was made with the token that signs now; else it is to be written again."""


class RecordSeals:
    """Seals of one bucket. Without a cluster key nothing is sealed, and sealed records are read all the same."""

    def __init__(self, bucket: str, *, adopts_unsigned: bool = False) -> None:
        """`adopts_unsigned`: records without a seal are believed; an earlier version wrote them."""
        self._bucket, self._adopts_unsigned = bucket.encode(), adopts_unsigned
        self._key = cluster_key.current()
        self._written_at: dict[str, int] = {}
        self._refusals = Refusals("record")

    def seal(self, key: str, value: bytes) -> bytes:
        if self._key is None:
            return value
        at = max(now_ms(), self._written_at.get(key, 0) + 1)
        mac = self._key.sign(Purpose.RECORD, self._message(key, at, value))
        return b"%s.%d.%s\n%s" % (_MAGIC, at, mac.hex().encode(), value)

    def open(self, key: str, sealed: bytes) -> Opened | None:
        """None for a record that is refused, which is counted."""
        opened, why = self._open(key, sealed)
        if why:
            remedy = "--adopt-unsigned-tenants, once, if an earlier version wrote it" if why == "unsigned" else ""
            self._refusals.add(why, key=key, remedy=remedy)
        return opened

    def _open(self, key: str, sealed: bytes) -> tuple[Opened | None, str]:
        head, _, value = sealed.partition(b"\n")
        words = head.split(b".")
        if words[0] != _MAGIC:
            is_believed = self._key is None or self._adopts_unsigned
            return (Opened(sealed, self._key is None), "") if is_believed else (None, "unsigned")
        if self._key is None:
            return Opened(value, is_current=True), ""
        if len(words) != 3 or not words[1].isdigit() or len(words[1]) > 15:
            return None, "forged"
        at, mac = int(words[1]), _unhex(words[2])
        message = self._message(key, at, value)
        if not self._key.believes(mac, Purpose.RECORD, message):
            return None, "forged"
        if at < self._written_at.get(key, 0):
            return None, "replayed"
        self._written_at[key] = at
        return Opened(value, self._key.is_of_first(mac, Purpose.RECORD, message)), ""

    def _message(self, key: str, at: int, value: bytes) -> bytes:
        return framed(self._bucket, key.encode(), at.to_bytes(8, "big"), value)


def _unhex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
