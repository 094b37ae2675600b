"""The bytes that each tenant keeps in Redis, by key, with their expiry. Knows nothing about the
values."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from headwater.services.runtime import errors
from headwater.services.runtime.store import Script, Store, StoreUnavailable

PATIENCE_SECONDS = 2.0
ReplyT = TypeVar("ReplyT")
_CLAIM = Script(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local name, size, ttl, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
local function bytes_of(each) return tonumber(redis.call('HGET', KEYS[2], each) or 0) end
local total = bytes_of('')
for _, each in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do
  total = total - bytes_of(each)
  redis.call('HDEL', KEYS[2], each)
  redis.call('ZREM', KEYS[1], each)
end
local before = bytes_of(name)
local after = math.max(0, ARGV[3] == 'more' and before + size or size)
local is_granted = after <= before or limit < 0 or total - before + after <= limit
if is_granted then
  total = total - before + after
  redis.call('HSET', KEYS[2], name, after)
  redis.call('ZADD', KEYS[1], now + ttl, name)
end
redis.call('HSET', KEYS[2], '', total)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, math.max(ttl, redis.call('PTTL', key))) end
return { is_granted and 1 or 0, total }
""",
    # NOTE: a claimed value is written next, which a full Redis refuses: nothing stays claimed then.
    past_memory_bound=False,
)
_RELEASE = Script(
    """
local bytes = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0)
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('HINCRBY', KEYS[2], '', -bytes)
end
"""
)


class StoredBytes:
    """Bytes by tenant and key in Redis. Every method but `drop` raises `StoreUnavailable`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(
        self, tenant: str, key: str, num_bytes: int, *, seconds: float, limit: int
    ) -> int | None:
        """Claims room before a value of that size is written. Returns None, or, where the tenant
        would have more than `limit`, the bytes that it has."""
        return await self._claim(tenant, key, num_bytes, "all", seconds, limit)

    async def claim_more(
        self, tenant: str, key: str, num_bytes: int, *, seconds: float, limit: int
    ) -> int | None:
        """Like `claim`, for a stored value that grows by `num_bytes`. A negative number shrinks it
        and is always granted."""
        return await self._claim(tenant, key, num_bytes, "more", seconds, limit)

    async def release(self, tenant: str, key: str) -> None:
        """Releases the room of a value that is gone."""
        await self._store.run(_RELEASE, _keys(tenant), [key])

    async def drop(self, tenant: str, key: str, *, of: str) -> bool:
        """Deletes a value. Returns False where there was none. Raises `Unavailable`, see
        `patiently`."""
        is_gone = await patiently(self._store.command("DEL", key), of=of)
        # Where that fails the bytes count until the value expires.
        with contextlib.suppress(errors.Unavailable):
            await patiently(self.release(tenant, key), of=of)
        return bool(is_gone)

    async def drop_all(self, tenant: str) -> None:
        """Deletes every value of a tenant."""
        until, sizes = _keys(tenant)
        for key in await self._store.command("ZRANGE", until, 0, -1):
            await self._store.command("DEL", key)
        for each in (until, sizes):
            await self._store.command("DEL", each)

    async def _claim(
        self, tenant: str, key: str, num_bytes: int, kind: str, seconds: float, limit: int
    ) -> int | None:
        args = [key, num_bytes, kind, int(seconds * 1e3), limit]
        is_granted, total = await self._store.run(_CLAIM, _keys(tenant), args)
        return None if is_granted else int(total)


async def patiently(
    call: Awaitable[ReplyT], *, of: str, seconds: float = PATIENCE_SECONDS
) -> ReplyT:
    """Reply of the store. Raises `Unavailable`, naming what is stored there, where it does not come
    in time."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except (StoreUnavailable, TimeoutError):
        raise errors.Unavailable(
            f"the store of {of} is out of reach", code="store_unavailable"
        ) from None


def _keys(tenant: str) -> tuple[str, str]:
    tag = f"headwater:stored:{{{tenant.encode().hex()}}}"
    return f"{tag}:until", f"{tag}:bytes"
