"""Responses that nobody waits for, over the real line: asked for, polled, streamed in parts,
cancelled, survived."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headwater.services.stack.embedded import start_nats
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, UNDRAFTED, Behind, Gateway

ASKED: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0, "background": True}
LONG: Any = ASKED | {"max_output_tokens": 4000, "extra_body": {"ignore_eos": True} | UNDRAFTED}


@pytest.fixture(scope="module")
def flags(nats_url: str, shared_redis_url: str) -> list[str]:
    return [f"--nats-url={nats_url}", f"--redis-url={shared_redis_url}"]


@pytest.fixture(scope="module")
def keeper(
    slow_behind: Behind, start_gateway: GatewayStarter, flags: list[str]
) -> Iterator[Gateway]:
    """A gateway whose long answers still run when a test cancels them, even if the machine
    pauses."""
    with start_gateway(slow_behind, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(keeper: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keeper.rest}/v1", api_key="any", max_retries=0) as official:
        yield official


def over(client: openai.OpenAI, response_id: str, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < end, response
        time.sleep(0.02)
    return response


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_a_response_in_the_background_is_found_when_it_is_done(
    client: openai.OpenAI, keeper: Gateway
) -> None:
    waited_for = client.responses.create(**ASKED | {"background": False}, input="Name a river.")
    asked = client.responses.create(**ASKED, input="Name a river.")
    assert (asked.status, asked.output, asked.background) == ("queued", [], True)
    done = over(client, asked.id)
    assert (done.status, done.id, done.created_at) == ("incomplete", asked.id, asked.created_at)
    assert (done.output_text, done.background) == (waited_for.output_text, True)
    follow_up = client.responses.create(
        **ASKED | {"background": False}, input="More.", previous_response_id=done.id
    )
    assert follow_up.usage is not None
    assert waited_for.usage is not None
    assert follow_up.usage.input_tokens > waited_for.usage.input_tokens
    assert (
        keeper.client.get(f"/v1/responses/{asked.id}", headers={"x-tenant": "other"}).status_code
        == 404
    )
    client.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)


def test_a_response_without_an_answer_has_no_next_turn(client: openai.OpenAI) -> None:
    asked = client.responses.create(**LONG, input="Name a river.")
    reported = f"previous_response_id is '{asked.id}'; allowed: one that was answered and is kept"
    for is_cancelled in (False, True):
        if is_cancelled:
            client.responses.cancel(asked.id)
        with pytest.raises(openai.BadRequestError, match=re.escape(reported)) as refused:
            client.responses.create(
                **ASKED | {"background": False}, input="More.", previous_response_id=asked.id
            )
        assert refused.value.code == "previous_response_not_found"


def test_its_stream_is_read_on_from_any_event(client: openai.OpenAI) -> None:
    whole = list(client.responses.create(**ASKED, input="Name a lake.", stream=True))
    assert [event.type for event in whole[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    final: Any = whole[-1]
    assert final.response.output_text == text_of(whole)
    for after in (0, 4, len(whole) - 2):
        rest = list(client.responses.retrieve(final.response.id, stream=True, starting_after=after))
        assert rest == whole[after + 1 :]
    assert over(client, final.response.id).output_text == text_of(whole)


def test_a_response_that_was_not_streamed_has_no_stream(client: openai.OpenAI) -> None:
    asked = client.responses.create(**LONG, input="Tell a long story.")
    for _ in ("while it runs", "when it is over"):
        with pytest.raises(
            openai.BadRequestError, match="allowed: for responses with background and stream"
        ):
            client.responses.retrieve(asked.id, stream=True)
        client.responses.cancel(asked.id)


def test_one_that_is_cancelled_stops_and_says_so(client: openai.OpenAI, keeper: Gateway) -> None:
    asked = client.responses.create(**LONG, input="Tell a long story.")
    assert client.responses.cancel(asked.id).status == "cancelled"
    assert over(client, asked.id).status == "cancelled"
    keeper.wait_until(lambda: keeper.client.get("/load").json()["server_load"] == 0)
    assert client.responses.cancel(asked.id).status == "cancelled"
    with client.responses.create(**LONG, input="Tell a longer one.", stream=True) as stream:
        events: list[Any] = [next(stream)]
        client.responses.cancel(events[0].response.id)
        events += list(stream)
    assert events[-1].type == "response.cancelled"
    waited_for = client.responses.create(**ASKED | {"background": False}, input="x")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(waited_for.id)


def test_what_cannot_be_answered_is_refused_at_once(
    client: openai.OpenAI, keeper: Gateway, gateway: Gateway
) -> None:
    def refused(**more: Any) -> Any:
        body = {"model": MODEL, "input": "x", "background": True} | more
        return keeper.client.post("/v1/responses", json=body).json()["error"]["param"]

    assert refused(store=False) == "store"
    assert refused(temperature=9) == "temperature"
    assert refused(input="x " * 9000, max_output_tokens=5) == "input"
    for after in ("-2", "0" * 20 + "9" * 5000):
        assert (
            keeper.client.get(
                f"/v1/responses/resp_x?stream=true&starting_after={after}"
            ).status_code
            == 400
        )
    reply = gateway.client.post(
        "/v1/responses", json={"model": MODEL, "input": "x", "background": True}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")


@pytest.mark.long
async def test_while_nats_is_away_no_response_is_said_to_be_missing(
    behind: Behind,
    start_gateway: GatewayStarter,
    tmp_path: Path,
    shared_redis_url: str,
    kept: dict[str, Any],
) -> None:
    """It may run: who polls would give it up."""
    server = await start_nats(tmp_path, jetstream=tmp_path / "streams", **kept)
    flags = (f"--nats-url={server.url}", f"--redis-url={shared_redis_url}")
    with start_gateway(behind, *flags) as running:
        path = "/v1/responses/resp_x"
        assert running.client.get(path).status_code == 404
        await server.kill()
        for reply in (running.client.get(path), running.client.delete(path)):
            code = reply.json()["error"]["code"]
            assert (reply.status_code, code) == (503, "storage_unavailable")
            assert reply.headers["retry-after"]


@pytest.fixture
async def own_nats_url(tmp_path: Path, kept: dict[str, Any]) -> AsyncIterator[str]:
    """Where nobody else takes work."""
    server = await start_nats(tmp_path, jetstream=tmp_path / "streams", **kept)
    yield server.url
    await server.stop()


def test_another_gateway_goes_on_with_what_was_computed(
    gateway: Gateway,
    slow_behind: Behind,
    start_gateway: GatewayStarter,
    own_nats_url: str,
    shared_redis_url: str,
) -> None:
    """Of one that leaves: the second run dispatches nothing, says nothing twice, and in the end all
    of it is there."""
    # The answer must still be running when both gateways have been asked which of them computes it.
    asked: Any = LONG | {"input": "Tell of the sea.", "max_output_tokens": 800}
    flags = (f"--nats-url={own_nats_url}", f"--redis-url={shared_redis_url}")
    with openai.OpenAI(base_url=f"{gateway.rest}/v1", api_key="any", max_retries=0) as official:
        undisturbed = official.responses.create(**asked | {"background": False})
    with start_gateway(slow_behind, *flags) as first, start_gateway(slow_behind, *flags) as second:
        with openai.OpenAI(base_url=f"{first.rest}/v1", api_key="any", max_retries=0) as official:
            stream = official.responses.create(**asked, stream=True)
            reported: list[Any] = [next(stream)]
            while not text_of(reported):
                reported.append(next(stream))
            stream.close()
        response_id = reported[0].response.id
        loads = {load_of(each): each for each in (first, second)}
        computing = loads[1]
        other = loads[0]
        computing.stage.terminate()
        with openai.OpenAI(base_url=f"{other.rest}/v1", api_key="any", max_retries=0) as official:
            events: list[Any] = list(official.responses.retrieve(response_id, stream=True))
            done = over(official, response_id)
        assert text_of(events) == done.output_text == undisturbed.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert done.usage.output_tokens == asked["max_output_tokens"]
        [prompt] = other.client.get(f"/v1/requests/{response_id}/explain").json()["prompts"]
        assert prompt["attempts"] == [], "no engine was asked again"
        other.wait_until(lambda: other.client.get(f"/v1/streams/{response_id}").status_code == 404)
        computing.stage.process.wait(60)


def load_of(gateway: Gateway) -> int:
    load: int = gateway.client.get("/load").json()["server_load"]
    return load


@pytest.mark.long
def test_a_response_outlives_the_gateways_that_compute_it(
    behind: Behind, start_gateway: GatewayStarter, flags: list[str]
) -> None:
    """The first is killed, the second drained; the text that was told stays as it is and goes on
    behind."""
    with start_gateway(behind, *flags) as first, start_gateway(behind, *flags) as second:
        with openai.OpenAI(base_url=f"{first.rest}/v1", api_key="any", max_retries=0) as official:
            asked = LONG | {"max_output_tokens": 500}
            stream = official.responses.create(**asked, input="Tell of the sea.", stream=True)
            reported: list[Any] = []
            while not text_of(reported):
                reported.append(next(stream))
        response_id = reported[0].response.id
        with openai.OpenAI(base_url=f"{second.rest}/v1", api_key="any", max_retries=0) as official:
            first.stage.kill()
            assert official.responses.retrieve(response_id).status == "in_progress"
        second.stage.terminate()
        second.stage.process.wait(60)
    with (
        start_gateway(behind, *flags) as third,
        openai.OpenAI(base_url=f"{third.rest}/v1", api_key="any", max_retries=0) as official,
    ):
        after = reported[-1].sequence_number
        rest: list[Any] = list(
            official.responses.retrieve(response_id, stream=True, starting_after=after)
        )
        assert [event.sequence_number for event in rest] == list(
            range(after + 1, after + 1 + len(rest))
        )
        assert rest[-1].response.output_text == text_of(reported) + text_of(rest)
        assert rest[-1].response.usage.output_tokens == 500
