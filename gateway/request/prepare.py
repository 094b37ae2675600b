"""Prompts to tokens, by a processor: what a generation is before it waits for its turn.

A request takes its place in its tenant's minute first.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from headwater.proto import processor_pb2

from ..adapters.names import Target
from ..stages.stream_context import StreamNotKept
from .choice import Choice
from .cluster import Cluster
from .generation import Generation
from .served_fields import check_fields


async def prepare(cluster: Cluster, generation: Generation) -> None:
    """Counts the request of a generation and prepares it. Raises `LimitExceeded`, `BadRequest`,
    `NotFound`, `Unavailable`, and `StreamNotKept` for a resumed one that has changed."""
    await _count(cluster, generation)
    await _prepare(cluster, generation)


async def prepare_all(cluster: Cluster, generations: Sequence[Generation]) -> None:
    """Counts a request and prepares its prompts. The first error ends the others. Raises as
    `prepare` does."""
    await _count(cluster, generations[0])
    await for_each_prompt(cluster, generations, lambda generation: _prepare(cluster, generation))


async def _count(cluster: Cluster, generation: Generation) -> None:
    """Takes the request's place in its tenant's minute. A resumed stream that no gateway has
    charged yet has its place already."""
    request = generation.request
    caller = request.caller
    if generation.found is None or generation.found.prompt_tokens:
        await cluster.accounts.count(caller.tenant, caller.standing, request.model)


async def _prepare(cluster: Cluster, generation: Generation) -> None:
    request = generation.request
    tenant = request.caller.tenant
    tier = request.caller.tier
    target = generation.target = _target(cluster, generation)
    await cluster.cold_starts.text_stages(target.model, tenant=tenant, tier=tier)
    generation.model = cluster.served.model(target.model)
    check_fields(cluster.router.engines(generation.model.key), request.sampling)
    generation.namespace = cluster.namespaces.of(
        tenant.key,
        generation.model,
        lora=target.adapter.hex(),
        cache_salt=request.cache_salt,
        shared=tenant.shared_cache,
    )
    front_namespace = b""
    # A request with a salt shares no blocks.
    digest = cluster.shared_prompts.of(tenant.id, target.model, request.prompt)
    if digest and not request.cache_salt:
        front_namespace = cluster.namespaces.of_front(
            digest, generation.model, lora=target.adapter.hex()
        )
    call = processor_pb2.PrepareRequest(
        model=target.model,
        prompt=request.prompt,
        sampling=request.sampling,
        cache_namespace=generation.namespace,
        front_namespace=front_namespace,
        stream=request.stream,
        pooling=request.pooling,
        prompt_name=request.prompt_name,
        escape_special_tokens=cluster.tenants.escapes_special_tokens(tenant),
        tenant=tenant.key,
    )
    prepared = await cluster.stages.processors.prepare(call, request.caller.span)
    generation.take(prepared)
    if prepared.num_front_blocks:
        generation.front = front_namespace, prepared.num_front_blocks
    generation.timeline.prepared_at = time.perf_counter()
    sampling = prepared.sampling
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(63)
    num_choices = sampling.n if sampling.use_beam_search else max(sampling.n, sampling.best_of)
    if num_choices > sampling.n:
        # The best are found by their tokens' log probabilities, whether or not the client wants to
        # see these.
        sampling.logprobs = True
    generation.choices = [
        Choice(i, request.first_index + i, generation.prompt) for i in range(num_choices)
    ]
    if (found := generation.found) is not None:
        sampling.seed = found.context.seed
        generation.attempt = found.attempt
        if num_choices != len(found.granted):
            raise StreamNotKept(found.request_id)


def _target(cluster: Cluster, generation: Generation) -> Target:
    """Target of a request's name; a resumed request keeps the adapter that it was admitted with."""
    request = generation.request
    target = cluster.served.target(request.caller.tenant, request.model)
    found = generation.found
    return (
        target if found is None else msgspec.structs.replace(target, adapter=found.context.adapter)
    )


async def for_each_prompt(
    cluster: Cluster,
    generations: Sequence[Generation],
    work: Callable[[Generation], Awaitable[None]],
) -> None:
    """Awaits `work` for the prompts of one request, a few of its tenant's and model's at a time:
    prompts of a model whose stages are being started hold up no others. A request's only prompt
    waits for no other one."""
    first = generations[0]
    if len(generations) == 1:
        await work(first)
        return
    await cluster.prompt_windows.for_each(
        (first.request.caller.tenant.key, first.request.model), generations, work
    )
