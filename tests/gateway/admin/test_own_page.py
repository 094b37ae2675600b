"""What web pages may do on a gateway without keys: its own console everything, pages of others
nothing."""

from __future__ import annotations

import pytest

from tests.gateway.processes import Gateway

DRAIN = "/admin/replicas/nobody/drain"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"sec-fetch-site": "same-origin"}, "replica_not_found"),
        ({"sec-fetch-site": "same-site"}, "permission_denied"),
        ({}, "permission_denied"),
    ],
    ids=["console", "same-site", "old-browser"],
)
def test_a_page_changes_things_only_as_the_gateways_own(
    gateway: Gateway, headers: dict[str, str], code: str
) -> None:
    reply = gateway.client.post(DRAIN, json={}, headers={"origin": gateway.rest} | headers)
    assert reply.json()["error"]["code"] == code


def test_a_page_of_another_origin_does_not_reach_it_whatever_it_says(gateway: Gateway) -> None:
    headers = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    for method, path in (("POST", DRAIN), ("GET", "/console/live?once=1")):
        reply = gateway.client.request(method, path, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
