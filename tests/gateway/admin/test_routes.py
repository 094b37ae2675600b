"""Paths of models whose names have slashes, and of tenants on a gateway that keeps none."""

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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/admin/models/org/model"),
        ("PATCH", "/admin/models/org/model"),
        ("POST", "/admin/models/org/model/wake"),
    ],
)
def test_a_models_name_may_have_a_slash(gateway: Gateway, method: str, path: str) -> None:
    reply = gateway.client.request(method, path, json={"min_replicas": 1})
    error = reply.json()["error"]
    assert reply.status_code != 405
    assert error["code"] != "path_not_found"
