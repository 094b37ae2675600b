"""POST /v1/embeddings: OpenAI's JSON around vectors."""

from __future__ import annotations

import base64
import sys
import time
from array import array
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest

from ..request.choice_count import check_num_choices
from ..request.embedding import POOLINGS, Embedding
from ..wire.body import Body
from ..wire.required import missing
from .completions import prompts_of
from .schema import Flag, Messages, TokenId, TokenizeRequest, Truncation, Whole
from .to_pb import conversation_to_pb, truncation_to_pb

ALLOWED_INPUT = (
    "a string, a list of strings, token ids, or a list of lists of token ids, none empty"
)

OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)
"""Fields that say how messages become a prompt."""


class EmbeddingRequest(Body, kw_only=True):
    """The body of POST /v1/embeddings."""

    model: Annotated[str, Meta(description="a served model's name")]
    input: (
        Annotated[str | list[str | TokenId | list[TokenId]], Meta(description=ALLOWED_INPUT)] | None
    ) = None
    messages: Messages | None = None
    """A conversation in place of `input`."""
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template: (
        Annotated[str, Meta(description="a Jinja template, or the name of one of the model's")]
        | None
    ) = None
    """Template in place of the model's, where the operator trusts those of clients."""
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="float or base64")] | None
    ) = None
    dimensions: (
        Annotated[Whole, Meta(description="a whole number, up to the model's hidden size")] | None
    ) = None
    pooling: (
        Annotated[
            Literal["last", "mean", "cls", "token", "sparse"],
            Meta(description="last, mean, cls, token or sparse"),
        ]
        | None
    ) = None
    normalize: Flag | None = None
    prompt_name: (
        Annotated[str, Meta(max_length=256, description="a name of the model's prompts")] | None
    ) = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: (
        Annotated[Literal["left", "right"], Meta(description="left or right")] | None
    ) = None
    add_special_tokens: Flag | None = None
    user: str | None = None
    cache_salt: (
        Annotated[str, Meta(max_length=1024, description="a string of up to 1024 characters")]
        | None
    ) = None
    priority: Annotated[int, Meta(ge=0, le=1000, description="a whole number, 0…1000")] | None = (
        None
    )
    request_id: (
        Annotated[str, Meta(max_length=256, description="a string of up to 256 characters")] | None
    ) = None


def to_embedding(asked: EmbeddingRequest, max_choices: int) -> Embedding:
    """Converts a body. Raises `BadRequest`."""
    return Embedding(
        model=asked.model,
        prompts=_prompts_of(asked, max_choices),
        pooling=POOLINGS[asked.pooling or "model"],
        dimensions=asked.dimensions,
        normalize=asked.normalize is not False,
        truncate_prompt_tokens=(
            None
            if asked.truncate_prompt_tokens is None
            else truncation_to_pb(asked.truncate_prompt_tokens)
        ),
        truncation_side=asked.truncation_side,
        prompt_name=asked.prompt_name,
        cache_salt=asked.cache_salt or "",
    )


def _prompts_of(asked: EmbeddingRequest, max_choices: int) -> list[processor_pb2.Prompt]:
    if asked.messages is not None and asked.input is not None:
        raise BadRequest("input", "input and messages exclude each other; allowed: exactly one")
    if asked.messages is not None:
        return [_conversation_of(asked)]
    for name in OF_MESSAGES:
        if getattr(asked, name):
            raise BadRequest(name, f"{name} without messages; allowed: with messages")
    if asked.input is None:
        raise missing("input", f"{ALLOWED_INPUT}, or messages in its place")
    check = partial(check_num_choices, "input", sampling=common_pb2.Sampling(), allowed=max_choices)
    return prompts_of("input", asked.input, check, add_special_tokens=asked.add_special_tokens)


def _conversation_of(asked: EmbeddingRequest) -> processor_pb2.Prompt:
    """The conversation as one prompt. As in vLLM, it does not begin an answer unless asked to."""
    BadRequest.unless(asked.messages, "messages", asked.messages, "at least one message")
    return conversation_to_pb(
        TokenizeRequest(
            messages=asked.messages,
            add_generation_prompt=bool(asked.add_generation_prompt),
            continue_final_message=asked.continue_final_message,
            chat_template=asked.chat_template,
            chat_template_kwargs=asked.chat_template_kwargs,
            add_special_tokens=asked.add_special_tokens,
        )
    )


def reply_of(asked: EmbeddingRequest, embedding: Embedding, request_id: str) -> dict[str, Any]:
    encode = _base64 if asked.encoding_format == "base64" else list
    return {
        "id": f"embd-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.model,
        "data": [
            {"object": "embedding", "index": i, "embedding": encode(vector)}
            for i, vector in enumerate(embedding.vectors)
        ],
        "usage": {
            "prompt_tokens": embedding.num_prompt_tokens,
            "total_tokens": embedding.num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": embedding.num_cached_tokens},
        },
    }


def _base64(vector: list[float]) -> str:
    """Vector as little-endian float32 in base64, as OpenAI's clients read it."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
