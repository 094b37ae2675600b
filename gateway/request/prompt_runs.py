"""Runs the prompts of one request as their turns come, at their tenant's expense, and logs it in
one line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from headwater.services.runtime.tasks import in_succession

from ..stages.stream_context import Found
from ..tenancy.grant import Grant
from ..tenancy.token_counts import ResumedRequest, TokenNeed, TokenUse
from .choice import Sink
from .cluster import Cluster
from .generation import Generation
from .generation_run import run_generation


async def run_all(cluster: Cluster, generations: Sequence[Generation], sink: Sink) -> None:
    """Runs the prepared prompts of one request; their choices go to `sink`. The next prompt starts
    when the one before has its turn. The first error ends the others. A resumed request has one
    prompt."""
    async with _paid(cluster, generations) as grant:
        for generation in generations:
            generation.granted(grant)
        cluster.running.begin(generations)
        try:
            if len(generations) == 1:
                await run_generation(cluster, generations[0], sink)
            else:
                await in_succession(
                    partial(run_generation, cluster, each, sink) for each in generations
                )
        finally:
            for generation in generations:
                cluster.running.ended(generation)
            log_request(cluster, generations)


def _paid(
    cluster: Cluster, generations: Sequence[Generation]
) -> AbstractAsyncContextManager[Grant]:
    first = generations[0]
    accounts = cluster.accounts
    caller = first.request.caller
    model = first.request.model
    use = partial(_use_of, generations)
    if first.found is not None:
        return accounts.resumed(caller, model, _resumed(first, first.found), use)
    return accounts.paid(caller, model, _need_of(generations), use)


def _need_of(generations: Sequence[Generation]) -> TokenNeed:
    num_answers = prompt_tokens = first_tokens = num_seats = num_first_seats = 0
    for each in generations:
        seats = each.num_seats
        num_answers += len(each.choices) * each.is_answered
        prompt_tokens += each.num_prompt_tokens
        first_tokens += each.num_tokens_at_first
        num_seats += seats
        num_first_seats = max(num_first_seats, seats if each.is_together else 1)
    return TokenNeed(
        num_prompts=len(generations),
        num_answers=num_answers,
        prompt_tokens=prompt_tokens,
        first_tokens=first_tokens,
        num_seats=num_seats,
        num_first_seats=num_first_seats,
    )


def _use_of(generations: Sequence[Generation]) -> TokenUse:
    num_sent = prompt_tokens = cached_tokens = output_tokens = 0
    for each in generations:
        if each.attempt:
            num_sent += 1
            prompt_tokens += each.num_prompt_tokens
            cached_tokens += each.cached_tokens
            output_tokens += each.num_output_tokens
    return TokenUse(
        num_prompts=len(generations),
        num_sent=num_sent,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


def _resumed(generation: Generation, found: Found) -> ResumedRequest:
    return ResumedRequest(
        request_id=found.request_id,
        prompt_tokens=generation.num_prompt_tokens,
        charged_prompt_tokens=found.prompt_tokens,
        charged_output_tokens=found.output_tokens,
        num_tokens=sum(found.num_tokens),
        granted=sum(found.granted),
        num_outstanding=found.num_outstanding,
        num_seats=generation.num_seats,
        num_readers=found.num_readers,
        is_charged=found.is_charged,
    )


def log_request(cluster: Cluster, generations: Sequence[Generation]) -> None:
    """Logs a request in one line, however many prompts and choices it has."""
    if not cluster.log.is_enabled_for(logging.INFO):
        return
    first = generations[0]
    timelines = [each.timeline for each in generations]
    outcomes = {timeline.outcome for timeline in timelines}
    first_tokens = [timeline.ttft for timeline in timelines if timeline.ttft is not None]
    cluster.log.info(
        "request",
        request_id=first.request.caller.request_id,
        tenant=first.request.caller.tenant.id,
        trace_id=first.request.caller.span.context.trace_id,
        model=first.request.model,
        outcome=next((each for each in ("error", "cancelled") if each in outcomes), "done"),
        prompts=len(generations),
        attempt=max(each.attempt for each in generations),
        replica=first.decision.replica_id if first.decision is not None else None,
        prompt_tokens=sum(each.num_prompt_tokens for each in generations),
        cached_tokens=sum(each.cached_tokens for each in generations),
        output_tokens=sum(each.num_output_tokens for each in generations),
        ttft=min(first_tokens, default=None),
        seconds=max(timeline.seconds for timeline in timelines),
    )
