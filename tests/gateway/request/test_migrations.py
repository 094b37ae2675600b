"""What a gateway makes of streams that are lost: what it sends elsewhere, what it never shows, what
it gives up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headwater.gateway.request.choice import UNSEEN_TOKENS
from headwater.gateway.request.migrations import BURST, Migrations
from headwater.proto.common_pb2 import (
    LOSS_CAUSE_ENGINE_GONE,
    LOSS_CAUSE_HANDED_OVER,
    LOSS_CAUSE_MISSING,
    LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING,
    LossCause,
)
from headwater.proto.output_processor_pb2 import Open
from headwater.services.runtime.tasks import end
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway, completion_body
from tests.gateway.scripted_output import ScriptedOutputProcessor, scripted_stages

NUM_ENGINES = 5
FURTHER = UNSEEN_TOKENS + 1
"""Tokens that lead away from where an engine died."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Scripted:
    """A gateway, and what stands behind it as the test says."""

    script: ScriptedOutputProcessor
    gateway: Gateway
    client: httpx.AsyncClient

    def ask(self, **more: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(
            self.client.post("/v1/completions", json=completion_body(**more))
        )

    async def metric(self, name: str) -> float:
        return await asyncio.to_thread(self.gateway.metric, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(behind: Behind, start_gateway: GatewayStarter) -> AsyncIterator[Scripted]:
    async with scripted_stages(behind.processor, NUM_ENGINES) as (
        script,
        output_processor,
        engines,
    ):
        starting = start_gateway(Behind(behind.processor, output_processor, tuple(engines)))
        gateway = await asyncio.to_thread(starting.__enter__)
        await asyncio.to_thread(gateway.wait_for_replicas, NUM_ENGINES)
        async with httpx.AsyncClient(base_url=gateway.rest, timeout=60) as client:
            yield Scripted(script, gateway, client)
        await asyncio.to_thread(starting.__exit__, None, None, None)


def go_on(script: ScriptedOutputProcessor, opened: Open, num_tokens: int) -> None:
    """The answer so many tokens further."""
    (stream_id,), first = opened.add.stream_ids, opened.add.num_output_tokens
    script.start(stream_id)
    script.tokens(stream_id, first, [first] * num_tokens, "x", sum(opened.delivered_bytes))


@pytest.fixture
def scripted(stages: Scripted) -> Scripted:
    stages.script.begin()
    return stages


async def test_an_answer_goes_on_where_it_stopped_and_nothing_of_an_earlier_attempt_is_shown(
    scripted: Scripted,
) -> None:
    script = scripted.script
    reply = scripted.ask(n=2, temperature=1, return_token_ids=True, max_tokens=50)
    first = await script.open(0)
    a, b = first.add.stream_ids
    script.tokens(a, 0, [10, 11], "ab", 0)
    script.tokens(b, 0, [20], "x", 0)
    script.end(b, 1)
    script.lose(a, LOSS_CAUSE_HANDED_OVER)
    script.tokens(a, 2, [66], "late", 2)
    second = await script.open(1)
    (c,) = second.add.stream_ids
    assert c not in (a, b)
    assert second.replica_id != first.replica_id
    assert (list(second.add.output_ids), list(second.delivered_bytes)) == ([10, 11], [2])
    assert (second.add.attempt, list(second.add.choice_indices)) == (2, [0])
    assert (second.add.sampling, second.add.request_id) == (
        first.add.sampling,
        first.add.request_id,
    )
    assert second.add.credit == first.add.credit - 2
    script.tokens(a, 2, [66], "late", 2)
    script.tokens(c, 2, [12], "c", 2)
    script.tokens(a, 3, [66], "late", 3)
    script.lose(c, LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING)
    script.leave()
    third = await script.open(2)
    assert third.replica_id != first.replica_id
    script.end(third.add.stream_ids[0], 3)
    answer = (await reply).json()
    assert [(each["text"], each["token_ids"]) for each in answer["choices"]] == [
        ("abc", [10, 11, 12]),
        ("x", [20]),
    ]
    assert answer["usage"]["completion_tokens"] == 4
    explained = (await scripted.client.get(f"/v1/requests/{answer['id']}/explain")).json()[
        "prompts"
    ][0]
    causes = [each["cause"] for each in explained["attempts"]]
    assert causes == ["handed_over", "output_processor_gone", None]
    assert await scripted.metric("headwater_migrations_total") >= 2


@pytest.mark.long
async def test_stages_that_were_held_up_for_seconds_are_still_known(scripted: Scripted) -> None:
    """They are in this process, as in one that a busy machine keeps from running. Whoever asked
    next was refused, and its test waited for a request that never came."""
    time.sleep(6)  # noqa: ASYNC251 (nothing here answers meanwhile)
    reply = scripted.ask(max_tokens=50)
    scripted.script.end((await scripted.script.open(0)).add.stream_ids[0], 0)
    assert (await reply).status_code == 200


async def lose_after_a_token(
    script: ScriptedOutputProcessor, number: int, cause: LossCause
) -> None:
    """Answers one token in the stream of an attempt, and then loses the stream."""
    (stream_id,) = (await script.open(number)).add.stream_ids
    script.tokens(stream_id, number, [number], "x", number)
    script.lose(stream_id, cause)


async def test_engines_that_leave_in_order_use_up_no_attempt_and_those_that_die_do(
    scripted: Scripted,
) -> None:
    script = scripted.script
    reply = scripted.ask(max_tokens=50)
    for number in range(3):
        await lose_after_a_token(script, number, LOSS_CAUSE_HANDED_OVER)
    (stream_id,) = (await script.open(3)).add.stream_ids
    script.end(stream_id, 3)
    assert (await reply).json()["choices"][0]["text"] == "xxx"
    reply = scripted.ask(max_tokens=50)
    for number in range(4, 7):
        opened = await script.open(number)
        go_on(script, opened, FURTHER)
        script.lose(opened.add.stream_ids[0], LOSS_CAUSE_ENGINE_GONE)
    failed = await reply
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_output_processors_that_leave_in_order_use_up_no_attempt(scripted: Scripted) -> None:
    """In a rollout an answer may go on at the output processor that is restarted next."""
    script = scripted.script
    reply = scripted.ask(max_tokens=50)
    for number in range(4):
        await lose_after_a_token(script, number, LOSS_CAUSE_OUTPUT_PROCESSOR_LEAVING)
        script.leave()
    (stream_id,) = (await script.open(4)).add.stream_ids
    script.end(stream_id, 4)
    assert (await reply).json()["choices"][0]["text"] == "xxxx"


async def test_an_answer_with_which_two_engines_die_at_the_same_place_is_the_last_that_they_die_of(
    scripted: Scripted,
) -> None:
    script = scripted.script
    reply = scripted.ask(max_tokens=50)
    for number, num_tokens in enumerate((FURTHER, 2)):
        opened = await script.open(number)
        go_on(script, opened, num_tokens)
        script.lose(opened.add.stream_ids[0], LOSS_CAUSE_ENGINE_GONE)
    failed = await reply
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "poison_request")
    assert len(script.opens) == 2


async def lose_two_engines(scripted: Scripted, replies: list[asyncio.Task[httpx.Response]]) -> bool:
    """Whether two answers were at one engine, and then at another one, when these died."""
    script = scripted.script
    for first, num_tokens in ((0, FURTHER), (2, 2)):
        together = [await script.open(first), await script.open(first + 1)]
        if together[0].replica_id != together[1].replica_id:
            await end(*replies)
            opened_ids = {each.add.stream_ids[0] for each in together}
            await script.receives(lambda ids=opened_ids: ids <= script.cancels.keys())
            return False
        for opened in together:
            go_on(script, opened, num_tokens)
        for opened in together:
            script.lose(opened.add.stream_ids[0], LOSS_CAUSE_ENGINE_GONE)
    return True


async def test_suspects_of_two_deaths_run_one_at_a_time_until_they_pass_that_position(
    scripted: Scripted,
) -> None:
    script = scripted.script
    prompt = "The river went down to the sea. " * 8
    async with asyncio.timeout(120):
        replies = [scripted.ask(prompt=prompt, max_tokens=50) for _ in range(2)]
        # What one has sent counts as cached for two seconds, in which a busy machine may not come
        # to the other.
        while not await lose_two_engines(scripted, replies):
            script.begin()
            replies = [scripted.ask(prompt=prompt, max_tokens=50) for _ in range(2)]
    poison = await script.open(4)
    go_on(script, poison, 2)
    assert len(script.opens) == 5
    script.lose(poison.add.stream_ids[0], LOSS_CAUSE_ENGINE_GONE)
    innocent = await script.open(5)
    assert innocent.add.request_id != poison.add.request_id
    go_on(script, innocent, FURTHER)
    script.end(innocent.add.stream_ids[0], FURTHER + 2 + FURTHER)
    answers = [await reply for reply in replies]
    assert sorted(each.status_code for each in answers) == [200, 500]
    assert (
        next(each for each in answers if each.status_code == 200).json()["choices"][0]["text"]
        == "x" * 3
    )


async def test_suspects_of_an_engines_death_are_tried_one_at_a_time_and_a_second_one_is_the_last(
    scripted: Scripted,
) -> None:
    script = scripted.script
    replies = [scripted.ask(prompt=f"Story {number}", max_tokens=50) for number in range(3)]
    opens = [await script.open(number) for number in range(3)]
    began = opens[2].add
    script.start(began.stream_ids[0])
    script.tokens(began.stream_ids[0], 0, [5], "y", 0)
    for opened in opens:
        script.lose(opened.add.stream_ids[0], LOSS_CAUSE_ENGINE_GONE)
    # What had given tokens moves at once, beside the first suspect.
    await script.receives(lambda: len(script.opens) == 5)
    await asyncio.sleep(0.2)
    assert len(script.opens) == 5
    moved = next(each.add for each in script.opens[3:] if each.add.request_id == began.request_id)
    poison = next(each.add for each in script.opens[3:] if each.add.request_id != began.request_id)
    script.end(moved.stream_ids[0], 1)
    script.lose(poison.stream_ids[0], LOSS_CAUSE_ENGINE_GONE)
    innocent = (await script.open(5)).add
    assert innocent.request_id not in (poison.request_id, began.request_id)
    script.start(innocent.stream_ids[0])
    script.end(innocent.stream_ids[0], 0)
    answers = [await reply for reply in replies]
    assert sorted(each.status_code for each in answers) == [200, 200, 500]
    refused = next(each.json()["error"] for each in answers if each.status_code == 500)
    assert refused["code"] == "poison_request"


async def test_an_answer_that_began_at_an_earlier_engine_does_not_wait_for_suspects(
    scripted: Scripted,
) -> None:
    """As one that was handed over, and whose new engine died before it said anything."""
    script = scripted.script
    reply = scripted.ask(prompt="Begun", max_tokens=50)
    begun = (await script.open(0)).add
    script.start(begun.stream_ids[0])
    script.tokens(begun.stream_ids[0], 0, [5], "y", 0)
    script.lose(begun.stream_ids[0], LOSS_CAUSE_HANDED_OVER)
    await script.open(1)
    suspect = scripted.ask(prompt="Not begun", max_tokens=50)
    await script.open(2)
    for number in (2, 1):
        script.lose(script.opens[number].add.stream_ids[0], LOSS_CAUSE_ENGINE_GONE)
    await script.receives(lambda: len(script.opens) == 5)
    for opened in script.opens[3:]:
        stream_id = opened.add.stream_ids[0]
        num_tokens = opened.add.num_output_tokens
        script.start(stream_id)
        script.end(stream_id, num_tokens)
    answers = [await each for each in (reply, suspect)]
    assert [each.status_code for each in answers] == [200, 200]
    assert answers[0].json()["choices"][0]["text"] == "y"


async def test_few_may_move_on_suspicion(scripted: Scripted) -> None:
    script = scripted.script
    num_asked = int(BURST) + 5
    replies = [scripted.ask(prompt=f"Story {number}", max_tokens=50) for number in range(num_asked)]
    for opened in [await script.open(number) for number in range(num_asked)]:
        (stream_id,) = opened.add.stream_ids
        script.start(stream_id)
        script.tokens(stream_id, 0, [5], "y", 0)
        script.lose(stream_id, LOSS_CAUSE_MISSING)
    for number in range(num_asked, num_asked + int(BURST)):
        script.end((await script.open(number)).add.stream_ids[0], 1)
    # The migrations count as dispatches too: there may be room for one more.
    num_ended = num_asked + int(BURST)
    while not all(reply.done() for reply in replies):
        for opened in script.opens[num_ended:]:
            script.end(opened.add.stream_ids[0], 1)
            num_ended += 1
        await asyncio.sleep(0.01)
    codes = [(await reply).status_code for reply in replies]
    assert 4 <= codes.count(503) <= 5
    assert codes.count(200) == num_asked - codes.count(503)


async def test_migrations_on_suspicion_are_a_tenth_of_the_dispatches_beyond_the_first_few() -> None:
    migrations = Migrations()
    assert [migrations.is_excused() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(30):
        migrations.dispatched()
    assert [migrations.is_excused() for _ in range(4)] == [True] * 3 + [False]
    leave = await migrations.alone("m")
    waiting = asyncio.create_task(migrations.alone("m"))
    (await migrations.alone("other"))()
    await asyncio.sleep(0)
    assert not waiting.done()
    leave()
    (await waiting)()
