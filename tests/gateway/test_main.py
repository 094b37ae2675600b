"""The gateway as a process: how it starts, what it shares a port with, what a browser finds at its
door."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from headwater.services.runtime.version import RELEASE, commit
from tests.gateway.processes import MODEL, Behind, Gateway, gateway_stage, launched, started


def test_it_is_there_in_moments_even_with_nothing_behind() -> None:
    began = time.monotonic()
    stage = gateway_stage(start=launched)
    with started(stage), Gateway(stage) as gateway:
        # The design asks for 2 s on a free machine; tests share theirs.
        assert time.monotonic() - began < 60
        assert gateway.client.get("/health").json() == {"status": "ok"}
        ready = gateway.client.get("/ready")
        assert (ready.status_code, ready.json()["missing"]) == (
            503,
            ["processor", "output processor", "engine"],
        )
        reply = gateway.client.post("/v1/chat/completions", json={"model": "m", "messages": []})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "processor_unavailable")
        stage.terminate()
        assert stage.process.wait(60) == 0


def test_ready_waits_for_the_first_engine_unless_the_first_request_starts_it(
    behind: Behind,
) -> None:
    without_engine = [
        *Behind(behind.processor, behind.output_processor, ()).flags(),
        "--cold-start-timeout=60",
    ]
    patient = gateway_stage(*without_engine, "--ready-needs-engine=never")
    usual = gateway_stage(*without_engine)
    with started(patient, usual), Gateway(patient) as gateway, Gateway(usual) as other:
        gateway.wait_until(gateway.is_ready)
        reported = gateway.client.get("/ready").json()
        assert (reported["ready"], reported["missing"], reported["awaited"]) == (
            True,
            [],
            ["engine"],
        )
        assert reported["detail"].startswith("engine starting")
        other.wait_until(lambda: other.client.get("/ready").json()["missing"] == ["engine"])
        assert other.client.get("/ready").status_code == 503


def test_a_body_without_its_content_type_is_refused_with_how_to_send_one(gateway: Gateway) -> None:
    text = {"content-type": "text/plain"}
    for headers, found in ((text, "'text/plain'"), ({}, "missing")):
        reply = gateway.client.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert reply.status_code == 415
        message = (
            f"content-type is {found}; allowed: application/json; send -H 'content-type: "
            "application/json'"
        )
        assert reply.json()["error"]["message"] == message


def test_every_process_says_what_it_was_made_from(gateway: Gateway) -> None:
    reported = gateway.client.get("/version").json()
    assert reported == {"version": RELEASE, "commit": commit()}
    line = f'headwater_build_info{{commit="{commit()}",stage="gateway",version="{RELEASE}"}} 1.0'
    assert gateway.client.get("/metrics").text.count(line) == 1


def test_several_share_a_port(behind: Behind) -> None:
    first = gateway_stage(*behind.flags(), "--reuse-port")
    with started(first):
        ports = [first.addresses[name].rpartition(":")[2] for name in ("rest", "grpc")]
        second = gateway_stage(
            *behind.flags(), "--reuse-port", f"--port={ports[0]}", f"--grpc-port={ports[1]}"
        )
        with started(second), Gateway(second) as gateway:
            assert second.addresses == first.addresses
            first.terminate()
            assert first.process.wait(60) == 0
            gateway.wait_until(gateway.is_ready)
            assert gateway.chat()["choices"]


def test_an_impossible_setting_is_reported_in_a_sentence_and_ends_the_gateway() -> None:
    command = [sys.executable, "-m", "headwater.gateway", "--host=0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "headwater gateway: --host is '0.0.0.0'; allowed: a loopback address"
    )


def test_a_browser_finds_a_chat_page_that_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    page = gateway.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert policy.startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
    )
    for file, media_type in (("console.css", "text/css"), ("app.js", "text/javascript")):
        assert f"console/{file}" in page.text
        reply = gateway.client.get(f"/console/{file}")
        assert (reply.status_code, reply.headers["content-type"]) == (200, media_type)
        assert "://" not in reply.text
    long = f"/console/{'a' * 300}.js"
    for path in (
        "/console/nothing.js",
        "/console/..%2fapp.py",
        "/console/%2e%2e/app.py",
        "/console/%00.js",
        long,
    ):
        assert gateway.client.get(path).status_code == 404


def test_what_is_served_is_described(gateway: Gateway) -> None:
    document = gateway.client.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert document["paths"]["/v1/files"].keys() == {"get", "post"}
    assert "delete" in document["paths"]["/v1/files/{id}"]
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert "temperature" in fields
    assert gateway.client.get("/version").json()["version"]
    (card,) = gateway.client.get("/v1/models").json()["data"]
    assert gateway.client.get(f"/v1/models/{card['id']}").json() == card
    assert card["max_model_len"] == 8192
    assert card["model_code"] == "headwater"


def test_without_a_supervisor_models_are_not_loaded_and_the_answer_says_so(
    gateway: Gateway,
) -> None:
    reply = gateway.client.post("/admin/models", json={"model": "smollm2-135m-instruct"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_supervisor")
    assert "where `headwater up` runs it" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "", {"model": "a\nb"}, "model"),
        ("POST", "", {"model": "/models/../secrets"}, "model"),
        ("POST", "", {"model": MODEL, "served_model_name": "a\x1b[2J"}, "served_model_name"),
        ("POST", "", {"model": MODEL, "served_model_name": "a/../b"}, "served_model_name"),
        ("PATCH", "/a%1B%5B2J", {"min_replicas": 1}, "name"),
        ("DELETE", "/a%1B%5B2J", None, "name"),
        ("DELETE", "/%2E%2E", None, "name"),
    ],
)
def test_names_of_models_that_would_forge_logs_or_paths_are_refused_to_administrators_too(
    gateway: Gateway, method: str, path: str, body: Any, param: str
) -> None:
    # As sent: a client library would take the dots out.
    reply = gateway.client.request(method, f"/admin/models{path}", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert "printable characters" in reply.json()["error"]["message"]


def test_metrics_count_what_happened(gateway: Gateway) -> None:
    before = {
        name: gateway.metric(name)
        for name in (
            "headwater_generation_tokens_total",
            "headwater_e2e_request_latency_seconds_count",
        )
    }
    gateway.chat(max_tokens=5)
    assert (
        gateway.metric("headwater_generation_tokens_total")
        == before["headwater_generation_tokens_total"] + 5
    )
    assert gateway.metric("headwater_e2e_request_latency_seconds_count") == (
        before["headwater_e2e_request_latency_seconds_count"] + 1
    )
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_queue_time_seconds",
    ):
        assert gateway.metric(f"headwater_{name}_count") > 0


def test_pages_of_other_origins_may_call_where_they_are_named(behind: Behind) -> None:
    stage = gateway_stage(*behind.flags(), "--allowed-origins=https://chat.example")
    with started(stage):
        asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        url = f"http://{stage.addresses['rest']}/v1/chat/completions"
        assert (
            httpx.options(url, headers=asked, timeout=60).headers["access-control-allow-origin"]
            == "https://chat.example"
        )
        refused = httpx.options(url, headers=asked | {"origin": "https://evil.example"}, timeout=60)
        assert "access-control-allow-origin" not in refused.headers


def test_the_description_of_the_api_has_a_page_for_people(gateway: Gateway) -> None:
    page = gateway.client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "/console/api.js" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
