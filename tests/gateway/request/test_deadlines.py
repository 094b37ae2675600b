"""What cannot be in time is refused at once, and costs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    Behind,
    Gateway,
    completion_body,
    engine_stage,
    started,
)

SECONDS_A_TOKEN = 0.004


@pytest.fixture(scope="module")
def slow(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway that knows how slow its engine is, and lets one request run at once."""
    engine = engine_stage(f"--simulated-prefill-seconds={SECONDS_A_TOKEN}", "--simulated-step-seconds=0.01")
    with started(engine):
        seeds = Behind(behind.processor, behind.output_processor, (engine.address,))
        with start_gateway(seeds, "--max-running=1") as gateway:
            for first in (1000, 2000):
                gateway.complete(prompt(first), max_tokens=1)
            # Until the engine's word has come, each is computed until its deadline: a new one each time.
            news = itertools.count(10_000, 500)
            gateway.wait_until(lambda: "would come in" in late(gateway, next(news)).json()["error"]["message"])
            yield gateway


def prompt(first: int) -> list[int]:
    return list(range(first, first + 400))


def late(gateway: Gateway, first: int) -> httpx.Response:
    """Asked for in half of the time that it takes. Refused after that, it would not be told how long it takes."""
    headers = {"x-headwater-deadline-ms": "800"}
    return gateway.client.post("/v1/completions", json=completion_body(prompt(first)), headers=headers)


@pytest.mark.slow
def test_a_first_token_that_would_be_late_is_refused_with_the_time_it_would_take(slow: Gateway) -> None:
    refused = late(slow, 3000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "the first token would come in 1." in refused.json()["error"]["message"]
    with grpc.insecure_channel(slow.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.CompleteRequest(model=MODEL, text="a river " * 400)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Complete(request, metadata=(("x-headwater-deadline-ms", "800"),))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the first token would come in" in str(raised.value.details())
    usage = slow.complete(prompt(3000), max_tokens=1)["usage"]
    assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens"), "nothing was computed"


@pytest.mark.slow
def test_who_would_be_late_does_not_wait_for_a_turn_and_who_waits_leaves_at_the_deadline(slow: Gateway) -> None:
    asked = completion_body("Once", max_tokens=4000, ignore_eos=True, stream=True)
    with slow.client.stream("POST", "/v1/completions", json=asked) as running:
        lines = running.iter_lines()
        next(lines)
        assert "would come in" in late(slow, 4000).json()["error"]["message"]
        headers = {"x-headwater-deadline-ms": "400"}
        waiting = slow.client.post("/v1/completions", json=completion_body("Short"), headers=headers)
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert slow.metric("headwater_num_requests_waiting") == 0
