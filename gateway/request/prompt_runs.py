"""The prompts of one request on their common way: prepared a few at a time, run one after another as their turns come,
at their tenant's expense, with one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from headwater.services.runtime.tasks import in_succession

from .generation import Generation


async def prepare_all(generations: Sequence[Generation]) -> None:
    """Prepares the prompts of one request. The first error ends the others."""
    # By its own class: one that is resumed is prepared otherwise.
    await for_each_prompt(generations, lambda generation: generation.prepare())


async def for_each_prompt(generations: Sequence[Generation], work: Callable[[Generation], Awaitable[None]]) -> None:
    """Awaits `work` for the prompts of one request, a few of its tenant's and model's at a time: those of a model whose
    stages are being started hold up no others. A request's only prompt waits for no other one."""
    first = generations[0]
    if len(generations) == 1:
        await work(first)
        return
    await first.line.prompt_windows.for_each((first.job.caller.tenant.key, first.job.model), generations, work)


async def run_all(generations: Sequence[Generation]) -> None:
    """Runs the prompts of one request at its tenant's expense: the next one starts when the one before has its turn.
    The first error ends the others."""
    line = generations[0].line
    async with line.accounts.paid(generations):
        try:
            with line.running(generations):
                if len(generations) == 1:
                    await generations[0].run()
                else:
                    await in_succession(generation.run for generation in generations)
        finally:
            log_request(generations)


def log_request(generations: Sequence[Generation]) -> None:
    """One line, however many prompts and choices it has."""
    if not generations[0].line.log.is_enabled_for(logging.INFO):
        return
    first, roads = generations[0], [each.road for each in generations]
    outcomes = {road.outcome for road in roads}
    first_tokens = [road.ttft for road in roads if road.ttft is not None]
    first.line.log.info(
        "request",
        request_id=first.job.caller.request_id,
        tenant=first.job.caller.tenant.id,
        trace_id=first.job.caller.span.context.trace_id,
        model=first.job.model,
        outcome=next((each for each in ("error", "cancelled") if each in outcomes), "done"),
        prompts=len(generations),
        attempt=max(each.attempt for each in generations),
        replica=first.decision.replica_id if first.decision is not None else None,
        prompt_tokens=sum(each.num_prompt_tokens for each in generations),
        cached_tokens=sum(each.cached_tokens for each in generations),
        output_tokens=sum(each.num_output_tokens for each in generations),
        ttft=min(first_tokens, default=None),
        seconds=max(road.seconds for road in roads),
    )
