"""Times at which tenants' records were last written or removed, so that an older record that is put
back is refused.

NATS cannot prove it: its passwords suffice to restore any earlier state. So the times are kept out
of their reach, in a file of this machine and in Redis, and gateways send them to each other in
sealed messages. A record with no time in any of these places is taken from NATS as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec
import structlog
from redis.exceptions import ResponseError

from headwater.services.runtime.owner_file import write_owner_file
from headwater.services.runtime.record_seal import RecordSeals
from headwater.services.runtime.store import Script, Store, StoreUnavailable

HASH = "headwater:tenants:last_written"
_PAGE = 1000
# Past Redis's bound of memory: it is a line for each name that was ever a tenant's.
_SET = Script("redis.call('HSET', KEYS[1], unpack(ARGV))")
_times = msgspec.json.Decoder(dict[str, int])


class LastWritten:
    """Times of records, in milliseconds since 1970, by the record's key in the bucket; times only
    grow. Without a cluster key it stays empty: no time there could be trusted."""

    def __init__(self, path: str = "", store: Store | None = None) -> None:
        """`path` is a file that gateways of one machine may share; empty: none."""
        self._path = Path(path) if path else None
        self._store = store or Store(None)
        self._seals = RecordSeals(HASH)
        self._times: dict[str, int] = {}
        self._on_disk: dict[str, int] = {}
        self._in_redis: dict[str, int] = {}

    def of(self, key: str) -> int:
        """Time of a record; 0 for an unknown one."""
        return self._times.get(key, 0)

    def note(self, times: Mapping[str, int]) -> None:
        for key, at in times.items() if self._seals.are_made else ():
            self._times[key] = max(at, self.of(key))

    async def read(self) -> None:
        """Reads the times that this machine and other gateways have kept."""
        self._on_disk = await asyncio.to_thread(self._load)
        self.note(self._on_disk)
        await self._fetch()

    async def keep(self) -> None:
        """Writes the known times to the places that lack them. A place that is out of reach gets
        them the next time."""
        if self._path is not None and any(self._newer_than(self._on_disk)):
            await asyncio.to_thread(self._save, self._path)
        # This is a copy, since other times are noted while Redis is asked.
        newer = iter(list(self._newer_than(self._in_redis)))
        while page := list(islice(newer, _PAGE)):
            sealed = [(key, self._seals.seal(key, b"%d" % at)) for key, at in page]
            try:
                await self._store.run(_SET, [HASH], [word for pair in sealed for word in pair])
            except StoreUnavailable:
                return
            except ResponseError as refusal:
                self._warn("cannot be kept in Redis", refusal)
                return
            self._in_redis |= page

    def _newer_than(self, kept: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        return ((key, at) for key, at in self._times.items() if at > kept.get(key, 0))

    async def _fetch(self) -> None:
        """Reads the times in Redis; none where Redis is away, has lost them, or holds foreign
        values: running gateways write them again."""
        if not self._seals.are_made:
            return
        try:
            found = await self._store.command("HGETALL", HASH)
        except StoreUnavailable:
            return
        except ResponseError as refusal:
            self._warn("cannot be read from Redis", refusal)
            return
        self._in_redis = {}
        for key, sealed in found.items():
            if (
                opened := self._seals.open(name := key.decode(errors="replace"), sealed)
            ) is not None:
                self.note({name: int(opened.value)})
                # Values signed by a token that is about to go are written once more.
                self._in_redis |= {name: int(opened.value)} if opened.is_current else {}

    def _load(self) -> dict[str, int]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            return _times.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError) as failure:
            self._warn("cannot be read", failure)
            return {}

    def _save(self, path: Path) -> None:
        """Writes the file, merged with what another gateway has written meanwhile."""
        merged = self._load()
        merged |= {key: at for key, at in dict(self._times).items() if at > merged.get(key, 0)}
        try:
            write_owner_file(path, msgspec.json.encode(merged))
        except OSError as failure:
            self._warn("cannot be kept", failure)

    @staticmethod
    def _warn(what: str, failure: Exception) -> None:
        structlog.get_logger().warning(f"the times of tenants' records {what}", error=str(failure))
