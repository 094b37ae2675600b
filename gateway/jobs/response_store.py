"""Responses that clients may retrieve, kept in Redis for a time. Knows nothing about computing
them.

Redis keeps data that may be lost: without Redis answers are sent all the same and say that they
were not kept.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.services.runtime import errors
from headwater.services.runtime.rare_log import RareLog
from headwater.services.runtime.store import Store

from ..storage_limits import StorageLimits
from .conversation_store import ConversationStore
from .stored_bytes import StoredBytes, patiently

STORED = "responses"
MAX_BYTES = 4 * 1024 * 1024
"""Most bytes of one response with the conversation before it."""
DROP_SECONDS = 60.0
"""Seconds to drop all data of a tenant."""
Item = dict[str, Any]

_rare_log = RareLog()


class KeptResponse(msgspec.Struct, kw_only=True):
    """A response, and the data that the next turn needs."""

    response: dict[str, Any]
    input: list[Item]
    """Items that the client sent in this turn."""
    conversation: list[Item]
    """All items up to and with this response's output; instructions belong to one turn only."""


class ResponseStore:
    """Responses by tenant (`Tenant.key`) and id: no tenant finds another's."""

    def __init__(self, store: Store, seconds: float, limits: StorageLimits | None = None) -> None:
        self._store = store
        self._seconds = seconds
        self._limits = limits or StorageLimits()
        self._bytes = StoredBytes(store)
        self.conversations = ConversationStore(store, seconds, self._limits, self._bytes)

    async def keep(self, tenant: str, kept: KeptResponse) -> bool:
        """Keeps a response. Returns False where it cannot be found later."""
        value = msgspec.json.encode(kept)
        key = _key(tenant, kept.response["id"])
        if len(value) > MAX_BYTES:
            return False
        limit = self._limits.response_bytes(tenant)
        try:
            claim = self._bytes.claim(tenant, key, len(value), seconds=self._seconds, limit=limit)
            if await patiently(claim, of=STORED) is not None:
                return False
            await patiently(
                self._store.command("SET", key, value, "PX", int(self._seconds * 1e3)), of=STORED
            )
        except errors.Unavailable:
            _rare_log.add("response not kept: the store is out of reach", id=kept.response["id"])
            return False
        return True

    async def find(self, tenant: str, response_id: str) -> KeptResponse:
        """Stored response. Raises `NotFound`, or `Unavailable` while Redis is out of reach."""
        value = await patiently(self._store.command("GET", _key(tenant, response_id)), of=STORED)
        if value is None:
            raise errors.NotFound("response", response_id)
        return msgspec.json.decode(value, type=KeptResponse)

    async def drop(self, tenant: str, response_id: str) -> None:
        """Drops a response. Raises `NotFound`, `Unavailable`."""
        if not await self._bytes.drop(tenant, _key(tenant, response_id), of=STORED):
            raise errors.NotFound("response", response_id)

    async def drop_all(self, tenant: str) -> None:
        """Drops all responses and conversations of a tenant that was removed. Raises
        `Unavailable`."""
        if self._store.url is not None:
            await patiently(self._bytes.drop_all(tenant), of=STORED, seconds=DROP_SECONDS)


def _key(tenant: str, response_id: str) -> str:
    return f"headwater:response:{tenant.encode().hex()}:{response_id}"
