"""One request with very many choices: refused above a bound, and counted by its choices below
it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    Stage,
    chat_body,
    completion_body,
    gateway_stage,
    started,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def front() -> Iterator[Stage]:
    """A gateway with nothing behind it: whatever it refuses was not prepared."""
    stage = gateway_stage("--max-choices=16")
    with started(stage):
        yield stage


def post(stage: Stage, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"http://{stage.addresses['rest']}{path}", json=body, timeout=60)
    error: dict[str, Any] = reply.json()["error"]
    return error | {"status": reply.status_code}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            COMPLETIONS,
            completion_body(["x"] * 17),
            "prompt",
            "prompt has 17 prompts; allowed: 1…16",
        ),
        (
            COMPLETIONS,
            completion_body(["x"] * 4, n=5),
            "n",
            "n is 5 for each of 4 prompts, 20 choices in all; allowed: 16 a request",
        ),
        (
            COMPLETIONS,
            completion_body([[1, 2]] * 4, n=2, best_of=5),
            "best_of",
            "best_of is 5 for each of 4 prompts, 20 choices in all; allowed: 16 a request",
        ),
        (CHAT, chat_body(n=17), "n", "n is 17, 17 choices in all; allowed: 16 a request"),
        (
            CHAT,
            chat_body(n=17, stream=True, stream_options={"resumable": True}),
            "n",
            "n is 17, 17 choices in all; allowed: 16 a request",
        ),
        (
            EMBEDDINGS,
            {"model": MODEL, "input": ["x"] * 17},
            "input",
            "input has 17 prompts; allowed: 1…16",
        ),
    ],
)
def test_more_choices_than_a_request_may_have_are_refused_before_anything_is_prepared(
    front: Stage, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    error = post(front, path, body)
    assert (error["status"], error["code"], error["param"]) == (400, "too_many_choices", param)
    assert error["message"] == message


def test_as_many_choices_as_a_request_may_have_are_let_through(front: Stage) -> None:
    for body in (
        completion_body(["x"] * 16),
        completion_body(["x"] * 4, n=4),
        completion_body("x", n=16),
    ):
        assert post(front, COMPLETIONS, body)["status"] == 503, "there is no processor"


def test_over_grpc_the_same_bound_holds(front: Stage) -> None:
    prompt = processor_pb2.Prompt(text="x")
    with grpc.insecure_channel(front.addresses["grpc"]) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        sampling = common_pb2.Sampling(n=17, max_tokens=1)
        calls = [
            (
                stub.Complete,
                inference_pb2.CompleteRequest(model=MODEL, text="x", sampling=sampling),
            ),
            (stub.Embed, inference_pb2.EmbedRequest(model=MODEL, inputs=[prompt] * 17)),
        ]
        for call, request in calls:
            with pytest.raises(grpc.RpcError) as refused:
                call(request)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "allowed: 1" in refused.value.details()


def test_seats_are_of_choices_so_that_one_request_does_not_take_more_than_there_are(
    slow_behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(slow_behind, "--max-running=6") as gateway, ThreadPoolExecutor(1) as pool:
        body = completion_body(
            ["One", "Two", "Three"],
            n=4,
            temperature=1,
            max_tokens=200,
            ignore_eos=True,
            **UNDRAFTED,
        )
        asked = pool.submit(httpx.post, gateway.rest + COMPLETIONS, json=body, timeout=60)
        names = ("headwater_num_streams", "headwater_num_requests_running")
        # One read returns both metrics, because these six choices end, and the next begin, a few
        # seconds later.
        gateway.wait_until(lambda: gateway.metrics(*names) == [6, 6])
        reply = asked.result()
        usage = reply.json()["usage"]
        assert usage["completion_tokens"] == 12 * 200, "and all of them end"
        assert [choice["index"] for choice in reply.json()["choices"]] == list(range(12))
        gateway.wait_until(lambda: gateway.metric("headwater_num_requests_running") == 0)


@pytest.mark.long
def test_choices_whose_turns_come_late_are_those_that_come_at_once(
    gateway: Gateway, behind: Behind, start_gateway: GatewayStarter
) -> None:
    body = completion_body(
        ["One river", "Two rivers"], n=5, temperature=1, seed=7, logprobs=1, max_tokens=40
    )
    at_once = gateway.complete(**body)
    with start_gateway(behind, "--max-running=3") as narrow:
        for _ in range(2):
            late = narrow.complete(**body)
            assert [c["text"] for c in late["choices"]] == [c["text"] for c in at_once["choices"]]
            usage = {name: late["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
            assert usage == {name: at_once["usage"][name] for name in usage}


@pytest.mark.long
def test_a_request_is_one_line_of_the_log_however_many_choices_it_has(
    behind: Behind, start_gateway: Any
) -> None:
    stage = gateway_stage(*behind.flags(), "--log-level=info", "--log-receipts=1")
    with started(stage), Gateway(stage) as gateway:
        gateway.wait_until(gateway.is_ready)
        asked = gateway.complete(["One", "Two", "Three"] * 20, n=4, temperature=1)
        log = [json.loads(line) for line in stage.close().splitlines() if line.startswith("{")]
    request_id = asked["id"].removeprefix("cmpl-")
    lines = [line for line in log if line.get("request_id") == request_id]
    assert sorted(line["event"] for line in lines) == ["request", "routed"]
    [reported] = [line for line in lines if line["event"] == "request"]
    assert (reported["prompts"], reported["output_tokens"]) == (
        60,
        asked["usage"]["completion_tokens"],
    )
