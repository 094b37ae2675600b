"""Runs one generation to the end of its choices, through the failures of stages: an attempt on a
replica, then the next one from where that stopped.

Knows nothing about clients: the output of a stream goes from the choice to the sink.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from headwater.proto import common_pb2, engine_pb2
from headwater.proto.output_processor_pb2 import Open
from headwater.services.runtime import errors
from headwater.services.runtime.prefix import prefix_of

from ..router.decision import Decision
from ..router.dispatches import Dispatch
from ..stages.output_session import OutputSession
from .beam_search import BeamSearch
from .choice import Choice, Sink
from .choice_stream import ChoiceStream
from .cluster import Cluster
from .fault_history import FaultHistory
from .generation import Generation
from .open_request import go_on, open_request, stream_context
from .prefetching import prefetching
from .prompt_turns import PromptTurns
from .release import release
from .stream_failure import OUTPUT_PROCESSOR_UNAVAILABLE, Cause, StreamLost
from .timeline import Attempt, EngineStart

MOST_READS = 10
"""Most times that a request's evicted adapter is read again."""
WAIT_SECONDS = 30.0
"""Seconds that an answer which has begun waits for a replica or an output processor, where none is
left."""


class Dispatcher:
    """One run of a generation. Use once: `run`."""

    def __init__(self, cluster: Cluster, generation: Generation, sink: Sink) -> None:
        self._cluster = cluster
        self._generation = generation
        self._sink = sink
        metrics = cluster.metrics.of(generation.target.model)
        self._observe_first_token = metrics.first_token
        self._observe_between_tokens = metrics.between_tokens
        self._turns: PromptTurns[Choice]
        """Turns of the choices. Set when the generation runs."""
        self._ended: asyncio.Future[None] | None = None
        self._dispatch: Dispatch | None = None
        self._started_attempt: int | None = None
        """The attempt in which the prompt began to be computed."""
        self._faults = FaultHistory(cluster, generation)
        self._open_at: tuple[OutputSession, Decision] | None = None
        """Output session and decision of the attempt, once its first streams are open."""

    async def check_deadline(self) -> None:
        """Raises `DeadlineExceeded` for a generation that would be late even if its turn came at
        once."""
        if self._generation.request.caller.deadline is not None:
            await self._choose()

    async def run(self, turns: PromptTurns[Choice]) -> None:
        """Dispatches until every choice has ended. Raises errors that no other replica would
        mend."""
        generation = self._generation
        self._turns = turns
        if not generation.is_computed:
            for choice in generation.choices:
                choice.end("length")
                self._sink.ended(choice)
                self.choice_ended(choice)
            return
        for choice in generation.choices:
            choice.credit_left = generation.grant.first_credit
        await self._attempt_until_done()

    async def admit_others(self, turns: PromptTurns[Choice]) -> None:
        """Begins the choices that have no turn yet, as their turns come, beside `run`."""
        try:
            while not turns.are_all_given:
                self._join(await turns.next())
        except errors.HeadwaterError as error:
            # The queue may be full, for example.
            self.broke(error)

    async def _attempt_until_done(self) -> None:
        try:
            while True:
                self._generation.attempt += 1
                try:
                    await self._try()
                    return
                except StreamLost as loss:
                    self._faults.consider(loss)
                    if loss.cause is Cause.ENGINE_GONE:
                        # Other gateways have lost answers with it, and would choose the same
                        # replica for theirs.
                        await asyncio.sleep(self._cluster.router.peers.turn_seconds)
        finally:
            self._faults.end_doubt()

    # Events of streams; see `StreamEvents`.

    def started(self, start: engine_pb2.Start) -> None:
        """Notes that the prompt is being computed. Choices share one prompt: the report of the
        choice that computes it counts, which found the fewest cached tokens, and of several
        attempts the first one."""
        is_news = self._is_news(start)
        generation = self._generation
        if is_news and self._started_attempt is None:
            self._started_attempt = generation.attempt
            self._turns.started()
        elif (
            generation.attempt != self._started_attempt
            or start.cached_tokens >= generation.cached_tokens
        ):
            return
        generation.cached_tokens = start.cached_tokens
        generation.cached_by_tier = dict(start.cached_by_tier) if start.cached_by_tier else {}

    def first_token(self, now: float) -> None:
        timeline = self._generation.timeline
        if timeline.first_token_at is None:
            timeline.first_token_at = now
            self._observe_first_token(now - timeline.arrived_at)

    def got_further(self) -> None:
        """Notes that a choice is past the position at which an engine died."""
        self._faults.got_further()

    def choice_ended(self, choice: Choice) -> None:
        self._turns.ended(choice)
        self._cluster.metrics.finished.add(self._generation.target.model, str(choice.finish_reason))
        if self._faults.is_doubted:
            self._faults.got_further()
        if self._ended is not None and not self._ended.done() and not self._generation.unfinished:
            self._ended.set_result(None)

    def broke(self, error: errors.HeadwaterError) -> None:
        """Ends the attempt by `error`."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _is_news(self, start: engine_pb2.Start) -> bool:
        """Notes that the attempt's prompt is being computed. Returns False where that was known."""
        attempt = self._generation.timeline.attempts[-1]
        if attempt.start is not None:
            return False
        attempt.start = EngineStart(
            start.queue_seconds, start.prefill_seconds, start.policy, start.fcfs_queue_seconds
        )
        if not self._generation.has_begun:
            self._faults.pass_trial()
        if self._dispatch is not None:
            decision = self._dispatch.decision
            cached_tokens = start.cached_tokens
            if decision.num_prompt_tokens > self._generation.num_prompt_tokens:
                # An engine reports the prompt alone; the answer so far was looked up with it.
                cached_tokens = max(cached_tokens, decision.predicted_cached_tokens)
            self._cluster.router.dispatches.started(self._dispatch, cached_tokens)
            self._cluster.admission.give()
        return True

    def _begin(self) -> asyncio.Future[None]:
        """Prepares an attempt before its streams are opened. The future is done when every choice
        has ended, or one of them is lost."""
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    async def _try(self) -> None:
        """Runs one attempt. Raises `StreamLost` where another attempt may do better."""
        generation = self._generation
        await self._faults.begin_trial()
        try:
            asked_at = time.perf_counter()
            decision = generation.decision = await self._choose()
            session = await self._session(decision)
            attempt = Attempt(
                decision=decision, asked_at=asked_at, dispatched_at=time.perf_counter()
            )
            generation.timeline.attempts += (attempt,)
            self._faults.dispatched(decision.incarnation)
            try:
                await self._attempt(session, decision)
            except errors.HeadwaterError as error:
                attempt.error = error.message
                attempt.cause = error.cause.value if isinstance(error, StreamLost) else ""
                attempt.was_alone = self._faults.is_on_trial
                raise
            finally:
                attempt.ended_at = time.perf_counter()
        finally:
            self._faults.pass_trial()

    async def _attempt(self, session: OutputSession, decision: Decision) -> None:
        generation = self._generation
        cluster = self._cluster
        ended = self._begin()
        if not generation.prompt.is_scored:
            # An attempt that failed may have scored a part of the prompt.
            generation.prompt.logprobs = []
        self._dispatch = cluster.router.dispatches.begin(
            decision,
            generation.request.caller.request_id,
            is_first=not generation.request.first_index,
        )
        self._turns.sent()
        cluster.migrations.dispatched()
        reason = "client_gone"
        is_outage = False
        try:
            await self._open(session, decision)
            with prefetching(cluster.stages.prefetches, generation, decision):
                await ended
        except errors.Unavailable as error:
            loss = error if isinstance(error, StreamLost) else None
            if loss is None and error.code == OUTPUT_PROCESSOR_UNAVAILABLE:
                loss = StreamLost(error.message, Cause.OUTPUT_PROCESSOR_GONE)
            if loss is None:
                raise
            reason = "attempt_lost"
            is_outage = loss.cause.is_outage
            raise loss from None
        except errors.InternalError:
            is_outage = True
            raise
        finally:
            self._open_at = None
            release(generation, reason)
            cluster.router.dispatches.finished(self._dispatch, failed=is_outage)

    async def _choose(self) -> Decision:
        """The replica that is predicted to answer soonest, among those that have not failed this
        generation."""
        generation = self._generation
        cluster = self._cluster
        prepared = generation.prepared
        model_key = generation.model.key
        token_ids, hashes = self._computed()
        await cluster.router.consult(model_key, hashes)
        await cluster.cold_starts.replica_of_admitted(
            generation.target.model, generation.request.caller.tenant, self._least_seconds
        )
        max_tokens = prepared.sampling.max_tokens - (len(token_ids) - len(prepared.prompt_ids))
        attempts = generation.timeline.attempts
        target = generation.target
        for num_reads in itertools.count(1):
            adapter_of = target.model, target.adapter, self._faults.failed
            await cluster.placement.ensure(*adapter_of)
            try:
                decision = cluster.router.choose(
                    model_key,
                    hashes,
                    len(token_ids),
                    max_tokens,
                    exclude=self._faults.failed,
                    numerics_id=attempts[0].decision.member.numerics_id
                    if attempts and generation.has_begun
                    else "",
                    expected_tokens=generation.timeline.expected_tokens,
                    adapter=target.adapter,
                    lender=self._faults.lender,
                    may_hand_over=generation.may_be_handed_over,
                )
                break
            except errors.Unavailable as error:
                if num_reads < MOST_READS and cluster.placement.is_displaced(*adapter_of):
                    continue
                await self._wait(
                    lambda: cluster.router.wait_for(model_key, self._faults.failed), error
                )
        remaining_ms = generation.request.caller.remaining_ms
        seconds = decision.predicted_seconds
        if remaining_ms and seconds * 1e3 > remaining_ms:
            raise errors.DeadlineExceeded(
                f"the first token would come in {seconds:.1f} s, the deadline is in "
                f"{remaining_ms / 1e3:.1f} s"
            )
        return decision

    def _computed(self) -> tuple[Sequence[int], bytes]:
        """Token ids of the prompt and of the longest unfinished choice, and their block hashes."""
        prepared = self._generation.prepared
        longest = max(
            (choice.output_ids for choice in self._generation.unfinished), key=len, default=[]
        )
        if not longest:
            return prepared.prompt_ids, prepared.block_hashes
        token_ids = [*prepared.prompt_ids, *longest]
        generation = self._generation
        hashes = prefix_of(
            generation.namespace, token_ids, prepared.block_size, front=generation.front
        )
        return token_ids, hashes

    async def _session(self, decision: Decision) -> OutputSession:
        request = self._generation.request
        model = self._generation.target.model
        outputs = self._cluster.stages.outputs
        # The id of a request finds the output processor of a resumable one, and keeps several
        # prompts at a single one that counts the tokens of all of them.
        is_by_id = request.context is not None or self._generation.grant.num_prompts > 1
        key = request.caller.request_id if is_by_id else decision.address
        while True:
            try:
                return outputs.pick(key, model)
            except errors.Unavailable as error:
                await self._wait(lambda: outputs.wait_for(model), error)

    @property
    def _least_seconds(self) -> float:
        """Seconds for which it waits for a stage at least."""
        return WAIT_SECONDS if self._generation.has_begun else 0.0

    async def _wait(
        self, coming: Callable[[], Awaitable[None]], otherwise: errors.Unavailable
    ) -> None:
        """Waits for a stage, where an answer has begun or a supervisor starts stages. Raises
        `Unavailable` when none comes."""
        seconds = max(self._least_seconds, self._cluster.cold_starts.patience)
        if not seconds:
            raise otherwise
        try:
            async with asyncio.timeout(seconds):
                await coming()
        except TimeoutError:
            raise errors.Unavailable(
                "nothing can go on with the answer", code="no_replica"
            ) from None

    async def _open(self, session: OutputSession, decision: Decision) -> None:
        generation = self._generation
        generation.grant.counted_by.add(session)
        refusal = generation.grant.refusal
        if refusal is not None and any(not each.credit_left for each in generation.unfinished):
            raise refusal
        if generation.prepared.sampling.use_beam_search and not generation.has_begun:
            await self._find_beams(session, decision)
        for opening, choices in self._openings(decision):
            self._open_streams(session, opening, choices)
        self._open_at = session, decision

    def _join(self, choices: Sequence[Choice]) -> None:
        """Opens streams of choices whose turn comes while others run, at the same replica. Between
        two attempts the next attempt takes them."""
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

    def _streams(self, choices: Sequence[Choice]) -> list[ChoiceStream]:
        return [
            ChoiceStream(choice, self._sink, self, self._observe_between_tokens)
            for choice in choices
        ]

    def _open_streams(
        self, session: OutputSession, opening: Open, choices: Sequence[Choice]
    ) -> None:
        streams = self._streams(choices)
        ids = session.open(opening, streams, stream_context(self._generation))
        for stream, stream_id in zip(streams, ids, strict=True):
            stream.opened(session, stream_id)

    def _openings(self, decision: Decision) -> Iterator[tuple[Open, list[Choice]]]:
        """Groups choices by the stream opening that carries them. Choices without tokens share a
        prompt; a choice with tokens has an opening of its own. One choice scores the prompt."""
        generation = self._generation
        sampling = self._generation.prepared.sampling
        unfinished = [choice for choice in generation.unfinished if self._turns.has(choice)]
        begun = [choice for choice in unfinished if choice.output_ids]
        fresh = [choice for choice in unfinished if not choice.output_ids]
        scores = generation.prompt.awaits_scores
        for choices in [*([fresh] if fresh else []), *([choice] for choice in begun)]:
            opening = self._opening(decision, choices)
            first = choices[0]
            if first.output_ids:
                # A beam is complete.
                go_on(opening, first, is_whole=sampling.use_beam_search)
            if not scores:
                opening.add.sampling.ClearField("prompt_logprobs")
            scores = False
            yield opening, choices

    def _opening(self, decision: Decision, choices: Sequence[Choice]) -> Open:
        return open_request(self._generation, decision, choices, self._turns.virtual_time(choices))

    async def _find_beams(self, session: OutputSession, decision: Decision) -> None:
        """Finds the beams' tokens; their text is made as in a resume."""
        generation = self._generation
        prepared = self._generation.prepared

        def make_open(prompt_ids: Sequence[int], sampling: common_pb2.Sampling) -> Open:
            opening = self._opening(decision, generation.choices[:1])
            opening.add.prompt_ids[:] = prompt_ids
            opening.add.sampling.CopyFrom(sampling)
            opening.add.forks = True
            opening.charge.prompt_alone = True
            opening.ClearField("answer_format")
            return opening

        ends = frozenset([*prepared.sampling.stop_token_ids, *prepared.eos_token_ids])
        ends -= frozenset(prepared.eos_token_ids) if prepared.sampling.ignore_eos else frozenset()
        search = BeamSearch(
            session, prepared.prompt_ids, prepared.sampling, make_open, self.started
        )
        beams = await search.run(ends)
        for choice, beam in zip(generation.choices, beams, strict=False):
            choice.resume(beam.token_ids)
