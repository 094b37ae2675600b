"""One request's life, from its first byte to its last: prepare, admit, route, open, stream, finish or cancel.

The same under REST and gRPC: what comes back goes to a `Sink` as typed pieces, pushed by the session's reader without a
task in between. Holds what another attempt needs: prompt ids, output ids, delivered bytes, attempt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.proto import common_pb2, engine_pb2, processor_pb2
from headwater.services.runtime import errors
from headwater.services.runtime.served_model import ServedModel
from headwater.services.runtime.tasks import owned_task

from ..router.decision import Decision
from ..tenancy.grant import LEASE_TOKENS, Grant
from .choice import Choice, ScoredChoice, Sink
from .cluster import Cluster
from .dispatch import Dispatcher
from .generation_request import GenerationRequest
from .prompt_turns import Part, Place, PromptTurns
from .timeline import Timeline, told_work
from .timelines import Explanation


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt and its choices. Call `prepare`, then `run` in a task of its own."""

    line: Cluster
    job: GenerationRequest
    sink: Sink
    prepared: processor_pb2.PrepareReply = field(default_factory=processor_pb2.PrepareReply)
    num_prompt_tokens: int = 0
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from the second on, when asked."""
    is_scored: bool = False
    """The last of them is there."""
    attempt: int = 0
    cached_tokens: int = 0
    decision: Decision | None = None
    grant: Grant = field(init=False)
    """Set before it runs."""
    turns: PromptTurns[Choice] | None = None
    """Of its choices among those of its tenant's and others' requests, once it runs."""
    model: ServedModel = field(init=False)
    """As it was when the request was prepared: what carries it on asks nobody for it again."""
    namespace: bytes = b""
    """Root of its prompt's hashes."""
    road: Timeline = field(default_factory=Timeline)
    carriage: Dispatcher = field(init=False)
    _has_started: bool = False
    _task: asyncio.Task[Any] | None = None
    cancelled_by: errors.HeadwaterError | None = None

    def __post_init__(self) -> None:
        self.carriage = Dispatcher(self)

    @property
    def is_answered(self) -> bool:
        """With tokens, that is."""
        return bool(self.prepared.sampling.max_tokens) and not self.job.pooling

    @property
    def is_computed(self) -> bool:
        """By an engine, that is."""
        return self.is_answered or bool(self.prepared.sampling.HasField("prompt_logprobs") or self.job.pooling)

    @property
    def _model_key(self) -> str:
        """Of the model whose replicas compute it; empty where none does."""
        return self.model.key if self.is_computed else ""

    @property
    def num_tokens_at_first(self) -> int:
        """That its answers need before more is asked for. Beams are not followed one by one: all that they may need."""
        sampling = self.prepared.sampling
        each = sampling.max_tokens if sampling.use_beam_search else min(sampling.max_tokens, LEASE_TOKENS)
        return each * len(self.choices) if self.is_answered else 0

    @property
    def awaits_scores(self) -> bool:
        return not self.is_scored and self.prepared.sampling.HasField("prompt_logprobs")

    @property
    def num_output_tokens(self) -> int:
        """So far; what counts once a choice has ended is what its engine counted."""
        return _num_output_tokens(self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Thoughts of the choices that have ended."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    async def prepare(self) -> None:
        """Text to tokens, by the contract. Raises `BadRequest`, `NotFound`, `Unavailable`."""
        await self.line.demand.text_stages(self.job.model)
        job = self.job
        self.model = self.line.processors.model(job.model)
        self.namespace = self.line.namespaces.of(
            job.caller.tenant.key, self.model, cache_salt=job.cache_salt, shared=job.caller.tenant.shared_cache
        )
        request = processor_pb2.PrepareRequest(
            model=job.model,
            prompt=job.prompt,
            sampling=job.sampling,
            cache_namespace=self.namespace,
            stream=job.stream,
            pooling=job.pooling,
            escape_special_tokens=self.line.tenants.escapes_special_tokens(job.caller.tenant),
        )
        self.prepared = await self.line.processors.prepare(request, job.caller.span)
        self.num_prompt_tokens = len(self.prepared.prompt_ids)
        self.road.prepared_at = time.perf_counter()
        sampling = self.prepared.sampling
        if not sampling.HasField("seed"):
            sampling.seed = secrets.randbits(63)
        num_choices = sampling.n if sampling.use_beam_search else max(sampling.n, sampling.best_of)
        if num_choices > sampling.n:
            # The best are found by their tokens' log probabilities, whether or not the client wants to see these.
            sampling.logprobs = True
        kind = Choice if sampling.max_tokens or job.pooling else ScoredChoice
        self.choices = [kind(self, number, self.sink) for number in range(num_choices)]

    @property
    def answered(self) -> list[Choice]:
        """The choices that a client gets: of more than it wanted, those whose tokens were likeliest on average."""
        num_wanted = self.prepared.sampling.n
        if len(self.choices) <= num_wanted:
            return self.choices
        return sorted(self.choices, key=lambda choice: choice.mean_logprob, reverse=True)[:num_wanted]

    async def run(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Waits for a turn, calls `on_turn`, carries the request to its end. Raises the named error that ended it."""
        self._task = asyncio.current_task()
        road, model = self.road, self.job.model
        outcome = "error"
        try:
            if self.cancelled_by is not None:
                raise self.cancelled_by
            self.line.check(self.job.caller)
            if self.is_computed:
                # Before it has a turn: those of models that are there do not wait behind it.
                await self.line.demand.replica(model)
                await self.carriage.foresee()
            road.queued_at = time.perf_counter()
            await self._run_in_turn(on_turn)
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            if self.cancelled_by is not None:
                assert self._task is not None
                self._task.uncancel()
                raise self.cancelled_by from None
            raise
        finally:
            road.outcome, road.ended_at = outcome, time.perf_counter()
            self.line.ended(self)
            self._tell()

    async def _run_in_turn(self, on_turn: Callable[[], None]) -> None:
        """The choices begin one by one as their turns come, unless they have to begin together."""
        turns = self.turns = self._make_turns()
        try:
            await (turns.together(self.num_seats) if self._is_together else turns.next())
            on_turn()
            self.road.admitted_at = time.perf_counter()
            self.line.metrics.of(self.job.model).queue_time(self.road.admitted_at - (self.road.queued_at or 0.0))
            if turns.are_all_given or not self.is_computed:
                await self._carry()
            else:
                async with owned_task(self._admit_others(turns)):
                    await self._carry()
        finally:
            turns.release()
            # NOTE: it knows the generation; see `dissolve`.
            self.turns = None

    async def _admit_others(self, turns: PromptTurns[Choice]) -> None:
        try:
            while not turns.are_all_given:
                self.carriage.join(await turns.next())
        except errors.HeadwaterError as error:
            # The queue is full, for one.
            self.broke(error)

    def _make_turns(self) -> PromptTurns[Choice]:
        caller = self.job.caller
        place = Place(
            tenant=caller.tenant,
            tier=caller.tenant.tier + caller.priority,
            model_key=self._model_key,
            num_prompt_tokens=self.num_prompt_tokens,
        )
        line = self.line
        return PromptTurns(
            line.admission, line.fair, self.grant.entrance, place, self.choices, self._guess_of, self._cost_of
        )

    @property
    def _is_together(self) -> bool:
        """Beams are compared at each step; who resumes a request finds all its choices at one place."""
        return self.prepared.sampling.use_beam_search or self.job.context is not None

    @property
    def num_seats(self) -> int:
        """That all its choices take."""
        sampling = self.prepared.sampling
        return max(sampling.n, sampling.best_of) if sampling.use_beam_search else len(self.choices)

    @property
    def num_seats_at_first(self) -> int:
        """Without which none of its choices can begin."""
        return self.num_seats if self._is_together else 1

    def _guess_of(self, choices: Sequence[Choice], has_prompt: bool) -> Part:
        output = self.prepared.sampling.max_tokens * len(choices) if self.is_answered else 0
        return Part(uncached=self.num_prompt_tokens * has_prompt, output=output)

    def _cost_of(self, choices: Sequence[Choice], has_prompt: bool) -> Part:
        prompt = self.num_prompt_tokens if self.attempt and has_prompt else 0
        cached = min(prompt, self.cached_tokens)
        return Part(uncached=prompt - cached, cached=cached, output=_num_output_tokens(choices))

    def cancel(self, error: errors.HeadwaterError) -> None:
        """Ends the request from outside: `run` raises the error, also if it has not started."""
        self.cancelled_by = error
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _carry(self) -> None:
        """To the end of every choice, on as many replicas as that takes."""
        if not self.is_computed:
            for choice in self.choices:
                choice.end("length", None, 0)
            return
        await self.carriage.run()

    def first_token(self, now: float) -> None:
        if self.road.first_token_at is None:
            self.road.first_token_at = now
            self.line.metrics.of(self.job.model).first_token(now - self.road.arrived_at)

    def started(self, start: engine_pb2.Start) -> None:
        """Its choices share one prompt, so the first one's word counts, and of several attempts the first one's."""
        if self.carriage.started(start) and not self._has_started:
            self._has_started = True
            self.cached_tokens = start.cached_tokens
            if self.turns is not None:
                self.turns.started()

    def choice_ended(self, choice: Choice) -> None:
        if self.turns is not None:
            self.turns.ended(choice)
        self.line.metrics.finished.add(self.job.model, str(choice.finish_reason))
        self.carriage.choice_ended()

    def broke(self, error: errors.HeadwaterError) -> None:
        self.carriage.broke(error)

    def receipt(self) -> dict[str, Any]:
        """Where it was served and why, and how that turned out."""
        start = (self.road.attempts[-1].start if self.road.attempts else None) or engine_pb2.Start()
        return {
            "request_id": self.job.caller.request_id,
            "attempts": self.attempt,
            "exact": self.road.is_exact,
            "decision": self.decision.receipt if self.decision is not None else None,
            "cached_tokens": self.cached_tokens,
            "queue_seconds": self.road.queue_seconds,
            "engine_queue_seconds": start.queue_seconds,
            "prefill_seconds": start.prefill_seconds,
            "ttft_seconds": self.road.ttft,
            "engine": told_work(choice.work for choice in self.choices),
        }

    def dissolve(self) -> None:
        """Nobody asks any more, however it ended. NOTE: it, its choices and its carriage know each other, and what the
        collector of cycles need not find costs less."""
        for choice in self.choices:
            del choice.generation, choice.sink
        del self.carriage

    def explanation(self) -> Explanation:
        """Of the request that it belongs to, without its prompts."""
        caller = self.job.caller
        trace_id = caller.span.context.trace_id
        return self.line.roads.begin(
            caller.request_id, caller.tenant, self.job.model, caller.client_request_id, trace_id
        )

    def explained(self) -> dict[str, Any]:
        return self.road.explained(self)

    def _tell(self) -> None:
        """Whoever wants to know how it went: metrics, the collector of spans, those who ask later."""
        self.line.metrics.count(self)
        self.road.to_spans(self.job.caller.span)
        self._keep_road()

    def _keep_road(self) -> None:
        if self.line.roads.has_room(self.job.caller.request_id):
            self.line.roads.keep(self.explanation(), self.explained())


def _num_output_tokens(choices: Sequence[Choice]) -> int:
    """So far; what counts once a choice has ended is what its engine counted."""
    return sum(each.num_output_tokens if each.finish_reason else len(each.output_ids) for each in choices)
