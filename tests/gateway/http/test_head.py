"""HEAD: the headers of the GET, at once, and neither a stream nor the making of the content behind
them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headwater.gateway.http.batches import BatchSurface
from headwater.gateway.http.http_exchange import Exchange, HeadOnly
from headwater.gateway.http.own_pages import OwnPages
from headwater.gateway.jobs.batches.records import File
from headwater.gateway.tenancy.caller import Caller
from headwater.gateway.tenancy.tenants import Tenant
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, UNDRAFTED, Behind, Gateway, chat_body

LONG: dict[str, Any] = {"ignore_eos": True, "stream": True} | UNDRAFTED
"""Answers of 4,000 tokens still run when a test ends them, even if the machine pauses."""


@pytest.fixture(scope="module")
def keeper(
    slow_behind: Behind, start_gateway: GatewayStarter, nats_url: str, shared_redis_url: str
) -> Iterator[Gateway]:
    kept = (f"--nats-url={nats_url}", f"--redis-url={shared_redis_url}")
    with start_gateway(slow_behind, *kept, "--tokenizer-info") as gateway:
        yield gateway


def head_of(gateway: Gateway, path: str) -> httpx.Response:
    """The answer to a HEAD. The server takes another request on its connection only when its
    handler has ended."""
    with httpx.Client(
        base_url=gateway.rest, timeout=60, limits=httpx.Limits(max_connections=1)
    ) as client:
        head = client.head(path)
        assert client.get("/version").status_code == 200
    return head


def reported(headers: httpx.Headers) -> dict[str, str]:
    """Headers that two answers of the same request share, but for those that the content decides
    on."""
    mine = (
        "date",
        "x-request-id",
        "transfer-encoding",
        "content-length",
        "content-encoding",
        "vary",
    )
    return {name: value for name, value in headers.items() if name not in mine}


def assert_head_of_stream(gateway: Gateway, path: str) -> None:
    head = head_of(gateway, path)
    assert (head.status_code, head.headers["content-type"]) == (
        200,
        "text/event-stream; charset=utf-8",
    )
    with gateway.client.stream("GET", path) as stream:
        assert reported(head.headers) == reported(stream.headers)


def first_event(reply: httpx.Response) -> tuple[dict[str, Any], Iterator[str]]:
    """The first event of a stream, and the lines behind it."""
    lines = reply.iter_lines()
    line = next(each for each in lines if each.startswith("data: "))
    return json.loads(line.removeprefix("data: ")), lines


def test_the_stream_of_a_background_response_is_not_followed_for_a_head(keeper: Gateway) -> None:
    asked = {
        "model": MODEL,
        "input": "Name a river.",
        "max_output_tokens": 4000,
        "background": True,
    } | LONG
    with keeper.client.stream("POST", "/v1/responses", json=asked) as reply:
        event, _ = first_event(reply)
    path = f"/v1/responses/{event['response']['id']}"
    assert_head_of_stream(keeper, f"{path}?stream=true")
    assert head_of(keeper, f"{path}?stream=perhaps").status_code == 400
    assert head_of(keeper, "/v1/responses/resp_0?stream=true").status_code == 404
    assert keeper.client.post(f"{path}/cancel").json()["status"] == "cancelled"


def test_a_stream_is_not_gone_on_with_for_a_head(keeper: Gateway) -> None:
    asked = chat_body(max_tokens=4000, stream_options={"resumable": True}, **LONG)
    with keeper.client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        event, lines = first_event(reply)
        path = f"/v1/streams/{event['id']}"
        head = head_of(keeper, path)
        assert (head.status_code, head.headers["content-type"]) == (
            200,
            "text/event-stream; charset=utf-8",
        )
        # The reader that is there stays.
        assert any(line.startswith("data: ") for line in lines)
    assert_head_of_stream(keeper, path)
    assert keeper.client.delete(path).json()["deleted"]
    assert head_of(keeper, path).status_code == 404


def test_a_head_does_not_watch(keeper: Gateway) -> None:
    assert_head_of_stream(keeper, "/console/live")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/models",
            f"/v1/models/{MODEL}",
            "/metrics",
            "/openapi.json",
            "/console/live?once=1",
            "/health",
            "/",
        ),
        *("/docs", "/tokenizer_info", f"/tokenizer_info?model={MODEL}"),
    ],
)
def test_the_head_of_content_has_its_type_and_no_length(keeper: Gateway, path: str) -> None:
    head = head_of(keeper, path)
    whole = keeper.client.get(path)
    assert (head.status_code, reported(head.headers)) == (200, reported(whole.headers))
    assert head.headers.keys().isdisjoint(
        {"content-length", "transfer-encoding", "content-encoding"}
    )


def test_a_head_is_refused_as_a_get_is(keeper: Gateway) -> None:
    missing = (
        "/v1/models/nosuch",
        "/v1/responses/resp_0",
        "/console/nosuch.js",
        "/tokenizer_info?model=nosuch",
    )
    for path in missing:
        head = head_of(keeper, path)
        whole = keeper.client.get(path)
        assert (head.status_code, reported(head.headers)) == (404, reported(whole.headers))
        assert whole.status_code == 404


async def nothing(*_: Any) -> Any:
    """Receives or sends no message."""


def exchange_of(method: str, send: Any, **path_params: str) -> Exchange:
    scope = {"method": method, "path": "/", "headers": [], "path_params": path_params}
    return Exchange(scope, nothing, send, slow_reader_limit=1.0, slow_body_limit=1.0)


async def test_a_page_of_metrics_is_not_made_for_a_head() -> None:
    without_metrics: Any = SimpleNamespace()
    pages = OwnPages(without_metrics, lambda _: True)
    with pytest.raises(HeadOnly) as ended:
        await pages.metrics(exchange_of("HEAD", nothing))
    assert dict(ended.value.headers)[b"content-type"].startswith(b"text/plain")
    with pytest.raises(AttributeError, match="metrics"):
        await pages.metrics(exchange_of("GET", nothing))


class FilesWithoutContent:
    """Files whose metadata alone can be read."""

    def __init__(self, file: File) -> None:
        self._file = file

    async def get(self, tenant: str, file_id: str) -> File:
        assert (tenant, file_id) == ("ada", "file-1")
        return self._file


async def caller_of(exchange: Exchange) -> Caller:
    return Caller(tenant=Tenant(id="ada"))


async def test_the_content_of_a_file_is_not_read_for_a_head() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    file = File(id="file-1", bytes=7, filename="a", purpose="batch", created_at=1, expires_at=2)
    stored: Any = SimpleNamespace(durable=None)
    callers: Any = SimpleNamespace(counted=caller_of)
    surface = BatchSurface(stored, callers, 100)
    surface._files = FilesWithoutContent(file)
    exchange = exchange_of("HEAD", send, id="file-1")
    await surface.file_content(exchange)
    start, body = sent
    assert (start["status"], dict(start["headers"])[b"content-length"]) == (200, b"7")
    assert body == {"type": "http.response.body", "body": b"", "more_body": False}


def test_the_head_of_a_file_has_its_length(keeper: Gateway) -> None:
    form = {"file": ("in.jsonl", b"{}\n" * 5)}
    file = keeper.client.post("/v1/files", data={"purpose": "batch"}, files=form).json()
    path = f"/v1/files/{file['id']}/content"
    head = head_of(keeper, path)
    whole = keeper.client.get(path)
    assert (head.content, head.headers["content-length"]) == (b"", "15")
    assert reported(head.headers) == reported(whole.headers)
