"""Slots of the prefix index in Redis: the column numbers of incarnations, with leases on Redis's
own clock.

`slots:{m:s}` is a hash with fields `<slot>:epoch`, `:replica`, `:address`, `:capacity`, `:lease`
(milliseconds of Redis's clock), `:seq` (of the last write) and `:live` (published). An empty epoch
means retired: the slot's holder can no longer write, and the reaper frees the number when none of
its bits is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.store import Script, Store

LEASE_MS = 5000


def tag(model_key: str, shard: int) -> str:
    """Hash tag that keeps all keys of one shard in one hash slot of a Redis Cluster."""
    return f"{{{model_key}:{shard}}}"


def slots_key(model_key: str, shard: int) -> str:
    return f"slots:{tag(model_key, shard)}"


def own_key(model_key: str, shard: int, slot: int) -> str:
    """Key of the set of block hashes whose bit `slot` is set."""
    return f"own:{tag(model_key, shard)}:{slot}"


def block_prefix(model_key: str, shard: int) -> bytes:
    """Prefix of a block's key. The block's hash follows it; the value is the bitmap of the slots
    that cache the block."""
    return f"pfx:{tag(model_key, shard)}:".encode()


def shard_of(root_hash: bytes, num_shards: int) -> int:
    """Number of the shard of a chain, by the hash of its first block."""
    return int.from_bytes(root_hash[:8], "little") % num_shards


_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_TAKE = Script(
    _NOW
    + """
local slot = 0
while redis.call('HEXISTS', KEYS[1], slot .. ':epoch') == 1 do slot = slot + 1 end
redis.call('HSET', KEYS[1], slot .. ':epoch', ARGV[1], slot .. ':replica', ARGV[2], slot .. ':address', ARGV[3],
  slot .. ':capacity', ARGV[4], slot .. ':lease', now + ARGV[5], slot .. ':seq', 0, slot .. ':live', 0)
return slot
"""
)
_RENEW = Script(
    _NOW
    + """
if redis.call('HGET', KEYS[1], ARGV[1] .. ':epoch') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1] .. ':lease', now + ARGV[3])
return 1
"""
)
_PUBLISH = Script(
    """
if redis.call('HGET', KEYS[1], ARGV[1] .. ':epoch') ~= ARGV[2] then return 0 end
local changes = {ARGV[1] .. ':live', 1}
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local slot = string.match(fields[i], '^(%d+):replica$')
  if slot and slot ~= ARGV[1] and fields[i + 1] == ARGV[3] then
    for _, change in ipairs({slot .. ':epoch', '', slot .. ':lease', 0, slot .. ':live', 0}) do
      changes[#changes + 1] = change
    end
  end
end
redis.call('HSET', KEYS[1], unpack(changes))
return 1
"""
)
_RETIRE = Script(
    """
if redis.call('HGET', KEYS[1], ARGV[1] .. ':epoch') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1] .. ':epoch', '', ARGV[1] .. ':lease', 0, ARGV[1] .. ':live', 0)
return 1
"""
)
_READ = Script(_NOW + "return {now, redis.call('HGETALL', KEYS[1])}")


@dataclass(frozen=True, slots=True)
class Slot:
    """A column as Redis knows it."""

    number: int
    replica_id: str
    epoch: int
    """Epoch of the owner; 0: retired."""
    address: str
    capacity: int
    is_live: bool
    """Whether it is published and its lease runs."""
    is_expired: bool
    """Whether its bits are to be reaped."""


class SlotTable:
    """The slots of one shard of one model. Every method raises `StoreUnavailable`."""

    def __init__(self, store: Store, model_key: str, shard: int) -> None:
        self._store = store
        self._keys = [slots_key(model_key, shard)]

    async def take(self, replica_id: str, epoch: int, address: str, capacity: int) -> int:
        """Takes the lowest free number, leased and not yet published."""
        arguments = (epoch_text(epoch), replica_id, address, capacity, LEASE_MS)
        return int(await self._store.run(_TAKE, self._keys, arguments))

    async def renew(self, slot: int, epoch: int) -> bool:
        """Renews the lease. Returns False when the slot belongs to this incarnation no longer."""
        return bool(await self._store.run(_RENEW, self._keys, (slot, epoch_text(epoch), LEASE_MS)))

    async def publish(self, slot: int, epoch: int, replica_id: str) -> bool:
        """Shows the column to readers and retires every other one of the replica, in one step.
        Returns False as `renew`."""
        return bool(
            await self._store.run(_PUBLISH, self._keys, (slot, epoch_text(epoch), replica_id))
        )

    async def retire(self, slot: int, epoch: int) -> bool:
        """Hides the column for good and leaves it to the reaper. Returns False as `renew`."""
        return bool(await self._store.run(_RETIRE, self._keys, (slot, epoch_text(epoch))))

    async def read(self, *, seconds: float | None = None) -> list[Slot]:
        """Every slot that has a number, in order; `seconds` as in `Store.run`."""
        now, flat = await self._store.run(_READ, self._keys, seconds=seconds)
        fields = {field.decode(): value for field, value in zip(flat[::2], flat[1::2], strict=True)}
        numbers = sorted(
            int(field.partition(":")[0]) for field in fields if field.endswith(":epoch")
        )
        return [_slot(number, int(now), fields) for number in numbers]


def epoch_text(epoch: int) -> str:
    """Text of an epoch in Redis."""
    return f"{epoch:016x}"


def _slot(number: int, now: int, fields: dict[str, bytes]) -> Slot:
    def field(name: str) -> str:
        return fields[f"{number}:{name}"].decode()

    epoch = int(field("epoch") or "0", 16)
    leased = int(field("lease")) > now
    return Slot(
        number=number,
        replica_id=field("replica"),
        epoch=epoch,
        address=field("address"),
        capacity=int(field("capacity")),
        is_live=bool(epoch) and leased and field("live") == "1",
        is_expired=not epoch or not leased,
    )
