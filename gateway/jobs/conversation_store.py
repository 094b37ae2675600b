"""Conversations that clients store and extend, kept in Redis for a time after the last turn.

Each is one list: first its head, then its items in order, so that a turn is added as one step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.services.runtime import errors
from headwater.services.runtime.store import Script, Store

from ..storage_limits import StorageLimits
from .stored_bytes import StoredBytes, patiently

STORED = "conversations"
MAX_ITEMS = 2000
"""Largest number of items of one conversation."""
MAX_BYTES = 4 * 1024 * 1024
"""Largest number of bytes of one conversation, as of a response with its input: more does not fit
into a model's context."""
Item = dict[str, Any]
_NOT_THERE = -1
_TOO_MANY = -2
_TOO_LARGE = -3
# KEYS: the conversation. ARGV: most items, most bytes, items. Redis is asked for the held bytes,
# and counts those that it spends on the list; items of a call at the same time are in it or come
# behind.
_ADD = Script(
    """
local num_held = redis.call('LLEN', KEYS[1])
if num_held == 0 then return -1 end
if num_held - 1 + #ARGV - 2 > tonumber(ARGV[1]) then return -2 end
local num_bytes = redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 0)
for i = 3, #ARGV do num_bytes = num_bytes + #ARGV[i] end
if num_bytes > tonumber(ARGV[2]) then return -3 end
for i = 3, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
return #ARGV - 2
""",
    past_memory_bound=False,
)
_items = msgspec.json.Decoder(Item)


class Head(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    created_at: int
    metadata: dict[str, str]


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation with its items."""

    id: str
    head: Head
    items: list[Item]

    def object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.head.created_at,
            "metadata": self.head.metadata,
        }


class ConversationStore:
    """Conversations by tenant and id. Every method raises `Unavailable` while Redis is out of
    reach, and `NotFound`, also for another tenant's."""

    def __init__(
        self, store: Store, seconds: float, limits: StorageLimits, stored: StoredBytes
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._limits = limits
        self._bytes = stored

    async def create(self, tenant: str, conversation: Conversation) -> None:
        if len(conversation.items) > MAX_ITEMS:
            raise _too_much("items", MAX_ITEMS)
        key = _key(tenant, conversation.id)
        values = [msgspec.json.encode(each) for each in (conversation.head, *conversation.items)]
        if sum(map(len, values)) > MAX_BYTES:
            raise _too_much("bytes", MAX_BYTES)
        await self._claim(tenant, key, values)
        await self._command("RPUSH", key, *values)
        await self._extend(key)

    async def find(self, tenant: str, conversation_id: str) -> Conversation:
        values = await self._command("LRANGE", _key(tenant, conversation_id), 0, -1)
        if not values:
            raise errors.NotFound("conversation", conversation_id)
        head = msgspec.json.decode(values[0], type=Head)
        return Conversation(
            id=conversation_id, head=head, items=[_items.decode(value) for value in values[1:]]
        )

    async def add(self, tenant: str, conversation_id: str, items: list[Item]) -> None:
        """Adds all items together, also while other requests add some."""
        key = _key(tenant, conversation_id)
        added = [msgspec.json.encode(item) for item in items]
        if not await self._command("LLEN", key):
            raise errors.NotFound("conversation", conversation_id)
        await self._claim(tenant, key, added)
        outcome = await patiently(
            self._store.run(_ADD, [key], [MAX_ITEMS, MAX_BYTES, *added]), of=STORED
        )
        if outcome < 0:
            await self._unclaim(tenant, key, sum(map(len, added)))
        if outcome == _NOT_THERE:
            raise errors.NotFound("conversation", conversation_id)
        if outcome in (_TOO_MANY, _TOO_LARGE):
            raise (
                _too_much("items", MAX_ITEMS)
                if outcome == _TOO_MANY
                else _too_much("bytes", MAX_BYTES)
            )
        await self._extend(key)

    async def store_head(self, tenant: str, conversation: Conversation) -> None:
        """Stores the head of a conversation, which was changed."""
        key = _key(tenant, conversation.id)
        value = msgspec.json.encode(conversation.head)
        before = await self._command("LINDEX", key, 0)
        await self._claim(tenant, key, [value], instead_of=len(before or b""))
        await self._command("LSET", key, 0, value)
        await self._extend(key)

    async def remove(self, tenant: str, conversation: Conversation, item: Item) -> None:
        key = _key(tenant, conversation.id)
        value = msgspec.json.encode(item)
        if await self._command("LREM", key, 1, value):
            await self._unclaim(tenant, key, len(value))

    async def drop(self, tenant: str, conversation_id: str) -> None:
        if not await self._bytes.drop(tenant, _key(tenant, conversation_id), of=STORED):
            raise errors.NotFound("conversation", conversation_id)

    async def _extend(self, key: str) -> None:
        await self._command("PEXPIRE", key, int(self._seconds * 1e3))

    async def _claim(
        self, tenant: str, key: str, values: Sequence[bytes], *, instead_of: int = 0
    ) -> None:
        """Reserves room for values; one may replace an older value. Raises
        `StorageLimitExceeded`."""
        num_bytes = sum(map(len, values)) - instead_of
        limit = self._limits.response_bytes(tenant)
        claim = self._bytes.claim_more(tenant, key, num_bytes, seconds=self._seconds, limit=limit)
        if (used := await patiently(claim, of=STORED)) is not None:
            raise errors.StorageLimitExceeded("response_bytes", used, num_bytes, limit)

    async def _unclaim(self, tenant: str, key: str, num_bytes: int) -> None:
        """Gives room back. Room that cannot be given back counts until the value expires."""
        with contextlib.suppress(errors.Unavailable):
            await self._claim(tenant, key, [], instead_of=num_bytes)

    async def _command(self, *words: Any) -> Any:
        return await patiently(self._store.command(*words), of=STORED)


def _too_much(what: str, allowed: int) -> errors.BadRequest:
    return errors.BadRequest(
        "items", f"the conversation would have more {what} than allowed: {allowed}"
    )


def _key(tenant: str, conversation_id: str) -> str:
    return f"headwater:conversation:{tenant.encode().hex()}:{conversation_id}"
