"""Bodies of /api/embed and /api/embeddings to prompts, and vectors to their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.proto.processor_pb2 import Prompt
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.request_limits import WHAT_FITS

from ..request.embedding import POOLINGS, Embedding
from .lines import nanoseconds
from .schema import EmbeddingsRequest, EmbedRequest


def texts_of(asked: EmbedRequest) -> list[str]:
    """Texts to embed; none where the request asks that the model be there. Raises `BadRequest`."""
    if isinstance(asked.input, str):
        return [asked.input] if asked.input else []
    texts = asked.input or []
    BadRequest.unless(all(texts), "input", texts, "a string or a list of strings, none empty")
    return texts


def embed_to_embedding(asked: EmbedRequest, texts: Sequence[str], model: str) -> Embedding:
    is_cut = asked.truncate is not False
    return Embedding(
        model=model,
        prompts=[Prompt(text=text) for text in texts],
        pooling=POOLINGS["model"],
        dimensions=asked.dimensions,
        normalize=True,
        truncate_prompt_tokens=WHAT_FITS if is_cut else None,
        truncation_side="right" if is_cut else None,
        cache_salt="",
    )


def embeddings_to_embedding(asked: EmbeddingsRequest, model: str) -> Embedding:
    return Embedding(
        model=model,
        prompts=[Prompt(text=asked.prompt or "")],
        pooling=POOLINGS["model"],
        dimensions=None,
        normalize=False,
        truncate_prompt_tokens=WHAT_FITS,
        truncation_side="right",
        cache_salt="",
    )


def embed_reply(asked: EmbedRequest, embedding: Embedding, seconds: float) -> dict[str, Any]:
    waits = (each.timeline.stretches()["replica"] or 0.0 for each in embedding.generations)
    return {
        "model": asked.model,
        "embeddings": embedding.vectors,
        "total_duration": nanoseconds(seconds),
        "load_duration": nanoseconds(max(waits)),
        "prompt_eval_count": embedding.num_prompt_tokens,
    }
