"""Seals on records that outlive their writer, in NATS and Redis: records that a process without the
key wrote are not trusted.

A seal is a code of a record's place, its value and the time of writing. It does not prove that no
later record was written there: a reader that needs to know remembers the times that it has seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import cluster_key
from .cluster_key import Purpose, framed
from .freshness import now_ms
from .refusals import Refusals

_MAGIC = b"hw1"
"""First bytes of a seal. No JSON document begins with them, and no map of msgpack."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A record that is trusted."""

    value: bytes
    at: int
    """Time of writing, milliseconds since 1970; 0 where it has no seal."""
    is_current: bool
    """Whether its seal was made with the token that signs now; otherwise it is to be written
    again."""


class RecordSeals:
    """Seals of one bucket. Without a cluster key nothing is sealed, and sealed records are read all
    the same."""

    def __init__(self, bucket: str, *, adopts_unsigned: bool = False) -> None:
        """`adopts_unsigned`: records without a seal are trusted; an earlier version wrote them."""
        self._bucket = bucket.encode()
        self._adopts_unsigned = adopts_unsigned
        self._key = cluster_key.current()
        self._refusals = Refusals("record")

    @property
    def are_made(self) -> bool:
        """Whether there is a cluster key."""
        return self._key is not None

    def code(self, key: str, value: bytes, *, after: int = 0) -> bytes:
        """The seal alone, for a value that is stored next to it; empty without a cluster key. It
        contains the time of writing, which is later than `after` even if this machine's clock is
        behind."""
        if self._key is None:
            return b""
        at = max(now_ms(), after + 1)
        mac = self._key.sign(Purpose.RECORD, self._message(key, at, value))
        return b"%s.%d.%s" % (_MAGIC, at, mac.hex().encode())

    def name_of(self, word: str) -> str:
        """Name that is always the same for a word and cannot be guessed without the cluster key;
        without a key, the word itself."""
        if self._key is None:
            return word
        return self._key.sign(Purpose.RECORD, framed(self._bucket, b"name", word.encode())).hex()

    def seal(self, key: str, value: bytes, *, after: int = 0) -> bytes:
        """The `code` followed by the value."""
        code = self.code(key, value, after=after)
        return code + b"\n" + value if code else value

    def open(self, key: str, sealed: bytes, *, not_before: int = 0) -> Opened | None:
        """Opens a value of `seal`; otherwise as `open_beside`."""
        if not sealed.startswith(_MAGIC):
            return self.open_beside(key, b"", sealed, not_before=not_before)
        code, _, value = sealed.partition(b"\n")
        return self.open_beside(key, code, value, not_before=not_before)

    def open_beside(
        self, key: str, code: bytes, value: bytes, *, not_before: int = 0
    ) -> Opened | None:
        """Checks a value against its seal. None for a record that is refused, which is counted; a
        record that was written before `not_before` is refused, too."""
        opened, why = self._open(key, code, value)
        if opened is not None and opened.at < not_before:
            opened = None
            why = "replayed"
        if why:
            self._refusals.add(why, key=key, remedy=_REMEDIES.get(why, ""))
        return opened

    @staticmethod
    def time_of(sealed: bytes) -> int:
        """Time in a seal of `seal`; 0 where it made none."""
        words = sealed.partition(b"\n")[0].split(b".")
        return int(words[1]) if words[0] == _MAGIC else 0

    def _open(self, key: str, code: bytes, value: bytes) -> tuple[Opened | None, str]:
        if self._key is None:
            return Opened(value, 0, is_current=True), ""
        if not code:
            return (
                (Opened(value, 0, is_current=False), "")
                if self._adopts_unsigned
                else (None, "unsigned")
            )
        words = code.split(b".")
        if words[0] != _MAGIC or len(words) != 3 or not words[1].isdigit() or len(words[1]) > 15:
            return None, "forged"
        at = int(words[1])
        mac = _unhex(words[2])
        message = self._message(key, at, value)
        if not self._key.believes(mac, Purpose.RECORD, message):
            return None, "forged"
        return Opened(value, at, self._key.is_of_first(mac, Purpose.RECORD, message)), ""

    def _message(self, key: str, at: int, value: bytes) -> bytes:
        return framed(self._bucket, key.encode(), at.to_bytes(8, "big"), value)


_REMEDIES = {
    "unsigned": "--adopt-unsigned-tenants, once, if an earlier version wrote it",
    "replayed": "docs/security.md, if NATS was restored from a backup",
}


def _unhex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
