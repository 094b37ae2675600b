"""A tenant whose streams in the background fill what is kept of events: nobody else's stream is the
worse for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.gateway.jobs.background.records import OVER
from headwater.gateway.jobs.durable import BACKGROUND_LOG
from headwater.gateway.jobs.storage_bounds import PERCENT
from tests.gateway.jobs.test_full_storage import small, small_nats, stages_behind
from tests.gateway.processes import MODEL, UNDRAFTED, Gateway
from tests.gateway.tenancy.test_line_of_tenants import Customer, admin

__all__ = ["small", "small_nats", "stages_behind"]
RESPONSES = "/v1/responses"
STORAGE = 20_000_000
SHARE = STORAGE * PERCENT[BACKGROUND_LOG] // 100 // 2
"""The half of the stream that is the most for one tenant."""


@pytest.fixture
def storage() -> int:
    return STORAGE


def stream(who: Customer, num_tokens: int) -> list[dict[str, Any]]:
    """Events of a stream in the background to its end, or the error instead."""
    asked = {
        "model": MODEL,
        "input": "x",
        "max_output_tokens": num_tokens,
        "background": True,
        "stream": True,
    }
    reply = who.post(RESPONSES, asked)
    if reply.status_code != 200:
        return [reply.json() | {"type": reply.status_code}]
    return [
        json.loads(line.removeprefix("data: "))
        for line in reply.text.splitlines()
        if line.startswith("data: ")
    ]


def id_of(events: list[dict[str, Any]]) -> str:
    return str(events[0]["response"]["id"])


@pytest.mark.long
def test_a_tenant_that_has_filled_its_share_of_events_stops_no_other_stream(
    small: Gateway,
) -> None:
    eve = Customer(small)
    bob = Customer(small)
    ids = []
    num_bytes = 0
    while (events := stream(eve, 400))[0]["type"] != 429:
        ids.append(id_of(events))
        num_bytes += len(json.dumps(events))
        assert num_bytes < 2 * SHARE, "nothing bounds it"
    assert events[0]["error"]["code"] == "storage_limit_exceeded"
    assert "events of streams in the background: the tenant keeps" in events[0]["error"]["message"]
    theirs = stream(bob, 400)
    assert theirs[-1]["type"] == "response.incomplete"
    assert len(theirs) > 100
    # What keeps no events is answered, and deleting makes room.
    plain = {"model": MODEL, "input": "x", "max_output_tokens": 4, "background": True}
    assert eve.post(RESPONSES, plain).status_code == 200
    for each in ids:
        assert (
            small.client.delete(f"{RESPONSES}/{each}", headers=eve.headers).json()["deleted"]
            is True
        )
    assert stream(eve, 400)[-1]["type"] == "response.incomplete"


@pytest.mark.long
def test_streams_that_outgrow_what_their_tenant_may_keep_end_and_say_why(small: Gateway) -> None:
    ada = Customer(small, file_bytes=150_000)
    limit = 150_000
    ids = []
    kept = 0
    while (events := stream(ada, 2000))[0]["type"] != 429:
        ids.append(id_of(events))
        kept += len(json.dumps(events, separators=(",", ":")))
        # How the last one ends depends on whether its answer was whole when there was no room left.
        assert events[-1]["type"] in ("response.failed", "response.incomplete"), events[-1]
        if events[-1]["type"] == "response.failed":
            assert events[-1]["response"]["error"]["code"] == "storage_limit_exceeded"
        assert kept < 2 * limit, "nothing bounds it"
    assert events[0]["error"]["code"] == "storage_limit_exceeded"
    assert "file_bytes: the tenant keeps" in events[0]["error"]["message"]
    for each in ids:
        small.wait_until(
            lambda each=each: ada.get(f"{RESPONSES}/{each}").json().get("status") in OVER
        )  # type: ignore[misc]
        assert small.client.delete(f"{RESPONSES}/{each}", headers=ada.headers).status_code == 200
    assert stream(ada, 10)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("stages_behind", ["slow_behind"], indirect=True)
def test_a_reader_of_a_deleted_stream_receives_its_end_and_nothing_else_is_kept(
    small: Gateway,
) -> None:
    ada = Customer(small)
    asked = {
        "model": MODEL,
        "input": "x",
        "max_output_tokens": 6000,
        "background": True,
        "stream": True,
    }
    asked |= {"ignore_eos": True} | UNDRAFTED
    with small.client.stream("POST", RESPONSES, json=asked, headers=ada.headers) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        response_id = id_of([json.loads(next(lines)[6:])])
        for _ in range(5):
            next(lines)
        assert (
            small.client.delete(f"{RESPONSES}/{response_id}", headers=ada.headers).status_code
            == 200
        )
        assert json.loads(list(lines)[-1][6:])["type"] == "response.cancelled"
    assert ada.get(f"{RESPONSES}/{response_id}").status_code == 404
    assert admin(small, "DELETE", f"/tenants/{ada.id}").json()["is_cleared"] is True
