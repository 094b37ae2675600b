"""Seals on messages of the bus: a process without a cluster token can publish, and is not trusted.

A seal is a code of subject, sender, number, time and payload. Each sender numbers its messages, so
that a reader takes none twice; a new reader refuses messages that are older than a minute.
"""

from __future__ import annotations

import secrets
import struct
from collections import OrderedDict

from .cluster_key import MIN_MAC_LEN, ClusterKey, Purpose
from .freshness import is_fresh, now_ms
from .refusals import Refusals

_MAGIC = b"\x00hw1"
"""First bytes of a seal. No other message begins with them: neither protobuf nor JSON does."""
_HEAD = struct.Struct(">4s8sQQ16s")
"""Format of the head: magic, sender, number, milliseconds since 1970, code."""
_SIGNED = struct.Struct(">8sQQI")
_MAX_SENDERS = 4096
"""Number of senders whose last message number a reader remembers."""


class Sealer:
    """One sender. Without a key nothing is sealed."""

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key
        self._sender = secrets.token_bytes(8)
        self._number = 0

    def seal(self, subject: str, payload: bytes) -> bytes:
        if self._key is None:
            return payload
        self._number += 1
        at = now_ms()
        mac = self._key.sign(
            Purpose.BUS, _message(subject, self._sender, self._number, at, payload)
        )[:MIN_MAC_LEN]
        return _HEAD.pack(_MAGIC, self._sender, self._number, at, mac) + payload


class SealReader:
    """One reader of messages in the order of their sending. Without a key it accepts messages
    without a seal."""

    def __init__(self, key: ClusterKey | None, refusals: Refusals) -> None:
        self._key = key
        self._refusals = refusals
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def open(self, subject: str, message: bytes) -> bytes | None:
        """The payload; None for a message that is refused, which is counted."""
        payload, why = self._open(subject, message)
        if why:
            self._refusals.add(why, subject=subject)
        return payload

    def _open(self, subject: str, message: bytes) -> tuple[bytes | None, str]:
        is_sealed = message.startswith(_MAGIC) and len(message) >= _HEAD.size
        if self._key is None:
            # A stage without the token of the others.
            return (None, "no_token_here") if is_sealed else (message, "")
        if not is_sealed:
            return None, "unsigned"
        _, sender, number, at, mac = _HEAD.unpack_from(message)
        payload = message[_HEAD.size :]
        if not self._key.believes(mac, Purpose.BUS, _message(subject, sender, number, at, payload)):
            return None, "forged"
        if not is_fresh(at):
            return None, "stale"
        if number <= self._numbers.get(sender, 0):
            return None, "replayed"
        self._numbers[sender] = number
        self._numbers.move_to_end(sender)
        if len(self._numbers) > _MAX_SENDERS:
            self._numbers.popitem(last=False)
        return payload, ""


def _message(subject: str, sender: bytes, number: int, at: int, payload: bytes) -> bytes:
    """Bytes that the code covers. The length of the subject marks the start of the payload."""
    name = subject.encode()
    return _SIGNED.pack(sender, number, at, len(name)) + name + payload
