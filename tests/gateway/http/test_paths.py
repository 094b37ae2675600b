"""Paths behind a proxy, and with a slash at their end."""

from __future__ import annotations

import re

import pytest

from headwater.gateway.settings import GatewaySettings
from headwater.services.runtime.settings import SettingError
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body


def test_a_slash_at_the_end_of_a_path_says_nothing(gateway: Gateway) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/v1/chat/completions"):
        is_chat = path.endswith("completions")
        method, body = ("POST", chat_body(max_tokens=1)) if is_chat else ("GET", None)
        assert gateway.client.request(method, f"{path}/", json=body).status_code == 200, path
    assert gateway.client.get("/v1/none/").status_code == 404
    refused = gateway.client.post("/v1/messages/", json={}).json()
    assert refused["type"] == "error", "the envelope is that of the path"


def test_a_root_path_is_served_whether_or_not_a_proxy_takes_it_off(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--root-path=/team/llm") as gateway:
        for path in (
            "/v1/models",
            "/team/llm/v1/models",
            "/team/llm/v1/models/",
            "/team/llm/api/tags",
        ):
            assert gateway.client.get(path).status_code == 200, path
        assert gateway.client.post("/team/llm/v1/chat/completions", json=chat_body()).is_success
        refused = gateway.client.post("/team/llm/v1/messages", json={}).json()
        assert refused["type"] == "error"
        for path in ("/team/llmv1/models", "/other/v1/models", "/team/llm/team/llm/v1/models"):
            assert gateway.client.get(path).status_code == 404, path
        document = gateway.client.get("/team/llm/openapi.json").json()
        assert document["servers"] == [{"url": "/team/llm"}]


def addresses_of(gateway: Gateway, page: str, **headers: str) -> set[str]:
    """Addresses that a page loads or links, and the server that the API's description names."""
    text = gateway.client.get(page, headers=headers).text
    document = gateway.client.get("/openapi.json", headers=headers).json()
    return {*re.findall(r'(?:href|src)="(/[^"]*)"', text), document["servers"][0]["url"]}


def test_pages_load_what_they_need_below_the_root_path(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--root-path=/team/llm") as gateway:
        for page in ("/", "/team/llm/", "/team/llm/docs"):
            addresses = addresses_of(gateway, page)
            assert {"/team/llm", "/team/llm/console/console.css"} <= addresses
            assert all(address.startswith("/team/llm") for address in addresses)
            assert all(gateway.client.get(address).is_success for address in addresses)
        # Only a proxy that is trusted says where it serves the gateway.
        assert "/team/llm" in addresses_of(gateway, "/", **{"x-forwarded-prefix": "/other"})


def test_a_trusted_proxy_names_the_path_of_each_request(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--trust-forwarded-prefix") as gateway:
        assert "/" in addresses_of(gateway, "/docs")
        for prefix in ("/a/b", "/a/b/"):
            addresses = addresses_of(gateway, "/docs", **{"x-forwarded-prefix": prefix})
            assert {"/a/b", "/a/b/", "/a/b/console/api.js"} <= addresses
            assert all(address.startswith("/a/b") for address in addresses)
        for forged in ('/"><script>', "//evil.example", "https://evil.example", "/a b"):
            addresses = addresses_of(gateway, "/docs", **{"x-forwarded-prefix": forged})
            assert {"/", "/console/api.js"} <= addresses


@pytest.mark.parametrize("root", ["llm", "/llm/", "/", "/a//b", "/a?b"])
def test_a_root_path_begins_with_a_slash_and_ends_with_none(root: str) -> None:
    with pytest.raises(SettingError, match="root"):
        GatewaySettings(root_path=root)
