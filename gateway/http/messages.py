"""/v1/messages and /v1/messages/count_tokens over HTTP."""

from __future__ import annotations

from headwater.proto import processor_pb2
from headwater.services.runtime import errors

from ..anthropic.cache_hints import hints_of
from ..anthropic.decode import RequestT, decode
from ..anthropic.headers import check_headers
from ..anthropic.message_answer import MessageAnswer, MessageEvents
from ..anthropic.schema import CountTokensRequest, MessagesRequest
from ..anthropic.to_pb import names_of, to_prompt, to_sampling
from ..long_work import without_collector
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest
from ..request.prompt_length import prompt_length
from ..request.sinks import Gathered
from ..tenancy.caller import Caller
from .http_exchange import Exchange
from .one_answer import run_one


class Messages:
    """The handlers. `keep_alive` is the silence in seconds after which a stream gets a ping."""

    def __init__(self, cluster: Cluster, keep_alive: float) -> None:
        self._cluster = cluster
        self._keep_alive = keep_alive

    async def create(self, exchange: Exchange, caller: Caller, body: bytes) -> None:
        check_headers(exchange.headers)
        asked = await self._decoded(caller, body, MessagesRequest)
        generation = Generation(
            await self._cluster.long_work.by_size(
                caller.tenant.key, len(body), _request_of, caller, asked, len(body)
            )
        )
        answer = MessageAnswer(
            request_id=caller.request_id, model=asked.model, generation=generation
        )
        events = MessageEvents(answer, exchange.open_stream) if asked.stream else None
        gathered = Gathered()
        await run_one(
            self._cluster,
            exchange,
            generation,
            events or gathered,
            names_of=lambda: names_of(asked),
            silence=self._keep_alive,
        )
        if events is None:
            [choice] = generation.choices
            await exchange.reply_json(answer.whole(gathered.of(choice)))
        else:
            await exchange.end_stream(events.last_events())

    async def count_tokens(self, exchange: Exchange, caller: Caller, body: bytes) -> None:
        """Replies the number of tokens that the prompt would have; nothing is answered."""
        check_headers(exchange.headers)
        asked = await self._decoded(caller, body, CountTokensRequest)
        await self._cluster.accounts.count(caller.tenant, caller.standing, asked.model)
        prompt = await self._cluster.long_work.by_size(
            caller.tenant.key, len(body), _prompt_of, asked, len(body)
        )
        try:
            length = await prompt_length(self._cluster, caller, asked.model, prompt)
        except errors.BadRequest as error:
            raise error.in_words_of(names_of(asked)) from None
        await exchange.reply_json({"input_tokens": length})

    async def _decoded(self, caller: Caller, body: bytes, kind: type[RequestT]) -> RequestT:
        tenant = caller.tenant.key
        return await self._cluster.long_work.by_size(tenant, len(body), decode, body, kind)


def _prompt_of(asked: CountTokensRequest, num_bytes: int) -> processor_pb2.Prompt:
    with without_collector(num_bytes):
        return to_prompt(asked)


def _request_of(caller: Caller, asked: MessagesRequest, num_bytes: int) -> GenerationRequest:
    return GenerationRequest(
        caller=caller.with_hints(hints_of(asked)),
        model=asked.model,
        prompt=_prompt_of(asked, num_bytes),
        sampling=to_sampling(asked),
        stream=bool(asked.stream),
        endpoint="messages",
    )
