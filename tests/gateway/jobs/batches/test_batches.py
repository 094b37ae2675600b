"""Files and batches over the real line: what clients send and get, what survives whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import signal
import socket
import time
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import openai
import pytest

from headwater.gateway.http.batches import MAX_IN_TRANSIT
from headwater.gateway.jobs.durable import RESULTS
from headwater.services.stack.embedded import EmbeddedServer, start_nats
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    engine_stage,
    gateway_stage,
    started,
)
from tests.polling import holds_within

KEYS = "ada key-of-ada\neve key-of-eve\n"


@pytest.fixture(scope="module")
def batching(behind: Behind, start_gateway: GatewayStarter, nats_url: str) -> Iterator[Gateway]:
    with start_gateway(behind, f"--nats-url={nats_url}") as gateway:
        yield gateway


@pytest.fixture
def client(batching: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{batching.rest}/v1", api_key="any", max_retries=0) as each:
        yield each


def line(
    custom_id: str, *, url: str = "/v1/completions", method: str = "POST", **body: Any
) -> dict[str, Any]:
    asked = {
        "model": MODEL,
        "prompt": f"Story {custom_id}",
        "max_tokens": 4,
        "temperature": 0,
    } | body
    return {"custom_id": custom_id, "method": method, "url": url, "body": asked}


def as_jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("input.jsonl", content), purpose="batch").id


def started_batch(client: openai.OpenAI, content: bytes, **more: Any) -> Any:
    endpoint: Any = "/v1/completions"
    return client.batches.create(
        input_file_id=upload(client, content), endpoint=endpoint, completion_window="24h", **more
    )


def over(client: openai.OpenAI, batch_id: str, seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch_id)).status not in (
        "completed",
        "failed",
        "expired",
        "cancelled",
    ):
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_the_official_client_runs_a_batch_from_upload_to_results(
    client: openai.OpenAI, batching: Gateway
) -> None:
    lines = [line(f"request-{i}") for i in range(20)]
    lines += [
        line("too hot", temperature=9.0),
        line("streamed", stream=True),
        line("nobody", model="nobody"),
    ]
    lines += [
        line("later", background=True),
        line("drafted", speculative={"drafter": "ngram", "max_tokens": 4}),
    ]
    lines += [line("drafted far", speculative={"max_tokens": 32})]
    batch = started_batch(client, as_jsonl(lines), metadata={"for": "test"})
    assert (batch.object, batch.metadata, batch.completion_window) == (
        "batch",
        {"for": "test"},
        "24h",
    )
    batch = over(client, batch.id)
    assert (batch.status, batch.errors) == ("completed", None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (26, 21, 5)
    assert (
        batch.created_at
        <= batch.in_progress_at
        <= batch.finalizing_at
        <= batch.completed_at
        < batch.expires_at
    )
    answers = {each["custom_id"]: each for each in results(client, batch.output_file_id)}
    assert answers.keys() == {"drafted", *(f"request-{i}" for i in range(20))}
    alone = batching.complete("Story request-7", max_tokens=4)
    response = answers["request-7"]["response"]
    assert (response["status_code"], answers["request-7"]["error"]) == (200, None)
    assert response["body"]["choices"] == alone["choices"]
    assert response["body"]["id"] == f"cmpl-{response['request_id']}"
    errors = {each["custom_id"]: each for each in results(client, batch.error_file_id)}
    assert errors["too hot"]["response"]["status_code"] == 400
    assert errors["too hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["drafted far"]["response"]["body"]["error"]["param"] == "speculative.max_tokens"
    assert errors["nobody"]["response"]["status_code"] == 404
    for name in ("streamed", "later"):
        assert (errors[name]["response"], errors[name]["error"]["code"]) == (None, "invalid_value")


def test_chats_are_run_too_and_a_line_is_explained_by_its_request_id(
    client: openai.OpenAI, batching: Gateway
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4}
    content = as_jsonl(
        [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}]
    )
    # As some editors write it.
    content = BOM_UTF8 + content
    batch = client.batches.create(
        input_file_id=upload(client, content),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    (answer,) = results(client, over(client, batch.id).output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    reported = batching.client.get(
        f"/v1/requests/{answer['response']['request_id']}/explain"
    ).json()
    assert reported["prompts"][0]["outcome"] == "done"


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        (b"", [("empty_file", None, None)]),
        pytest.param(b"\n\n", [("empty_file", None, None)], marks=pytest.mark.long),
        pytest.param(b"{}\n", [("invalid_json_line", 1, None)], marks=pytest.mark.long),
        (
            b'\n{"custom_id": "\xff"}\n[1]\n',
            [("invalid_json_line", 2, None), ("invalid_json_line", 3, None)],
        ),
        (as_jsonl([line("a"), line("b"), line("a")]), [("duplicate_custom_id", 3, "custom_id")]),
        (as_jsonl([line("a", url="/v1/chat/completions")]), [("mismatched_endpoint", 1, "url")]),
        (
            as_jsonl([line("a", method="GET"), line("")]),
            [("invalid_method", 1, "method"), ("invalid_custom_id", 2, "custom_id")],
        ),
    ],
)
def test_a_file_that_cannot_be_run_fails_its_batch_naming_the_lines(
    client: openai.OpenAI, lines: bytes, faults: list[Any]
) -> None:
    batch = over(client, started_batch(client, lines).id)
    assert batch.status == "failed"
    assert [(each.code, each.line, each.param) for each in batch.errors.data] == faults
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = as_jsonl([line(f"{i}", prompt="x" * 1000) for i in range(1500)])
    file_id = upload(client, content)
    file = client.files.retrieve(file_id)
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(content),
        "input.jsonl",
        "batch",
        "processed",
    )
    assert client.files.content(file_id).content == content
    second = upload(client, b"{}")
    page = client.files.list(limit=1, order="asc")
    assert page.has_more
    assert {file_id, second} <= {each.id for each in client.files.list(limit=100)}
    assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.files.content(file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(file_id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "forever"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"input_file_id": 5}, "input_file_id"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            "output_expires_after",
        ),
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_name(
    batching: Gateway, body: dict[str, Any], param: str
) -> None:
    asked = {
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "input_file_id": "file-x",
    } | body
    reply = batching.client.post("/v1/batches", json=asked)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_batch_of_a_file_that_does_not_exist_is_refused_in_the_name_of_the_field(
    batching: Gateway,
) -> None:
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": "file-x"}
    reply = batching.client.post("/v1/batches", json=asked)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (
        404,
        "input_file_id",
        "file_not_found",
    )


def test_what_is_no_upload_is_refused(batching: Gateway) -> None:
    post = batching.client.post
    assert post("/v1/files", json={}).status_code == 415
    assert (
        post("/v1/files", files={"file": b"x"}, data={"purpose": "vision"}).json()["error"]["param"]
        == "purpose"
    )
    assert (
        post("/v1/files", files={"file": b"x"}).json()["error"]["message"]
        == "purpose is missing; allowed: batch or adapter"
    )
    assert (
        post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"}).json()["error"]["param"]
        == "file"
    )
    sooner = {
        "purpose": "batch",
        "expires_after[anchor]": "created_at",
        "expires_after[seconds]": "3600",
    }
    error = post("/v1/files", files={"file": b"x"}, data=sooner).json()["error"]
    assert error["param"] == "expires_after[anchor]"
    assert "30 days" in error["message"]
    broken = {"content-type": "multipart/form-data"}
    assert post("/v1/files", content=b"--x", headers=broken).status_code == 400
    assert batching.client.get("/v1/batches/batch_none").status_code == 404
    assert batching.client.get("/v1/files/no%20key").status_code == 404
    assert batching.client.delete("/v1/batches").status_code == 405
    assert batching.client.get("/v1/files?limit=0").json()["error"]["param"] == "limit"


def test_a_form_in_another_charset_than_utf_8_is_refused(batching: Gateway) -> None:
    form = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n-%s\r\n--b--\r\n'

    def refused(charset: str, value: str) -> tuple[int, str]:
        headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
        reply = batching.client.post("/v1/files", content=form % value, headers=headers)
        return reply.status_code, reply.json()["error"]["code"]

    # Python takes minutes to decode a megabyte of Punycode.
    assert refused("punycode", "a" * 1_000_000) == (415, "unsupported_media_type")
    assert refused("idna", "a") == (415, "unsupported_media_type")
    assert refused("UTF-8", "batch") == (400, "missing_field")


def test_a_tenant_sends_a_gateway_a_bounded_number_of_files_at_once(batching: Gateway) -> None:
    def status(tenant: str) -> int:
        files = {"file": ("input.jsonl", b"{}")}
        reply = batching.client.post(
            "/v1/files", files=files, data={"purpose": "batch"}, headers={"x-tenant": tenant}
        )
        return reply.status_code

    host, _, port = batching.rest.removeprefix("http://").rpartition(":")
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\nx-tenant: many\r\ncontent-length: 1000\r\n"
    )
    with contextlib.ExitStack() as scope:
        sending = list[socket.socket]()
        for _ in range(MAX_IN_TRANSIT + 1):
            sending.append(
                scope.enter_context(socket.create_connection((host, int(port)), timeout=60))
            )
            sending[-1].sendall(
                f"{head}content-type: multipart/form-data; boundary=b\r\n\r\n--b".encode()
            )
        (refused,), _, _ = select.select(sending, [], [], 60)
        assert refused.recv(65536).startswith(b"HTTP/1.1 429")
        assert (status("many"), status("few")) == (429, 200)
    assert holds_within(lambda: status("many") == 200, 60)


def test_a_gateway_without_nats_says_so(gateway: Gateway) -> None:
    reply = gateway.client.get("/v1/batches")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")


def test_a_cancelled_batch_ends_with_what_it_has(
    slow_behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> None:
    # Some lines run and some wait for their turn.
    lines = [line(f"{i}", max_tokens=7000, ignore_eos=True, **UNDRAFTED) for i in range(20)]
    with (
        start_gateway(slow_behind, f"--nats-url={nats_url}", "--batch-concurrency=8") as gateway,
        openai.OpenAI(base_url=f"{gateway.rest}/v1", api_key="any", max_retries=0) as client,
    ):
        batch = started_batch(client, as_jsonl([line("short"), *lines]))
        gateway.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = over(client, batch.id)
        assert batch.status == "cancelled"
        counts = batch.request_counts
        assert counts.completed + counts.failed == counts.total == 21
        good = results(client, batch.output_file_id)
        bad = results(client, batch.error_file_id)
        assert len({each["custom_id"] for each in good + bad}) == len(good) + len(bad) == 21
        assert {each["error"]["code"] for each in bad} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError, match="the batch is cancelled"):
            client.batches.cancel(batch.id)


def test_batches_and_files_are_their_tenants_own(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(KEYS)
    flags = (f"--nats-url={nats_url}", f"--api-key-file={tmp_path / 'keys'}")
    with start_gateway(behind, *flags) as gateway, contextlib.ExitStack() as clients:
        ada, eve = (
            clients.enter_context(
                openai.OpenAI(
                    base_url=f"{gateway.rest}/v1", api_key=f"key-of-{name}", max_retries=0
                )
            )
            for name in ("ada", "eve")
        )
        batch = over(ada, started_batch(ada, as_jsonl([line("a")])).id)
        assert batch.request_counts.completed == 1
        for refused in (
            lambda: eve.batches.retrieve(batch.id),
            lambda: eve.batches.cancel(batch.id),
            lambda: eve.files.content(batch.output_file_id),
            lambda: eve.files.delete(batch.input_file_id),
            lambda: (
                started_batch(eve, b"").input_file_id and eve.files.retrieve(batch.input_file_id)
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        assert [each.id for each in ada.batches.list()] == [batch.id]


def num_answered(gateway: Gateway) -> float:
    """Number of lines that a gateway has answered, whether or not their results are kept yet."""
    return gateway.metric("headwater_batch_lines_total")


async def kept_results(nats_url: str) -> list[bytes]:
    """Results that NATS keeps: the lines of an output file, each behind its seal."""
    connection = await nats.connect(nats_url)
    try:
        bucket = await connection.jetstream().key_value(RESULTS)
        return [(await bucket.get(key)).value or b"" for key in await bucket.keys()]
    finally:
        await connection.close()


@pytest.mark.slow
def test_a_batch_outlives_its_gateway_an_engine_and_nats(
    behind: Behind, free_dir: Path, kept: dict[str, Any]
) -> None:
    """Each line has one result although a gateway, an engine and NATS are killed; a kept result
    does not change."""
    num_lines = 200
    lines = [line(f"{i}", max_tokens=40, ignore_eos=True, **UNDRAFTED) for i in range(num_lines)]
    engines = [
        engine_stage(f"--replica-id={name}", "--simulated-step-seconds=0.01") for name in "ab"
    ]
    with asyncio.Runner() as runner, started(*engines), contextlib.ExitStack() as stack:
        bus: EmbeddedServer = runner.run(start_nats(free_dir, jetstream=free_dir / "js", **kept))
        stack.callback(lambda: runner.run(bus.stop()))
        stages = Behind(
            behind.processor, behind.output_processor, tuple(engine.address for engine in engines)
        )
        flags = [*stages.flags(), f"--nats-url={bus.url}", "--batch-concurrency=8"]
        first = gateway_stage(*flags)
        second = gateway_stage(*flags)
        with started(first, second), Gateway(first) as one, Gateway(second) as other:
            for gateway in (one, other):
                gateway.wait_until(gateway.is_ready)
            with openai.OpenAI(base_url=f"{other.rest}/v1", api_key="any", max_retries=5) as client:
                batch_id = started_batch(client, as_jsonl(lines)).id

                def has_results_of_both() -> bool:
                    num_kept = client.batches.retrieve(batch_id).request_counts.completed
                    return num_kept > max(20, min(num_answered(one), num_answered(other)))

                one.wait_until(has_results_of_both)
            # Some of its results are kept: more are than the other one has answered.
            holder = max((one, other), key=num_answered)
            survivor = other if holder is one else one
            # The survivor would delete the kept results with the last line.
            survivor.stage.process.send_signal(signal.SIGSTOP)
            holder.stage.kill()
            engines[0].kill()
            kept_before = runner.run(kept_results(bus.url))
            survivor.stage.process.send_signal(signal.SIGCONT)
            runner.run(bus.kill())
            bus = runner.run(start_nats(free_dir, port=bus.port, jetstream=free_dir / "js", **kept))
            with openai.OpenAI(
                base_url=f"{survivor.rest}/v1", api_key="any", max_retries=5
            ) as client:
                batch = over(client, batch_id)
                assert (batch.status, batch.error_file_id) == ("completed", None)
                answers = results(client, batch.output_file_id)
                output = client.files.content(batch.output_file_id).content.splitlines()
            assert sorted(int(each["custom_id"]) for each in answers) == list(range(num_lines))
            # A line in work at a kill may be answered twice; a result that was kept stays.
            assert len(kept_before) > 20
            assert all(any(value.endswith(each) for each in output) for value in kept_before)
            assert num_answered(survivor) > 0
