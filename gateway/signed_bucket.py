"""A bucket of JetStream whose values are sealed: a value that a process without the key wrote is
ignored.

Knows nothing about the contents of values. An earlier value that is put back is trusted again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.kv import KeyValue

from headwater.services.runtime.record_seal import RecordSeals

from .buckets import Missing, drop_keys, entries, put_once, sizes, value_of


class SignedBucket:
    """Values by key. Every method raises what JetStream raises."""

    def __init__(self, js: JetStreamContext, bucket: KeyValue, seals: RecordSeals) -> None:
        self._js = js
        self._bucket = bucket
        self.seals = seals

    async def put(self, key: str, value: bytes) -> None:
        await self._bucket.put(key, self.seals.seal(key, value))

    async def create(self, key: str, value: bytes) -> None:
        """Writes a new value. Raises `KeyWrongLastSequenceError` if the key exists."""
        await self._bucket.create(key, self.seals.seal(key, value))

    async def update(self, key: str, value: bytes, *, last: int) -> None:
        """Replaces a value. Raises `KeyWrongLastSequenceError` where that is not the last revision
        any longer."""
        await self._bucket.update(key, self.seals.seal(key, value), last=last)

    async def delete(self, key: str, *, last: int) -> None:
        await self._bucket.delete(key, last=last)

    async def drop(self, pattern: str) -> None:
        """Drops keys that match the filter, with all that they ever had; also while storage is
        full."""
        await drop_keys(self._js, self._bucket._name, pattern)

    async def sizes(self, pattern: str) -> list[int]:
        """Bytes of each value that matches the filter now, without reading any."""
        return await sizes(self._js, self._bucket._name, pattern)

    async def put_once(self, key: str, value: bytes, headers: dict[str, str]) -> bool:
        """Writes a value once. Returns False where there is a trusted value. One that is not
        trusted is replaced."""
        subject = f"$KV.{self._bucket._name}.{key}"
        sealed = self.seals.seal(key, value)
        if await put_once(self._js, subject, sealed, headers):
            return True
        try:
            await self.get(key)
        except Missing:
            there = await self._bucket.get(key)
            expected = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(there.revision)}
            await self._js.publish(subject, sealed, headers=expected | headers)
            return True
        return False

    async def get(self, key: str) -> tuple[bytes, int]:
        """A value and its revision. Raises `Missing`."""
        value, revision = await value_of(self._bucket, key)
        if (opened := self.seals.open(key, value)) is None:
            raise Missing(key)
        return opened.value, revision

    async def all(self, pattern: str) -> AsyncIterator[tuple[str, bytes]]:
        """Keys and values that match the filter now."""
        async for entry in entries(self._js, self._bucket._name, pattern):
            if (opened := self.seals.open(entry.key, entry.value or b"")) is not None:
                yield entry.key, opened.value

    async def sign_all(self) -> None:
        """Signs trusted values without a seal, or with that of an earlier token, unless they change
        meanwhile."""
        found = [entry async for entry in entries(self._js, self._bucket._name, ">")]
        for entry in found:
            opened = self.seals.open(entry.key, entry.value or b"")
            if opened is not None and not opened.is_current:
                try:
                    await self.update(entry.key, opened.value, last=entry.revision or 0)
                except nats.js.errors.KeyWrongLastSequenceError:
                    continue
