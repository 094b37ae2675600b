"""Takes the bits of dead columns out of the prefix index, a few at a time, and frees their
numbers."""

from __future__ import annotations

import asyncio
import random

import structlog
from redis.exceptions import ResponseError

from ..runtime.fault_log import FaultLog
from ..runtime.store import STORE_FAILURES, Script, Store, StoreUnavailable
from .slots import SlotTable, block_prefix, own_key, slots_key

BLOCKS_PER_CALL = 256
_PAUSE_SECONDS = 1.0

# The owner of the number is looked at again in each call: a column that was freed, and taken by
# another incarnation meanwhile, is left alone.
_REAP = Script(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slot = ARGV[1]
local held = redis.call('HMGET', KEYS[1], slot .. ':epoch', slot .. ':lease')
if not held[1] or (held[1] ~= '' and tonumber(held[2]) > now) then return 1 end
redis.call('HSET', KEYS[1], slot .. ':epoch', '', slot .. ':live', 0)
for i = 3, #KEYS do
  if redis.call('GETBIT', KEYS[i], slot) == 1 then
    redis.call('SETBIT', KEYS[i], slot, 0)
    if redis.call('BITCOUNT', KEYS[i]) == 0 then redis.call('DEL', KEYS[i]) end
  end
  redis.call('SREM', KEYS[2], string.sub(KEYS[i], ARGV[2] + 1))
end
if redis.call('SCARD', KEYS[2]) > 0 then return 0 end
for _, field in ipairs({'epoch', 'replica', 'address', 'capacity', 'lease', 'seq', 'live'}) do
  redis.call('HDEL', KEYS[1], slot .. ':' .. field)
end
return 1
"""
)


class Reaper:
    """Reaper of one model. Several may work on one model at the same time; every engine runs
    one."""

    def __init__(self, store: Store, model_key: str, num_shards: int) -> None:
        self._store = store
        self._model_key = model_key
        self._num_shards = num_shards
        self._faults = FaultLog("column not reaped", STORE_FAILURES)

    async def run(self) -> None:
        """Reaps for ever, at a jittered pace so that several reapers seldom meet."""
        while True:
            await asyncio.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.5))
            try:
                await self.reap()
            except StoreUnavailable as failure:
                structlog.get_logger().debug("nothing reaped", error=str(failure))
            except Exception as fault:
                self._faults.add(fault)

    async def reap(self) -> int:
        """Reaps every column that has expired by now; returns their number. A column that Redis
        refuses to reap is logged and left. Raises `StoreUnavailable`, and what Redis answers where
        it refuses to list columns."""
        num_reaped = 0
        for shard in range(self._num_shards):
            expired = [
                slot.number
                for slot in await SlotTable(self._store, self._model_key, shard).read()
                if slot.is_expired
            ]
            for number in expired:
                num_reaped += await self._reap_column(shard, number)
        return num_reaped

    async def _reap_column(self, shard: int, number: int) -> bool:
        """Reaps a column; returns whether it is gone."""
        try:
            while not await self._reap_some(shard, number):
                pass
        except ResponseError as refusal:
            self._faults.add(refusal)
            return False
        return True

    async def _reap_some(self, shard: int, slot: int) -> bool:
        """Reaps some bits; returns whether the column is done with."""
        own = own_key(self._model_key, shard, slot)
        prefix = block_prefix(self._model_key, shard)
        hashes = await self._store.command("SRANDMEMBER", own, BLOCKS_PER_CALL)
        keys = [slots_key(self._model_key, shard), own, *(prefix + each for each in hashes)]
        return bool(await self._store.run(_REAP, keys, (slot, len(prefix))))
