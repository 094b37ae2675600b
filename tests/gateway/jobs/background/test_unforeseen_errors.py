"""Background responses whose runs end by unforeseen errors: they are computed a few times, not for
ever."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import structlog.testing

from headwater.gateway.jobs import busy
from headwater.gateway.jobs.background import run
from headwater.gateway.jobs.background.events import log_of
from headwater.services.runtime import subjects
from tests.gateway.jobs.background.test_refusals import FORGOTTEN, Bench, bench

__all__ = ["bench"]


class Broken:
    """Is busy with a response as often as it is told to, then answers with an event that no run
    understands."""

    def __init__(self, num_busy: int) -> None:
        self.num_busy = num_busy
        self.num_answers = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (scope["method"], scope["path"]) == FORGOTTEN:
            return
        if scope["method"] == "POST" and self.num_busy:
            self.num_busy -= 1
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        self.num_answers += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(
            {"type": "http.response.body", "body": b'data: {"type": "strange", "response": {}}\n\n'}
        )


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_that_fails_five_times_ends_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    """Being given back nine times before counts for nothing."""
    monkeypatch.setattr(busy, "FIRST_REST_SECONDS", 0.001)
    monkeypatch.setattr(busy, "MAX_REST_SECONDS", 0.01)
    monkeypatch.setattr(run, "PAUSES", (0.001,))
    app = Broken(num_busy=9 + busy.PATIENCE - 1)
    with structlog.testing.capture_logs() as lines:
        async with bench.running(app):
            response_id = await bench.ask("ada", is_streamed=is_streamed)
            response = await bench.over("ada", response_id)
            await bench.until_idle()
    assert response["status"] == "failed"
    assert response["error"] == {
        "code": "internal_error",
        "message": "the response failed 5 times by an internal fault; the log has it",
    }
    assert (app.num_busy, app.num_answers) == (0, 5)
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["work failed"] * 5
    events = [
        event
        async for _, data in log_of(bench.durable, "ada", response_id).stored()
        for event in msgspec.json.decode(data)
    ]
    assert [event["response"] for event in events if event["type"] == "response.failed"] == [
        response
    ] * is_streamed


async def test_a_response_that_this_version_cannot_read_waits_for_one_that_can(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "FIRST_REST_SECONDS", 0.001)
    bucket, response_id = await bench.ledger.bucket(), await bench.ask("ada")
    key = f"{subjects.key_of('ada')}.{response_id}"
    good, _ = await bucket.get(key)
    await bucket.put(key, b"of a later version")
    with structlog.testing.capture_logs() as lines:
        async with bench.running(), asyncio.timeout(60):
            while (  # noqa: ASYNC110 (a log)
                sum(line["event"] == "failed work is tried again uncounted" for line in lines) < 6
            ):
                await asyncio.sleep(0.01)
            assert bench.app.asked == []
            await bucket.put(key, good)
            assert (await bench.over("ada", response_id))["status"] == "completed"
