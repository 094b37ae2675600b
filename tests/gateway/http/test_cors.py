"""Preflights: what browsers ask before a page of another origin may call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, Gateway

ORIGIN = "https://chat.example"
PREFLIGHT = {"origin": ORIGIN, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
ASKED = PREFLIGHT | {"access-control-request-headers": "authorization,content-type,x-request-id"}
OTHERS = [
    "/admin/tenants",
    "/admin/replicas",
    "/admin/models/x",
    "/console/chat.js",
    "/v1/models/",
    "/nowhere",
]


@pytest.fixture(scope="module")
def named(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    with start_gateway(behind, f"--allowed-origins={ORIGIN}") as gateway:
        yield gateway


def paths(gateway: Gateway) -> list[str]:
    return [
        path.replace("{", "").replace("}", "")
        for path in gateway.client.get("/openapi.json").json()["paths"]
    ]


def test_a_preflight_of_an_allowed_origin_is_answered_for_every_route(named: Gateway) -> None:
    for path in [*paths(named), *OTHERS]:
        for method in ("GET", "POST", "PATCH", "DELETE"):
            reply = named.client.options(
                path, headers=ASKED | {"access-control-request-method": method}
            )
            assert reply.status_code == 200, (path, method, reply.text)
            assert reply.headers["access-control-allow-origin"] == ORIGIN
            assert method in reply.headers["access-control-allow-methods"]
            assert (
                reply.headers["access-control-allow-headers"]
                == ASKED["access-control-request-headers"]
            )
            assert "access-control-allow-credentials" not in reply.headers


def test_a_page_may_ask_for_the_private_network_first(named: Gateway) -> None:
    asked = ASKED | {
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    reply = named.client.options("/v1/chat/completions", headers=asked)
    assert (reply.status_code, reply.headers["access-control-allow-private-network"]) == (
        200,
        "true",
    )


def test_a_preflight_of_another_origin_opens_nothing(named: Gateway, gateway: Gateway) -> None:
    asked = ASKED | {"access-control-request-method": "POST"}
    for where, origin in ((named, "https://evil.example"), (gateway, ORIGIN), (gateway, "null")):
        for path in [*paths(where), *OTHERS]:
            reply = where.client.options(path, headers=asked | {"origin": origin})
            assert reply.status_code == 403, path
            assert not [name for name in reply.headers if name.startswith("access-control-")], path
            error = reply.json()["error"]
            # Ollama's API has a sentence there.
            message = error if path.startswith("/api/") else error["message"]
            assert "--allowed-origins" in message


def test_options_is_refused_with_the_name_of_the_setting(gateway: Gateway, named: Gateway) -> None:
    for where in (gateway, named):
        # No preflight, since no browser sends it: there is no method to ask for.
        reply = where.client.options("/v1/chat/completions")
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
        reported = (
            "/v1/chat/completions does not take OPTIONS; allowed: POST; preflights are "
            "answered to pages of"
        )
        assert reply.json()["error"]["message"] == f"{reported} --allowed-origins"
    same = {"origin": gateway.rest, "access-control-request-method": "POST"}
    refused = gateway.client.options("/v1/chat/completions", headers=same)
    assert "--allowed-origins" in refused.json()["error"]["message"]
    assert (
        "--allowed-origins"
        not in gateway.client.put("/v1/chat/completions").json()["error"]["message"]
    )
