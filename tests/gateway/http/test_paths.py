"""Paths behind a proxy, and with a slash at their end."""

from __future__ import annotations

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


@pytest.mark.parametrize("root", ["llm", "/llm/", "/", "/a//b", "/a?b"])
def test_a_root_path_begins_with_a_slash_and_ends_with_none(root: str) -> None:
    with pytest.raises(SettingError, match="root"):
        GatewaySettings(root_path=root)
