"""A request that another gateway began, or an earlier connection: found by its id, told again from the start, gone on.

What the client has had already is left out by whoever writes the answer: it is rendered all the same, since the state
behind the next event is what rendering left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headwater.proto import engine_pb2, output_processor_pb2
from headwater.services.runtime import errors

from ..stages.output_session import OutputSession
from ..stages.stream_context import Found, StreamNotKept
from ..tenancy.caller import Caller
from .choice import Choice
from .cluster import Cluster
from .generation import Generation
from .prompt_runs import log_request
from .prompt_turns import Part
from .release import part
from .stream_failure import StreamLost

ReplyT = TypeVar("ReplyT")


def caller_of(found: Found, caller: Caller) -> Caller:
    """Who resumes, on the terms of the request."""
    context = found.context
    return dataclasses.replace(
        caller,
        request_id=found.request_id,
        client_request_id=context.client_request_id,
        wants_receipt=context.wants_receipt,
    )


def bare_id(shown: str) -> str:
    """Our id, of one with or without the prefix that an answer's id has."""
    return shown.rpartition("-")[2].rpartition("_")[2]


async def find(line: Cluster, tenant: str, request_id: str) -> Found:
    """Raises `StreamNotKept`, or `Unavailable` where nobody can tell."""
    return await _of_whom_it_concerns(line, request_id, lambda session: session.find(request_id, tenant))


async def forget(line: Cluster, tenant: str, request_id: str) -> None:
    """Nobody will come for it: what runs of it ends, as soon as its reader leaves. Raises as `find` does."""
    await _of_whom_it_concerns(line, request_id, lambda session: session.forget(request_id, tenant))


async def _of_whom_it_concerns(
    line: Cluster, request_id: str, ask: Callable[[OutputSession], Awaitable[ReplyT]]
) -> ReplyT:
    """Asks output processors, the likeliest first."""
    fault: errors.Unavailable | None = None
    for session in line.outputs.in_order_for(request_id):
        try:
            return await ask(session)
        except errors.NotFound:
            continue
        except errors.Unavailable as error:
            fault = error
    if fault is None and not line.outputs.is_whole:
        # A gateway that has just begun, for one.
        fault = errors.Unavailable("not every output processor is within reach", code="output_processor_unavailable")
    raise fault or StreamNotKept(request_id)


async def run_resumed(generation: ResumedGeneration) -> None:
    """To its end, at its tenant's expense as far as nobody has paid."""
    async with generation.line.accounts.resumed(generation, generation.found):
        try:
            with generation.line.running([generation]):
                await generation.run()
        finally:
            log_request([generation])


@dataclass(slots=True, eq=False, kw_only=True)
class ResumedGeneration(Generation):
    """Goes on with what was found. Should its engine or output processor die now, it is carried on as any other."""

    found: Found
    attached: output_processor_pb2.Attached | None = None

    @property
    def is_computed(self) -> bool:
        """It is on its way already: it waits for no replica."""
        return False

    async def prepare(self) -> None:
        await Generation.prepare(self)
        self.prepared.sampling.seed = self.found.context.seed
        self.attempt = self.found.attempt
        if len(self.choices) != len(self.found.granted):
            raise StreamNotKept(self.found.request_id)

    def _guess_of(self, choices: Sequence[Choice], has_prompt: bool) -> Part:
        return Part(uncached=0, output=self.found.num_outstanding)

    def _cost_of(self, choices: Sequence[Choice], has_prompt: bool) -> Part:
        """What was told before is not its tenant's to pay again."""
        return Part(uncached=0, output=max(0, self.num_output_tokens - sum(self.found.num_tokens)))

    async def _carry(self) -> None:
        try:
            await self._go_on()
        except StreamLost:
            if self.attached is None:
                raise
            # How far it came is known now: it goes on elsewhere, from there.
            await self.carriage.run()

    async def _go_on(self) -> None:
        ended = self.carriage.begin()
        session = self.line.outputs.at(self.found.address)
        self.grant.counted_by.add(session)
        try:
            record_id = "" if self.found.is_charged else self.grant.request_id
            ids = session.attach(
                self.found.request_id, self.job.caller.tenant.key, self.choices, self._on_attached, record_id
            )
            for choice, stream_id in zip(self.choices, ids, strict=True):
                choice.opened(session, stream_id)
            await ended
        except errors.InternalError:
            if self.attached is None:
                raise StreamNotKept(self.found.request_id) from None
            raise
        finally:
            part(self, "attempt_lost")

    def _on_attached(self, attached: output_processor_pb2.Attached) -> None:
        self.attached = attached
        self.grant.charged_prompt_tokens = attached.prompt_tokens
        self.grant.charged_output_tokens = attached.output_tokens
        for choice, granted in zip(self.choices, attached.granted, strict=True):
            choice.attached(granted)

    def first_token(self, now: float) -> None:
        """Was told to the first gateway's metrics."""

    def started(self, start: engine_pb2.Start) -> None:
        if self.road.attempts:
            Generation.started(self, start)
        self.cached_tokens = self.cached_tokens or start.cached_tokens

    def _tell(self) -> None:
        self._keep_road()
