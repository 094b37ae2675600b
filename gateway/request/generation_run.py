"""One generation's run: a turn in the gateway's queue, the dispatcher, and the records at its
end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from headwater.services.runtime.tasks import owned_task

from .choice import Choice, Sink
from .cluster import Cluster
from .dispatch import Dispatcher
from .generation import Generation, not_asleep
from .metrics import OTHER_ADAPTERS
from .model_queue import Terms
from .prompt_turns import Place, PromptTurns
from .resumed import ResumedDispatcher
from .span_attributes import describe_model


async def run_generation(
    cluster: Cluster, generation: Generation, sink: Sink, on_turn: Callable[[], None] = lambda: None
) -> None:
    """Waits for a turn, calls `on_turn`, runs the generation to its end. Raises the named error
    that ended it."""
    generation.task = asyncio.current_task()
    timeline = generation.timeline
    outcome = "error"
    try:
        if generation.cancelled_by is not None:
            raise generation.cancelled_by
        cluster.check(generation.request.caller)
        kind = Dispatcher if generation.found is None else ResumedDispatcher
        dispatcher = kind(cluster, generation, sink)
        await _run_in_turn(cluster, generation, dispatcher, on_turn)
        outcome = "done"
    except asyncio.CancelledError:
        outcome = "cancelled"
        if generation.cancelled_by is not None:
            assert generation.task is not None
            generation.task.uncancel()
            raise generation.cancelled_by from None
        raise
    finally:
        timeline.outcome = outcome
        timeline.ended_at = time.perf_counter()
        cluster.running.ended(generation)
        _record(cluster, generation)


async def _run_in_turn(
    cluster: Cluster, generation: Generation, dispatcher: Dispatcher, on_turn: Callable[[], None]
) -> None:
    """Begins the choices one by one as their turns come, unless they have to begin together."""
    timeline = generation.timeline
    turns = _turns_of(cluster, generation)
    try:
        if generation.is_computed:
            if cluster.cold_starts.is_cold(generation.target.model):
                # Before the queue: requests of models that have a replica do not wait behind it.
                await _replica(cluster, generation, turns)
            await dispatcher.check_deadline()
        timeline.queued_at = time.perf_counter()
        await (turns.together(generation.num_seats) if generation.is_together else turns.next())
        on_turn()
        timeline.admitted_at = time.perf_counter()
        timeline.policy = turns.waited.policy
        timeline.fcfs_seconds = turns.waited.fcfs_seconds
        cluster.metrics.queued(
            generation.target.model,
            timeline.policy,
            timeline.admitted_at - (timeline.queued_at or 0.0),
        )
        if turns.are_all_given or not generation.is_computed:
            await dispatcher.run(turns)
        else:
            async with owned_task(dispatcher.admit_others(turns)):
                await dispatcher.run(turns)
    finally:
        turns.release()


async def _replica(cluster: Cluster, generation: Generation, turns: PromptTurns[Choice]) -> None:
    """Waits for a replica of the model, in the order in which the queue will give turns."""
    caller = generation.request.caller
    model = generation.target.model
    virtual_time = turns.first_share(together=generation.is_together)
    generation.wait_seconds = lambda: cluster.cold_starts.wait_seconds(model)
    await cluster.cold_starts.replica(
        model, tenant=caller.tenant, tier=caller.tier, virtual_time=virtual_time
    )
    generation.wait_seconds = not_asleep


def _turns_of(cluster: Cluster, generation: Generation) -> PromptTurns[Choice]:
    caller = generation.request.caller
    is_computed = generation.is_computed
    place = Place(
        tenant=caller.tenant,
        tier=caller.tier,
        # A generation that no replica computes waits for none.
        model_key=generation.model.key if is_computed else "",
        num_prompt_tokens=generation.num_prompt_tokens,
        **(_needs(cluster, generation) if is_computed else {}),
    )
    return PromptTurns(
        cluster.admission,
        cluster.fair,
        generation.grant.entrance,
        place,
        generation.choices,
        generation.expected,
        generation.spent,
    )


def _needs(cluster: Cluster, generation: Generation) -> dict[str, Any]:
    """Fields of a place: what replicas will probably have to compute and hold of a generation, and
    when it is due."""
    request = generation.request
    model = generation.model
    timeline = generation.timeline
    timeline.expected_tokens = expected = cluster.answer_lengths.predict(
        request.caller.tenant.key,
        request.endpoint,
        generation.prepared.sampling.max_tokens,
        request.caller.expected_tokens,
    )
    num_uncached = cluster.router.num_uncached(
        model.key, generation.prepared.block_hashes, generation.num_prompt_tokens
    )
    arrived_at = time.monotonic() - timeline.seconds
    terms = Terms(
        arrived_at=arrived_at,
        num_answer_tokens=expected,
        num_blocks=(num_uncached + expected) // model.block_size + 1,
        first_token_by=arrived_at + (request.caller.ttft_goal or math.inf),
    )
    return {"num_uncached": num_uncached, "terms": terms}


def _record(cluster: Cluster, generation: Generation) -> None:
    """Records metrics, spans, and the timeline for later requests. The first gateway counts a
    resumed generation."""
    timeline = generation.timeline
    caller = generation.request.caller
    if generation.is_answered and timeline.outcome == "done":
        for choice in generation.choices:
            cluster.answer_lengths.add(
                caller.tenant.key, generation.request.endpoint, choice.num_output_tokens
            )
    if generation.found is None:
        cluster.metrics.count(
            generation.target.model,
            caller.tenant,
            seconds=timeline.seconds,
            ttft=timeline.ttft,
            num_prompt_tokens=generation.num_prompt_tokens,
            cached_tokens=generation.cached_tokens,
            num_output_tokens=generation.num_output_tokens,
        )
        if (target := generation.target).adapter:
            name = generation.request.model if target.is_public else OTHER_ADAPTERS
            cluster.metrics.count_adapter(name)
        if caller.span.is_collected:
            timeline.to_spans(caller.span)
            describe_model(caller.span, generation)
    cluster.explanations.keep(generation)
