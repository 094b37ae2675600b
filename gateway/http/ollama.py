"""Ollama's API over HTTP: answers and vectors."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any

from headwater.services.runtime import errors

from ..long_work import without_collector
from ..ollama import embeddings
from ..ollama.answer import OllamaAnswer, OllamaLines, loaded
from ..ollama.cache_hints import hints_of
from ..ollama.decode import RequestT, decode
from ..ollama.keep_alive import check_stays, note_ignored
from ..ollama.model_cards import served_name
from ..ollama.schema import (
    ChatRequest,
    Embedding,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
)
from ..ollama.to_pb import is_load, names_of, to_prompt, to_sampling
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest
from ..request.sinks import Gathered
from ..settings import GatewaySettings
from ..tenancy.caller import Caller
from .callers import Callers
from .http_exchange import Exchange, Route
from .one_answer import run_one


class OllamaSurface:
    """The handlers."""

    def __init__(self, cluster: Cluster, callers: Callers, settings: GatewaySettings) -> None:
        self._cluster = cluster
        self._callers = callers
        self._max_body_bytes = settings.max_body_bytes
        self._silence = settings.sse_keep_alive

    def routes(self) -> list[Route]:
        return [
            ("POST", "/api/chat", self.chat),
            ("POST", "/api/generate", self.generate),
            ("POST", "/api/embed", self.embed),
            ("POST", "/api/embeddings", self.embeddings),
        ]

    async def chat(self, exchange: Exchange) -> None:
        await self._answer(exchange, ChatRequest)

    async def generate(self, exchange: Exchange) -> None:
        await self._answer(exchange, GenerateRequest)

    async def embed(self, exchange: Exchange) -> None:
        began = time.perf_counter()
        caller, asked = await self._embedding_of(exchange, EmbedRequest)
        name = served_name(self._cluster, asked.model)
        texts = embeddings.texts_of(asked)
        if not texts:
            await self._load(exchange, caller, asked)
            await exchange.reply_json({"model": asked.model, "embeddings": []})
            return
        note_ignored(asked.keep_alive)
        vectors = embeddings.embed_to_embedding(asked, texts, name)
        await self._until_done(exchange, caller, vectors.run(self._cluster, caller))
        seconds = time.perf_counter() - began
        await exchange.reply_built(
            vectors.num_bytes, lambda: embeddings.embed_reply(asked, vectors, seconds)
        )

    async def embeddings(self, exchange: Exchange) -> None:
        caller, asked = await self._embedding_of(exchange, EmbeddingsRequest)
        if not asked.prompt:
            await self._load(exchange, caller, asked)
            await exchange.reply_json({"embedding": []})
            return
        note_ignored(asked.keep_alive)
        vectors = embeddings.embeddings_to_embedding(asked, served_name(self._cluster, asked.model))
        try:
            await self._until_done(exchange, caller, vectors.run(self._cluster, caller))
        except errors.BadRequest as error:
            raise error.in_words_of({"input": "prompt"}) from None
        [vector] = vectors.vectors
        await exchange.reply_json({"embedding": vector})

    async def _answer(
        self, exchange: Exchange, kind: type[ChatRequest] | type[GenerateRequest]
    ) -> None:
        """Answers whole, or in a stream unless the client asks for none."""
        caller = self._callers.let_in(exchange)
        body = await exchange.body(self._max_body_bytes)
        asked = await self._decoded(caller, body, kind)
        if is_load(asked):
            await self._load(exchange, caller, asked)
            await exchange.reply_json(loaded(asked))
            return
        note_ignored(asked.keep_alive)
        generation = Generation(
            await self._cluster.long_work.by_size(
                caller.tenant.key, len(body), self._request_of, caller, asked, len(body)
            )
        )
        answer = OllamaAnswer(asked, generation)
        lines = OllamaLines(answer, exchange.open_stream) if asked.stream is not False else None
        gathered = Gathered()
        await run_one(
            self._cluster,
            exchange,
            generation,
            lines or gathered,
            names_of=lambda: names_of(asked),
            silence=self._silence,
        )
        if lines is None:
            [choice] = generation.choices
            await exchange.reply_json(answer.whole(gathered.of(choice)))
        else:
            await exchange.end_stream(lines.last_events())

    def _request_of(
        self, caller: Caller, asked: ChatRequest | GenerateRequest, num_bytes: int
    ) -> GenerationRequest:
        """Raises `BadRequest`."""
        with without_collector(num_bytes):
            prompt = to_prompt(asked)
        return GenerationRequest(
            caller=caller.with_hints(hints_of(asked)),
            model=served_name(self._cluster, asked.model),
            prompt=prompt,
            sampling=to_sampling(asked),
            stream=asked.stream is not False,
            endpoint="ollama",
        )

    async def _embedding_of(
        self, exchange: Exchange, kind: type[RequestT]
    ) -> tuple[Caller, RequestT]:
        caller = self._callers.let_in(exchange)
        body = await exchange.body(self._max_body_bytes)
        return caller, await self._decoded(caller, body, kind)

    async def _load(
        self, exchange: Exchange, caller: Caller, asked: ChatRequest | GenerateRequest | Embedding
    ) -> None:
        """Returns when a replica of the model is there. Raises `BadRequest` where it is to be
        unloaded, `NotFound` for an unknown model, `Unavailable` where it cannot start."""
        check_stays(asked.keep_alive)
        name = served_name(self._cluster, asked.model)
        await self._callers.count(caller, name)
        await self._until_done(exchange, caller, self._replica(caller, name))

    async def _replica(self, caller: Caller, name: str) -> None:
        starts = self._cluster.cold_starts
        tenant = caller.tenant
        name = self._cluster.served.target(tenant, name).model
        await starts.text_stages(name, tenant=tenant, tier=caller.tier)
        self._cluster.served.model(name)
        await starts.replica(name, tenant=tenant, tier=caller.tier, virtual_time=0.0)

    async def _until_done(
        self, exchange: Exchange, caller: Caller, work: Coroutine[Any, Any, None]
    ) -> None:
        """Awaits work within the caller's deadline and while its client is there."""
        async with caller.within_deadline():
            await exchange.unless_client_leaves(work)

    async def _decoded(self, caller: Caller, body: bytes, kind: type[RequestT]) -> RequestT:
        tenant = caller.tenant.key
        return await self._cluster.long_work.by_size(tenant, len(body), decode, body, kind)
