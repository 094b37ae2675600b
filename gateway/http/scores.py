"""/rerank, /score, /classify and /pooling: handlers."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from headwater.proto import common_pb2
from headwater.services.runtime.served_model import CLASSIFY

from ..openai.decode import decode
from ..openai.embeddings import EmbeddingRequest, to_embedding
from ..openai.scores import (
    ClassifyRequest,
    RerankRequest,
    ScoreRequest,
    ScoringBody,
    classify_reply,
    pooling_reply,
    rerank_pairs,
    rerank_reply,
    score_pairs,
    score_reply,
    texts_to_classify,
    truncation_of,
)
from ..request.cluster import Cluster
from ..request.embedding import Embedding
from ..request.scoring import check_task
from ..settings import GatewaySettings
from ..tenancy.caller import Caller
from .callers import Callers
from .http_exchange import Exchange, Route

KindT = TypeVar("KindT", bound=ScoringBody | EmbeddingRequest)


class ScoreSurface:
    """Endpoints of rerankers, classifiers and embedders."""

    def __init__(self, cluster: Cluster, callers: Callers, settings: GatewaySettings) -> None:
        self._cluster = cluster
        self._callers = callers
        self._max_body_bytes = settings.max_body_bytes

    def routes(self) -> list[Route]:
        return [
            ("POST", "/rerank", self.rerank),
            ("POST", "/v1/rerank", self.rerank),
            ("POST", "/v2/rerank", self.rerank_v2),
            ("POST", "/score", self.score),
            ("POST", "/v1/score", self.score),
            ("POST", "/classify", self.classify),
            ("POST", "/pooling", self.pooling),
        ]

    async def rerank(self, exchange: Exchange) -> None:
        await self._rerank(exchange, shows_documents=True)

    async def rerank_v2(self, exchange: Exchange) -> None:
        await self._rerank(exchange, shows_documents=False)

    async def score(self, exchange: Exchange) -> None:
        caller, asked = await self._asked(exchange, ScoreRequest)
        scored = score_pairs(asked)
        await self._run(exchange, caller, scored.run(self._cluster, caller))
        await exchange.reply_json(score_reply(asked, scored, caller.request_id))

    async def classify(self, exchange: Exchange) -> None:
        caller, asked = await self._asked(exchange, ClassifyRequest)
        check_task(self._cluster, caller.tenant, asked.model, CLASSIFY)
        embedding = Embedding(
            model=asked.model,
            prompts=texts_to_classify(asked),
            pooling=common_pb2.POOLING_MODEL,
            dimensions=None,
            normalize=False,
            truncate_prompt_tokens=truncation_of(asked),
            cache_salt="",
            endpoint="classify",
        )
        await self._run(exchange, caller, embedding.run(self._cluster, caller))
        await exchange.reply_json(classify_reply(asked, embedding, caller.request_id))

    async def pooling(self, exchange: Exchange) -> None:
        caller, asked = await self._asked(exchange, EmbeddingRequest)
        embedding = to_embedding(asked, self._cluster.max_choices)
        embedding.normalize = bool(asked.normalize)
        embedding.endpoint = "pooling"
        await self._run(exchange, caller, embedding.run(self._cluster, caller))
        build = partial(pooling_reply, asked.model, embedding, caller.request_id)
        await exchange.reply_built(embedding.num_bytes, build)

    async def _rerank(self, exchange: Exchange, *, shows_documents: bool) -> None:
        caller, asked = await self._asked(exchange, RerankRequest)
        scored = rerank_pairs(asked)
        await self._run(exchange, caller, scored.run(self._cluster, caller))
        await exchange.reply_json(
            rerank_reply(asked, scored, caller.request_id, shows_documents=shows_documents)
        )

    async def _asked(self, exchange: Exchange, kind: type[KindT]) -> tuple[Caller, KindT]:
        """The caller and the body. Raises `BadRequest`."""
        caller = self._callers.let_in(exchange)
        body = await exchange.body(self._max_body_bytes)
        asked = await self._cluster.long_work.by_size(
            caller.tenant.key, len(body), decode, body, kind
        )
        caller = caller.with_body(asked.request_id, asked.priority)
        exchange.request_id = caller.shown_id
        return caller, asked

    async def _run(
        self, exchange: Exchange, caller: Caller, work: Coroutine[Any, Any, None]
    ) -> None:
        """Awaits the work within the caller's deadline."""
        async with caller.within_deadline():
            await exchange.unless_client_leaves(work)
