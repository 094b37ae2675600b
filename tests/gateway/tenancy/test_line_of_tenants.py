"""Tenants on a running gateway: made over /admin and the command line, held to their limits, told
of in records."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from headwater.services.cli.__main__ import app as command_line
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, UNDRAFTED, Behind, Gateway, chat_body, completion_body

ADMIN = "admin-key-of-the-house"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True} | UNDRAFTED


@pytest.fixture(scope="module")
def administered(
    nats_url: str, shared_redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """Flags of a gateway whose tenants are managed."""
    path = tmp_path_factory.mktemp("keys") / "admins"
    path.write_text(f"carol {ADMIN}\n")
    return (f"--nats-url={nats_url}", f"--redis-url={shared_redis_url}", f"--admin-key-file={path}")


@pytest.fixture(scope="module")
def managed(
    behind: Behind, start_gateway: GatewayStarter, administered: tuple[str, ...]
) -> Iterator[Gateway]:
    with start_gateway(
        behind, *administered, "--master-key=0123456789abcdef", "--log-level=info"
    ) as gateway:
        yield gateway


def admin(
    gateway: Gateway, method: str, path: str, body: Any = None, key: str = ADMIN
) -> httpx.Response:
    return gateway.client.request(
        method, f"/admin{path}", json=body, headers={"authorization": f"Bearer {key}"}
    )


class Customer:
    """A tenant with its key."""

    def __init__(self, gateway: Gateway, **settings: Any) -> None:
        self.gateway = gateway
        self.id = f"t-{uuid.uuid4().hex[:8]}"
        made = admin(gateway, "POST", "/tenants", {"id": self.id, **settings})
        assert made.status_code == 201, made.text
        self.key = made.json()["key"]
        gateway.wait_until(lambda: self.get("/v1/models").status_code == 200)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def get(self, path: str) -> httpx.Response:
        return self.gateway.client.get(path, headers=self.headers)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.gateway.client.post(path, json=body, headers=self.headers)


def test_a_tenant_is_made_changed_rotated_and_removed(managed: Gateway) -> None:
    ada = Customer(managed, weight=2.0, limits={"requests_per_minute": 100})
    assert ada.post(CHAT, chat_body()).status_code == 200
    assert managed.client.post(CHAT, json=chat_body()).status_code == 401
    changed = admin(
        managed,
        "PATCH",
        f"/tenants/{ada.id}",
        {"tier": 3, "ttft_goal_ms": 800, "limits": {"concurrency": 7}},
    ).json()
    assert (changed["tier"], changed["ttft_goal_ms"], changed["limits"]) == (
        3,
        800,
        {"requests_per_minute": 100, "concurrency": 7},
    )
    lifted = admin(
        managed, "PATCH", f"/tenants/{ada.id}", {"limits": {"requests_per_minute": None}}
    ).json()
    assert lifted["limits"] == {"concurrency": 7}
    old = ada.key
    ada.key = admin(managed, "POST", f"/tenants/{ada.id}/keys", {"expire_others_after": 0}).json()[
        "key"
    ]
    managed.wait_until(lambda: ada.get("/v1/models").status_code == 200)
    assert (
        managed.client.get("/v1/models", headers={"authorization": f"Bearer {old}"}).status_code
        == 401
    )
    assert admin(managed, "DELETE", f"/tenants/{ada.id}").json()["deleted"] is True
    managed.wait_until(lambda: ada.get("/v1/models").status_code == 401)
    assert admin(managed, "GET", f"/tenants/{ada.id}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/tenants", {"id": "a b"}, 400),
        ("POST", "/tenants", {"id": "a", "limits": {"requests": 1}}, 400),
        ("POST", "/tenants", {"id": "a", "weight": 0}, 400),
        ("PATCH", "/tenants/nobody", {"tier": 1}, 404),
        ("DELETE", "/tenants/nobody", None, 404),
        ("GET", "/tenants/nobody/usage?days=0", None, 400),
        ("GET", "/tenants/nobody/usage?days=00040099999999999", None, 400),
    ],
)
def test_what_administration_cannot_do_is_refused_by_name(
    managed: Gateway, method: str, path: str, body: Any, status: int
) -> None:
    reply = admin(managed, method, path, body)
    assert (reply.status_code, reply.json()["error"]["param"] is not None) == (status, True), (
        reply.text
    )


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        (
            {"limits": {"concurrency": "x"}},
            "limits.concurrency",
            "is 'x'; allowed: a whole number, 0…",
        ),
        ({"limits": {"budget": -1}}, "limits.budget", "is -1; allowed: a whole number, 0…"),
        (
            {"limits": {"budget_period": "year"}},
            "limits.budget_period",
            "is 'year'; allowed: day or month",
        ),
        (
            {"limits": {"requests": 1}},
            "limits.requests",
            "is no field that exists; allowed: requests_per_minute, tokens",
        ),
        (
            {"models": {"a/b.c": {"budget": 1.5}}},
            "models.a/b.c.budget",
            "is 1.5; allowed: a whole number, 0…",
        ),
        ({"models": {"m": 3}}, "models", "allowed: an object or null"),
        ({"weight": 0}, "weight", "is 0; allowed: a number above 0, up to 1000"),
        ({"tier": 101}, "tier", "is 101; allowed: a whole number, 0…100"),
        (
            {"tpot_goal_ms": -1},
            "tpot_goal_ms",
            "is -1; allowed: a whole number of milliseconds, 0…",
        ),
        ({"color": "red"}, "color", "is no field that exists; allowed: weight, tier"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_its_place_value_and_what_is_allowed(
    managed: Gateway, change: dict[str, Any], param: str, message: str
) -> None:
    ada = Customer(managed)
    reply = admin(managed, "PATCH", f"/tenants/{ada.id}", change)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), reply.text
    assert error["message"].startswith(f"{param} ")
    assert message in error["message"]


def test_only_administrators_administer_and_each_change_is_on_record(managed: Gateway) -> None:
    ada = Customer(managed)
    assert admin(managed, "GET", "/tenants", key=ada.key).status_code == 403
    assert admin(managed, "DELETE", f"/tenants/{ada.id}", key="not-a-key").status_code == 403
    assert managed.client.get("/admin/tenants").status_code == 401
    admin(managed, "PATCH", f"/tenants/{ada.id}", {"weight": 4})
    records = [
        each for each in admin(managed, "GET", "/audit").json()["data"] if each["tenant"] == ada.id
    ]
    assert [(each["admin"], each["action"]) for each in records] == [
        ("carol", "add"),
        ("carol", "set"),
    ]
    assert records[1]["change"] == {"weight": 4.0}
    shown = json.dumps(records) + admin(managed, "GET", f"/tenants/{ada.id}").text
    assert ada.key.split("-", 2)[2] not in shown
    assert "digest" not in shown


def test_an_administrator_s_key_may_come_in_x_api_key(managed: Gateway) -> None:
    def status(key: str) -> int:
        return managed.client.get("/admin/tenants", headers={"x-api-key": key}).status_code

    assert (status(ADMIN), status("another")) == (200, 403)


def test_requests_of_a_minute_end_in_429_with_openai_s_headers(managed: Gateway) -> None:
    ada = Customer(managed, limits={"requests_per_minute": 3, "tokens_per_minute": 100_000})
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: ada.post(CHAT, chat_body()), range(8)))
    seconds = time.monotonic() - began
    assert sorted(reply.status_code for reply in replies) == [200] * 3 + [429] * 5
    answered = [reply for reply in replies if reply.status_code == 200]
    assert sorted(reply.headers["x-ratelimit-remaining-requests"] for reply in answered) == [
        "0",
        "1",
        "2",
    ]
    assert {reply.headers["x-ratelimit-limit-tokens"] for reply in replies} == {"100000"}
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 60 - seconds <= int(refused.headers["retry-after"]) <= 65
    with managed.client.stream(
        "POST", CHAT, json=chat_body(stream=True), headers=ada.headers
    ) as stream:
        assert stream.status_code == 429
    # Nothing of its body is read any longer; of another's, on the same connections, all is.
    nonsense = ada.headers | {"content-type": "application/json"}

    def nonsense_behind_a_refusal() -> list[httpx.Response]:
        """A refusal stands for a second, in which a busy machine may not come to the others."""
        assert ada.post(CHAT, chat_body()).status_code == 429
        return [
            managed.client.post(CHAT, content=b"{" * 100_000, headers=nonsense) for _ in range(3)
        ]

    replies = managed.first(
        nonsense_behind_a_refusal,
        lambda replies: {reply.status_code for reply in replies} == {429},
    )
    assert {reply.headers["x-ratelimit-remaining-requests"] for reply in replies} == {"0"}
    assert Customer(managed).post(CHAT, chat_body()).status_code == 200


def test_one_request_of_many_choices_runs_no_more_of_them_at_once_than_its_tenant_may(
    slow_behind: Behind, start_gateway: GatewayStarter, administered: tuple[str, ...]
) -> None:
    with start_gateway(slow_behind, *administered) as slow:
        ada = Customer(slow, limits={"concurrency": 3})
        bob = Customer(slow)
        body = completion_body(["One", "Two", "Three", "Four"], n=3, temperature=1, **LONG)
        # The choices outlast this block, so that none of the three ends and lets a fourth begin.
        with slow.client.stream(
            "POST", COMPLETIONS, json=body | {"stream": True}, headers=ada.headers
        ) as reply:
            assert reply.status_code == 200, reply.read()
            slow.wait_until(lambda: slow.metric("headwater_num_streams") == 3)
            refused = ada.post(COMPLETIONS, completion_body()).json()["error"]
            assert refused["message"].endswith("as many of its choices run as may at once")
            assert bob.post(COMPLETIONS, completion_body()).status_code == 200
            assert slow.metric("headwater_num_requests_running") == 3
        # The seats are free when the gateway has seen that the client left.
        whole = slow.first(
            lambda: ada.post(COMPLETIONS, body | {"max_tokens": 20}),
            lambda reply: reply.status_code == 200,
        )
        assert whole.json()["usage"]["completion_tokens"] == 12 * 20
        beams = completion_body(n=4, use_beam_search=True, temperature=0)
        assert ada.post(COMPLETIONS, beams).status_code == 429, "beams run together or not at all"


def test_a_budget_ends_an_answer_in_its_middle_and_not_a_token_later(managed: Gateway) -> None:
    ada = Customer(managed, limits={"budget": 100, "budget_period": "day"})
    prompt = [500 + i for i in range(20)]
    body = completion_body(
        prompt, max_tokens=300, ignore_eos=True, stream=True, return_token_ids=True
    )
    with managed.client.stream("POST", COMPLETIONS, json=body, headers=ada.headers) as stream:
        events = [
            json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")
        ]
    tokens = [
        token
        for event in events
        for choice in event.get("choices", ())
        for token in choice.get("token_ids", ())
    ]
    assert len(tokens) == 80, "what the prompt left"
    assert events[-1]["error"]["code"] == "insufficient_quota"
    assert (
        ada.post(COMPLETIONS, body | {"stream": False}).json()["error"]["code"]
        == "insufficient_quota"
    )
    admin(managed, "PATCH", f"/tenants/{ada.id}", {"limits": {"budget": 10_000}})
    managed.wait_until(lambda: ada.post(COMPLETIONS, completion_body(prompt)).status_code == 200)


@pytest.mark.long
def test_a_long_answer_goes_on_while_its_limits_give_more(managed: Gateway) -> None:
    ada = Customer(managed, limits={"tokens_per_minute": 50_000, "budget": 10_000})
    reply = ada.post(COMPLETIONS, completion_body([7] * 10, max_tokens=1200, ignore_eos=True))
    assert reply.json()["usage"]["completion_tokens"] == 1200, reply.text


def test_what_a_request_used_is_one_record_and_the_command_line_shows_it(
    managed: Gateway, tmp_path: Path
) -> None:
    runner = CliRunner()
    env = {
        "HEADWATER_ADMIN_KEY": ADMIN,
        "HEADWATER_BASE_URL": managed.rest,
        "HEADWATER_STATE_DIR": str(tmp_path),
    }
    name = f"c-{uuid.uuid4().hex[:8]}"

    def tenant(*words: str) -> str:
        done = runner.invoke(command_line, ["tenant", *words], env=env)
        assert done.exit_code == 0, done.output
        return done.output

    key = tenant("add", name, "--requests-per-minute=9", "--weight=3").strip()
    headers = {"authorization": f"Bearer {key}"}
    managed.wait_until(lambda: managed.client.get("/v1/models", headers=headers).status_code == 200)
    used = [
        managed.client.post(CHAT, json=chat_body(), headers=headers).json()["usage"]
        for _ in range(2)
    ]
    batch = managed.client.post(
        COMPLETIONS, json=completion_body(["One", "Two"]), headers=headers
    ).json()["usage"]
    managed.wait_until(
        lambda: sum(row["requests"] for row in json.loads(tenant("usage", name, "--json"))) >= 3
    )
    [row] = json.loads(tenant("usage", name, "--json"))
    assert (row["model"], row["requests"]) == (MODEL, 3)
    assert row["output_tokens"] == sum(each["completion_tokens"] for each in (*used, batch))
    assert row["prompt_tokens"] == sum(each["prompt_tokens"] for each in (*used, batch))
    tenant("set", name, "--tokens-per-minute=500", "--requests-per-minute=-1", "--shared-cache")
    tenant("set", name, "--model=m", "--concurrency=2")
    tenant("set", name, "--file-bytes=1000", "--response-bytes=2000")
    tenant("set", name, "--response-bytes=-1")
    shown = json.loads(tenant("show", name, "--json"))
    assert shown["limits"] == {"tokens_per_minute": 500}
    assert shown["models"] == {"m": {"concurrency": 2}}
    assert shown["shared_cache"] is True
    assert (shown["file_bytes"], shown["response_bytes"]) == (1000, None)
    assert name in tenant("list")
    assert tenant("rotate-key", name, "--grace=60").strip() != key
    for_people = tenant("show", name)
    assert "tokens per minute 500" in for_people
    assert "m: concurrency 2" in for_people
    assert "UTC" in for_people, "the end of the key that was replaced"
    tenant("remove", name)
    assert runner.invoke(command_line, ["tenant", "show", name], env=env).exit_code != 0


def test_an_administrator_may_ask_in_a_tenant_s_name_and_a_tenant_may_not(managed: Gateway) -> None:
    ada = Customer(managed, limits={"requests_per_minute": 1})
    bob = Customer(managed)
    headers = {"authorization": f"Bearer {ADMIN}", "x-tenant": ada.id}
    assert managed.client.post(CHAT, json=chat_body(), headers=headers).status_code == 200
    assert managed.client.post(CHAT, json=chat_body(), headers=headers).status_code == 429
    named = bob.headers | {"x-tenant": ada.id}
    assert managed.client.post(CHAT, json=chat_body(), headers=named).status_code == 200


def test_tenants_that_share_their_cache_hit_each_other_s_prefixes_and_no_others(
    managed: Gateway,
) -> None:
    ada = Customer(managed, shared_cache=True)
    bob = Customer(managed, shared_cache=True)
    eve = Customer(managed)
    body = chat_body(f"{uuid.uuid4()} The mountain stands. " * 20)

    def hits(customer: Customer) -> int:
        usage = customer.post(CHAT, body).json()["usage"]
        return int((usage["prompt_tokens_details"] or {})["cached_tokens"])

    assert hits(ada) == hits(eve) == 0
    assert hits(bob) > 0


def test_a_tenant_s_secrets_are_in_no_log_and_no_metric(managed: Gateway) -> None:
    ada = Customer(managed)
    reply = managed.client.post(
        CHAT, json=chat_body(), headers=ada.headers | {"x-headwater-receipt": "1"}
    )
    secret = ada.key.split("-", 2)[2]
    assert secret not in reply.text
    assert secret not in managed.client.get("/metrics").text


def test_metrics_name_tenants_to_administrators_and_on_a_port_of_their_own(
    managed: Gateway, behind: Behind, start_gateway: GatewayStarter, tmp_path: Path
) -> None:
    ada = Customer(managed)
    name = "headwater_tenant_tokens_total"
    assert ada.post(CHAT, chat_body()).status_code == 200
    reported = {
        who: managed.client.get(
            "/metrics", headers={"authorization": f"Bearer {key}"} if key else {}
        ).text
        for who, key in (("nobody", ""), ("ada", ada.key), ("admin", ADMIN))
    }
    assert f'tenant="{ada.id}"' in reported["admin"]
    for who in ("nobody", "ada"):
        assert (name in reported[who], "tenant=" in reported[who]) == (False, False)
        assert "headwater_prompt_tokens_total" in reported[who]
    keys = tmp_path / "keys"
    keys.write_text("eve a-key-of-eve\n")
    with start_gateway(behind, f"--api-key-file={keys}", "--metrics-port=0") as gateway:
        headers = {"authorization": "Bearer a-key-of-eve"}
        assert gateway.client.post(CHAT, json=chat_body(), headers=headers).status_code == 200
        assert name not in gateway.client.get("/metrics", headers=headers).text
        own = httpx.get(f"http://{gateway.stage.addresses['metrics']}/metrics", timeout=60).text
        assert f'{name}{{kind="output",tenant="eve"}} 8.0' in own


def test_a_stream_that_is_resumed_is_charged_once_and_is_its_tenant_s_alone(
    managed: Gateway,
) -> None:
    ada = Customer(managed, limits={"budget": 5000, "budget_period": "day"})
    bob = Customer(managed)
    # More than a lease.
    body = completion_body(
        [500 + i for i in range(20)], max_tokens=1200, ignore_eos=True, stream=True
    )
    body["stream_options"] = {"resumable": True}
    with managed.client.stream("POST", COMPLETIONS, json=body, headers=ada.headers) as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data: {"))
    path = f"/v1/streams/{json.loads(first[6:])['id']}"
    assert bob.get(path).json()["error"]["code"] == "stream_not_found"
    for after in ("1", "0"):
        with managed.client.stream(
            "GET", path, headers=ada.headers | {"last-event-id": after}
        ) as rest:
            assert rest.status_code == 200, rest.read()
            assert list(rest.iter_lines())[-2].endswith("data: [DONE]")
    usage = f"/tenants/{ada.id}/usage"
    managed.wait_until(
        lambda: (
            sum(row["output_tokens"] for row in admin(managed, "GET", usage).json()["data"]) >= 1200
        )
    )
    [row] = admin(managed, "GET", usage).json()["data"]
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (1, 20, 1200)
    # What is left of the budget: 3,780 tokens, one of them for an answer.
    assert ada.post(COMPLETIONS, completion_body([7] * 3780, max_tokens=1)).status_code == 429
    assert ada.post(COMPLETIONS, completion_body([7] * 3779, max_tokens=1)).status_code == 200
