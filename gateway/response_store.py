"""Responses that clients may come back to, kept in Redis for a time. Knows nothing about how they are made.

Redis keeps what can be lost: without it answers go out all the same and say that they were not kept.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import structlog

from headwater.gateway.conversation_store import ConversationStore
from headwater.services import errors
from headwater.services.store import Store, StoreUnavailable

PATIENCE_SECONDS = 2.0
MAX_BYTES = 4 * 1024 * 1024
"""Of one response with the conversation that led to it."""
Item = dict[str, Any]


class KeptResponse(msgspec.Struct, kw_only=True):
    """A response and what the next one needs of it."""

    response: dict[str, Any]
    input: list[Item]
    """As the client gave it, of this turn alone."""
    conversation: list[Item]
    """Everything up to and with this response's output; instructions are each turn's own."""


class ResponseStore:
    """By tenant and id: nobody finds another tenant's."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self.conversations = ConversationStore(store, seconds)

    async def keep(self, tenant: str, kept: KeptResponse) -> bool:
        """Whether it can be found from now on."""
        value = msgspec.json.encode(kept)
        if len(value) > MAX_BYTES:
            return False
        try:
            await self._command("SET", _key(tenant, kept.response["id"]), value, "PX", int(self._seconds * 1e3))
        except errors.Unavailable:
            structlog.get_logger().warning("response not kept: the store is out of reach", id=kept.response["id"])
            return False
        return True

    async def find(self, tenant: str, response_id: str) -> KeptResponse:
        """Raises `NotFound`, or `Unavailable` while nobody can tell."""
        value = await self._command("GET", _key(tenant, response_id))
        if value is None:
            raise errors.NotFound("response", response_id)
        return msgspec.json.decode(value, type=KeptResponse)

    async def drop(self, tenant: str, response_id: str) -> None:
        """Raises `NotFound`, `Unavailable`."""
        if not await self._command("DEL", _key(tenant, response_id)):
            raise errors.NotFound("response", response_id)

    async def _command(self, *words: Any) -> Any:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self._store.command(*words)
        except (StoreUnavailable, TimeoutError):
            raise errors.Unavailable("the store of responses is out of reach", code="store_unavailable") from None


def _key(tenant: str, response_id: str) -> str:
    return f"headwater:response:{tenant.encode().hex()}:{response_id}"
