"""A grammar that compiles and begins well, and explodes later than any check looks."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc
from tests.gateway.processes import THINKER, Gateway

# After 400 letters, far beyond the tokens that the check takes, the next may be any of thousands.
LATE = f'start: /[a-z]{{400}}/ {"a? " * 3000}\na: "x" | "y" "z"'
GOOD = 'start: "yes" | "no"'


def body(grammar: str, **more: Any) -> dict[str, Any]:
    asked = {
        "structured_outputs": {"grammar": grammar},
        "max_tokens": 1000,
        "temperature": 0,
        "reasoning_effort": "none",
    }
    return {"model": THINKER, "messages": [{"role": "user", "content": "Hi"}]} | asked | more


@pytest.mark.long
def test_a_grammar_that_explodes_late_ends_its_request_alone(
    thinker: Gateway,
) -> None:
    reply = thinker.client.post("/v1/chat/completions", json=body(LATE))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_grammar")
    assert error["message"].startswith("the grammar cannot be followed any further: ")
    good = thinker.client.post("/v1/chat/completions", json=body(GOOD))
    assert good.json()["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.long
def test_a_stream_whose_grammar_explodes_late_ends_with_the_same_error(thinker: Gateway) -> None:
    with thinker.client.stream(
        "POST", "/v1/chat/completions", json=body(LATE, stream=True)
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-2] == "event: error"
    assert '"code":"invalid_grammar"' in lines[-1]


@pytest.mark.long
def test_over_grpc_a_grammar_that_explodes_late_is_an_invalid_argument(thinker: Gateway) -> None:
    sampling = common_pb2.Sampling(max_tokens=1000, temperature=0)
    sampling.structured_output.grammar = LATE
    with grpc.insecure_channel(thinker.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Complete(
                inference_pb2.CompleteRequest(model=THINKER, text="Hi", sampling=sampling),
                timeout=60,
            )
    failure: Any = raised.value
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(failure)
    assert status is not None
    assert b"invalid_grammar" in status.details[0].value
