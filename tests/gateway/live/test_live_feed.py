"""What watchers are told of a cluster: everything for administrators, for others their own tenant,
text for nobody."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.gateway.live.live_feed import MAX_OF_TENANT, MAX_WATCHERS
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    chat_body,
    engine_stage,
    started,
)

ADMIN = {"authorization": "Bearer admin-key-of-the-house"}
ADA = {"authorization": "Bearer key-of-ada"}
GRACE = {"authorization": "Bearer key-of-grace"}
SECRET_WORD = "quicksilver"


@pytest.fixture(scope="module")
def keyed(
    slow_behind: Behind,
    start_gateway: GatewayStarter,
    nats_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gateway]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ada key-of-ada\ngrace key-of-grace\n")
    flags = (
        f"--nats-url={nats_url}",
        f"--admin-key={ADMIN['authorization'][7:]}",
        f"--api-key-file={keys}",
    )
    with start_gateway(slow_behind, *flags) as gateway:
        yield gateway


def snapshot(gateway: Gateway, headers: dict[str, str]) -> dict[str, Any]:
    reply = gateway.client.get("/console/live?once=1", headers=headers)
    assert reply.status_code == 200, reply.text
    assert SECRET_WORD not in reply.text
    reported: dict[str, Any] = reply.json()
    return reported


def chat(gateway: Gateway, headers: dict[str, str]) -> None:
    body = chat_body(f"Say {SECRET_WORD} to a river.", max_tokens=4, ignore_eos=True)
    reply = gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text


@contextlib.contextmanager
def answering(gateway: Gateway, headers: dict[str, str]) -> Iterator[None]:
    """An answer that runs for the length of a scope: longer than any machine is slow."""
    body = chat_body(
        f"Say {SECRET_WORD} to a river.", max_tokens=6000, ignore_eos=True, stream=True, **UNDRAFTED
    )
    with gateway.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        yield


def test_without_a_key_the_feed_is_refused(keyed: Gateway) -> None:
    assert keyed.client.get("/console/live").status_code == 401
    wrong = {"authorization": "Bearer nobody-knows-this"}
    assert keyed.client.get("/console/live", headers=wrong).status_code == 401


def test_a_tenant_sees_itself_and_no_other_and_no_process(keyed: Gateway) -> None:
    chat(keyed, ADA)
    chat(keyed, GRACE)
    reported = snapshot(keyed, ADA)
    assert reported["caller"] == {"name": "ada", "is_admin": False, "has_keys": True}
    assert [row["id"] for row in reported["tenants"]] == ["ada"]
    assert {row["tenant"] for row in reported["recent"]} == {"ada"}
    assert reported.keys().isdisjoint({"replicas", "stages", "prefixes", "event_lag"})
    assert "grace" not in json.dumps(reported)
    assert reported["totals"]["output_tokens"] == reported["tenants"][0]["output_tokens"] >= 4


def test_a_tenant_of_the_same_name_sees_nothing_of_the_other(keyed: Gateway) -> None:
    chat(keyed, ADA)
    added = keyed.client.post("/admin/tenants", json={"id": "ada"}, headers=ADMIN)
    assert added.status_code == 201, added.text
    other = {"authorization": f"Bearer {added.json()['key']}"}
    keyed.wait_until(
        lambda: keyed.client.get("/console/live?once=1", headers=other).status_code == 200
    )
    reported = snapshot(keyed, other)
    assert (reported["totals"]["output_tokens"], reported["recent"]) == (0, [])
    rows = [row for row in snapshot(keyed, ADMIN)["tenants"] if row["id"] == "ada"]
    assert sorted(bool(row["output_tokens"]) for row in rows) == [False, True]
    assert keyed.client.delete("/admin/tenants/ada", headers=ADMIN).status_code == 200


def test_counts_of_a_model_are_a_tenants_own_and_engines_are_not_counted(keyed: Gateway) -> None:
    keyed.wait_until(lambda: snapshot(keyed, ADMIN)["requests"] == [])
    with answering(keyed, ADA):
        keyed.wait_until(lambda: snapshot(keyed, ADMIN)["models"][0]["num_requests"] == 1)
        (hers,), (others,) = (snapshot(keyed, key)["models"] for key in (ADA, GRACE))
    assert (hers["num_requests"], others["num_requests"]) == (1, 0)
    assert (hers["replicas"], snapshot(keyed, ADMIN)["models"][0]["replicas"]) == (None, 1)


def test_an_administrator_sees_all_and_no_text(keyed: Gateway) -> None:
    chat(keyed, ADA)
    chat(keyed, ADA)
    # On a busy machine the findings name late stages as missing until these answer.
    reported = keyed.first(
        lambda: snapshot(keyed, ADMIN), lambda reported: reported["findings"] == []
    )
    assert {"ada", "grace"} <= {row["id"] for row in reported["tenants"]}
    (replica,) = reported["replicas"]
    assert (replica["state"], replica["model"]) == ("serving", MODEL)
    assert {row["kind"] for row in reported["stages"]} >= {"processor", "output_processor"}
    assert [row["id"] for row in reported["models"]] == [MODEL]
    (row, *_) = reported["recent"]
    assert (row["state"], row["output_tokens"], row["replica"]) == ("done", 4, replica["id"])
    assert replica["routed_tokens"] >= replica["cached_tokens"] > 0


def test_counters_move_while_an_answer_runs_and_the_request_is_seen_with_its_state(
    keyed: Gateway,
) -> None:
    keyed.wait_until(lambda: snapshot(keyed, ADMIN)["requests"] == [])
    before = snapshot(keyed, ADMIN)["totals"]["output_tokens"]
    with (
        answering(keyed, ADA),
        keyed.client.stream("GET", "/console/live", headers=ADMIN, timeout=60) as reply,
    ):
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
        running = next(
            reported
            for reported in events
            if any(row["output_tokens"] for row in reported["requests"])
        )
        grown = next(
            reported for reported in events if reported["totals"]["output_tokens"] > before + 40
        )
    (row,) = running["requests"]
    assert (row["tenant"], row["state"], row["model"]) == ("ada", "decode", MODEL)
    assert row["seconds"]["total"] > row["seconds"]["to_first_token"]
    assert grown["at"] >= running["at"]


def test_an_engine_that_leaves_is_gone_and_missing_stages_are_named(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> None:
    engine = engine_stage(f"--nats-url={nats_url}", "--replica-id=watched")
    with started(engine):
        alone = Behind(behind.processor, behind.output_processor, (engine.address,))
        with start_gateway(
            alone, f"--admin-key={ADMIN['authorization'][7:]}", f"--nats-url={nats_url}"
        ) as gateway:

            def ids() -> list[str]:
                return [
                    row["id"]
                    for row in snapshot(gateway, ADMIN)["replicas"]
                    if row["model"] == MODEL
                ]

            gateway.wait_until(lambda: "watched" in ids())
            engine.kill()
            gateway.wait_until(lambda: "watched" not in ids())


def gateways_of(reported: dict[str, Any], rows: str) -> list[str]:
    return [row["gateway"] for row in reported[rows]]


def gateways_running(reported: dict[str, Any]) -> list[str]:
    """Gateways of the requests that run; the other requests are queued."""
    return gateways_of(reported, "requests")[: int(reported["totals"]["num_running"])]


def test_each_of_two_gateways_shows_the_requests_of_both(
    keyed: Gateway,
    slow_behind: Behind,
    start_gateway: GatewayStarter,
    nats_url: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "keys").write_text("ada key-of-ada\ngrace key-of-grace\n")
    flags = (
        f"--nats-url={nats_url}",
        f"--admin-key={ADMIN['authorization'][7:]}",
        f"--api-key-file={tmp_path}/keys",
    )
    with start_gateway(slow_behind, *flags) as other:
        name = snapshot(other, ADMIN)["gateway"]
        keyed.wait_until(
            lambda: name in [each["id"] for each in snapshot(keyed, ADMIN)["gateways"]]
        )
        # Both gateways have removed the engines that other tests killed.
        before, _ = (
            gateway.first(
                lambda gateway=gateway: snapshot(gateway, ADMIN),
                lambda reported: len(reported["replicas"]) == 1,
            )  # type: ignore[misc]
            for gateway in (keyed, other)
        )
        chat(other, ADA)
        with answering(other, GRACE):
            # Each snapshot asks the other gateway again. If that one is late, its last answer
            # counts, or none.
            reported, his = (
                keyed.first(
                    lambda key=key: snapshot(keyed, key),
                    lambda reported: gateways_running(reported) == [name],
                )  # type: ignore[misc]
                for key in (ADMIN, GRACE)
            )
            hers = keyed.first(
                lambda: snapshot(keyed, ADA),
                lambda reported: gateways_of(reported, "recent")[:1] == [name],
            )
            (request,) = reported["requests"]
            explained = keyed.first(
                lambda: keyed.client.get(f"/v1/requests/{request['id']}/explain", headers=GRACE),
                lambda reply: reply.status_code == 200,
            )
            hidden = keyed.client.get(f"/v1/requests/{request['id']}/explain", headers=ADA)
        keyed.wait_until(lambda: snapshot(keyed, ADMIN)["requests"] == [])
    assert (request["tenant"], explained.json()["gateway"], hidden.status_code) == (
        "grace",
        name,
        404,
    )
    (replica,), (replica_before,) = reported["replicas"], before["replicas"]
    assert replica["routed_tokens"] > replica_before["routed_tokens"]
    assert reported["totals"]["num_running"] == 1
    assert reported["models"][0]["num_requests"] == 1
    assert reported["totals"]["output_tokens"] >= before["totals"]["output_tokens"] + 4
    assert reported["recent"][0]["gateway"] == name
    assert reported["recent"][0]["tenant"] == "ada"
    # A tenant sees its own on both, and nothing of the other.
    assert (hers["requests"], hers["recent"][0]["gateway"]) == ([], name)
    assert hers["tenants"][0]["output_tokens"] == hers["totals"]["output_tokens"] >= 4
    assert ([row["tenant"] for row in his["requests"]], his["totals"]["num_running"]) == (
        ["grace"],
        1,
    )
    assert his["models"][0]["num_requests"] == 1
    # In quotes: the letters are hexadecimal digits too, of which ids are made.
    assert '"ada"' not in json.dumps(his)
    keyed.wait_until(
        lambda: [each["id"] for each in snapshot(keyed, ADMIN)["gateways"]] == [before["gateway"]]
    )


def test_requests_that_have_ended_are_shown_in_the_order_of_their_ends(keyed: Gateway) -> None:
    keyed.wait_until(lambda: snapshot(keyed, ADMIN)["requests"] == [])
    with answering(keyed, ADA):
        keyed.first(
            lambda: snapshot(keyed, ADA)["requests"],
            lambda rows: any(row["seconds"]["total"] > 2 and row["output_tokens"] for row in rows),
        )
    keyed.wait_until(lambda: snapshot(keyed, ADMIN)["requests"] == [])
    chat(keyed, ADA)
    short, long, *_ = snapshot(keyed, ADA)["recent"]
    assert (short["state"], short["output_tokens"]) == ("done", 4)
    assert (long["state"], long["seconds"]["total"] > 2) == ("cancelled", True)


def test_watchers_are_bounded(keyed: Gateway) -> None:
    with (
        httpx.Client(
            base_url=keyed.rest, timeout=60, limits=httpx.Limits(max_connections=None)
        ) as client,
        contextlib.ExitStack() as watching,
    ):
        streams = [
            client.stream("GET", "/console/live", headers=ADMIN) for _ in range(MAX_WATCHERS)
        ]
        # An iterator that is dropped closes its response.
        lines = [watching.enter_context(stream).iter_lines() for stream in streams]
        assert all(next(each).startswith("data: ") for each in lines)
        refused = client.get("/console/live?once=1", headers=ADMIN)
    assert refused.status_code == 429
    keyed.wait_until(
        lambda: keyed.client.get("/console/live?once=1", headers=ADMIN).status_code == 200
    )


def test_a_tenant_takes_no_watchers_places_from_administrators_and_other_tenants(
    keyed: Gateway,
) -> None:
    def status(headers: dict[str, str]) -> int:
        return keyed.client.get("/console/live?once=1", headers=headers).status_code

    with contextlib.ExitStack() as watching:
        streams = [
            keyed.client.stream("GET", "/console/live", headers=ADA) for _ in range(MAX_OF_TENANT)
        ]
        lines = [watching.enter_context(stream).iter_lines() for stream in streams]
        assert all(next(each).startswith("data: ") for each in lines)
        assert (status(ADA), status(GRACE), status(ADMIN)) == (429, 200, 200)
    keyed.wait_until(lambda: status(ADA) == 200)
