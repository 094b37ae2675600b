"""Streams over REST that a client can come back for: asked for with `stream_options.resumable`,
gone on by id."""

from __future__ import annotations

import msgspec

from headwater.services.runtime.errors import BadRequest

from ..openai.answers import Answer, EventStream, Renderer
from ..openai.cache_hints import hints_of
from ..openai.chat import ChatRenderer
from ..openai.completions import CompletionRenderer
from ..openai.decode import decode
from ..openai.numbered import NumberedSink, NumberedStream
from ..openai.response_schema import ResponsesRequest
from ..openai.run_answer import Silence, run_answer
from ..openai.schema import Answering, ChatCompletionRequest, CompletionRequest
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest
from ..request.resumed import bare_id, caller_of, check_repeatable, find, forget
from ..stages.stream_context import Found, StreamContext, StreamKind, StreamNotKept
from ..tenancy.caller import Caller
from .http_exchange import Exchange
from .responses import Responses

MAX_EVENTS = 2**32 - 1


class ResumableStreams:
    """The handlers. `keep_alive` is the silence in seconds after which a stream gets a comment."""

    def __init__(self, cluster: Cluster, responses: Responses, keep_alive: float) -> None:
        self._cluster = cluster
        self._responses = responses
        self._keep_alive = keep_alive

    async def answer(
        self,
        exchange: Exchange,
        caller: Caller,
        asked: Answering,
        kind: StreamKind,
        renderer: Renderer,
        body: bytes,
    ) -> None:
        """Starts a resumable stream."""
        context = StreamContext(
            kind=kind,
            body=body,
            client_request_id=caller.client_request_id,
            wants_receipt=caller.wants_receipt,
        )
        await self._write(
            exchange, caller, asked, renderer, NumberedStream(exchange.open_stream), context
        )

    async def resume(self, exchange: Exchange, caller: Caller, shown_id: str) -> None:
        """A stream that began elsewhere, behind the last event that the client has."""
        after = _last_event(exchange.headers.get("last-event-id", "0"))
        found = await find(self._cluster, caller.tenant.key, bare_id(shown_id))
        caller = caller_of(found, caller)
        exchange.request_id = caller.shown_id
        out = NumberedStream(exchange.open_stream, after)
        kind = found.context.kind
        body = found.context.body
        if kind is StreamKind.RESPONSE:
            await self._responses.resume(
                exchange, caller, decode(body, ResponsesRequest), out, found
            )
        elif kind is StreamKind.CHAT:
            chat = decode(body, ChatCompletionRequest)
            caller = caller.with_body(chat.request_id, chat.priority)
            caller = caller.with_hints(hints_of(chat))
            await self._write(exchange, caller, chat, ChatRenderer(chat), out, found.context, found)
        elif kind is StreamKind.COMPLETION:
            completion = decode(body, CompletionRequest)
            caller = caller.with_body(completion.request_id, completion.priority)
            caller = caller.with_hints(hints_of(completion))
            await self._write(
                exchange,
                caller,
                completion,
                CompletionRenderer(completion),
                out,
                found.context,
                found,
            )
        else:
            # The stream was requested over gRPC, where `Resume` continues it.
            raise StreamNotKept(found.request_id)

    async def forget(self, exchange: Exchange, caller: Caller) -> None:
        """A stream that its client does not want any longer."""
        shown_id = exchange.path_params["id"]
        await forget(self._cluster, caller.tenant.key, bare_id(shown_id))
        await exchange.reply_json({"id": shown_id, "object": "stream", "deleted": True})

    async def _write(
        self,
        exchange: Exchange,
        caller: Caller,
        asked: Answering,
        renderer: Renderer,
        out: NumberedStream,
        context: StreamContext,
        found: Found | None = None,
    ) -> None:
        """Writes an answer from its beginning, or from where it was `found`."""
        request = msgspec.structs.replace(self._only_request(renderer, caller), context=context)
        answer = Answer(
            id=f"{context.kind}-{request.caller.request_id}",
            asked=asked,
            renderer=renderer,
            wants_receipt=context.wants_receipt,
            created=context.created,
        )
        answer.generations = [Generation(request, found)]
        stream = EventStream(answer, out.opened_by)
        async with caller.within_deadline():
            work = run_answer(self._cluster, answer, NumberedSink(stream, out))
            tick = Silence(stream).tick
            await exchange.unless_client_leaves(work, silence=self._keep_alive, on_silence=tick)
        await exchange.end_stream(stream.last_events())

    def _only_request(self, renderer: Renderer, caller: Caller) -> GenerationRequest:
        """Raises `BadRequest` for what cannot be told twice in the same order."""
        requests = renderer.generation_requests(caller, self._cluster.max_choices)
        check_repeatable("stream_options.resumable", requests[0].sampling, len(requests))
        return requests[0]


def _last_event(given: str) -> int:
    """Raises `BadRequest`."""
    if not (given.isascii() and given.isdigit() and len(given) <= 10 and int(given) <= MAX_EVENTS):
        raise BadRequest.of("Last-Event-ID", given, "the id of an event of the stream, or 0")
    return int(given)
