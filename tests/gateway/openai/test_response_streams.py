"""Streams of responses: what their events tell, put together, is the response in the last of
them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headwater.services.stack.embedded import start_nats
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL as PLAIN_MODEL
from tests.gateway.processes import THINKER as MODEL
from tests.gateway.processes import UNDRAFTED, Behind, Gateway

PATH = "/v1/responses"
CALL = '{"name": "time", "arguments": {}}'
SAID = f'start: "One moment. " <[11]> {json.dumps(CALL)} <[12]>'
"""A grammar of text and a call between the marks of one, which the model writes behind its
thoughts."""
ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": "What time is it?",
    "tools": [{"type": "function", "name": "time"}],
    "temperature": 1,
    "seed": 3,
    "stream": True,
}
ANSWERS: dict[str, dict[str, Any]] = {
    "reasoning": {
        "structured_outputs": {"grammar": SAID},
        "chat_template_kwargs": {"opens_thoughts": True},
        "thinking_token_budget": 8,
    },
    "message": {"structured_outputs": {"grammar": SAID}, "reasoning": {"effort": "none"}},
    "function_call": {
        "tool_choice": {"type": "function", "name": "time"},
        "reasoning": {"effort": "none"},
    },
}
"""Requests by the kind of their answer's first item. Items of the kinds below it follow."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "background": {"background": True},
    "resumable": {"stream_options": {"resumable": True}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own_nats_url(
    tmp_path_factory: pytest.TempPathFactory, kept: dict[str, Any]
) -> AsyncIterator[str]:
    """A NATS server without gateways of other models, which would take its background responses."""
    folder: Path = tmp_path_factory.mktemp("nats")
    server = await start_nats(folder, jetstream=folder / "streams", **kept)
    yield server.url
    await server.stop()


@pytest.fixture(scope="module")
def keeper(
    thinking_behind: Behind, start_gateway: GatewayStarter, own_nats_url: str, shared_redis_url: str
) -> Iterator[Gateway]:
    """A gateway that computes responses in the background too."""
    with start_gateway(
        thinking_behind, f"--nats-url={own_nats_url}", f"--redis-url={shared_redis_url}"
    ) as gateway:
        yield gateway


def events_of(gateway: Gateway, method: str, path: str, **request: Any) -> list[dict[str, Any]]:
    with gateway.client.stream(method, path, **request) as reply:
        assert reply.status_code == 200, reply.read()
        return events_in(reply)


def events_in(reply: httpx.Response) -> list[dict[str, Any]]:
    return [
        json.loads(line.removeprefix("data: "))
        for line in reply.iter_lines()
        if line.startswith("data: ")
    ]


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as a strict client puts them together: one is announced once, before it grows, and ends
    once."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind in ("response.created", "response.queued", "response.in_progress"):
            assert event["response"]["output"] == [], kind
        elif kind == "response.output_item.added":
            assert (event["output_index"], event["item"]["status"]) == (len(items), "in_progress")
            items.append(event["item"])
        elif kind == "response.output_item.done":
            assert items[event["output_index"]]["status"] == "in_progress"
            items[event["output_index"]] = event["item"]
        elif "output_index" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    return items


@pytest.mark.parametrize("way", WAYS)
def test_no_event_has_items_before_they_are_announced(keeper: Gateway, way: str) -> None:
    begin = [
        "created",
        *(["queued"] if way == "background" else []),
        "in_progress",
        "output_item.added",
    ]
    for place, kind in enumerate(ANSWERS):
        events = events_of(keeper, "POST", PATH, json=ASKED | WAYS[way] | ANSWERS[kind])
        assert [event["type"] for event in events[: len(begin)]] == [
            f"response.{each}" for each in begin
        ]
        last = events[-1]["response"]
        assert [item["type"] for item in last["output"]] == list(ANSWERS)[place:]
        assert put_together(events) == last["output"]
        if way == "background":
            assert events_of(keeper, "GET", f"{PATH}/{last['id']}?stream=true") == events
        if way == "resumable":
            assert events_of(keeper, "GET", f"/v1/streams/{last['id']}") == events


@pytest.fixture(scope="module")
def slow(slow_behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    with start_gateway(slow_behind) as gateway:
        yield gateway


@pytest.mark.parametrize("way", ["plain", "resumable"])
def test_a_response_that_fails_has_what_was_answered_until_then(slow: Gateway, way: str) -> None:
    asked: dict[str, Any] = {
        "model": PLAIN_MODEL,
        "input": "So?",
        "max_output_tokens": 4000,
        "ignore_eos": True,
    }
    asked |= {"stream": True} | UNDRAFTED | WAYS[way]
    events: list[dict[str, Any]] = []
    # However busy the machine is, one of these deadlines falls between the first and the last
    # token.
    for milliseconds in ("700", "4000", "16000"):
        late = {"x-headwater-deadline-ms": milliseconds}
        with slow.client.stream("POST", PATH, json=asked, headers=late) as reply:
            events = events_in(reply)
        if any(event["type"] == "response.output_text.delta" for event in events):
            break
    assert [event["code"] for event in events if event["type"] == "error"] == ["deadline_exceeded"]
    failed = events[-1]["response"]
    [message] = failed["output"]
    assert put_together(events) == [message]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert (failed["status"], message["status"]) == ("failed", "incomplete")
    assert message["content"][0]["text"] == "".join(deltas) != ""
    assert failed["usage"]["output_tokens"] >= len(deltas)
    assert failed["usage"]["input_tokens"] > 0
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
