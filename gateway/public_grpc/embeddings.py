"""Messages of Embed: the reply."""

from __future__ import annotations

from itertools import chain

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
        embeddings=_vectors(embedding),
        usage=common_pb2.Usage(
            prompt_tokens=embedding.num_prompt_tokens, cached_tokens=embedding.num_cached_tokens
        ),
    )


def _vectors(embedding: Embedding) -> list[inference_pb2.EmbedReply.Vector]:
    vector = inference_pb2.EmbedReply.Vector
    match embedding.pooling_used:
        case common_pb2.POOLING_TOKEN:
            return [
                vector(values=chain.from_iterable(matrix), num_vectors=len(matrix))
                for matrix in embedding.matrices
            ]
        case common_pb2.POOLING_SPARSE:
            return [
                vector(values=weights.values(), token_ids=weights)
                for weights in embedding.token_weights
            ]
        case _:
            return [vector(values=each) for each in embedding.vectors]
