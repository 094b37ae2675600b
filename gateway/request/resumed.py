"""A request that another gateway or an earlier connection began: it is found by its id, repeated
from the start and continued.

The renderer leaves out the events that the client has. It renders them all the same, since the next
event depends on the state that rendering left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import TypeVar

import msgspec

from headwater.proto import common_pb2, engine_pb2, output_processor_pb2
from headwater.services.runtime import errors

from ..stages.output_session import OutputSession
from ..stages.stream_context import Found, StreamNotKept
from ..tenancy.caller import Caller
from .choice import Choice, Sink
from .cluster import Cluster
from .dispatch import Dispatcher
from .generation import Generation
from .prompt_turns import PromptTurns
from .release import release
from .stream_failure import StreamLost

ReplyT = TypeVar("ReplyT")


def caller_of(found: Found, caller: Caller) -> Caller:
    """Caller that resumes, on the terms of the request."""
    context = found.context
    return msgspec.structs.replace(
        caller,
        request_id=found.request_id,
        client_request_id=context.client_request_id,
        wants_receipt=context.wants_receipt,
    )


def check_repeatable(field: str, sampling: common_pb2.Sampling, num_prompts: int = 1) -> None:
    """Raises `BadRequest` for what cannot be told twice in the same order. `field` asks for a
    resumable stream."""
    for what, is_there in (
        ("several prompts", num_prompts > 1),
        ("beam search", sampling.use_beam_search),
        ("log probabilities of the prompt", sampling.HasField("prompt_logprobs")),
    ):
        if is_there:
            raise errors.BadRequest(field, f"{field} is true; allowed: without {what}")


def bare_id(shown: str) -> str:
    """Gateway's id of a request, given with or without the prefix that an answer's id has."""
    return shown.rpartition("-")[2].rpartition("_")[2]


async def find(cluster: Cluster, tenant: str, request_id: str) -> Found:
    """Finds a request. Raises `StreamNotKept`, or `Unavailable` while an output processor that may
    have it is out of reach."""
    return await _ask_outputs(cluster, request_id, lambda session: session.find(request_id, tenant))


async def forget(cluster: Cluster, tenant: str, request_id: str) -> None:
    """Drops the stream: its running choices end as soon as its reader leaves. Raises as `find`
    does."""
    await _ask_outputs(cluster, request_id, lambda session: session.forget(request_id, tenant))


async def _ask_outputs(
    cluster: Cluster, request_id: str, ask: Callable[[OutputSession], Awaitable[ReplyT]]
) -> ReplyT:
    """Asks output processors, the likeliest first."""
    fault: errors.Unavailable | None = None
    for session in cluster.stages.outputs.in_order_for(request_id):
        try:
            return await ask(session)
        except errors.NotFound:
            continue
        except errors.Unavailable as error:
            fault = error
    if fault is None and not cluster.stages.outputs.is_whole:
        # The gateway may have just started, for example.
        fault = errors.Unavailable(
            "not every output processor is within reach", code="output_processor_unavailable"
        )
    try:
        raise fault or StreamNotKept(request_id)
    finally:
        # As in `Processors._call`.
        del fault


class ResumedDispatcher(Dispatcher):
    """Goes on with the streams that were found. A generation whose engine or output processor dies
    meanwhile is dispatched as any other."""

    _attached: output_processor_pb2.Attached | None = None

    def __init__(self, cluster: Cluster, generation: Generation, sink: Sink) -> None:
        super().__init__(cluster, generation, sink)
        self._first_starts: dict[int, engine_pb2.Start] = {}
        """First report of each stream that was found, by stream id."""

    async def run(self, turns: PromptTurns[Choice]) -> None:
        self._turns = turns
        found = self._generation.found
        assert found is not None
        try:
            await self._go_on(found)
        except StreamLost:
            if self._attached is None:
                raise
            # The last token is known now, so the choice can go on at another replica.
            await self._attempt_until_done()

    async def _go_on(self, found: Found) -> None:
        generation = self._generation
        ended = self._begin()
        streams = self._streams(generation.choices)
        session = self._cluster.stages.outputs.at(found.address)
        generation.grant.counted_by.add(session)
        try:
            record_id = "" if found.is_charged else generation.grant.request_id
            tenant_key = generation.request.caller.tenant.key
            ids = session.attach(
                found.request_id, tenant_key, streams, self._on_attached, record_id
            )
            for stream, stream_id in zip(streams, ids, strict=True):
                stream.opened(session, stream_id)
            await ended
        except errors.InternalError:
            if self._attached is None:
                raise StreamNotKept(found.request_id) from None
            raise
        finally:
            release(generation, "attempt_lost")

    def _on_attached(self, attached: output_processor_pb2.Attached) -> None:
        self._attached = attached
        generation = self._generation
        generation.grant.charged_prompt_tokens = attached.prompt_tokens
        generation.grant.charged_output_tokens = attached.output_tokens
        for choice, granted in zip(generation.choices, attached.granted, strict=True):
            choice.attached(granted)

    def first_token(self, now: float) -> None:
        """Counts nothing: the first gateway has counted the first token."""

    def started(self, start: engine_pb2.Start) -> None:
        generation = self._generation
        if generation.timeline.attempts:
            super().started(start)
        elif start.stream_id not in self._first_starts:
            self._first_starts[start.stream_id] = start
        if self._first_starts:
            # As in the attempt that began it: the choice that computed the prompt counts.
            first = min(self._first_starts.values(), key=attrgetter("cached_tokens"))
            generation.cached_tokens = first.cached_tokens
            generation.cached_by_tier = dict(first.cached_by_tier)
