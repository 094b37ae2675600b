"""Conversations that clients keep here and add to, in Redis for a time after the last turn.

One list each: first what is said of it, then its items in order, so that a turn is added as one step.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from headwater.services import errors
from headwater.services.store import Store, StoreUnavailable

PATIENCE_SECONDS = 2.0
MAX_ITEMS = 2000
"""Of one conversation."""
Item = dict[str, Any]
_items = msgspec.json.Decoder(Item)


class Head(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    created_at: int
    metadata: dict[str, str]


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation as it stands."""

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
    """By tenant and id. Everything here raises `Unavailable` while Redis is out of reach, and `NotFound`, also for
    another tenant's."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    async def create(self, tenant: str, conversation: Conversation) -> None:
        _check_room(len(conversation.items))
        key = _key(tenant, conversation.id)
        values = [msgspec.json.encode(each) for each in (conversation.head, *conversation.items)]
        await self._command("RPUSH", key, *values)
        await self._extend(key)

    async def find(self, tenant: str, conversation_id: str) -> Conversation:
        values = await self._command("LRANGE", _key(tenant, conversation_id), 0, -1)
        if not values:
            raise errors.NotFound("conversation", conversation_id)
        head = msgspec.json.decode(values[0], type=Head)
        return Conversation(id=conversation_id, head=head, items=[_items.decode(value) for value in values[1:]])

    async def add(self, tenant: str, conversation_id: str, items: list[Item]) -> None:
        """All of them, side by side, whoever else adds to it."""
        key = _key(tenant, conversation_id)
        _check_room(await self._command("LLEN", key) - 1 + len(items))
        if items and not await self._command("RPUSHX", key, *map(msgspec.json.encode, items)):
            raise errors.NotFound("conversation", conversation_id)
        await self._extend(key)

    async def tell(self, tenant: str, conversation: Conversation) -> None:
        """Keeps what is said of it, which was changed."""
        key = _key(tenant, conversation.id)
        await self._command("LSET", key, 0, msgspec.json.encode(conversation.head))
        await self._extend(key)

    async def remove(self, tenant: str, conversation: Conversation, item: Item) -> None:
        await self._command("LREM", _key(tenant, conversation.id), 1, msgspec.json.encode(item))

    async def drop(self, tenant: str, conversation_id: str) -> None:
        if not await self._command("DEL", _key(tenant, conversation_id)):
            raise errors.NotFound("conversation", conversation_id)

    async def _extend(self, key: str) -> None:
        await self._command("PEXPIRE", key, int(self._seconds * 1e3))

    async def _command(self, *words: Any) -> Any:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._store.command(*words)
        except (StoreUnavailable, TimeoutError):
            raise errors.Unavailable("the store of conversations is out of reach", code="store_unavailable") from None


def _check_room(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise errors.BadRequest("items", f"the conversation would have {num_items} items; allowed: {MAX_ITEMS}")


def _key(tenant: str, conversation_id: str) -> str:
    return f"headwater:conversation:{tenant.encode().hex()}:{conversation_id}"
