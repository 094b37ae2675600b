"""Paths of tenants on a gateway that keeps none."""

from __future__ import annotations

import pytest

from tests.gateway.processes import Gateway


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/tenants"),
        ("POST", "/admin/tenants/ada/keys"),
        ("DELETE", "/admin/tenants/ada"),
    ],
)
def test_without_administrators_a_list_of_tenants_is_refused_with_how_to_have_them(
    gateway: Gateway, method: str, path: str
) -> None:
    reply = gateway.client.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "path_not_found")
    assert error["message"].endswith(
        "gateways have it that are started with --admin-key-file or HEADWATER_ADMIN_KEY"
    )
