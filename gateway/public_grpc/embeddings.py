"""Messages of Embed: the reply."""

from __future__ import annotations

from headwater.proto import common_pb2, inference_pb2

from ..request.embedding import Embedding
from ..tenancy.caller import Caller


def embed_reply(
    request: inference_pb2.EmbedRequest, embedding: Embedding, caller: Caller
) -> inference_pb2.EmbedReply:
    """Raises `BadRequest` for more dimensions than the model has."""
    return inference_pb2.EmbedReply(
        request_id=caller.request_id,
        client_request_id=caller.client_request_id,
        model=request.model,
        embeddings=[inference_pb2.EmbedReply.Vector(values=each) for each in embedding.vectors],
        usage=common_pb2.Usage(
            prompt_tokens=embedding.num_prompt_tokens, cached_tokens=embedding.num_cached_tokens
        ),
    )
