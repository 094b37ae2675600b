"""The timeline of a request: while it runs, after it ended, on any gateway, for its tenant
alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import UNDRAFTED, Behind, Gateway, completion_body


def test_an_answers_id_leads_to_where_it_was_and_why(gateway: Gateway) -> None:
    answer = gateway.complete("The road of a river", n=2, temperature=1, seed=3)
    reported = gateway.client.get(f"/v1/requests/{answer['id']}/explain").json()
    assert (reported["object"], reported["model"], reported["id"]) == (
        "request.explanation",
        answer["model"],
        answer["id"][5:],
    )
    (prompt,) = reported["prompts"]
    assert prompt["outcome"] == "done"
    assert prompt["output_tokens"] == answer["usage"]["completion_tokens"]
    (attempt,) = prompt["attempts"]
    assert attempt["decision"]["reason"] == "only"
    assert attempt["decision"]["candidates"][0]["replica_id"] == attempt["decision"]["replica_id"]
    assert [choice["engine"]["preemptions"] for choice in prompt["choices"]] == [0, 0]
    assert all(choice["engine"]["steps"] >= 8 for choice in prompt["choices"])
    assert all(choice["engine"]["mean_batch_size"] >= 1 for choice in prompt["choices"])
    assert all(0 < choice["engine"]["tokens_per_step"] <= 1 for choice in prompt["choices"])
    assert all(choice["engine"]["draft_tokens"] == 0 for choice in prompt["choices"])
    seconds = prompt["seconds"]
    assert all(seconds[name] >= 0 for name in seconds)
    assert (
        seconds["prepare"] + seconds["queue"] + seconds["route"]
        <= seconds["to_first_token"]
        <= seconds["total"]
    )


def test_the_beginning_of_an_id_leads_there_where_no_other_request_has_it(
    gateway: Gateway,
) -> None:
    whole = gateway.complete("A river")["id"].removeprefix("cmpl-")

    def explained(request_id: str, tenant: str = "") -> httpx.Response:
        headers = {"x-tenant": tenant} if tenant else {}
        return gateway.client.get(f"/v1/requests/{request_id}/explain", headers=headers)

    for beginning in (whole[:12], f"cmpl-{whole[:12]}"):
        assert explained(beginning).json()["id"] == whole
    assert explained(whole[:5]).status_code == 404
    assert explained(whole[:12], "eve").status_code == 404


def test_a_second_turn_shows_how_much_of_it_was_cached(gateway: Gateway) -> None:
    text = (
        "A long prompt that fills some blocks of the cache before it comes a second time, word "
        "for word. " * 3
    )
    gateway.complete(text)
    answer = gateway.complete(text)
    (prompt,) = gateway.client.get(f"/v1/requests/{answer['id']}/explain").json()["prompts"]
    assert prompt["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert prompt["attempts"][0]["decision"]["actual_cached_tokens"] == prompt["cached_tokens"]


def test_a_running_request_is_explained_up_to_now(gateway: Gateway) -> None:
    asked = completion_body(max_tokens=8000, ignore_eos=True, stream=True, **UNDRAFTED)
    with gateway.client.stream(
        "POST", "/v1/completions", json=asked, headers={"x-tenant": "ada"}
    ) as reply:
        lines = reply.iter_lines()
        first = json.loads(next(lines)[6:])
        path = f"/v1/requests/{first['id']}/explain"
        assert gateway.client.get(path).status_code == 404
        reported = gateway.client.get(path, headers={"x-tenant": "ada"}).json()
        assert reported["prompts"][0]["outcome"] == "running"
        assert reported["prompts"][0]["seconds"]["to_first_token"] > 0


def begun_before_its_deadline(
    gateway: Gateway,
    headers: dict[str, str],
    path: str = "/v1/completions",
    asked: dict[str, Any] | None = None,
) -> httpx.Response:
    """Returns an answer that began before its deadline. However busy the machine is, one of these
    deadlines comes between the first and the last token."""
    asked = asked or completion_body(max_tokens=8000, ignore_eos=True, stream=True, **UNDRAFTED)
    for milliseconds in (500, 4000, 16_000):
        more = headers | {"x-headwater-deadline-ms": str(milliseconds)}
        reply = gateway.client.post(path, json=asked, headers=more)
        if reply.status_code == 200:
            return reply
        assert reply.status_code == 504, reply.text
        assert "deadline" in reply.text
    raise AssertionError("no answer began before its deadline")


def test_a_request_that_failed_is_explained_too_and_one_that_never_was_is_404(
    slow_gateway: Gateway,
) -> None:
    gateway = slow_gateway
    reply = begun_before_its_deadline(gateway, {"x-request-id": "mine"})
    request_id = json.loads(
        next(line for line in reply.text.splitlines() if line.startswith("data: "))[6:]
    )["id"]
    reported = gateway.client.get(f"/v1/requests/{request_id}/explain").json()
    assert (reported["prompts"][0]["outcome"], reported["client_request_id"]) == (
        "cancelled",
        "mine",
    )
    missing = gateway.client.get("/v1/requests/mine/explain")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.long
def test_any_gateway_explains_what_another_one_answered(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> None:
    flags = f"--nats-url={nats_url}"
    with start_gateway(behind, flags) as one, start_gateway(behind, flags) as other:
        answer = one.complete()
        reported = other.client.get(f"/v1/requests/{answer['id']}/explain")
        assert reported.status_code == 200, reported.text
        assert reported.json() == one.client.get(f"/v1/requests/{answer['id']}/explain").json()
        elsewhere = other.client.get(
            f"/v1/requests/{answer['id']}/explain", headers={"x-tenant": "eve"}
        )
        assert elsewhere.status_code == 404


@pytest.mark.parametrize(
    "name", ["headwater_tenant_tokens_total", "headwater_request_prompt_tokens_count"]
)
def test_tokens_are_counted_by_tenant_and_model(gateway: Gateway, name: str) -> None:
    before = gateway.metric(name)
    gateway.complete()
    assert gateway.metric(name) > before


def test_log_lines_of_a_request_carry_its_ids(
    text_folder: Path, behind: Behind, start_gateway: GatewayStarter
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with start_gateway(behind, "--log-level=info") as gateway:
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-tenant": "ada"}
        answer = gateway.client.post(
            "/v1/completions", json=completion_body(), headers=headers
        ).json()
        log = gateway.stage.close()
    lines = [json.loads(line) for line in log.splitlines()]
    (line,) = (line for line in lines if line["event"] == "request")
    reported = (line["request_id"], line["trace_id"], line["tenant"], line["attempt"])
    assert reported == (answer["id"][5:], trace, "ada", 1)
