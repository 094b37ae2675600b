"""The public gRPC surface with clients in Python and in JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.processes import MODEL, UNDRAFTED, Gateway, completion_body

ROOT = Path(__file__).parents[3]
ENDLESS: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True} | UNDRAFTED


@pytest.fixture(scope="module")
def channel(gateway: Gateway) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(gateway.grpc) as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)


def chat(
    text: str = "Tell me of a river.", *, sampling: dict[str, Any] | None = None, **more: Any
) -> Any:
    conversation = processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content=text)]
    )
    asked = common_pb2.Sampling(**({"max_tokens": 8, "temperature": 0} | (sampling or {})))
    return inference_pb2.ChatRequest(model=MODEL, conversation=conversation, sampling=asked, **more)


def complete(text: str = "Once upon a time", **asked: Any) -> Any:
    """Fields of the request and of its sampling alike."""
    more = {
        name: asked.pop(name)
        for name in asked.keys() & inference_pb2.CompleteRequest.DESCRIPTOR.fields_by_name
    }
    sampling = common_pb2.Sampling(**({"max_tokens": 8, "temperature": 0} | asked))
    return inference_pb2.CompleteRequest(model=MODEL, text=text, sampling=sampling, **more)


def test_a_chat_is_the_same_whole_streamed_and_over_rest(gateway: Gateway, stub: Any) -> None:
    whole = stub.Chat(chat())
    chunks = list(stub.ChatStream(chat()))
    assert "".join(chunk.content for chunk in chunks) == whole.choices[0].message.content
    assert whole.choices[0].message.content == gateway.chat()["choices"][0]["message"]["content"]
    assert chunks[0].role == whole.choices[0].message.role == "assistant"
    assert chunks[0].model == MODEL
    assert (
        chunks[-2].finish_reason
        == whole.choices[0].finish_reason
        == common_pb2.FINISH_REASON_LENGTH
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    assert {chunk.request_id for chunk in chunks} == {chunks[0].request_id}


def test_what_is_asked_for_comes_with_the_answer(stub: Any) -> None:
    asked = {
        "sampling": {"logprobs": True, "top_logprobs": 1},
        "return_token_ids": True,
        "return_receipt": True,
    }
    whole = stub.Chat(chat(**asked, client_request_id="mine"))
    choice = whole.choices[0]
    assert len(choice.logprobs) == len(choice.token_ids) == 8
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert json.loads(whole.receipt_json)["attempts"] == 1
    assert whole.client_request_id == "mine"
    chunks = list(stub.ChatStream(chat(**asked)))
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == list(choice.token_ids)
    assert [score for chunk in chunks for score in chunk.logprobs] == list(choice.logprobs)
    assert json.loads(chunks[-1].receipt_json)["decision"]


@pytest.mark.parametrize(
    "asked", [{}, {"n": 3, "temperature": 1.0, "seed": 4}, {"stop": ["s"], "max_tokens": 64}]
)
@pytest.mark.parametrize("resumable", [False, True])
def test_every_chunk_says_what_was_used_up_to_its_end_where_that_is_asked_for(
    stub: Any, asked: dict[str, Any], resumable: bool
) -> None:
    more = {"continuous_usage": True, "return_token_ids": True, "resumable": resumable}
    streams = [
        list(stub.ChatStream(chat(sampling=asked, **more))),
        list(stub.CompleteStream(complete(**asked, **more))),
    ]
    for chunks in streams:
        *parts, last = chunks
        reported = [part.usage for part in parts]
        so_far = list(accumulate(len(part.token_ids) for part in parts))
        if "stop" not in asked:
            # Of an answer that a stop string cuts, tokens are counted whose text did not come.
            assert [usage.completion_tokens for usage in reported] == so_far
        assert [usage.completion_tokens for usage in reported] == sorted(
            usage.completion_tokens for usage in reported
        )
        assert {usage.prompt_tokens for usage in reported} == {last.usage.prompt_tokens}
        assert reported[-1] == last.usage
    assert not any(chunk.HasField("usage") for chunk in list(stub.ChatStream(chat()))[:-1])


def test_completions_take_text_or_tokens_and_echo_the_prompt(stub: Any) -> None:
    text = stub.Complete(complete()).choices[0].text
    assert "".join(chunk.text for chunk in stub.CompleteStream(complete())) == text
    assert stub.Complete(complete(echo=True)).choices[0].text == "Once upon a time" + text
    assert (
        "".join(chunk.text for chunk in stub.CompleteStream(complete(echo=True)))
        == "Once upon a time" + text
    )
    request = processor_pb2.Prompt(text="Once upon a time")
    tokens = stub.Tokenize(inference_pb2.TokenizeRequest(model=MODEL, prompt=request))
    assert stub.Detokenize(
        inference_pb2.DetokenizeRequest(model=MODEL, token_ids=tokens.token_ids)
    ).text == ("Once upon a time")
    asked = inference_pb2.CompleteRequest(
        model=MODEL, token_ids={"ids": tokens.token_ids}, sampling=complete().sampling
    )
    assert stub.Complete(asked).choices[0].text == text


def test_an_echo_is_scored_whole_and_streamed_as_over_rest(gateway: Gateway, stub: Any) -> None:
    prompt = "Once upon a time there was a river that forgot its own name. " * 40
    (choice,) = stub.Complete(complete(prompt, echo=True, logprobs=True, top_logprobs=1)).choices
    chunks = list(
        stub.CompleteStream(complete(prompt, echo=True, logprobs=True, top_logprobs=1, n=1))
    )
    scores = [score for chunk in chunks for score in chunk.prompt_logprobs]
    assert scores == list(choice.prompt_logprobs)
    assert sum(bool(chunk.prompt_logprobs) for chunk in chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert [score for chunk in chunks for score in chunk.logprobs] == list(choice.logprobs)
    assert chunks[0].model == MODEL
    over_rest = gateway.complete(prompt, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert [
        None,
        *(pytest.approx(score.chosen.logprob) for score in [*scores, *choice.logprobs]),
    ] == (over_rest["token_logprobs"])


def test_a_chats_prompt_is_scored_and_tokens_are_spelled(gateway: Gateway, stub: Any) -> None:
    whole = stub.Chat(chat(sampling={"prompt_logprobs": 0}))
    assert len(whole.prompt_logprobs) == whole.usage.prompt_tokens - 1
    asked = inference_pb2.TokenizeRequest(
        model=MODEL, prompt=processor_pb2.Prompt(text="Once upon"), return_token_strings=True
    )
    assert "".join(stub.Tokenize(asked).token_strings) == "Once upon"


def test_a_stop_string_is_named(stub: Any) -> None:
    text = stub.Complete(complete()).choices[0].text
    choice = stub.Complete(complete(stop=[text[5:9]])).choices[0]
    assert choice.stop_reason.text == text[5:9]
    assert choice.finish_reason == common_pb2.FINISH_REASON_STOP


def test_models_are_listed(stub: Any) -> None:
    (card,) = stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert (card.id, card.max_model_len) == (MODEL, 8192)


def test_a_long_field_of_a_client_does_not_hide_the_error(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        stub.Complete(inference_pb2.CompleteRequest(model="m" * 100_000, text="x"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert raised.value.details().startswith("the model 'mmm")


def test_a_request_is_cancelled_by_its_tenant_alone(gateway: Gateway, stub: Any) -> None:
    endless = chat(sampling=ENDLESS)
    stream = stub.ChatStream(endless, metadata=(("x-tenant", "ada"),))
    request_id = next(stream).request_id
    cancel = inference_pb2.CancelRequest(request_id=request_id)
    with pytest.raises(grpc.RpcError) as raised:
        stub.Cancel(cancel, metadata=(("x-tenant", "bob"),))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert stub.Cancel(cancel, metadata=(("x-tenant", "ada"),)).cancelled
    with pytest.raises(grpc.RpcError) as raised:
        list(stream)
    assert raised.value.code() is grpc.StatusCode.CANCELLED
    assert not stub.Cancel(cancel, metadata=(("x-tenant", "ada"),)).cancelled
    gateway.wait_until(lambda: gateway.metric("headwater_num_streams") == 0)


def test_a_client_that_leaves_ends_its_request(gateway: Gateway, stub: Any) -> None:
    before = gateway.refused("client_closed_request")
    stream = stub.ChatStream(chat(sampling=ENDLESS))
    next(stream)
    assert gateway.metric("headwater_num_streams") == 1
    stream.cancel()
    gateway.wait_until(lambda: gateway.metric("headwater_num_streams") == 0)
    gateway.wait_until(lambda: gateway.metric("headwater_num_requests_running") == 0)
    # The gateway counts the client last, and the next test reads this count.
    gateway.wait_until(lambda: gateway.refused("client_closed_request") == before + 1)


def test_clients_that_leave_are_counted_the_same_over_rest_and_grpc(
    gateway: Gateway, stub: Any
) -> None:
    before = gateway.refused("client_closed_request")
    stream = stub.ChatStream(chat(sampling=ENDLESS))
    next(stream)
    stream.cancel()
    gateway.wait_until(lambda: gateway.refused("client_closed_request") == before + 1)
    endless = completion_body(**ENDLESS, stream=True)
    with gateway.client.stream("POST", "/v1/completions", json=endless):
        gateway.wait_until(lambda: gateway.metric("headwater_num_streams") == 1)
    gateway.wait_until(lambda: gateway.refused("client_closed_request") == before + 2)


def test_a_refusal_is_counted_over_grpc_too(gateway: Gateway, stub: Any) -> None:
    before = gateway.refused("invalid_value")
    with pytest.raises(grpc.RpcError):
        stub.Chat(chat(sampling={"temperature": -1}))
    assert gateway.refused("invalid_value") == before + 1


def test_a_deadline_is_kept(gateway: Gateway, stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.ChatStream(chat(sampling=ENDLESS), timeout=0.3))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    gateway.wait_until(lambda: gateway.metric("headwater_num_streams") == 0)


def test_a_slow_reader_gets_fewer_larger_chunks_and_the_whole_text(stub: Any) -> None:
    asked = {"max_tokens": 600, "ignore_eos": True}
    whole = stub.Chat(chat(sampling=asked)).choices[0].message.content
    stream = stub.ChatStream(chat(sampling=asked))
    first = next(stream)
    threading.Event().wait(0.5)
    assert first.content + "".join(chunk.content for chunk in stream) == whole


def test_health_and_reflection_answer(channel: grpc.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "headwater.v1.Inference"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == (
            health_pb2.HealthCheckResponse.SERVING
        )
    watching = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = iter(
        [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="headwater.v1.Inference"),
        ]
    )
    listed, described = reflection.ServerReflectionInfo(asked)
    names = {service.name for service in listed.list_services_response.service}
    assert {"headwater.v1.Inference", "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


@pytest.fixture
def proto_root(tmp_path: Path) -> Path:
    """The folder under which the .proto files lie as they import one another."""
    folder = tmp_path / "headwater" / "proto"
    folder.mkdir(parents=True)
    for proto in (ROOT / "proto").glob("*.proto"):
        shutil.copy(proto, folder)
    return tmp_path


@pytest.mark.long
def test_a_javascript_client_built_from_the_proto_files_alone_chats(
    gateway: Gateway, js_folder: Path, proto_root: Path
) -> None:
    command = ["node", str(js_folder / "client.js"), gateway.grpc, str(proto_root), MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["streamed"] == reported["whole"]
    assert reported["finish"] == "FINISH_REASON_LENGTH"
    assert reported["num_pieces"] > 2
    assert (
        reported["stream_usage"]["completion_tokens"]
        == reported["usage"]["completion_tokens"]
        == 12
    )
    assert reported["refused"]["code"] == "INVALID_ARGUMENT"
    assert "temperature is 7" in reported["refused"]["message"]
    assert reported["models"] == [MODEL]
    assert reported["text"] == "Hello world"
