"""The public gRPC surface: OpenAI's semantics in typed messages, over the same life of a request as
REST."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
import msgspec

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from headwater.services.runtime import errors
from headwater.services.runtime.tasks import end

from ..request.choice import Choice
from ..request.choice_count import check_num_choices
from ..request.cluster import Cluster, shutting_down
from ..request.embedding import BY_TOKEN, Embedding
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest, score_echo
from ..request.prepare import prepare
from ..request.prompt_runs import run_all
from ..request.resumed import bare_id, caller_of, check_repeatable, find
from ..request.sinks import Gathered, OrderedQueue, Piece, PieceQueue
from ..stages.stream_context import Found, StreamContext, StreamKind, StreamNotKept
from ..tenancy.caller import MAX_PRIORITY, Caller
from ..tenancy.tenants import Identity
from . import scores
from .cache_hints import hints_of
from .call_standings import CallStandings
from .embeddings import embed_reply
from .messages import (
    Asked,
    StreamUsage,
    call_delta,
    chat_choice,
    chunk_fields,
    complete_choice,
    optional,
    prompt_of,
    reply_head,
    score_chunks,
)

Context = grpc.aio.ServicerContext[Any, Any]
Working = Asked | inference_pb2.EmbedRequest | scores.Pairs
Pieces = AsyncIterator[tuple[Generation, Piece | Choice | None]]
ChunkT = TypeVar("ChunkT", inference_pb2.ChatChunk, inference_pb2.CompleteChunk)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves the API by the cluster. Methods raise named errors, which the interceptor turns into
    status."""

    def __init__(self, cluster: Cluster, max_text_bytes: int, standings: CallStandings) -> None:
        self._cluster = cluster
        self._standings = standings
        self._max_text_bytes = max_text_bytes

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> inference_pb2.ChatReply:
        generation, gathered = await self._whole(request, context)
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
        pieces = self._pieces(request, self._admit(request, context))
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
        generation, gathered = await self._whole(request, context)
        echo = await self._echo(generation) if request.sampling.echo else ""
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
        pieces = self._pieces(request, self._admit(request, context))
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
                    echo = await self._echo(generation) if echo is None else echo
                    chunk.text = echo + chunk.text
                for scored in score_chunks(generation, chunk):
                    yield scored
            yield chunk

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ResumeReply]:
        if self._cluster.draining:
            raise shutting_down()
        caller = self._traced(self._caller(context), "Resume")
        after = request.after_index
        found = await find(self._cluster, caller.tenant.key, bare_id(request.request_id))
        caller = caller_of(found, caller)
        kind = found.context.kind
        body = found.context.body
        if kind is StreamKind.GRPC_CHAT:
            chat = inference_pb2.ChatRequest.FromString(body)
            pieces = self._pieces(chat, caller, found)
            async for chat_chunk in _numbered(self._chat_chunks(chat, pieces), chat, after):
                yield inference_pb2.ResumeReply(chat=chat_chunk)
        elif kind is StreamKind.GRPC_COMPLETE:
            complete = inference_pb2.CompleteRequest.FromString(body)
            pieces = self._pieces(complete, caller, found)
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
        caller = self._admit(request, context)
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
        caller = self._admit(request, context)
        scored = scores.rerank_pairs(request)
        async with caller.within_deadline():
            await scored.run(self._cluster, caller)
        return scores.rerank_reply(request, scored, caller)

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: Context
    ) -> inference_pb2.ScoreReply:
        caller = self._admit(request, context)
        scored = scores.score_pairs(request)
        async with caller.within_deadline():
            await scored.run(self._cluster, caller)
        return scores.score_reply(request, scored, caller)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeReply:
        caller, model = await self._count(request, context)
        asked = processor_pb2.ProcessorTokenizeRequest(
            model=model,
            prompt=request.prompt,
            return_token_strings=request.return_token_strings,
            escape_special_tokens=self._cluster.tenants.escapes_special_tokens(caller.tenant),
            tenant=caller.tenant.key,
        )
        reply = await self._cluster.processors.tokenize(asked)
        return inference_pb2.TokenizeReply(
            token_ids=reply.token_ids,
            max_model_len=reply.max_model_len,
            token_strings=reply.token_strings,
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeReply:
        caller, model = await self._count(request, context)
        asked = processor_pb2.ProcessorDetokenizeRequest(
            model=model, token_ids=request.token_ids, tenant=caller.tenant.key
        )
        return inference_pb2.DetokenizeReply(
            text=(await self._cluster.processors.detokenize(asked)).text
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsReply:
        tenant = self._caller(context).tenant
        cards = [
            inference_pb2.ModelCard(
                id=model.name,
                max_model_len=model.max_model_len,
                created=since,
                revision=model.revision,
                capabilities=model.capabilities,
            )
            for model, since in self._cluster.models_of(tenant).values()
        ]
        return inference_pb2.ListModelsReply(models=cards)

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelReply:
        return inference_pb2.CancelReply(
            cancelled=self._cluster.cancel(self._caller(context), request.request_id)
        )

    async def _whole(self, request: Asked, context: Context) -> tuple[Generation, Gathered]:
        """Runs a request to its end."""
        caller = self._admit(request, context)
        gathered = Gathered()
        generation = self._generation(request, caller, None, stream=False)
        async with caller.within_deadline():
            await prepare(self._cluster, generation)
            await run_all(self._cluster, [generation], gathered)
        return generation, gathered

    async def _pieces(self, request: Asked, caller: Caller, found: Found | None = None) -> Pieces:
        """Yields pieces of choices, choices that have ended, and last None. Leaving the loop ends
        the request."""
        queue = OrderedQueue() if request.resumable else PieceQueue()
        generation = self._generation(request, caller, found, stream=True)
        async with caller.within_deadline():
            await prepare(self._cluster, generation)
            work = asyncio.create_task(run_all(self._cluster, [generation], queue))
            try:
                async for news in queue.read(work):
                    yield generation, news
            finally:
                await end(work)
            yield generation, None

    def _generation(
        self, request: Asked, caller: Caller, found: Found | None, *, stream: bool
    ) -> Generation:
        sampling = request.sampling
        check_num_choices("prompt", 1, sampling, self._cluster.max_choices)
        stream = score_echo(sampling, stream=stream)
        asked = GenerationRequest(
            caller=caller.with_hints(hints_of(request)),
            model=request.model,
            prompt=prompt_of(request),
            sampling=sampling,
            stream=stream,
            endpoint="grpc",
            cache_salt=request.cache_salt,
            context=found.context if found is not None else _context(request, caller),
        )
        return Generation(asked, found)

    async def _echo(self, generation: Generation) -> str:
        prompt = generation.request.prompt
        if prompt.WhichOneof("kind") == "text" and not generation.request.sampling.HasField(
            "truncate_prompt_tokens"
        ):
            return prompt.text
        request = processor_pb2.ProcessorDetokenizeRequest(
            model=generation.request.model,
            token_ids=generation.prepared.prompt_ids,
            tenant=generation.request.caller.tenant.key,
        )
        return (await self._cluster.processors.detokenize(request)).text

    def _admit(self, request: Working, context: Context) -> Caller:
        if self._cluster.draining:
            raise shutting_down()
        caller = self._caller(context)
        if not 0 <= request.priority <= MAX_PRIORITY:
            raise errors.BadRequest.of(
                "priority", request.priority, f"a whole number, 0…{MAX_PRIORITY}"
            )
        caller = caller.with_body(request.client_request_id, request.priority)
        self._cluster.reject_early(caller)
        return self._traced(caller, request.DESCRIPTOR.name.removesuffix("Request"))

    def _traced(self, caller: Caller, method: str) -> Caller:
        caller = self._cluster.traced(caller, f"Inference/{method}")
        if caller.span.is_collected:
            caller.span.describe(
                {
                    "rpc.system": "grpc",
                    "rpc.service": "headwater.v1.Inference",
                    "rpc.method": method,
                }
            )
        return caller

    async def _count(
        self,
        request: inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest,
        context: Context,
    ) -> tuple[Caller, str]:
        """Counts a request that no engine computes; returns its caller and model. Raises
        `LimitExceeded`, `BodyTooLarge`."""
        caller = self._caller(context)
        self._cluster.accounts.exhausted.reject_early(caller.tenant, caller.standing)
        if request.ByteSize() > self._max_text_bytes:
            raise errors.BodyTooLarge(self._max_text_bytes)
        model = request.model or self._cluster.processors.only_model()
        await self._cluster.accounts.count(caller.tenant, caller.standing, model)
        return caller, self._cluster.target(caller.tenant, model).model

    def _caller(self, context: Context) -> Caller:
        metadata = context.invocation_metadata()
        caller = identified(metadata, self._cluster.tenants, remaining=context.time_remaining())
        return msgspec.structs.replace(caller, standing=self._standings.of_this_call())


def identified(metadata: Any, tenants: Identity, *, remaining: float | None = None) -> Caller:
    """The caller of a call, by its metadata; `remaining` are the seconds of its deadline. Raises as
    `Caller.of`."""
    words = _words(metadata)
    for name in ("authorization", "x-api-key", "api-key"):
        if [key for key, _ in words].count(name) > 1:
            raise errors.BadRequest(name, f"{name} is given more than once; allowed: once")
    return Caller.of(dict(words), tenants, remaining=remaining)


def headers_of(metadata: Any) -> dict[str, str]:
    """A call's metadata as headers."""
    return dict(_words(metadata))


def _words(metadata: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in metadata or () if isinstance(value, str)]


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


def _context(request: Asked, caller: Caller) -> StreamContext | None:
    """Context of a resumable stream. Raises `BadRequest` for a stream that cannot be repeated in
    the same order."""
    if not request.resumable:
        return None
    check_repeatable("resumable", request.sampling)
    is_chat = isinstance(request, inference_pb2.ChatRequest)
    return StreamContext(
        kind=StreamKind.GRPC_CHAT if is_chat else StreamKind.GRPC_COMPLETE,
        body=request.SerializeToString(),
        client_request_id=caller.client_request_id,
        wants_receipt=caller.wants_receipt,
    )
