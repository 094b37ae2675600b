"""Long vectors are read in the tenants' thread, so that the event loop goes on with other
requests."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.gateway.long_work import LONG_BODY_BYTES, LongWork
from headwater.gateway.request import scoring
from headwater.gateway.request.choice import Choice
from headwater.gateway.request.cluster import Cluster
from headwater.gateway.request.embedding import VALUE_BYTES, Embedding
from headwater.gateway.request.generation import Generation
from headwater.gateway.request.generation_request import GenerationRequest
from headwater.gateway.request.scoring import PairScores
from headwater.gateway.tenancy.caller import Caller
from headwater.gateway.tenancy.tenants import Tenant
from headwater.proto import common_pb2
from headwater.services.runtime.served_model import EMBED

CALLER = Caller(tenant=Tenant(id="ada"))


async def run_with_vectors(embedding: Embedding, *_: Any) -> None:
    """Gives each text a vector of as many ones as the model's name says."""
    for prompt in embedding.prompts:
        request = GenerationRequest(
            caller=CALLER,
            model=embedding.model,
            prompt=prompt,
            sampling=common_pb2.Sampling(),
            stream=False,
            endpoint=embedding.endpoint,
        )
        generation = Generation(request)
        choice = Choice(0, 0, generation.prompt)
        choice.vector = [1.0] * int(embedding.model)
        generation.choices.append(choice)
        embedding.generations.append(generation)


async def test_long_vectors_are_compared_in_a_turn_of_their_tenant_and_short_ones_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "check_task", lambda *_: EMBED)
    monkeypatch.setattr(Embedding, "run", run_with_vectors)
    long_work = LongWork()
    cluster = cast(Cluster, SimpleNamespace(long_work=long_work))
    may_end = threading.Event()
    tenant = CALLER.tenant.key
    held = asyncio.create_task(long_work.by_size(tenant, LONG_BODY_BYTES, may_end.wait, 60))
    await asyncio.sleep(0)

    async def scores(num_values: int) -> list[float]:
        pairs = PairScores.of_texts(str(num_values), ["a"], ["b"])
        await pairs.run(cluster, CALLER)
        return pairs.scores

    half = LONG_BODY_BYTES // VALUE_BYTES // 2
    long = asyncio.create_task(scores(half))
    assert await scores(half - 1) == pytest.approx([1.0])
    assert not long.done()
    may_end.set()
    assert await long == pytest.approx([1.0])
    assert await held
    long_work.close()
