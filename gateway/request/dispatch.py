"""How one prompt's answers reach their end, whatever dies on the way: an attempt on a replica, and the next one from
where it stopped. Knows nothing of clients; what a stream says goes straight to its choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import structlog

from headwater.proto import common_pb2, engine_pb2
from headwater.proto.output_processor_pb2 import Open
from headwater.services.runtime import errors
from headwater.services.runtime.prefix import prefix_of

from ..router.decision import Decision
from ..router.router import Dispatch, Incarnation
from ..stages.output_session import OutputSession
from .beam_search import BeamSearch
from .charge import charge_of
from .release import context_of, part
from .stream_failure import OUTPUT_PROCESSOR_UNAVAILABLE, Cause, PoisonRequest, StreamLost
from .timeline import Attempt

if TYPE_CHECKING:
    from .choice import Choice
    from .generation import Generation

MAX_ATTEMPTS = 3
"""That end by a fault; an engine that leaves in order is none."""
WAIT_SECONDS = 30.0
"""That an answer which has begun stands still at least for a replica or an output processor that died."""


class Dispatcher:
    """Use once: `run`."""

    def __init__(self, generation: Generation) -> None:
        self._generation, self._line = generation, generation.line
        self._ended: asyncio.Future[None] | None = None
        self._dispatch: Dispatch | None = None
        self._failed: set[Incarnation] = set()
        self._num_faults = 0
        self._doubted_on: Incarnation | None = None
        """An engine died of it or of something else, and it has not got any further since; where it is now."""
        self._is_doubted = self._is_suspect = False
        """Of a suspect nobody else is to be tried at the same time."""
        self._end_trial: Callable[[], None] | None = None
        self._open_at: tuple[OutputSession, Decision] | None = None
        """Where the attempt runs, once its first streams are open."""

    async def run(self) -> None:
        """Dispatches until every choice has ended. Raises what no other replica would mend."""
        generation = self._generation
        if not generation.attempt:
            for choice in generation.choices:
                choice.credit_left = generation.grant.first_credit
        try:
            while True:
                generation.attempt += 1
                try:
                    await self._try()
                    return
                except StreamLost as loss:
                    self._consider(loss)
        finally:
            self._doubt_ended()

    async def foresee(self) -> None:
        """Raises `DeadlineExceeded` for what would be late even if its turn came at once: it need not wait for that."""
        if self._generation.job.caller.deadline is not None:
            await self._choose()

    def started(self, start: engine_pb2.Start) -> bool:
        """An attempt's prompt is computed: whoever is tried alone has stood the trial. False when it was known."""
        attempt = self._generation.road.attempts[-1]
        if attempt.start is not None:
            return False
        attempt.start = start
        if not self._has_begun:
            self._stood_trial()
        if self._dispatch is not None:
            decision, cached_tokens = self._dispatch.decision, start.cached_tokens
            if decision.num_prompt_tokens > self._generation.num_prompt_tokens:
                # An engine tells of the prompt alone; the answer so far was looked up with it.
                cached_tokens = max(cached_tokens, decision.predicted_cached_tokens)
            self._line.router.started(self._dispatch, cached_tokens)
            self._line.admission.give()
        return True

    def got_further(self) -> None:
        """A choice is past where it was when an engine died."""
        if all(choice.is_past_doubt for choice in self._unfinished):
            self._is_doubted = self._is_suspect = False
            self._doubt_ended()
            self._stood_trial()

    def begin(self) -> asyncio.Future[None]:
        """Streams are about to be opened; done when every choice has ended, or one of them is lost."""
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def choice_ended(self) -> None:
        if self._is_doubted:
            self.got_further()
        if self._ended is not None and not self._ended.done() and not self._unfinished:
            self._ended.set_result(None)

    def broke(self, error: errors.HeadwaterError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    @property
    def _unfinished(self) -> list[Choice]:
        return [choice for choice in self._generation.choices if choice.finish_reason is None]

    @property
    def _has_begun(self) -> bool:
        """The client may have had something of it."""
        return any(choice.output_ids for choice in self._generation.choices)

    async def _try(self) -> None:
        """One attempt. Raises `StreamLost` where another one may do better."""
        generation = self._generation
        if self._is_suspect:
            self._end_trial = await self._line.migrations.alone(self._model_key)
        try:
            asked_at = time.perf_counter()
            decision = generation.decision = await self._choose()
            session = await self._session(decision)
            attempt = Attempt(decision=decision, asked_at=asked_at, dispatched_at=time.perf_counter())
            generation.road.attempts.append(attempt)
            if self._is_doubted:
                self._doubted_on = decision.incarnation
                self._line.migrations.doubt(decision.incarnation)
            try:
                await self._attempt(session, decision)
            except errors.HeadwaterError as error:
                attempt.error = error.message
                attempt.cause = error.cause.value if isinstance(error, StreamLost) else ""
                attempt.was_alone = self._end_trial is not None
                raise
            finally:
                attempt.ended_at = time.perf_counter()
        finally:
            self._stood_trial()

    def _stood_trial(self) -> None:
        if self._end_trial is not None:
            self._end_trial()
            self._end_trial = None

    def _consider(self, loss: StreamLost) -> None:
        """Raises what ends the request, if the attempt that was lost was its last."""
        generation, cause = self._generation, loss.cause
        attempt = generation.road.attempts[-1]
        told = {"request_id": generation.job.caller.request_id, "replica": attempt.decision.replica_id}
        if cause is Cause.ENGINE_GONE:
            # Whoever was there with it shall know that it was.
            self._doubted_on = None
            if self._is_to_blame(attempt):
                structlog.get_logger().error("poison request", attempts=generation.attempt, **told)
                raise PoisonRequest("engines die of the request; it is not tried again")
            # What had given tokens goes on at once, unless that went wrong already.
            self._is_suspect = self._is_doubted or attempt.start is None
            if not self._is_doubted:
                for choice in self._unfinished:
                    choice.doubt()
            self._is_doubted = True
        self._doubt_ended()
        self._num_faults += cause is not Cause.HANDED_OVER
        if self._num_faults == MAX_ATTEMPTS:
            raise loss
        if cause.is_suspicion and not self._line.migrations.is_excused():
            structlog.get_logger().warning("migration refused: too many on suspicion", cause=cause.value, **told)
            raise loss
        if cause.is_of_engine:
            self._failed.add(attempt.decision.incarnation)
        self._line.metrics.retries.add()
        if self._has_begun:
            self._line.metrics.migrations.add(cause.value)
            structlog.get_logger().info("migration", cause=cause.value, tokens=generation.num_output_tokens, **told)

    def _is_to_blame(self, attempt: Attempt) -> bool:
        """Whether a second engine died at the same place of the answer, with nobody else there who could have done it
        as well."""
        if not self._is_doubted:
            return False
        return attempt.was_alone or self._line.migrations.num_doubted(attempt.decision.incarnation) == 1

    def _doubt_ended(self) -> None:
        """On the engine where it is or was: it got further there, or left while that one lived."""
        if self._doubted_on is not None:
            self._line.migrations.trust(self._doubted_on)
            self._doubted_on = None

    @property
    def _model_key(self) -> str:
        return self._generation.model.key

    async def _choose(self) -> Decision:
        """The replica that answers soonest, of those that have not failed this request."""
        generation, line, model_key = self._generation, self._line, self._model_key
        prepared, caller = generation.prepared, generation.job.caller
        token_ids, hashes = self._computed()
        await line.router.consult(model_key, hashes)
        await line.demand.replica(generation.job.model)
        max_tokens = prepared.sampling.max_tokens - (len(token_ids) - len(prepared.prompt_ids))
        first = generation.road.attempts[0].decision.member if generation.road.attempts else None
        while True:
            try:
                decision = line.router.choose(
                    model_key,
                    hashes,
                    len(token_ids),
                    max_tokens,
                    exclude=self._failed,
                    numerics_id=first.numerics_id if first is not None and self._has_begun else "",
                )
                break
            except errors.Unavailable as error:
                await self._wait(lambda: line.router.wait_for(model_key, self._failed), error)
        remaining_ms, seconds = caller.remaining_ms, decision.predicted_seconds
        if remaining_ms and seconds * 1e3 > remaining_ms:
            raise errors.DeadlineExceeded(
                f"the first token would come in {seconds:.1f} s, the deadline is in {remaining_ms / 1e3:.1f} s"
            )
        return decision

    def _computed(self) -> tuple[Sequence[int], bytes]:
        """What is to be computed anew, of the longest choice, and its blocks' hashes."""
        prepared = self._generation.prepared
        longest = max((choice.output_ids for choice in self._unfinished), key=len, default=[])
        if not longest:
            return prepared.prompt_ids, prepared.block_hashes
        token_ids = [*prepared.prompt_ids, *longest]
        return token_ids, prefix_of(self._generation.namespace, token_ids, prepared.block_size)

    async def _session(self, decision: Decision) -> OutputSession:
        job, num_prompts = self._generation.job, self._generation.grant.num_prompts
        # Who knows the id of a request that can be resumed finds its output processor, and one of several prompts has
        # one that counts what all of them use.
        key = job.caller.request_id if job.context is not None or num_prompts > 1 else decision.address
        while True:
            try:
                return self._line.outputs.pick(key, job.model)
            except errors.Unavailable as error:
                await self._wait(lambda: self._line.outputs.wait_for(job.model), error)

    async def _wait(self, coming: Callable[[], Awaitable[None]], otherwise: errors.Unavailable) -> None:
        """For a stage, where an answer has begun or somebody starts stages. Raises `Unavailable` when none comes."""
        seconds = max(WAIT_SECONDS if self._has_begun else 0.0, self._line.demand.patience)
        if not seconds:
            raise otherwise
        try:
            async with asyncio.timeout(seconds):
                await coming()
        except TimeoutError:
            raise errors.Unavailable("nothing can go on with the answer", code="no_replica") from None

    async def _attempt(self, session: OutputSession, decision: Decision) -> None:
        generation, line = self._generation, self._line
        ended = self.begin()
        if not generation.is_scored:
            # An attempt that failed may have scored a part of the prompt.
            generation.prompt_logprobs = []
        self._dispatch = line.router.dispatched(
            decision, generation.job.caller.request_id, is_first=not generation.job.first_index
        )
        if generation.turns is not None:
            generation.turns.sent()
        line.migrations.dispatched()
        reason, is_outage = "client_gone", False
        try:
            await self._open(session, decision)
            await ended
        except errors.Unavailable as error:
            loss = error if isinstance(error, StreamLost) else None
            if loss is None and error.code == OUTPUT_PROCESSOR_UNAVAILABLE:
                loss = StreamLost(error.message, Cause.OUTPUT_PROCESSOR_GONE)
            if loss is None:
                raise
            reason, is_outage = "attempt_lost", loss.cause.is_outage
            raise loss from None
        except errors.InternalError:
            is_outage = True
            raise
        finally:
            self._open_at = None
            part(generation, reason)
            line.router.finished(self._dispatch, failed=is_outage)

    async def _open(self, session: OutputSession, decision: Decision) -> None:
        generation = self._generation
        generation.grant.counted_by.add(session)
        if (refusal := generation.grant.refusal) is not None and any(not each.credit_left for each in self._unfinished):
            raise refusal
        if generation.prepared.sampling.use_beam_search and not self._has_begun:
            await self._find_beams(session, decision)
        for opening, choices in self._openings(decision):
            self._open_streams(session, opening, choices)
        self._open_at = session, decision

    def join(self, choices: Sequence[Choice]) -> None:
        """Choices whose turn came while others run go where those are. Between two attempts the next one takes them."""
        if self._open_at is None or self._ended is None or self._ended.done():
            return
        session, decision = self._open_at
        opening = self._opening(decision, choices)
        # The choices that were there first score the prompt.
        opening.add.sampling.ClearField("prompt_logprobs")
        try:
            self._open_streams(session, opening, choices)
        except errors.HeadwaterError as error:
            self.broke(error)

    def _open_streams(self, session: OutputSession, opening: Open, choices: Sequence[Choice]) -> None:
        ids = session.open(opening, choices, context_of(self._generation))
        for choice, stream_id in zip(choices, ids, strict=True):
            choice.opened(session, stream_id)

    def _openings(self, decision: Decision) -> Iterator[tuple[Open, list[Choice]]]:
        """Choices without tokens share a prompt; each other one goes on by itself. One of them scores the prompt."""
        turns, sampling = self._generation.turns, self._generation.prepared.sampling
        unfinished = [choice for choice in self._unfinished if turns is None or turns.has(choice)]
        begun = [choice for choice in unfinished if choice.output_ids]
        fresh = [choice for choice in unfinished if not choice.output_ids]
        scores = sampling.HasField("prompt_logprobs") and not self._generation.is_scored
        for choices in [*([fresh] if fresh else []), *([choice] for choice in begun)]:
            opening, first = self._opening(decision, choices), choices[0]
            if first.output_ids:
                opening.add.output_ids[:] = first.output_ids
                opening.delivered_bytes[:] = [first.delivered_bytes]
                if sampling.use_beam_search:
                    # It has been found whole: what is missing is its text.
                    opening.add.sampling.max_tokens = len(first.output_ids)
            if not scores:
                opening.add.sampling.ClearField("prompt_logprobs")
            scores = False
            yield opening, choices

    async def _find_beams(self, session: OutputSession, decision: Decision) -> None:
        """What an engine has computed makes its text as in a resume."""

        def make_open(prompt_ids: Sequence[int], sampling: common_pb2.Sampling) -> Open:
            opening = self._opening(decision, self._generation.choices[:1])
            opening.add.prompt_ids[:] = prompt_ids
            opening.add.sampling.CopyFrom(sampling)
            opening.charge.prompt_alone = True
            opening.ClearField("answer_format")
            return opening

        prepared = self._generation.prepared
        ends = frozenset([*prepared.sampling.stop_token_ids, *prepared.eos_token_ids])
        ends -= frozenset(prepared.eos_token_ids) if prepared.sampling.ignore_eos else frozenset()
        search = BeamSearch(session, prepared.prompt_ids, prepared.sampling, make_open, self._generation.started)
        beams = await search.run(ends)
        for choice, beam in zip(self._generation.choices, beams, strict=False):
            choice.resume(beam.token_ids)

    def _opening(self, decision: Decision, choices: Sequence[Choice]) -> Open:
        generation = self._generation
        caller, prepared = generation.job.caller, generation.prepared
        add = engine_pb2.Add(
            request_id=caller.request_id,
            prompt_index=generation.job.first_index,
            attempt=generation.attempt,
            prompt_ids=prepared.prompt_ids,
            sampling=prepared.sampling,
            eos_token_ids=prepared.eos_token_ids,
            bad_word_ids=prepared.bad_word_ids,
            grammar=prepared.grammar,
            num_grammar_bytes=len(prepared.grammar),
            choice_indices=[choice.number for choice in choices],
            tenant=caller.tenant.key,
            weight=caller.tenant.weight,
            tier=caller.tenant.tier + caller.priority,
            virtual_time=generation.turns.virtual_time(choices) if generation.turns is not None else 0.0,
            deadline_ms=caller.remaining_ms,
            cache_namespace=generation.namespace,
            traceparent=caller.span.context.traceparent,
            tracestate=caller.span.context.tracestate,
            predicted_cached_tokens=decision.predicted_cached_tokens,
            # What was leased and has not come, wherever it was to come from.
            credit=max(0, min(choice.credit_left for choice in choices)),
            pooling=generation.job.pooling,
        )
        if not add.sampling.max_tokens and not generation.job.pooling:
            add.sampling.max_tokens = 1
        return Open(
            engine_address=decision.address,
            replica_id=decision.replica_id,
            epoch=decision.epoch,
            model=generation.job.model,
            add=add,
            answer_format=prepared.answer_format if prepared.HasField("answer_format") else None,
            charge=charge_of(generation),
        )
