"""Calls that no engine computes: requests of their tenant's minute, of its key's too, and bounded
in bytes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headwater.gateway.public_grpc.refusal_pace import AT_ONCE, EACH_SECONDS
from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body, processor_stage, started

ADMIN = "admin-key-of-the-house"
Call = Callable[["Customer"], httpx.Response]
FILE = {"file": ("in.jsonl", b"{}\n")}
RESPONSE = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}


@pytest.fixture(scope="module")
def house(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str, shared_redis_url: str
) -> Iterator[Gateway]:
    flags = (f"--nats-url={nats_url}", f"--redis-url={shared_redis_url}", f"--admin-key={ADMIN}")
    with start_gateway(behind, *flags, "--max-text-bytes=65536") as gateway:
        yield gateway


class Customer:
    """A tenant with a key and so many requests a minute."""

    def __init__(self, gateway: Gateway, requests_per_minute: int | None) -> None:
        self.gateway = gateway
        self.id = f"t-{uuid.uuid4().hex[:8]}"
        limits = (
            {"requests_per_minute": requests_per_minute} if requests_per_minute is not None else {}
        )
        body = {"id": self.id, "limits": limits}
        made = gateway.client.post(
            "/admin/tenants", json=body, headers={"authorization": f"Bearer {ADMIN}"}
        )
        assert made.status_code == 201, made.text
        self.key = made.json()["key"]
        self.headers = {"authorization": f"Bearer {self.key}"}
        gateway.wait_until(
            lambda: gateway.client.get("/v1/models", headers=self.headers).status_code == 200
        )

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self.gateway.client.request(method, path, headers=self.headers, **more)


CALLS: dict[str, Call] = {
    "tokenize": lambda ada: ada.call("POST", "/tokenize", json={"model": MODEL, "prompt": "Hello"}),
    "detokenize": lambda ada: ada.call(
        "POST", "/detokenize", json={"model": MODEL, "tokens": [1, 2, 3]}
    ),
    "tokens of messages": lambda ada: ada.call(
        "POST",
        "/v1/messages/count_tokens",
        json={"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]},
    ),
    "input tokens": lambda ada: ada.call("POST", "/v1/responses/input_tokens", json=RESPONSE),
    "a conversation": lambda ada: ada.call("POST", "/v1/conversations", json={}),
    "reading a conversation": lambda ada: ada.call("GET", "/v1/conversations/conv_0/items"),
    "a file": lambda ada: ada.call("POST", "/v1/files", data={"purpose": "batch"}, files=FILE),
    "files": lambda ada: ada.call("GET", "/v1/files"),
    "a file's content": lambda ada: ada.call("GET", "/v1/files/file-0/content"),
    "a batch": lambda ada: ada.call("POST", "/v1/batches", json={}),
    "a background response": lambda ada: ada.call(
        "POST", "/v1/responses", json=RESPONSE | {"background": True}
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_call_that_no_engine_computes_is_a_request_of_the_minute(
    house: Gateway, call: Call
) -> None:
    ada = Customer(house, requests_per_minute=2)
    bob = Customer(house, requests_per_minute=2)
    first, second, third = (call(ada) for _ in range(3))
    assert 429 not in (first.status_code, second.status_code), (first.text, second.text)
    assert third.status_code == 429
    assert third.json()["error"]["message"] == f"tenant {ada.id}: its requests a minute are used up"
    assert int(third.headers["retry-after"]) > 0
    assert ada.call("POST", "/v1/chat/completions", json=chat_body()).status_code == 429
    assert call(bob).status_code == first.status_code


def raw(path: str, content: bytes) -> Call:
    headers = {"content-type": "application/json"}
    return lambda ada: ada.gateway.client.post(path, content=content, headers=ada.headers | headers)


def asking(path: str, **more: Any) -> Call:
    return lambda ada: ada.call("POST", path, json=chat_body(**more))


REFUSED: dict[str, tuple[Call, int]] = {
    "broken JSON": (raw("/v1/chat/completions", b"{"), 400),
    "deep JSON": (raw("/v1/responses", b'{"model":"m","input":' + b"[" * 600 + b"]" * 600), 400),
    "costly JSON": (raw("/tokenize", b'{"x":[1e308%b]}' % (b",1e308" * 300)), 400),
    "a message, by x-api-key": (
        lambda ada: ada.gateway.client.post(
            "/v1/messages", json={"model": MODEL, "messages": []}, headers={"x-api-key": ada.key}
        ),
        400,
    ),
    "a grammar": (
        asking("/v1/chat/completions", guided_regex="(?=a)", max_tokens=1),
        400,
    ),
    "a long prompt": (
        lambda ada: ada.call(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "a b " * 20_000}
        ),
        400,
    ),
    "one entry of many": (
        lambda ada: ada.call(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": ["a"] * 20 + [""]}
        ),
        400,
    ),
    "a model": (asking("/v1/chat/completions", model="nobody"), 404),
    "a response": (lambda ada: ada.call("GET", "/v1/responses/resp_nobody"), 404),
    "a body of another type": (
        lambda ada: ada.gateway.client.post(
            "/v1/embeddings", content="{}", headers=ada.headers | {"content-type": "text/plain"}
        ),
        415,
    ),
    "a header": (
        lambda ada: ada.gateway.client.get("/v1/models", headers=ada.headers | {"x-priority": "x"}),
        400,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_request_is_a_request_of_the_minute(house: Gateway, name: str) -> None:
    call, status = REFUSED[name]
    ada = Customer(house, requests_per_minute=2)
    statuses = [call(ada).status_code for _ in range(4)]
    assert statuses == [status, status, 429, 429]
    # One that is refused by a limit takes no more of it.
    assert ada.call("POST", "/v1/chat/completions", json=chat_body()).status_code == 429


def test_a_request_that_is_counted_and_then_refused_counts_once(house: Gateway) -> None:
    ada = Customer(house, requests_per_minute=2)
    too_many = {"model": MODEL, "tokens": [1] * 8193}
    assert ada.call("POST", "/detokenize", json=too_many).status_code == 400
    assert ada.call("POST", "/v1/chat/completions", json=chat_body()).status_code == 200


def test_a_refused_call_over_grpc_is_a_request_of_the_minute(house: Gateway) -> None:
    ada = Customer(house, requests_per_minute=2)
    metadata = (("authorization", f"Bearer {ada.key}"),)
    deep = "[" * 600 + "]" * 600
    conversation = processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content="Hello")],
        chat_template_kwargs_json=deep,
    )
    with grpc.insecure_channel(house.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        codes = []
        for call in (stub.Chat, lambda *each, **more: list(stub.ChatStream(*each, **more))) * 2:
            with pytest.raises(grpc.RpcError) as refused:
                call(
                    inference_pb2.ChatRequest(model=MODEL, conversation=conversation),
                    metadata=metadata,
                )
            codes.append(refused.value.code())
    assert (
        codes == [grpc.StatusCode.INVALID_ARGUMENT] * 2 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
    )


def test_a_client_that_calls_on_after_its_minute_is_refused_at_a_pace(house: Gateway) -> None:
    """Two and a half thousand refusals a second took most of a gateway's time."""
    metadata = (("authorization", f"Bearer {Customer(house, 1).key}"),)
    num = AT_ONCE + 40
    began = time.monotonic()
    with grpc.insecure_channel(house.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        message = inference_pb2.EmbedRequest(model="none")
        calls = [stub.Embed.future(message, metadata=metadata) for _ in range(num)]
        codes = [call.code() for call in calls]
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= num - 2
    # Without a pace they are there within 0.1 s; a busy machine only takes longer.
    assert time.monotonic() - began >= 30 * EACH_SECONDS


def ask_over_grpc(ada: Customer) -> None:
    conversation = processor_pb2.Conversation(
        messages=[common_pb2.ChatMessage(role="user", content="Hello")]
    )
    with grpc.insecure_channel(ada.gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Chat.future(
            inference_pb2.ChatRequest(
                model=MODEL, conversation=conversation, sampling=common_pb2.Sampling(max_tokens=1)
            ),
            metadata=(("authorization", f"Bearer {ada.key}"),),
        )
        assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


PREPARED: dict[str, tuple[Callable[[Customer], object], int]] = {
    "chat": (asking("/v1/chat/completions", max_tokens=1), 1),
    "prompts": (
        lambda ada: ada.call(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": ["a"] * 5, "max_tokens": 1}
        ),
        5,
    ),
    "a response": (lambda ada: ada.call("POST", "/v1/responses", json=RESPONSE), 1),
    "over gRPC": (ask_over_grpc, 1),
}
"""Calls by name, each with the number of prompts that one of them prepares."""


def test_no_more_is_prepared_at_once_than_the_minute_has_requests(
    behind: Behind,
    text_folder: Path,
    start_gateway: GatewayStarter,
    nats_url: str,
    shared_redis_url: str,
) -> None:
    processor = processor_stage(text_folder, "--metrics-port=0")
    flags = (f"--nats-url={nats_url}", f"--redis-url={shared_redis_url}", f"--admin-key={ADMIN}")
    with started(processor):
        own = Behind(processor.address, behind.output_processor, behind.replicas)

        def num_prepared() -> float:
            page = httpx.get(f"http://{processor.addresses['metrics']}/metrics").text
            name = 'headwater_processor_seconds_count{method="Prepare"}'
            lines = [line for line in page.splitlines() if line.startswith(name)]
            return sum(float(line.rpartition(" ")[2]) for line in lines)

        with start_gateway(own, *flags) as gateway, ThreadPoolExecutor(16) as threads:
            for name, (call, num_prompts) in PREPARED.items():
                before = num_prepared()
                ada = Customer(gateway, requests_per_minute=2)
                list(threads.map(call, [ada] * 16))
                assert num_prepared() - before == 2 * num_prompts, name


def test_a_background_response_is_one_request_and_not_another_when_it_is_computed(
    house: Gateway,
) -> None:
    ada = Customer(house, requests_per_minute=2)
    asked = ada.call("POST", "/v1/responses", json=RESPONSE | {"background": True}).json()

    path = f"/v1/responses/{asked['id']}"
    house.wait_until(lambda: ada.call("GET", path).json().get("status") == "incomplete")
    assert ada.call("POST", "/v1/chat/completions", json=chat_body()).status_code == 200
    assert ada.call("POST", "/v1/chat/completions", json=chat_body()).status_code == 429


def test_what_makes_room_is_never_refused_for_having_asked_too_often(house: Gateway) -> None:
    ada = Customer(house, requests_per_minute=2)
    conversation = ada.call("POST", "/v1/conversations", json={}).json()["id"]
    file = ada.call("POST", "/v1/files", data={"purpose": "batch"}, files=FILE).json()["id"]
    assert ada.call("GET", "/v1/files").status_code == 429
    deleted = ada.call("DELETE", f"/v1/files/{file}")
    assert deleted.status_code == 200, deleted.text
    assert ada.call("DELETE", f"/v1/conversations/{conversation}").status_code == 200


def test_over_grpc_they_count_as_well(house: Gateway) -> None:
    with grpc.insecure_channel(house.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for call, request in (
            (
                stub.Tokenize,
                inference_pb2.TokenizeRequest(
                    model=MODEL, prompt=processor_pb2.Prompt(text="Hello")
                ),
            ),
            (stub.Detokenize, inference_pb2.DetokenizeRequest(model=MODEL, token_ids=[1, 2])),
        ):
            ada = Customer(house, requests_per_minute=1)
            metadata = (("authorization", f"Bearer {ada.key}"),)
            call(request, metadata=metadata)
            with pytest.raises(grpc.RpcError) as refused:
                call(request, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_six_hundred_thousand_ids_are_refused_before_they_cost_anything(house: Gateway) -> None:
    ada = Customer(house, None)
    ids = [1] * 600_000
    for path, body in (
        ("/detokenize", {"model": MODEL, "tokens": ids}),
        ("/tokenize", {"model": MODEL, "prompt": "a" * 600_000}),
    ):
        refused = ada.call("POST", path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    few = ada.call("POST", "/detokenize", json={"model": MODEL, "tokens": [1] * 8193})
    assert few.status_code == 400
    assert (
        few.json()["error"]["message"]
        == "tokens has 8193 ids; allowed: at most 8192, the model's context"
    )
    metadata = (("authorization", f"Bearer {ada.key}"),)
    with grpc.insecure_channel(house.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for num_ids in (600_000, 8193):
            with pytest.raises(grpc.RpcError) as over:
                stub.Detokenize(
                    inference_pb2.DetokenizeRequest(model=MODEL, token_ids=ids[:num_ids]),
                    metadata=metadata,
                )
            assert over.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_conversation_does_not_grow_without_end(house: Gateway) -> None:
    ada = Customer(house, None)
    path = f"/v1/conversations/{ada.call('POST', '/v1/conversations', json={}).json()['id']}/items"
    items = [{"role": "user", "content": "x" * 150_000}] * 10
    statuses = [ada.call("POST", path, json={"items": items}).status_code for _ in range(4)]
    assert statuses == [200, 200, 400, 400]
    refused = ada.call("POST", path, json={"items": items}).json()["error"]
    assert refused["message"] == "the conversation would have more bytes than allowed: 4194304"
    assert (
        ada.call("POST", path, json={"items": [{"role": "user", "content": "short"}]}).status_code
        == 200
    )


def test_a_used_up_minute_refuses_a_call_over_grpc_before_its_message_comes(
    house: Gateway,
) -> None:
    ada = Customer(house, requests_per_minute=1)
    metadata = (("authorization", f"Bearer {ada.key}"),)
    asked = inference_pb2.TokenizeRequest(model=MODEL, prompt=processor_pb2.Prompt(text="Hello"))
    never = threading.Event()

    def no_message() -> Iterator[inference_pb2.TokenizeRequest]:
        never.wait()
        yield asked

    with grpc.insecure_channel(house.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stub.Tokenize(asked, metadata=metadata)
        waiting = channel.stream_unary(
            "/headwater.v1.Inference/Chat", request_serializer=asked.__class__.SerializeToString
        )
        try:
            # A refusal stands for a second, in which a busy machine may not come to the next call.
            for _ in range(12):
                with pytest.raises(grpc.RpcError) as counted:
                    stub.Tokenize(asked, metadata=metadata)
                with pytest.raises(grpc.RpcError) as refused:
                    waiting(no_message(), metadata=metadata, timeout=5)
                if refused.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    break
        finally:
            never.set()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == counted.value.details()
        stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
