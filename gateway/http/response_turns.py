"""Turns of stored responses: the items before a turn, and what is kept of its answer."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from headwater.services.runtime import errors
from headwater.services.runtime.rare_log import RareLog

from ..jobs.response_store import Item, KeptResponse, ResponseStore
from ..openai.response_answer import ResponseAnswer
from ..openai.response_history import as_item, stored_items
from ..openai.response_input import items_of
from ..openai.response_schema import InputItem, ResponsesRequest
from ..tenancy.caller import Caller
from ..wire.required import given

REFERENCE = "item_reference"
ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})i?[0-9]{1,5}")
"""Id of an item, with the request id of the response that is kept with it."""
MAX_READ_RESPONSES = 4
"""Most responses that the references of one turn may need."""
REFERENCED = "the id of an item of a response that is kept"

_rare_log = RareLog()


class ResponseTurns:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._conversations = store.conversations

    async def before(self, caller: Caller, asked: ResponsesRequest) -> list[Item]:
        """The items of the turns before."""
        if asked.conversation_id is not None:
            return (await self._conversations.find(caller.tenant.key, asked.conversation_id)).items
        if asked.previous_response_id is None:
            return []
        try:
            return (
                await self._store.find(caller.tenant.key, asked.previous_response_id)
            ).conversation
        except errors.NotFound:
            # The response may exist in the background without an answer yet.
            text = (
                f"previous_response_id is {asked.previous_response_id!r}; allowed: one that "
                "was answered and is kept"
            )
            raise errors.BadRequest(
                "previous_response_id", text, code="previous_response_not_found"
            ) from None

    async def new_items(
        self, caller: Caller, asked: ResponsesRequest, before: list[Item]
    ) -> list[InputItem]:
        """The items of this turn; items of kept responses stand in the place of references to
        them. Raises `BadRequest`, `Unavailable`."""
        items = items_of(asked)
        places = _references(items)
        found = {item["id"]: item for item in before if item["id"] in places}
        # A response is kept with its conversation: the one that is referred to last usually has
        # the items of all references.
        num_read = 0
        for item_id, at in reversed(places.items()):
            if item_id in found:
                continue
            if num_read == MAX_READ_RESPONSES:
                allowed = f"items of one conversation, or of {MAX_READ_RESPONSES} responses"
                raise errors.BadRequest.of(at, item_id, allowed)
            num_read += 1
            conversation = await self._conversation_with(caller, item_id, at)
            found = {item["id"]: item for item in conversation if item["id"] in places} | found
        return [
            stored_items([found[item.id or ""]])[0] if item.type == REFERENCE else item
            for item in items
        ]

    async def _conversation_with(self, caller: Caller, item_id: str, at: str) -> list[Item]:
        """The conversation of the response that the item belongs to. Raises `BadRequest`,
        `Unavailable`."""
        if (match := ITEM_ID.fullmatch(item_id)) is not None:
            with suppress(errors.NotFound):
                kept = await self._store.find(caller.tenant.key, f"resp_{match[1]}")
                if any(item["id"] == item_id for item in kept.conversation):
                    return kept.conversation
        raise errors.BadRequest.of(at, item_id, REFERENCED)

    async def kept(
        self,
        caller: Caller,
        answer: ResponseAnswer,
        before: list[Item],
        new_items: list[InputItem],
        *,
        is_known: bool,
    ) -> dict[str, Any]:
        """The response, with a field that says whether it is kept. One that `is_known` was stored
        before, and is kept or was deleted."""
        if is_known:
            return answer.ended()
        given = [as_item(item, f"{caller.request_id}i{i}") for i, item in enumerate(new_items)]
        await self._add_turn(caller, answer, [*given, *answer.items.items])
        response = answer.ended()
        if answer.is_stored:
            conversation = [*before, *given, *answer.items.items]
            kept = KeptResponse(response=response, input=given, conversation=conversation)
            response["store"] = await self._store.keep(caller.tenant.key, kept)
        return response

    async def _add_turn(self, caller: Caller, answer: ResponseAnswer, items: list[Item]) -> None:
        """Adds a turn to the conversation. An answer that could not be added says so."""
        if answer.conversation_id is None:
            return
        try:
            await self._conversations.add(caller.tenant.key, answer.conversation_id, items)
        except errors.HeadwaterError as error:
            _rare_log.add(
                "turn not kept",
                error.code,
                conversation=answer.conversation_id,
                error=error.message,
            )
            answer.conversation_id = None


def _references(items: list[InputItem]) -> dict[str, str]:
    """Ids of items that a turn refers to, each with the name of its field. Raises `BadRequest`."""
    places: dict[str, str] = {}
    for position, item in enumerate(items):
        if item.type == REFERENCE:
            at = f"input[{position}].id"
            if (item_id := given(at, item.id, REFERENCED)) in places:
                raise errors.BadRequest.of(at, item_id, "an id that no item before refers to")
            places[item_id] = at
    return places
