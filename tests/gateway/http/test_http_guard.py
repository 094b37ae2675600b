"""What a web page makes its visitor's browser send to a gateway, and heads that two readers would
read differently."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body

CHAT = "/v1/chat/completions"
KEY = "key-of-ada"


@pytest.fixture(scope="module")
def keyed(
    behind: Behind, start_gateway: GatewayStarter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys"
    path.touch(mode=0o600)
    path.write_text(f"ada {KEY}\n")
    with start_gateway(behind, f"--api-key-file={path}") as gateway:
        yield gateway


def sent_to(
    gateway: Gateway, *head: str, body: bytes = b"", line: str = "GET /v1/models HTTP/1.1"
) -> tuple[int, Any]:
    """Status and error of a request whose head is exactly this."""
    host, _, port = gateway.rest.removeprefix("http://").rpartition(":")
    lines = [line, *head, f"content-length: {len(body)}", "connection: close", "", ""]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    status = int(answer.split(b" ", 2)[1])
    return status, json.loads(answer.partition(b"\r\n\r\n")[2]).get(
        "error"
    ) if status != 200 else None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "10.0.0.7", "localhost.evil.example", "127.0.0.1.x"],
)
def test_a_page_whose_name_was_rebound_to_loopback_learns_and_changes_nothing(
    gateway: Gateway, host: str
) -> None:
    # Its browser takes page and gateway for one origin.
    own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    for reply in (
        gateway.client.post(CHAT, json=chat_body(), headers=own),
        gateway.client.get("/v1/models", headers={"host": host}),
        gateway.client.get("/metrics", headers={"host": host}),
        gateway.client.post("/admin/models", json={"model": MODEL}, headers={"host": host}),
    ):
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.:1",
        "127.0.0.1",
        "127.8.0.1:80",
        "[::1]",
        "[::1]:9",
    ],
)
def test_a_name_of_this_machine_is_answered(gateway: Gateway, host: str) -> None:
    assert gateway.client.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_name_that_a_proxy_in_front_has_is_answered_where_it_is_allowed(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--allowed-hosts=chat.example") as gateway:
        assert (
            gateway.client.get("/v1/models", headers={"host": "chat.example:443"}).status_code
            == 200
        )
        assert (
            gateway.client.get("/v1/models", headers={"host": "other.example"}).status_code == 403
        )


def test_with_keys_every_name_is_answered(keyed: Gateway) -> None:
    headers = {"host": "api.example", "authorization": f"Bearer {KEY}"}
    assert keyed.client.get("/v1/models", headers=headers).status_code == 200
    assert keyed.client.get("/health", headers={"host": "10.0.0.7:8000"}).status_code == 200


@pytest.mark.parametrize(
    "reported",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
    ids=str,
)
def test_a_page_of_another_origin_is_refused(
    gateway: Gateway, keyed: Gateway, reported: dict[str, str]
) -> None:
    before = gateway.metric("headwater_generation_tokens_total")
    for reply in (
        gateway.client.post(CHAT, json=chat_body(), headers=reported),
        gateway.client.get("/v1/models", headers=reported),
        keyed.client.get("/v1/models", headers=reported | {"authorization": f"Bearer {KEY}"}),
    ):
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"
    assert gateway.metric("headwater_generation_tokens_total") == before


def test_the_gateways_own_pages_and_links_to_them_are_answered(gateway: Gateway) -> None:
    own = {"origin": gateway.rest, "sec-fetch-site": "same-origin"}
    assert gateway.client.post(CHAT, json=chat_body(), headers=own).status_code == 200
    assert (
        gateway.client.post(CHAT, json=chat_body(), headers={"origin": gateway.rest}).status_code
        == 200
    )
    link = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert gateway.client.get("/", headers=link).status_code == 200
    assert gateway.client.post(CHAT, json=chat_body(), headers=link).status_code == 403


def test_a_page_whose_origin_is_allowed_is_answered(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--allowed-origins=https://chat.example") as gateway:
        reported = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
        reply = gateway.client.post(CHAT, json=chat_body(), headers=reported)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (
            200,
            "https://chat.example",
        )
        assert (
            gateway.client.get(
                "/v1/models", headers=reported | {"origin": "https://evil.example"}
            ).status_code
            == 403
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(max_tokens=1)),
        ("/v1/messages", chat_body(max_tokens=1)),
        ("/v1/embeddings", {"model": MODEL, "input": "a"}),
        ("/tokenize", {"model": MODEL, "prompt": "a"}),
        ("/api/generate", {"model": MODEL, "prompt": "a", "options": {"num_predict": 1}}),
    ],
)
def test_a_body_may_come_as_curl_sends_it_unless_a_page_does(
    gateway: Gateway, path: str, body: dict[str, object]
) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    content = json.dumps(body).encode()
    taken = gateway.client.post(path, content=content, headers=form)
    assert taken.status_code not in (403, 415), taken.text
    for from_page in (
        {"referer": f"{gateway.rest}/"},
        {"origin": gateway.rest},
        {"sec-fetch-site": "same-origin"},
    ):
        reply = gateway.client.post(path, content=content, headers=form | from_page)
        assert reply.status_code == 415, from_page


def test_operators_send_json_as_json(gateway: Gateway) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    reply = gateway.client.post("/admin/models", content=b'{"model": "a"}', headers=form)
    assert reply.status_code == 415


def test_a_body_without_the_content_type_of_json_is_refused(gateway: Gateway) -> None:
    # What a page may send to another origin without asking: no content type, or one that forms
    # have.
    body = json.dumps(chat_body()).encode()
    status, error = sent_to(gateway, "host: localhost", body=body, line=f"POST {CHAT} HTTP/1.1")
    assert (status, error["code"]) == (415, "unsupported_media_type")
    for path in (
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
        "/v1/conversations",
        "/v1/batches",
    ):
        assert gateway.client.post(path, content=body).status_code == 415
    with_type = sent_to(
        gateway,
        "host: localhost",
        "content-type: application/json",
        body=body,
        line=f"POST {CHAT} HTTP/1.1",
    )
    assert with_type == (200, None)


def test_no_answer_is_taken_for_a_page_or_a_script(gateway: Gateway) -> None:
    replies: list[httpx.Response] = [
        gateway.client.get(path)
        for path in ("/", "/v1/models", "/metrics", "/health", "/nothing", "/openapi.json")
    ]
    replies += [
        gateway.client.post(CHAT, json=chat_body(stream=stream)) for stream in (False, True)
    ]
    replies.append(gateway.client.get("/", headers={"host": "evil.example"}))
    assert {reply.headers["x-content-type-options"] for reply in replies} == {"nosniff"}


def test_a_host_that_is_missing_or_given_twice_is_refused(gateway: Gateway, keyed: Gateway) -> None:
    for each in (gateway, keyed):
        key = f"authorization: Bearer {KEY}"
        for head in (
            (),
            ("host: localhost", "host: evil.example"),
            ("host: a@localhost",),
            ("host:",),
        ):
            status, error = sent_to(each, key, *head)
            assert (status, error["param"]) == (400, "host")


def test_a_key_that_is_given_twice_is_refused(keyed: Gateway) -> None:
    key = f"authorization: Bearer {KEY}"
    assert sent_to(keyed, "host: x", key) == (200, None)
    for second in (key, "Authorization: Bearer another"):
        status, error = sent_to(keyed, "host: x", key, second)
        assert (status, error["param"]) == (400, "authorization")
    with grpc.insecure_channel(keyed.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        reported = ("authorization", f"Bearer {KEY}")
        assert stub.ListModels(inference_pb2.ListModelsRequest(), metadata=[reported]).models
        with pytest.raises(grpc.RpcError) as raised:
            stub.ListModels(
                inference_pb2.ListModelsRequest(),
                metadata=[reported, ("authorization", "Bearer another")],
            )
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_key_in_x_api_key_is_one_on_every_path(keyed: Gateway) -> None:
    chat = chat_body(max_tokens=1)
    messages = {name: chat[name] for name in ("model", "messages", "max_tokens")}

    def statuses(**headers: str) -> list[int]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return [
            keyed.client.get("/v1/models", headers=named).status_code,
            keyed.client.post(CHAT, json=chat, headers=named).status_code,
            keyed.client.post("/v1/messages", json=messages, headers=named).status_code,
        ]

    assert statuses(x_api_key=KEY) == [200] * 3
    assert statuses(api_key=KEY) == [200] * 3
    assert statuses(x_api_key="another") == statuses(api_key="another") == statuses() == [401] * 3
    # A proxy in front has a password of its own.
    assert statuses(x_api_key=KEY, authorization="Basic YTpi") == [200] * 3
    assert statuses(x_api_key="another", authorization=f"Bearer {KEY}") == [200] * 3
    assert statuses(x_api_key=KEY, authorization="Bearer another") == [401] * 3
    status, error = sent_to(keyed, "host: x", f"x-api-key: {KEY}", "x-api-key: another")
    assert (status, error["param"]) == (400, "x-api-key")
    refused = keyed.client.post("/v1/messages", json=messages).json()
    assert refused["error"]["type"] == "authentication_error"
    assert "x-api-key: KEY" in refused["error"]["message"]


def test_a_caller_without_a_key_learns_nothing_about_a_prompt_over_grpc(keyed: Gateway) -> None:
    with grpc.insecure_channel(keyed.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        asked = inference_pb2.CompleteRequest(model=MODEL, text="")
        urgent = inference_pb2.CompleteRequest(model=MODEL, text="x", priority=-1)
        for call in (stub.Complete, lambda asked: list(stub.CompleteStream(asked))):
            for request in (asked, urgent):
                with pytest.raises(grpc.RpcError) as raised:
                    call(request)
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # The gateway refuses the call before it parses the message.
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/headwater.v1.Inference/Complete")(b"\xff")
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
