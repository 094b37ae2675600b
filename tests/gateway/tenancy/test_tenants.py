"""Who asks: open tenants by name, keyed tenants by key, over REST and gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from headwater.gateway.tenancy.tenants import KeyedTenants, OpenTenants, Tenant
from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.runtime.errors import BadRequest, Unauthenticated
from headwater.services.runtime.settings import SettingError
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, chat_body

KEYS = "# keys\nada key-of-ada\n\nbob key-of-bob\nada second-key-of-ada\n"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


def test_without_keys_a_caller_is_the_open_tenant_or_the_one_that_it_names() -> None:
    assert OpenTenants().identify("", "") == Tenant(id="open")
    assert OpenTenants().identify("Bearer whatever", "team-7") == Tenant(id="team-7")
    for name in ("a b", "-a", "a" * 65, "é"):
        with pytest.raises(BadRequest, match="x-tenant is"):
            OpenTenants().identify("", name)


def test_with_keys_the_key_names_the_tenant_and_the_header_does_not(key_file: Path) -> None:
    tenants = KeyedTenants.read(key_file)
    assert tenants.identify("Bearer key-of-bob", "ada").id == "bob"
    assert tenants.identify("bearer second-key-of-ada", "").id == "ada"
    tenants.check(Tenant(id="bob"))
    with pytest.raises(Unauthenticated):
        tenants.check(Tenant(id="eve"))
    for header in ("", "Bearer", "Bearer ", "Basic key-of-ada", "Bearer key-of-eve", "key-of-ada"):
        with pytest.raises(Unauthenticated):
            tenants.identify(header, "ada")


def test_keys_are_kept_as_digests_only(key_file: Path) -> None:
    tenants = KeyedTenants.read(key_file)
    assert "key-of" not in repr(tenants)
    assert not any(b"key-of" in digest for digest in tenants.tenants)


@pytest.mark.parametrize("text", ["", "# nobody\n", "ada\n", "ada key more\n", "a/b key\n"])
def test_a_key_file_that_says_nothing_clear_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(SettingError, match="api-key-file"):
        KeyedTenants.read(path)


def test_keys_guard_both_surfaces_and_separate_caches(
    behind: Behind, start_gateway: GatewayStarter, key_file: Path
) -> None:
    with start_gateway(behind, f"--api-key-file={key_file}") as gateway:
        path = "/v1/chat/completions"
        body = chat_body("The mountain stands. " * 20)
        refused = gateway.client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )
        assert gateway.client.get("/v1/models").status_code == 401
        assert gateway.client.get("/health").status_code == 200
        cached = [
            gateway.client.post(path, json=body, headers={"authorization": f"Bearer {key}"}).json()[
                "usage"
            ]
            for key in ("key-of-ada", "second-key-of-ada", "key-of-bob")
        ]
        found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in cached]
        assert found[0] == found[2] == 0
        assert found[1] > 0
        with grpc.insecure_channel(gateway.grpc) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            assert stub.ListModels(
                inference_pb2.ListModelsRequest(),
                metadata=(("authorization", "Bearer key-of-bob"),),
            )
            with pytest.raises(grpc.RpcError) as raised:
                stub.ListModels(inference_pb2.ListModelsRequest())
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
