"""One column of the prefix index in Redis, written by the engine whose cache it mirrors; one a
shard.

It keeps the set of blocks that the column should hold, so that it can be written anew at any time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..runtime.store import Script, Store
from .slots import SlotTable, block_prefix, epoch_text, own_key, slots_key

BLOCKS_PER_CALL = 256
_RENEW_SECONDS = 1.0
_PENDING_FLOOR = 4096

# KEYS: slots, own set, a bitmap a block. ARGV: slot, epoch, seq, a digit a block (1 sets, 0
# clears), length of the bitmaps' prefix. Returns 1 when written (or written before: a reply was
# lost), 0 when the column is not the writer's.
_WRITE = Script(
    """
local slot, seq = ARGV[1], tonumber(ARGV[3])
local held = redis.call('HMGET', KEYS[1], slot .. ':epoch', slot .. ':seq')
if held[1] ~= ARGV[2] then return 0 end
local last = tonumber(held[2])
if seq <= last then return 1 end
if seq ~= last + 1 then return 0 end
local added, dropped = {}, {}
for i = 3, #KEYS do
  local block = string.sub(KEYS[i], ARGV[5] + 1)
  if string.byte(ARGV[4], i - 2) == 49 then
    redis.call('SETBIT', KEYS[i], slot, 1)
    added[#added + 1] = block
  else
    redis.call('SETBIT', KEYS[i], slot, 0)
    if redis.call('BITCOUNT', KEYS[i]) == 0 then redis.call('DEL', KEYS[i]) end
    dropped[#dropped + 1] = block
  end
end
if #added > 0 then redis.call('SADD', KEYS[2], unpack(added)) end
if #dropped > 0 then redis.call('SREM', KEYS[2], unpack(dropped)) end
redis.call('HSET', KEYS[1], slot .. ':seq', seq)
return 1
"""
)


Change = tuple[bytes, bool]
"""A block, and whether its bit is set or cleared."""


class ColumnLost(Exception):
    """The slot belongs to this incarnation no longer: its lease ran out, or Redis lost
    everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Incarnation that owns columns."""

    replica_id: str
    epoch: int
    address: str
    capacity: int
    """Number of blocks in the cache."""


class IndexColumn:
    """One column. `add`, `drop` and `clear` follow the cache and never wait; `write` brings Redis
    up to date."""

    def __init__(
        self,
        store: Store,
        model_key: str,
        shard: int,
        owner: Owner,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks: dict[bytes, None] = {}
        """Blocks that the column should hold, as keys: the garbage collector passes over such a
        dict."""
        self._store = store
        self._model_key = model_key
        self._shard = shard
        self._owner = owner
        self._clock = clock
        self._table = SlotTable(store, model_key, shard)
        self._pending: dict[bytes, bool] = {}
        """Changes that Redis does not have yet, each block's last one."""
        self._published: _Writer | None = None
        self._generation = 1
        self._filled_generation = 0

    @property
    def slot(self) -> int | None:
        """Number of the published column."""
        return self._published.slot if self._published is not None else None

    def add(self, block: bytes) -> None:
        self.blocks[block] = None
        self._pending[block] = True

    def drop(self, block: bytes) -> None:
        self.blocks.pop(block, None)
        self._pending[block] = False
        if len(self._pending) > _PENDING_FLOOR + 2 * len(self.blocks):
            # Redis is away and the cache turns over: to write the column anew is less work than to
            # catch up.
            self.rewrite()

    def clear(self) -> None:
        self.blocks.clear()
        self.rewrite()

    def rewrite(self) -> None:
        """Makes the next `write` create a new column; the old one counts until the new one is
        complete."""
        self._generation += 1
        self._pending.clear()

    async def write(self) -> bool:
        """Renews the lease when it is due and writes pending changes. Returns False when the column
        was lost; the next call makes a new one. Raises `StoreUnavailable`; then, too, call
        again."""
        try:
            if self._published is None or self._needs_filling:
                self._published = await self._fill()
            await self._published.renew()
            await self._flush(self._published)
        except ColumnLost:
            self._published = None
            return False
        return True

    async def leave(self) -> None:
        """Takes the column out of the index. Raises `StoreUnavailable`."""
        if self._published is not None:
            await self._table.retire(self._published.slot, self._owner.epoch)
            self._published = None

    @property
    def _needs_filling(self) -> bool:
        return self._published is None or self._filled_generation != self._generation

    async def _fill(self) -> _Writer:
        """Makes a new column from a copy of the blocks; changes that come meanwhile follow, then it
        is published.

        A column that fails half-way is left to its lease and the reaper.
        """
        generation = self._generation
        self._pending.clear()
        copy = list(self.blocks)
        owner = self._owner
        slot = await self._table.take(owner.replica_id, owner.epoch, owner.address, owner.capacity)
        column = _Writer(
            self._store, self._table, (self._model_key, self._shard), slot, owner.epoch, self._clock
        )
        for start in range(0, len(copy), BLOCKS_PER_CALL):
            await column.write([(block, True) for block in copy[start : start + BLOCKS_PER_CALL]])
            await column.renew()
            await self._keep_old()
        await self._flush(column)
        if generation != self._generation:
            await self._table.retire(slot, owner.epoch)
            raise ColumnLost
        if not await self._table.publish(slot, owner.epoch, owner.replica_id):
            raise ColumnLost
        self._filled_generation = generation
        return column

    async def _keep_old(self) -> None:
        """Keeps the lease of the column that readers still see."""
        if self._published is not None:
            try:
                await self._published.renew()
            except ColumnLost:
                self._published = None

    async def _flush(self, column: _Writer) -> None:
        await column.settle()
        while self._pending:
            blocks = list(itertools.islice(self._pending, BLOCKS_PER_CALL))
            await column.write([(block, self._pending.pop(block)) for block in blocks])
            await column.renew()


class _Writer:
    """Writes one slot, one call after the other, each with the next sequence number."""

    def __init__(
        self,
        store: Store,
        table: SlotTable,
        place: tuple[str, int],
        slot: int,
        epoch: int,
        clock: Callable[[], float],
    ) -> None:
        """`place` is the model's key and the shard."""
        self.slot = slot
        self._clock = clock
        self.unanswered: list[Change] = []
        """Changes of a call that may or may not have been done; it is sent again with the same
        number."""
        self._store = store
        self._table = table
        self._epoch = epoch
        self._prefix = block_prefix(*place)
        self._keys = [slots_key(*place), own_key(*place, slot)]
        self._seq = 0
        self._renew_at = self._clock() + _RENEW_SECONDS

    async def write(self, changes: list[Change]) -> None:
        """Writes changes. Raises `ColumnLost` and `StoreUnavailable`."""
        self.unanswered = changes
        await self.settle()

    async def settle(self) -> None:
        """Sends the call that was not answered, if there is one."""
        if not self.unanswered:
            return
        keys: list[bytes | str] = [
            *self._keys,
            *(self._prefix + block for block, _ in self.unanswered),
        ]
        digits = "".join("1" if is_set else "0" for _, is_set in self.unanswered)
        arguments = (self.slot, epoch_text(self._epoch), self._seq + 1, digits, len(self._prefix))
        if not await self._store.run(_WRITE, keys, arguments):
            raise ColumnLost
        self._seq += 1
        self.unanswered = []

    async def renew(self) -> None:
        """Extends the lease when it is time."""
        if self._clock() < self._renew_at:
            return
        if not await self._table.renew(self.slot, self._epoch):
            raise ColumnLost
        self._renew_at = self._clock() + _RENEW_SECONDS
