"""What cannot be in time is refused at once, and costs nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    completion_body,
    engine_stage,
    started,
)

SECONDS_A_TOKEN = 0.004
NEW_FIRST_TOKENS = itertools.count(10_000, 7)
"""First tokens of prompts that no test has sent before."""


@pytest.fixture(scope="module")
def slow(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway that knows how slow its engine is, and lets one request run at once."""
    engine = engine_stage(
        f"--simulated-prefill-seconds={SECONDS_A_TOKEN}", "--simulated-step-seconds=0.01"
    )
    with started(engine):
        seeds = Behind(behind.processor, behind.output_processor, (engine.address,))
        with start_gateway(seeds, "--max-running=1") as gateway:
            for first in (1000, 2000):
                gateway.complete(prompt(first), max_tokens=1)
            refused_early(gateway)
            yield gateway


def prompt(first: int) -> list[int]:
    return list(range(first, first + 400))


def refused_early(gateway: Gateway) -> tuple[int, httpx.Response]:
    """Sends new prompts with a deadline of half the time that they take, until one is refused
    early. Returns the first token of this prompt and the reply.

    A prompt is computed until its deadline instead, and its error names no time, if the gateway
    does not know the engine's load yet or if the machine pauses."""

    def ask() -> tuple[int, httpx.Response]:
        first = next(NEW_FIRST_TOKENS)
        body = completion_body(prompt(first))
        return first, gateway.client.post(
            "/v1/completions", json=body, headers={"x-headwater-deadline-ms": "800"}
        )

    return gateway.first(ask, lambda asked: "would come in" in asked[1].json()["error"]["message"])


def refused_early_over_grpc(gateway: Gateway) -> grpc.RpcError:
    """Sends new prompts over gRPC until one is refused early, and returns the error."""
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        def ask() -> Any:
            ids = processor_pb2.Prompt.TokenIds(ids=prompt(next(NEW_FIRST_TOKENS)))
            request = inference_pb2.CompleteRequest(model=MODEL, token_ids=ids)
            with pytest.raises(grpc.RpcError) as raised:
                stub.Complete(request, metadata=(("x-headwater-deadline-ms", "800"),))
            return raised.value

        return gateway.first(
            ask, lambda error: "the first token would come in" in str(error.details())
        )


@pytest.mark.slow
def test_a_first_token_that_would_be_late_is_refused_with_the_time_it_would_take(
    slow: Gateway,
) -> None:
    first, refused = refused_early(slow)
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")
    reported = re.search(
        r"the first token would come in (\d+\.\d) s", refused.json()["error"]["message"]
    )
    assert reported is not None
    # The simulated engine takes at least this long, and longer on a busy machine.
    assert 1.0 <= float(reported[1]) < 30.0
    assert refused_early_over_grpc(slow).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    usage = slow.complete(prompt(first), max_tokens=1)["usage"]
    assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens"), "nothing was computed"


@pytest.mark.slow
def test_a_request_that_would_be_late_does_not_wait_and_one_that_waits_leaves_at_its_deadline(
    slow: Gateway,
) -> None:
    asked = completion_body("Once", max_tokens=4000, ignore_eos=True, stream=True, **UNDRAFTED)
    with slow.client.stream("POST", "/v1/completions", json=asked) as running:
        lines = running.iter_lines()
        next(lines)
        refused_early(slow)
        headers = {"x-headwater-deadline-ms": "400"}
        waiting = slow.client.post(
            "/v1/completions", json=completion_body("Short"), headers=headers
        )
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert slow.metric("headwater_num_requests_waiting") == 0
