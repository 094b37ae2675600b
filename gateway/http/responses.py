"""/v1/responses over HTTP: a turn of a conversation, kept for the next one unless the client says
otherwise."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.services.runtime import errors

from ..jobs.response_store import ResponseStore
from ..openai.cache_hints import hints_of
from ..openai.numbered import NumberedSink, NumberedStream
from ..openai.paging import page_of
from ..openai.response_answer import ResponseAnswer, ResponseEvents, last_status
from ..openai.response_history import stored_items, without_oldest
from ..openai.response_input import check, names_of, to_prompt, to_sampling
from ..openai.response_schema import InputItem, ResponsesRequest
from ..request.choice import Sink
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest
from ..request.prepare import prepare
from ..request.prompt_length import prompt_length
from ..request.prompt_runs import run_all
from ..request.sinks import Gathered
from ..stages.stream_context import Found, StreamContext, StreamKind, StreamNotKept
from ..tenancy.caller import Caller
from .http_exchange import Exchange
from .response_turns import ResponseTurns


class Responses:
    """The handlers. `keep_alive` is the silence in seconds after which a stream gets a comment."""

    def __init__(self, cluster: Cluster, store: ResponseStore, keep_alive: float) -> None:
        self._cluster = cluster
        self._store = store
        self._keep_alive = keep_alive
        self._turns = ResponseTurns(store)

    async def create(
        self, exchange: Exchange, caller: Caller, asked: ResponsesRequest, body: bytes
    ) -> None:
        check(asked)
        caller = caller.with_body(asked.request_id, asked.priority).with_hints(hints_of(asked))
        exchange.request_id = caller.shown_id
        known = exchange.known
        if known is not None or (
            asked.stream and asked.stream_options is not None and asked.stream_options.resumable
        ):
            context = StreamContext(
                kind=StreamKind.RESPONSE, body=body, client_request_id=caller.client_request_id
            )
            if known is not None:
                # A background run reads a stream, which another gateway can continue.
                context = msgspec.structs.replace(context, created=known.created)
            await self._answer(
                exchange, caller, asked, context, NumberedStream(exchange.open_stream)
            )
        else:
            await self._answer(exchange, caller, asked)

    async def queued(self, caller: Caller, asked: ResponsesRequest) -> ResponseAnswer:
        """A response that is computed in the background, as it is reported until then. Raises the
        errors that computing it at once would raise."""
        check(asked)
        before = await self._turns.before(caller, asked)
        items = [*stored_items(before), *await self._turns.new_items(caller, asked, before)]
        generation = Generation(_request_of(caller, asked, items, len(before)))
        await _prepare(self._cluster, generation, asked, items, len(before))
        return ResponseAnswer(request_id=caller.request_id, asked=asked)

    async def resume(
        self,
        exchange: Exchange,
        caller: Caller,
        asked: ResponsesRequest,
        out: NumberedStream,
        found: Found,
    ) -> None:
        """A stream that began elsewhere. Raises `StreamNotKept` for one that is computed in the
        background."""
        if asked.background and exchange.known is None:
            raise StreamNotKept(found.request_id)
        caller = caller.with_body(asked.request_id, asked.priority).with_hints(hints_of(asked))
        await self._answer(exchange, caller, asked, found.context, out, found)

    async def _answer(
        self,
        exchange: Exchange,
        caller: Caller,
        asked: ResponsesRequest,
        context: StreamContext | None = None,
        out: NumberedStream | None = None,
        found: Found | None = None,
    ) -> None:
        answer = ResponseAnswer(request_id=caller.request_id, asked=asked)
        if context is not None:
            answer.created = context.created
        is_streamed = bool(asked.stream) or out is not None
        events = (
            ResponseEvents(answer, out.opened_by if out else exchange.open_stream)
            if is_streamed
            else None
        )
        if events is not None:
            exchange.error_event = events.failure
        gathered = Gathered()
        before = await self._turns.before(caller, asked)
        new_items = await self._turns.new_items(caller, asked, before)
        items = [*stored_items(before), *new_items]
        request = msgspec.structs.replace(
            _request_of(caller, asked, items, len(before)), context=context
        )
        sink: Sink = events or gathered
        sink = NumberedSink(sink, out) if out is not None else sink
        generation = answer.generation = Generation(request, found)
        async with caller.within_deadline():
            tick = events.keep_alive if events is not None else None
            work = self._run(generation, asked, items, len(before), sink)
            await exchange.unless_client_leaves(work, silence=self._keep_alive, on_silence=tick)
        if events is None:
            [choice] = generation.choices
            answer.items.add(gathered.of(choice))
            answer.items.end(last_status(choice))
        is_known = found is not None and found.has_ended and exchange.known is None
        response = await self._turns.kept(caller, answer, before, new_items, is_known=is_known)
        if events is None:
            await exchange.reply_json(response)
        else:
            await exchange.end_stream(events.last_event(response))

    async def _run(
        self,
        generation: Generation,
        asked: ResponsesRequest,
        items: list[InputItem],
        num_before: int,
        sink: Sink,
    ) -> None:
        await _prepare(self._cluster, generation, asked, items, num_before)
        await run_all(self._cluster, [generation], sink)

    async def count_input(
        self, exchange: Exchange, caller: Caller, asked: ResponsesRequest
    ) -> None:
        """How many tokens a turn's prompt would have; nothing is answered or kept."""
        check(asked)
        before = await self._turns.before(caller, asked)
        items = [*stored_items(before), *await self._turns.new_items(caller, asked, before)]
        prompt = to_prompt(asked, items, first=len(before))
        try:
            length = await prompt_length(self._cluster, caller, asked.model, prompt)
        except errors.BadRequest as error:
            raise error.in_words_of(names_of(asked)) from None
        await exchange.reply_json({"object": "response.input_tokens", "input_tokens": length})

    async def find(self, tenant: str, response_id: str) -> dict[str, Any]:
        """A response as it was answered. Raises `NotFound`, `Unavailable`."""
        return (await self._store.find(tenant, response_id)).response

    async def forget(self, tenant: str, response_id: str) -> None:
        """Raises `NotFound`, `Unavailable`."""
        await self._store.drop(tenant, response_id)

    async def list_input(self, exchange: Exchange, caller: Caller) -> None:
        kept = await self._store.find(caller.tenant.key, exchange.path_params["id"])
        await exchange.reply_json(page_of(exchange.query, kept.input[::-1]))


def _request_of(
    caller: Caller, asked: ResponsesRequest, items: list[InputItem], num_before: int
) -> GenerationRequest:
    return GenerationRequest(
        caller=caller,
        model=asked.model,
        prompt=to_prompt(asked, items, first=num_before),
        sampling=to_sampling(asked),
        stream=bool(asked.stream),
        endpoint="responses",
        cache_salt=asked.cache_salt or "",
    )


async def _prepare(
    cluster: Cluster,
    generation: Generation,
    asked: ResponsesRequest,
    items: list[InputItem],
    num_before: int,
) -> None:
    """A conversation that is too long loses its oldest items, where the client allows it."""
    while True:
        try:
            await prepare(cluster, generation)
            return
        except errors.BadRequest as error:
            shorter = without_oldest(items)
            if asked.truncation != "auto" or error.code != errors.CONTEXT_TOO_LONG or not shorter:
                raise error.in_words_of(names_of(asked)) from None
            num_before = num_before - (len(items) - len(shorter))
            items = shorter
            request = generation.request
            context = generation.request.context
            again = _request_of(request.caller, asked, items, num_before)
            generation.request = msgspec.structs.replace(again, context=context)
