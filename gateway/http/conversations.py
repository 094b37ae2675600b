"""/v1/conversations over HTTP: items that are kept for turns of /v1/responses and for clients to
read."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from headwater.services.runtime.errors import NotFound

from ..jobs.conversation_store import Conversation, ConversationStore, Head, Item
from ..long_work import LongWork
from ..openai.conversation_schema import MAX_ADDED, ConversationChange, NewConversation, NewItems
from ..openai.decode import RequestT, decode
from ..openai.paging import page_of
from ..openai.response_history import as_item, check_items
from ..openai.response_schema import InputItem
from ..tenancy.caller import Caller
from .http_exchange import Exchange


class Conversations:
    """The handlers."""

    def __init__(self, store: ConversationStore, long_work: LongWork, max_body_bytes: int) -> None:
        self._store = store
        self._long_work = long_work
        self._max_body_bytes = max_body_bytes

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        asked = await self._asked(exchange, caller, NewConversation, b"{}")
        head = Head(created_at=int(time.time()), metadata=asked.metadata or {})
        made = Conversation(
            id=f"conv_{secrets.token_hex(12)}", head=head, items=_kept(asked.items or [])
        )
        await self._store.create(caller.tenant.key, made)
        await exchange.reply_json(made.object())

    async def retrieve(self, exchange: Exchange, caller: Caller) -> None:
        await exchange.reply_json((await self._found(exchange, caller)).object())

    async def update(self, exchange: Exchange, caller: Caller) -> None:
        asked = await self._asked(exchange, caller, ConversationChange)
        conversation = await self._found(exchange, caller)
        conversation.head.metadata = asked.metadata
        await self._store.store_head(caller.tenant.key, conversation)
        await exchange.reply_json(conversation.object())

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        conversation_id = exchange.path_params["id"]
        await self._store.drop(caller.tenant.key, conversation_id)
        await exchange.reply_json(
            {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        )

    async def add_items(self, exchange: Exchange, caller: Caller) -> None:
        asked = await self._asked(exchange, caller, NewItems)
        items = _kept(asked.items)
        await self._store.add(caller.tenant.key, exchange.path_params["id"], items)
        await exchange.reply_json(page_of({"order": "asc", "limit": str(MAX_ADDED)}, items[::-1]))

    async def list_items(self, exchange: Exchange, caller: Caller) -> None:
        conversation = await self._found(exchange, caller)
        await exchange.reply_json(page_of(exchange.query, conversation.items[::-1]))

    async def get_item(self, exchange: Exchange, caller: Caller) -> None:
        await exchange.reply_json(_item(exchange, await self._found(exchange, caller)))

    async def delete_item(self, exchange: Exchange, caller: Caller) -> None:
        conversation = await self._found(exchange, caller)
        await self._store.remove(caller.tenant.key, conversation, _item(exchange, conversation))
        await exchange.reply_json(conversation.object())

    async def _asked(
        self, exchange: Exchange, caller: Caller, kind: type[RequestT], empty: bytes = b""
    ) -> RequestT:
        """The decoded body; `empty` stands for one without content. Raises `BadRequest`."""
        body = await exchange.body(self._max_body_bytes) or empty
        return await self._long_work.by_size(caller.tenant.key, len(body), decode, body, kind)

    async def _found(self, exchange: Exchange, caller: Caller) -> Conversation:
        return await self._store.find(caller.tenant.key, exchange.path_params["id"])


def _kept(given: list[InputItem]) -> list[Item]:
    """Raises `BadRequest` for what no turn could go on from."""
    check_items(given, "items")
    # A client's own id would name two items where it sends the same twice.
    return [
        as_item(msgspec.structs.replace(item, id=None), secrets.token_hex(12)) for item in given
    ]


def _item(exchange: Exchange, conversation: Conversation) -> dict[str, Any]:
    item_id = exchange.path_params["item_id"]
    for item in conversation.items:
        if item["id"] == item_id:
            return item
    raise NotFound("item", item_id)
