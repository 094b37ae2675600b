"""Turns of stored responses: the items before a turn, and what is kept of its answer."""

from __future__ import annotations

from typing import Any

from headwater.services.runtime import errors
from headwater.services.runtime.rare_log import RareLog

from ..jobs.response_store import Item, KeptResponse, ResponseStore
from ..openai.response_answer import ResponseAnswer
from ..openai.response_history import as_item
from ..openai.response_schema import InputItem, ResponsesRequest
from ..tenancy.caller import Caller

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
