"""Requests that came over gRPC, while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headwater.proto import inference_pb2, processor_pb2
from headwater.services.runtime.tasks import end

from ..request.choice import Choice
from ..request.choice_count import check_num_choices
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.generation_request import GenerationRequest, score_echo
from ..request.prepare import prepare
from ..request.prompt_runs import run_all
from ..request.resumed import check_repeatable
from ..request.sinks import Gathered, OrderedQueue, Piece, PieceQueue
from ..stages.stream_context import Found, StreamContext, StreamKind
from ..tenancy.caller import Caller
from .cache_hints import hints_of
from .messages import Asked, prompt_of

Pieces = AsyncIterator[tuple[Generation, Piece | Choice | None]]


class Runs:
    """Runs requests on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def whole(self, request: Asked, caller: Caller) -> tuple[Generation, Gathered]:
        """Runs a request to its end."""
        gathered = Gathered()
        generation = self._generation(request, caller, None, stream=False)
        async with caller.within_deadline():
            await prepare(self._cluster, generation)
            await run_all(self._cluster, [generation], gathered)
        return generation, gathered

    async def pieces(self, request: Asked, caller: Caller, found: Found | None = None) -> Pieces:
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

    async def echo(self, generation: Generation) -> str:
        """The text of a request's prompt."""
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
        return (await self._cluster.stages.processors.detokenize(request)).text

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
