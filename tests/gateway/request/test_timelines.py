"""Prompts that have ended and are remembered within a bound of memory, until a client asks for
them."""

from __future__ import annotations

import json
import time
import tracemalloc
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.gateway.request.ended_prompt import EndedPrompt
from headwater.gateway.request.explanations import Explanations
from headwater.gateway.request.running_requests import RunningRequests
from headwater.gateway.request.timeline import Attempt, EngineStart, Timeline
from headwater.gateway.request.timelines import Timelines
from headwater.gateway.router.cost import Parts
from headwater.gateway.router.decision import Candidate, Decision
from headwater.gateway.tenancy.caller import Caller
from headwater.gateway.tenancy.tenants import Tenant
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.member import Kind, Member


def ended(num_output_tokens: int) -> EndedPrompt:
    return EndedPrompt(
        timeline=Timeline(outcome="done"),
        num_prompt_tokens=3,
        cached_tokens=0,
        cached_by_tier={},
        num_output_tokens=num_output_tokens,
        choices=({"index": 0, "finish_reason": "stop"},),
    )


def test_what_is_remembered_has_a_bound() -> None:
    timelines = Timelines(Bus(None), "g", max_bytes=20_000)
    for number in range(1000):
        head = timelines.begin(f"{number}", Tenant(id="t"), "m", "", "", age=0.0)
        timelines.keep(head, ended(1))
        timelines.keep(head, ended(2))
    assert 10_000 < timelines.num_bytes <= 20_000
    assert timelines.find("0", "t") is None
    last = timelines.find("999", "t")
    assert last is not None
    assert [json.loads(bytes(prompt))["output_tokens"] for prompt in last.prompts] == [1, 2]
    assert [each.id for each in timelines.youngest(2)] == ["999", "998"]


async def test_a_beginning_that_several_ids_have_is_refused() -> None:
    timelines = Timelines(Bus(None), "g")
    for request_id, tenant in (("abcdef1", "ada"), ("abcdef2", "ada"), ("abcdef3", "eve")):
        head = timelines.begin(request_id, Tenant(id=tenant), "m", "", "", age=0.0)
        timelines.keep(head, ended(1))
    explanations = Explanations(timelines, RunningRequests())
    with pytest.raises(BadRequest, match="2 requests begin with 'abcdef'; allowed: an id, or more"):
        await explanations.find(Caller(tenant=Tenant(id="ada")), "abcdef")
    assert (await explanations.find(Caller(tenant=Tenant(id="eve")), "abcdef")).id == "abcdef3"
    assert (await explanations.find(Caller(tenant=Tenant(id="ada")), "abcdef2")).id == "abcdef2"


def test_a_tenant_finds_its_own_among_the_youngest_requests() -> None:
    timelines = Timelines(Bus(None), "g")
    for number in range(10):
        timelines.keep(
            timelines.begin(f"{number}", Tenant(id=f"t{number % 3}"), "m", "", "", age=0.0),
            ended(1),
        )
    assert [each.id for each in timelines.youngest(6, "t1")] == ["7", "4"]


def test_prompts_are_rendered_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timelines = Timelines(Bus(None), "g")
    num_rendered = 0
    explained = EndedPrompt.explained

    def counted(prompt: EndedPrompt) -> dict[str, Any]:
        nonlocal num_rendered
        num_rendered += 1
        return explained(prompt)

    monkeypatch.setattr(EndedPrompt, "explained", counted)
    for number in range(50):
        timelines.keep(timelines.begin(f"{number}", Tenant(id="t"), "m", "", "", age=0.0), ended(1))
    assert num_rendered == 0
    assert timelines.find("7", "t") is not None
    assert timelines.find("7", "another") is None
    assert next(timelines.youngest(400)).id == "49"
    assert num_rendered == 2


@pytest.mark.parametrize(
    ("num_attempts", "num_candidates", "num_choices"), [(0, 0, 0), (1, 1, 1), (3, 20, 5)]
)
def test_what_prompts_take_of_memory_is_about_what_is_estimated(
    num_attempts: int, num_candidates: int, num_choices: int
) -> None:
    # The first one imports parts of numpy.
    long_prompt(num_attempts, num_candidates, num_choices)
    tracemalloc.start()
    try:
        prompts = [long_prompt(num_attempts, num_candidates, num_choices) for _ in range(100)]
        measured = tracemalloc.get_traced_memory()[0] / 100
    finally:
        tracemalloc.stop()
    assert 0.9 * measured < prompts[0].num_bytes < 1.6 * measured + 200


def long_prompt(num_attempts: int, num_candidates: int, num_choices: int) -> EndedPrompt:
    """A prompt whose figures share no objects with those of others."""
    numbers = iter(np.random.default_rng(0).random(1000).tolist())
    attempts = tuple[Attempt, ...]()
    for _ in range(num_attempts):
        parts = (
            Parts(*islice(numbers, len(Parts.__struct_fields__))) for _ in range(num_candidates)
        )
        candidates = tuple(
            Candidate("a", each, next(numbers), 1.0, True, next(numbers), "", 3) for each in parts
        )
        decision = Decision(
            member=Member(kind=Kind.ENGINE, replica_id="a", epoch=1, address="a:1"),
            reason="load",
            candidates=candidates,
            num_candidates=num_candidates,
            hashes=(),
            num_prompt_tokens=3000,
            num_matched_blocks=1,
            block_size=16,
            predicted_cached_tokens=2000,
            predicted_seconds=next(numbers),
            actual_seconds=next(numbers),
        )
        start = EngineStart(next(numbers), next(numbers))
        times = {name: next(numbers) for name in ("asked_at", "dispatched_at", "ended_at")}
        attempts += (Attempt(decision=decision, start=start, **times),)
    work = {
        name: 1000.0 * next(numbers)
        for name in ("steps", "tokens_per_step", "draft_tokens", "mean_batch_size")
    }
    choices = tuple(
        {"index": i, "finish_reason": "stop", "engine": dict(work)} for i in range(num_choices)
    )
    prompt = ended(5)
    prompt.timeline.attempts = attempts
    return msgspec.structs.replace(prompt, choices=choices)


def test_hashes_of_a_prompts_blocks_are_not_remembered() -> None:
    prompt = long_prompt(2, 1, 1)
    for attempt in prompt.timeline.attempts:
        attempt.decision.hashes = (b"h" * 16,) * 1000
    prompt.timeline.forget_hashes()
    assert [attempt.decision.hashes for attempt in prompt.timeline.attempts] == [(), ()]


def test_a_request_was_made_when_it_came_and_not_when_it_is_explained() -> None:
    before = time.time()
    created = Timelines(Bus(None), "g").begin("r", Tenant(id="t"), "m", "", "", age=60.0).created
    assert before - 60.001 <= created <= time.time() - 59.999
