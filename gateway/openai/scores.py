"""Bodies and answers of /rerank, /score, /classify and /pooling: those of Cohere and Jina, and
vLLM's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest

from ..request.embedding import POOLINGS, Embedding
from ..request.scoring import PairScores, probabilities
from ..wire.body import Body
from .schema import Flag, Truncation, Whole
from .to_pb import truncation_to_pb

Texts = Annotated[str | list[str], Meta(description="a string or a list of strings")]
Document = str | dict[str, Any]


class ScoringBody(Body, kw_only=True):
    """Fields of every body of scores and labels."""

    model: Annotated[str, Meta(description="a served model's name")]
    truncate_prompt_tokens: Truncation | None = None
    """Tokens of a pair at most: the end of its document is cut, never its query."""
    user: str | None = None
    priority: Annotated[int, Meta(ge=0, le=1000, description="a whole number, 0…1000")] | None = (
        None
    )
    request_id: (
        Annotated[str, Meta(max_length=256, description="a string of up to 256 characters")] | None
    ) = None


class PairBody(ScoringBody, kw_only=True):
    """Fields of every body of pairs."""

    instruction: (
        Annotated[str, Meta(max_length=8192, description="a string of up to 8192 characters")]
        | None
    ) = None
    """Question by which the model judges a pair, where its template reads one."""
    pooling: Annotated[Literal["sparse"], Meta(description="sparse")] | None = None
    """Weights of tokens are compared, in place of what the embedder's files say."""


class RerankRequest(PairBody, kw_only=True):
    """The body of POST /rerank, /v1/rerank and /v2/rerank."""

    query: Annotated[str, Meta(description="a string")]
    documents: Annotated[
        list[Document], Meta(description="a list of strings, or of objects with text")
    ]
    top_n: Annotated[Whole, Meta(description="a whole number, at least 1")] | None = None
    return_documents: Flag | None = None


class ScoreRequest(PairBody, kw_only=True):
    """The body of POST /score and /v1/score."""

    text_1: Texts
    text_2: Texts


class ClassifyRequest(ScoringBody, kw_only=True):
    """The body of POST /classify."""

    input: Texts


def truncation_of(asked: ScoringBody) -> int | None:
    """Tokens that stay of a text or a pair; None: it is not cut."""
    given = asked.truncate_prompt_tokens
    return None if given is None else truncation_to_pb(given)


def rerank_pairs(asked: RerankRequest) -> PairScores:
    """Pairs that a rerank body asks for. Raises `BadRequest`."""
    documents = list(map(_text_of, asked.documents))
    return PairScores.of_documents(
        asked.model, asked.query, documents, asked.top_n, **_judged_by(asked)
    )


def score_pairs(asked: ScoreRequest) -> PairScores:
    """Pairs that a score body asks for. Raises `BadRequest`."""
    firsts = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
    seconds = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    return PairScores.of_texts(asked.model, firsts, seconds, **_judged_by(asked))


def _judged_by(asked: PairBody) -> dict[str, Any]:
    return {
        "truncate_prompt_tokens": truncation_of(asked),
        "instruction": asked.instruction or "",
        "pooling": POOLINGS[asked.pooling or "model"],
    }


def texts_to_classify(asked: ClassifyRequest) -> list[processor_pb2.Prompt]:
    """Prompts that a classify body asks for. Raises `BadRequest`."""
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    BadRequest.unless(texts and all(texts), "input", texts, "at least one text, none empty")
    return [processor_pb2.Prompt(text=text) for text in texts]


def rerank_reply(
    asked: RerankRequest, scored: PairScores, request_id: str, *, shows_documents: bool
) -> dict[str, Any]:
    """Documents, the best first; of equal ones the first. `shows_documents`: unless the client says
    otherwise."""
    scores = scored.scores
    shows = shows_documents if asked.return_documents is None else asked.return_documents
    return {
        "id": f"rerank-{request_id}",
        "model": asked.model,
        "results": [
            {"index": i, "relevance_score": scores[i]}
            | ({"document": {"text": _text_of(asked.documents[i])}} if shows else {})
            for i in scored.ranked(asked.top_n)
        ],
        "usage": _usage(scored.num_prompt_tokens),
        "meta": {"tokens": {"input_tokens": scored.num_prompt_tokens}},
    }


def score_reply(asked: ScoreRequest, scored: PairScores, request_id: str) -> dict[str, Any]:
    data = [
        {"index": i, "object": "score", "score": score} for i, score in enumerate(scored.scores)
    ]
    return _listed("score", request_id, asked.model, data, scored.num_prompt_tokens)


def classify_reply(asked: ClassifyRequest, embedding: Embedding, request_id: str) -> dict[str, Any]:
    labels = embedding.labels
    data = []
    for i, logits in enumerate(embedding.vectors):
        probs = probabilities(logits)
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append({"index": i, "label": labels[best], "probs": probs, "num_classes": len(probs)})
    return _listed("classify", request_id, asked.model, data, embedding.num_prompt_tokens)


def pooling_reply(model: str, embedding: Embedding, request_id: str) -> dict[str, Any]:
    found: Sequence[object]
    match embedding.pooling_used:
        case common_pb2.POOLING_TOKEN:
            found = embedding.matrices
        case common_pb2.POOLING_SPARSE:
            found = [
                {str(token_id): weight for token_id, weight in weights.items()}
                for weights in embedding.token_weights
            ]
        case _:
            found = embedding.vectors
    data = [{"index": i, "object": "pooling", "data": each} for i, each in enumerate(found)]
    return _listed("pool", request_id, model, data, embedding.num_prompt_tokens)


def _listed(
    kind: str, request_id: str, model: str, data: Sequence[dict[str, Any]], num_tokens: int
) -> dict[str, Any]:
    return {
        "id": f"{kind}-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage(num_tokens),
    }


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


def _text_of(document: Document) -> str:
    """Text of a document. Raises `BadRequest` for an object without one."""
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise BadRequest("documents", "a document without text; allowed: strings, or {text: …}")
    return text
