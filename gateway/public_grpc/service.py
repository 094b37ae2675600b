"""The public gRPC surface: OpenAI's semantics in typed messages, over the same life of a request as
REST."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2

from ..request.cluster import Cluster, shutting_down
from ..request.embedding import BY_TOKEN, Embedding
from ..request.resumed import bare_id, caller_of, find
from ..request.sinks import Piece
from ..stages.stream_context import StreamKind, StreamNotKept
from . import scores
from .call_standings import CallStandings
from .callers import Callers, Context
from .embeddings import embed_reply
from .messages import (
    Asked,
    StreamUsage,
    call_delta,
    chat_choice,
    chunk_fields,
    complete_choice,
    optional,
    reply_head,
    score_chunks,
)
from .runs import Pieces, Runs

ChunkT = TypeVar("ChunkT", inference_pb2.ChatChunk, inference_pb2.CompleteChunk)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves the API by the cluster. Methods raise named errors, which the interceptor turns into
    status."""

    def __init__(self, cluster: Cluster, max_text_bytes: int, standings: CallStandings) -> None:
        self._cluster = cluster
        self._callers = Callers(cluster, max_text_bytes, standings)
        self._runs = Runs(cluster)

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> inference_pb2.ChatReply:
        generation, gathered = await self._runs.whole(
            request, self._callers.admit(request, context)
        )
        return inference_pb2.ChatReply(
            choices=[
                chat_choice(index, choice, gathered.of(choice), request)
                for index, choice in enumerate(generation.answered)
            ],
            prompt_logprobs=generation.prompt_logprobs,
            **reply_head(generation, request),
        )

    async def ChatStream(
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ChatChunk]:
        pieces = self._runs.pieces(request, self._callers.admit(request, context))
        async for chunk in _numbered(self._chat_chunks(request, pieces), request):
            yield chunk

    async def _chat_chunks(
        self, request: inference_pb2.ChatRequest, pieces: Pieces
    ) -> AsyncIterator[inference_pb2.ChatChunk]:
        begun = set[int]()
        usage = StreamUsage()
        async for generation, news in pieces:
            chunk = inference_pb2.ChatChunk(
                **chunk_fields(generation, news, request, usage, is_first=not begun)
            )
            if isinstance(news, Piece):
                chunk.content = news.text
                chunk.reasoning_content = news.reasoning
                chunk.tool_calls.extend(call_delta(call) for call in news.calls)
            if chunk.index not in begun and news is not None:
                begun.add(chunk.index)
                chunk.role = "assistant"
            yield chunk

    async def Complete(
        self, request: inference_pb2.CompleteRequest, context: Context
    ) -> inference_pb2.CompleteReply:
        generation, gathered = await self._runs.whole(
            request, self._callers.admit(request, context)
        )
        echo = await self._runs.echo(generation) if request.sampling.echo else ""
        return inference_pb2.CompleteReply(
            choices=[
                complete_choice(index, choice, gathered.of(choice), request, echo)
                for index, choice in enumerate(generation.answered)
            ],
            **reply_head(generation, request),
        )

    async def CompleteStream(
        self, request: inference_pb2.CompleteRequest, context: Context
    ) -> AsyncIterator[inference_pb2.CompleteChunk]:
        pieces = self._runs.pieces(request, self._callers.admit(request, context))
        async for chunk in _numbered(self._complete_chunks(request, pieces), request):
            yield chunk

    async def _complete_chunks(
        self, request: inference_pb2.CompleteRequest, pieces: Pieces
    ) -> AsyncIterator[inference_pb2.CompleteChunk]:
        begun = set[int]()
        usage = StreamUsage()
        echo: str | None = None
        async for generation, news in pieces:
            chunk = inference_pb2.CompleteChunk(
                **chunk_fields(generation, news, request, usage, is_first=not begun)
            )
            if isinstance(news, Piece):
                chunk.text = news.text
            if chunk.index not in begun and news is not None:
                begun.add(chunk.index)
                if request.sampling.echo:
                    echo = await self._runs.echo(generation) if echo is None else echo
                    chunk.text = echo + chunk.text
                for scored in score_chunks(generation, chunk):
                    yield scored
            yield chunk

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ResumeReply]:
        if self._cluster.draining:
            raise shutting_down()
        caller = self._callers.traced(self._callers.of(context), "Resume")
        after = request.after_index
        found = await find(self._cluster, caller.tenant.key, bare_id(request.request_id))
        caller = caller_of(found, caller)
        kind = found.context.kind
        body = found.context.body
        if kind is StreamKind.GRPC_CHAT:
            chat = inference_pb2.ChatRequest.FromString(body)
            pieces = self._runs.pieces(chat, caller, found)
            async for chat_chunk in _numbered(self._chat_chunks(chat, pieces), chat, after):
                yield inference_pb2.ResumeReply(chat=chat_chunk)
        elif kind is StreamKind.GRPC_COMPLETE:
            complete = inference_pb2.CompleteRequest.FromString(body)
            pieces = self._runs.pieces(complete, caller, found)
            async for complete_chunk in _numbered(
                self._complete_chunks(complete, pieces), complete, after
            ):
                yield inference_pb2.ResumeReply(complete=complete_chunk)
        else:
            # The request came over HTTP, where /v1/streams goes on with it.
            raise StreamNotKept(found.request_id)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedReply:
        caller = self._callers.admit(request, context)
        embedding = Embedding(
            model=request.model,
            prompts=request.inputs,
            pooling=request.pooling or common_pb2.POOLING_MODEL,
            dimensions=optional(request, "dimensions"),
            normalize=request.normalize if request.HasField("normalize") else True,
            truncate_prompt_tokens=optional(request, "truncate_prompt_tokens"),
            truncation_side=optional(request, "truncation_side"),
            prompt_name=optional(request, "prompt_name"),
            cache_salt=request.cache_salt,
            endpoint="pooling" if request.pooling in BY_TOKEN else "embeddings",
        )
        async with caller.within_deadline():
            await embedding.run(self._cluster, caller)
        return await self._cluster.long_work.by_size(
            caller.tenant.key, embedding.num_bytes, embed_reply, request, embedding, caller
        )

    async def Rerank(
        self, request: inference_pb2.RerankRequest, context: Context
    ) -> inference_pb2.RerankReply:
        caller = self._callers.admit(request, context)
        scored = scores.rerank_pairs(request)
        async with caller.within_deadline():
            await scored.run(self._cluster, caller)
        return scores.rerank_reply(request, scored, caller)

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreReply:
        caller = self._callers.admit(request, context)
        scored = scores.score_pairs(request)
        async with caller.within_deadline():
            await scored.run(self._cluster, caller)
        return scores.score_reply(request, scored, caller)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeReply:
        caller, model = await self._callers.count(request, context)
        asked = processor_pb2.ProcessorTokenizeRequest(
            model=model,
            prompt=request.prompt,
            return_token_strings=request.return_token_strings,
            escape_special_tokens=self._cluster.tenants.escapes_special_tokens(caller.tenant),
            tenant=caller.tenant.key,
        )
        reply = await self._cluster.stages.processors.tokenize(asked)
        return inference_pb2.TokenizeReply(
            token_ids=reply.token_ids,
            max_model_len=reply.max_model_len,
            token_strings=reply.token_strings,
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeReply:
        caller, model = await self._callers.count(request, context)
        asked = processor_pb2.ProcessorDetokenizeRequest(
            model=model, token_ids=request.token_ids, tenant=caller.tenant.key
        )
        return inference_pb2.DetokenizeReply(
            text=(await self._cluster.stages.processors.detokenize(asked)).text
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsReply:
        tenant = self._callers.of(context).tenant
        cards = [
            inference_pb2.ModelCard(
                id=model.name,
                max_model_len=model.max_model_len,
                created=since,
                revision=model.revision,
                capabilities=model.capabilities,
            )
            for model, since in self._cluster.served.of(tenant).values()
        ]
        return inference_pb2.ListModelsReply(models=cards)

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelReply:
        return inference_pb2.CancelReply(
            cancelled=self._cluster.running.cancel(
                request.request_id, self._callers.of(context).tenant.key
            )
        )


async def _numbered(
    chunks: AsyncIterator[ChunkT], request: Asked, after: int = 0
) -> AsyncIterator[ChunkT]:
    """Chunks of a resumable stream with their numbers, behind those that the client has."""
    number = 0
    async for chunk in chunks:
        if request.resumable:
            chunk.chunk_index = number = number + 1
        if number > after or not request.resumable:
            yield chunk
