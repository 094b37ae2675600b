"""Messages of Rerank and Score: pairs to be scored, and the replies."""

from __future__ import annotations

from typing import Any

from headwater.proto import common_pb2, inference_pb2
from headwater.services.runtime.errors import BadRequest

from ..request.scoring import PairScores
from ..tenancy.caller import Caller
from .messages import optional

PAIR_POOLINGS = (
    common_pb2.POOLING_UNSPECIFIED,
    common_pb2.POOLING_MODEL,
    common_pb2.POOLING_SPARSE,
)
Pairs = inference_pb2.RerankRequest | inference_pb2.ScoreRequest


def rerank_pairs(request: inference_pb2.RerankRequest) -> PairScores:
    """Raises `BadRequest`."""
    return PairScores.of_documents(
        request.model,
        request.query,
        list(request.documents),
        optional(request, "top_n"),
        **_judged_by(request),
    )


def score_pairs(request: inference_pb2.ScoreRequest) -> PairScores:
    """Raises `BadRequest`."""
    return PairScores.of_texts(
        request.model, list(request.text_1), list(request.text_2), **_judged_by(request)
    )


def rerank_reply(
    request: inference_pb2.RerankRequest, scored: PairScores, caller: Caller
) -> inference_pb2.RerankReply:
    scores = scored.scores
    results = [
        inference_pb2.RerankReply.Result(
            index=i,
            relevance_score=scores[i],
            document=request.documents[i] if request.return_documents else "",
        )
        for i in scored.ranked(optional(request, "top_n"))
    ]
    return inference_pb2.RerankReply(results=results, **_head(request, scored, caller))


def score_reply(
    request: inference_pb2.ScoreRequest, scored: PairScores, caller: Caller
) -> inference_pb2.ScoreReply:
    return inference_pb2.ScoreReply(scores=scored.scores, **_head(request, scored, caller))


def _judged_by(request: Pairs) -> dict[str, Any]:
    return {
        "truncate_prompt_tokens": optional(request, "truncate_prompt_tokens"),
        "instruction": request.instruction,
        "pooling": _pooling_of(request),
    }


def _pooling_of(request: Pairs) -> common_pb2.Pooling.ValueType:
    """Raises `BadRequest`."""
    if request.pooling not in PAIR_POOLINGS:
        raise BadRequest.of("pooling", request.pooling, "POOLING_SPARSE, or none")
    return request.pooling or common_pb2.POOLING_MODEL


def _head(request: Pairs, scored: PairScores, caller: Caller) -> dict[str, Any]:
    return {
        "request_id": caller.request_id,
        "client_request_id": caller.client_request_id,
        "model": request.model,
        "usage": common_pb2.Usage(prompt_tokens=scored.num_prompt_tokens),
    }
