"""One request's life, from its first byte to its last: prepare, admit, route, open, stream, finish or cancel.

The same under REST and gRPC: what comes back goes to a `Sink` as typed pieces, pushed by the session's reader without a
task in between. Holds what another attempt needs: prompt ids, output ids, delivered bytes, attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from headwater.gateway.admission import Turn
from headwater.gateway.beam_search import BeamSearch
from headwater.gateway.choice import ENGINE_UNAVAILABLE, Choice, ScoredChoice, Sink
from headwater.gateway.job import Job
from headwater.gateway.line import Line
from headwater.gateway.output_sessions import OutputSession
from headwater.gateway.road import Attempt, Road
from headwater.gateway.roads import Explanation
from headwater.gateway.router.decision import Decision
from headwater.gateway.router.router import Dispatch
from headwater.gateway.tenancy.grant import LEASE_TOKENS, Grant
from headwater.gateway.tenancy.virtual_time import Share
from headwater.proto import common_pb2, engine_pb2, output_processor_pb2, processor_pb2
from headwater.services import errors

MAX_ATTEMPTS = 3


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt and its choices. Call `prepare`, then `run` in a task of its own."""

    line: Line
    job: Job
    sink: Sink
    prepared: processor_pb2.PrepareReply = field(default_factory=processor_pb2.PrepareReply)
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from the second on, when asked."""
    is_scored: bool = False
    """The last of them is there."""
    attempt: int = 0
    cached_tokens: int = 0
    decision: Decision | None = None
    grant: Grant = field(init=False)
    """Before it is charged, and where nobody is: as much as it wants."""
    turn: Turn | None = None
    share: Share | None = None
    """Its place among its tenant's and others' requests, once it runs."""
    _namespace: bytes = b""
    road: Road = field(default_factory=Road)
    _ended: asyncio.Future[None] | None = None
    _num_open: int = 0
    _dispatch: Dispatch | None = None
    _task: asyncio.Task[Any] | None = None
    _cancelled_by: errors.HeadwaterError | None = None

    def __post_init__(self) -> None:
        caller = self.job.caller
        self.grant = Grant(tenant=caller.tenant, request_id=caller.request_id, scopes=[])

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
        return self.line.processors.model(self.job.model).key if self.is_computed else ""

    @property
    def num_tokens_at_first(self) -> int:
        """That its answers need before more is asked for. Beams are not followed one by one: all that they may need."""
        sampling = self.prepared.sampling
        each = sampling.max_tokens if sampling.use_beam_search else min(sampling.max_tokens, LEASE_TOKENS)
        return each * len(self.choices) if self.is_answered else 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prepared.prompt_ids)

    @property
    def awaits_scores(self) -> bool:
        return not self.is_scored and self.prepared.sampling.HasField("prompt_logprobs")

    @property
    def num_output_tokens(self) -> int:
        """So far; what counts once a choice has ended is what its engine counted."""
        return sum(c.num_output_tokens if c.finish_reason else len(c.output_ids) for c in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Thoughts of the choices that have ended."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    async def prepare(self) -> None:
        """Text to tokens, by the contract. Raises `BadRequest`, `NotFound`, `Unavailable`."""
        await self.line.demand.text_stages(self.job.model)
        job, model = self.job, self.line.processors.model(self.job.model)
        self._namespace = self.line.namespaces.of(
            job.caller.tenant.id, model, cache_salt=job.cache_salt, shared=job.caller.tenant.shared_cache
        )
        request = processor_pb2.PrepareRequest(
            model=job.model,
            prompt=job.prompt,
            sampling=job.sampling,
            cache_namespace=self._namespace,
            stream=job.stream,
            pooling=job.pooling,
        )
        self.prepared = await self.line.processors.prepare(request, job.caller.span)
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

    async def run(self) -> None:
        """Waits for a turn and carries the request to its end. Raises the named error that ended it."""
        self._task = asyncio.current_task()
        caller, road, model = self.job.caller, self.road, self.job.model
        outcome = "error"
        try:
            with self.line.running(self):
                if self.is_computed:
                    # Before it has a turn: those of models that are there do not wait behind it.
                    await self.line.demand.replica(model)
                road.queued_at = time.perf_counter()
                with self._fairly() as self.share:
                    rank = caller.tenant.tier + caller.priority, self.share.virtual_time
                    async with self.line.admission.turn(*rank, self._model_key, self.num_prompt_tokens) as self.turn:
                        road.admitted_at = time.perf_counter()
                        self.line.metrics.of(model).queue_time.observe(road.admitted_at - road.queued_at)
                        await self._carry()
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            if self._cancelled_by is not None:
                assert self._task is not None
                self._task.uncancel()
                raise self._cancelled_by from None
            raise
        finally:
            road.outcome, road.ended_at = outcome, time.perf_counter()
            self._tell()

    @contextlib.contextmanager
    def _fairly(self) -> Iterator[Share]:
        """Its part of what its tenant is given; what that came to is known in the end."""
        num_output_tokens = self.prepared.sampling.max_tokens * len(self.choices) if self.is_answered else 0
        with self.line.fair.request(self.job.caller.tenant, self.num_prompt_tokens, num_output_tokens) as share:
            try:
                yield share
            finally:
                prompt = self.num_prompt_tokens if self.attempt else 0
                cached = min(prompt, self.cached_tokens)
                share.ended(uncached=prompt - cached, cached=cached, output=self.num_output_tokens)

    def cancel(self, error: errors.HeadwaterError) -> None:
        """Ends the request from outside: `run` raises the error."""
        if self._task is not None and not self._task.done():
            self._cancelled_by = error
            self._task.cancel()

    async def _carry(self) -> None:
        """Dispatches until an attempt ends well, or badly past its first token, or for the third time."""
        if not self.is_computed:
            self._num_open = len(self.choices)
            for choice in self.choices:
                choice.end("length", None, 0)
            return
        failed: set[str] = set()
        while True:
            self.attempt += 1
            asked_at = time.perf_counter()
            self.decision = await self._choose(failed)
            attempt = Attempt(decision=self.decision, asked_at=asked_at, dispatched_at=time.perf_counter())
            self.road.attempts.append(attempt)
            try:
                await self._attempt(self.decision)
                return
            except errors.HeadwaterError as error:
                attempt.error = error.message
                if not isinstance(error, errors.Unavailable):
                    raise
                if self.road.ttft is not None or self.attempt == MAX_ATTEMPTS:
                    raise
                if error.code == ENGINE_UNAVAILABLE:
                    failed.add(self.decision.replica_id)
                self.line.metrics.retries.inc()
            finally:
                attempt.ended_at = time.perf_counter()

    async def _choose(self, failed: set[str]) -> Decision:
        """The replica that answers soonest, of those that have not failed this request."""
        prepared, model_key = self.prepared, self.line.processors.model(self.job.model).key
        await self.line.router.consult(model_key, prepared.block_hashes)
        await self.line.demand.replica(self.job.model)
        num_prompt_tokens, max_tokens = len(prepared.prompt_ids), prepared.sampling.max_tokens
        decision = self.line.router.choose(
            model_key, prepared.block_hashes, num_prompt_tokens, max_tokens, exclude=failed
        )
        remaining_ms = self.job.caller.remaining_ms
        if remaining_ms and decision.predicted_seconds * 1e3 > remaining_ms:
            seconds = decision.predicted_seconds
            raise errors.DeadlineExceeded(f"the first token would come in {seconds:.1f} s, behind the deadline")
        return decision

    async def _attempt(self, decision: Decision) -> None:
        # A request that can be resumed names its output processor: whoever knows its id finds it.
        session = self.line.outputs.pick(
            self.job.caller.request_id if self.job.context else decision.address, self.job.model
        )
        self._ended = asyncio.get_running_loop().create_future()
        self._num_open = len(self.choices)
        # An attempt that failed may have scored a part of the prompt.
        self.prompt_logprobs, self.is_scored = [], False
        self._dispatch = self.line.router.dispatched(decision, self.job.caller.request_id)
        if self.turn is not None:
            self.turn.sent()
        is_fault = False
        try:
            if self.prepared.sampling.use_beam_search:
                await self._open_beams(session, decision)
            else:
                ids = session.open(self._open_message(decision), self.choices, self.context)
                for choice, stream_id in zip(self.choices, ids, strict=True):
                    choice.opened(session, stream_id)
            await self._ended
        except errors.HeadwaterError as error:
            is_fault = error.code in (ENGINE_UNAVAILABLE, errors.InternalError.code)
            raise
        finally:
            self.part()
            self.line.router.finished(self._dispatch, failed=is_fault)

    @property
    def context(self) -> bytes:
        """What another gateway needs to go on with it; empty when it is not resumable."""
        return self.job.context.encode(self.prepared.sampling.seed) if self.job.context is not None else b""

    def part(self) -> None:
        """Its streams end, or are left to whoever comes for them."""
        if self.job.context is None or not self._is_left():
            for choice in self.choices:
                choice.cancel("client_gone")
            return
        session = next((each.session for each in self.choices if each.session is not None), None)
        stream_ids = [stream_id for each in self.choices if (stream_id := each.let_go()) is not None]
        if session is not None:
            session.let_go(stream_ids, self.num_prompt_tokens, self.num_output_tokens)

    def _is_left(self) -> bool:
        """By its client's connection or by its gateway, not by a word that ends it. Asked while the cause is raised."""
        if not isinstance(sys.exc_info()[1], asyncio.CancelledError):
            return False
        deadline = self.job.caller.deadline
        is_late = deadline is not None and time.monotonic() >= deadline
        return not is_late and (self._cancelled_by is None or isinstance(self._cancelled_by, errors.Unavailable))

    async def _open_beams(self, session: OutputSession, decision: Decision) -> None:
        """Finds the beams; that an answer has been computed makes its text, as in a resume."""

        def make_open(prompt_ids: Sequence[int], sampling: common_pb2.Sampling) -> output_processor_pb2.Open:
            opening = self._open_message(decision)
            opening.add.prompt_ids[:] = prompt_ids
            opening.add.sampling.CopyFrom(sampling)
            opening.add.choice_indices[:] = [0]
            opening.ClearField("answer_format")
            return opening

        prepared = self.prepared
        ends = frozenset([*prepared.sampling.stop_token_ids, *prepared.eos_token_ids])
        ends -= frozenset(prepared.eos_token_ids) if prepared.sampling.ignore_eos else frozenset()
        beams = await BeamSearch(session, prepared.prompt_ids, prepared.sampling, make_open).run(ends)
        for choice, beam in zip(self.choices, beams, strict=False):
            opening = self._open_message(decision)
            opening.add.output_ids[:] = beam.token_ids
            opening.add.num_output_tokens = opening.add.sampling.max_tokens = len(beam.token_ids)
            opening.add.choice_indices[:] = [choice.number]
            choice.resume(beam.token_ids)
            [stream_id] = session.open(opening, [choice])
            choice.opened(session, stream_id)

    def _open_message(self, decision: Decision) -> output_processor_pb2.Open:
        caller, prepared = self.job.caller, self.prepared
        add = engine_pb2.Add(
            request_id=caller.request_id,
            attempt=self.attempt,
            prompt_ids=prepared.prompt_ids,
            sampling=prepared.sampling,
            eos_token_ids=prepared.eos_token_ids,
            bad_word_ids=prepared.bad_word_ids,
            grammar=prepared.grammar,
            num_grammar_bytes=len(prepared.grammar),
            choice_indices=range(len(self.choices)),
            tenant=caller.tenant.id,
            weight=caller.tenant.weight,
            tier=caller.tenant.tier + caller.priority,
            virtual_time=self.share.virtual_time if self.share is not None else 0.0,
            deadline_ms=caller.remaining_ms,
            cache_namespace=self._namespace,
            traceparent=caller.span.context.traceparent,
            predicted_cached_tokens=decision.predicted_cached_tokens,
            credit=self.grant.first_credit,
            pooling=self.job.pooling,
        )
        if not add.sampling.max_tokens and not self.job.pooling:
            add.sampling.max_tokens = 1
        return output_processor_pb2.Open(
            engine_address=decision.address,
            replica_id=decision.replica_id,
            epoch=decision.epoch,
            model=self.job.model,
            add=add,
            answer_format=prepared.answer_format if prepared.HasField("answer_format") else None,
        )

    def first_token(self, now: float) -> None:
        if self.road.first_token_at is None:
            self.road.first_token_at = now
            self.line.metrics.of(self.job.model).first_token.observe(now - self.road.arrived_at)

    def started(self, start: engine_pb2.Start) -> None:
        """Its choices share one prompt, so the first one's word counts."""
        attempt = self.road.attempts[-1]
        if attempt.start is None:
            attempt.start = start
            if self.share is not None:
                self.share.started()
            self.cached_tokens = start.cached_tokens
            if self._dispatch is not None:
                self.line.router.started(self._dispatch, start.cached_tokens)
                self.line.admission.give()

    def choice_ended(self, choice: Choice) -> None:
        self.line.metrics.of(self.job.model).finished(str(choice.finish_reason)).inc()
        self._num_open -= 1
        if self._num_open == 0 and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def broke(self, error: errors.HeadwaterError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def receipt(self) -> dict[str, Any]:
        """Where it was served and why, and how that turned out."""
        start = (self.road.attempts[-1].start if self.road.attempts else None) or engine_pb2.Start()
        return {
            "request_id": self.job.caller.request_id,
            "attempts": self.attempt,
            "decision": self.decision.receipt if self.decision is not None else None,
            "cached_tokens": self.cached_tokens,
            "engine_queue_seconds": start.queue_seconds,
            "prefill_seconds": start.prefill_seconds,
            "ttft_seconds": self.road.ttft,
        }

    def explanation(self) -> Explanation:
        """Of the request that it belongs to, without its prompts."""
        caller = self.job.caller
        trace_id = caller.span.context.trace_id
        return self.line.roads.begin(
            caller.request_id, caller.tenant.id, self.job.model, caller.client_request_id, trace_id
        )

    def explained(self) -> dict[str, Any]:
        return self.road.explained(self)

    def _tell(self) -> None:
        """Whoever wants to know how it went: metrics, the collector of spans, those who ask later, the log."""
        self.line.metrics.count(self)
        self.road.to_spans(self.job.caller.span)
        self.line.roads.keep(self.explanation(), self.explained())
        self._log()

    def _log(self) -> None:
        structlog.get_logger().info(
            "request",
            request_id=self.job.caller.request_id,
            tenant=self.job.caller.tenant.id,
            trace_id=self.job.caller.span.context.trace_id,
            model=self.job.model,
            outcome=self.road.outcome,
            attempt=self.attempt,
            replica=self.decision.replica_id if self.decision is not None else None,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_output_tokens,
            ttft=self.road.ttft,
            seconds=self.road.seconds,
        )


async def run_all(generations: Sequence[Generation]) -> None:
    """Runs the prompts of one request together, at its tenant's expense; the first error ends the others."""
    async with generations[0].line.accounts.paid(generations):
        await _run_together(generations)


async def _run_together(generations: Sequence[Generation]) -> None:
    if len(generations) == 1:
        await generations[0].run()
        return
    tasks = [asyncio.create_task(generation.run()) for generation in generations]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
