"""Adapters of tenants: those that an operator gives to some, and those that tenants bring."""

from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine_core.small_adapters import tensors_of, write_adapter
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body, engine_stage, started

ADMIN = {"authorization": "Bearer an-administrators-key"}
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Tenant:
    """A tenant of a gateway, with a key."""

    gateway: Gateway
    name: str
    headers: dict[str, str]

    def get(self, path: str) -> Any:
        return self.gateway.client.get(path, headers=self.headers).json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.gateway.client.post(path, json=body, headers=self.headers)

    def delete(self, path: str) -> httpx.Response:
        return self.gateway.client.delete(path, headers=self.headers)

    def upload(self, content: bytes) -> str:
        reply = self.gateway.client.post(
            "/v1/files",
            files={"file": ("adapter", content)},
            data={"purpose": "adapter"},
            headers=self.headers,
        )
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    def bring(self, name: str, folder: Path) -> httpx.Response:
        """Serves an adapter of its own from a tar of a folder."""
        return self.post("/v1/adapters", name=name, file_ids=[self.upload(packed(folder))])

    def chat(self, model: str) -> str:
        reply = self.gateway.client.post(CHAT, json=chat_body(model=model), headers=self.headers)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def refusal(self, model: str) -> Any:
        reply = self.gateway.client.post(CHAT, json=chat_body(model=model), headers=self.headers)
        return reply.json()["error"]["message"].replace(model, "NAME")

    @property
    def models(self) -> set[str]:
        return {each["id"] for each in self.get("/v1/models")["data"]}


def packed(folder: Path) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:gz") as archive:
        archive.add(folder, arcname="adapter")
    return into.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("one", "two", "three")):
        write_adapter(base / name, tensors_of(i, num_layers=1))
    write_adapter(base / "dora", tensors_of(9, num_layers=1), use_dora=True)
    return base


@pytest.fixture(scope="module")
def gateway(behind: Behind, start_gateway: GatewayStarter, nats_url: str) -> Iterator[Gateway]:
    engine = engine_stage("--adapter-memory=64", f"--nats-url={nats_url}", "--replica-id=own")
    seen = Behind(behind.processor, behind.output_processor, ())
    flags = (f"--nats-url={nats_url}", f"--admin-key={ADMIN['authorization'][7:]}")
    with (
        started(engine),
        start_gateway(seen, *flags, "--tenant-adapters=2", "--tenant-adapter-bytes=100000") as run,
    ):
        run.client.headers.update(ADMIN)
        run.wait_for_replicas(1)
        yield run
        for card in run.client.get("/admin/adapters").json()["data"]:
            if not card["owner"]:
                run.client.delete(f"/admin/adapters/{card['id']}")


def tenant(gateway: Gateway, **settings: Any) -> Tenant:
    name = f"t-{uuid.uuid4().hex[:8]}"
    added = gateway.client.post("/admin/tenants", json={"id": name} | settings)
    assert added.status_code == 201, added.text
    return Tenant(gateway, name, {"authorization": f"Bearer {added.json()['key']}"})


@pytest.fixture
def two(gateway: Gateway) -> Iterator[tuple[Tenant, Tenant]]:
    both = tenant(gateway), tenant(gateway)
    yield both
    for each in both:
        gateway.client.delete(f"/admin/tenants/{each.name}")


def test_an_operators_adapter_is_there_for_the_tenants_that_it_was_given_to(
    gateway: Gateway, two: tuple[Tenant, Tenant], folder: Path
) -> None:
    ada, bob = two
    body = {"name": "legal", "folder": str(folder / "one"), "base": MODEL}
    given = gateway.client.post("/admin/adapters", json=body | {"tenants": [ada.name]})
    assert given.status_code == 201, given.text
    assert ada.models == {MODEL, "legal"}
    assert bob.models == {MODEL}
    assert ada.chat("legal") != ada.chat(MODEL)
    assert bob.refusal("legal") == bob.refusal("unheard-of")
    assert bob.get("/v1/models/legal")["error"]["code"] == "model_not_found"
    assert bob.post("/tokenize", model="legal", prompt="a").status_code == 404


def test_two_tenants_have_one_name_each_with_its_own_adapter(
    two: tuple[Tenant, Tenant], folder: Path
) -> None:
    ada, bob = two
    brought = ada.bring("support", folder / "one")
    assert brought.status_code == 201, brought.text
    assert bob.models == {MODEL}
    assert bob.refusal("support") == bob.refusal("unheard-of")
    assert bob.delete("/v1/adapters/support").status_code == 404
    assert bob.bring("support", folder / "two").status_code == 201
    base = ada.chat(MODEL)
    assert len({base, ada.chat("support"), bob.chat("support")}) == 3
    [card] = ada.get("/v1/adapters")["data"]
    assert (card["id"], card["rank"]) == ("support", 4)
    assert ada.delete("/v1/adapters/support").status_code == 200
    assert ada.models == {MODEL}
    assert bob.chat("support") != base


def test_both_files_may_be_uploaded_as_they_are(two: tuple[Tenant, Tenant], folder: Path) -> None:
    ada, bob = two
    files = [ada.upload(path.read_bytes()) for path in sorted((folder / "one").iterdir())]
    assert len(files) == 2
    assert ada.post("/v1/adapters", name="plain", file_ids=files).status_code == 201
    assert ada.chat("plain") != ada.chat(MODEL)
    stolen = bob.post("/v1/adapters", name="plain", file_ids=files)
    assert (stolen.status_code, stolen.json()["error"]["param"]) == (404, "file_ids")


def test_tenants_bring_adapters_within_limits(
    gateway: Gateway, two: tuple[Tenant, Tenant], folder: Path
) -> None:
    ada, bob = two
    assert ada.bring("a", folder / "one").status_code == 201
    assert ada.bring("b", folder / "two").status_code == 201
    third = ada.bring("c", folder / "three")
    assert (third.status_code, third.json()["error"]["message"]) == (
        429,
        "the tenant has 2 adapters; allowed: 2",
    )
    # A new version takes the place of the one before.
    before = ada.chat("b")
    assert ada.bring("b", folder / "three").status_code == 201
    assert ada.chat("b") != before
    path = f"/admin/tenants/{bob.name}"
    assert gateway.client.patch(path, json={"adapter_bytes": 1000}).status_code == 200
    assert "at most 1000 bytes" in bob.bring("a", folder / "one").json()["error"]["message"]
    assert gateway.client.patch(path, json={"adapters": 0}).status_code == 200
    refused = bob.bring("a", folder / "one")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        403,
        "the operator lets this tenant bring no adapters: --tenant-adapters is 0",
    )


def test_what_an_engine_refuses_of_a_tenant_leaves_nothing(
    gateway: Gateway, two: tuple[Tenant, Tenant], folder: Path
) -> None:
    ada, _ = two
    for name, content, words in (
        ("x", packed(folder / "dora"), "DoRA is not served"),
        ("x", b"neither a zip nor a tar", "the file cannot be read"),
        (MODEL, packed(folder / "one"), "a name that no model has"),
        ("a\tb", packed(folder / "one"), "name is"),
    ):
        reply = ada.post("/v1/adapters", name=name, file_ids=[ada.upload(content)])
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]
    assert ada.get("/v1/adapters")["data"] == []
    assert ada.models == {MODEL}


def test_adapters_of_a_removed_tenant_are_dropped(gateway: Gateway, folder: Path) -> None:
    ada = tenant(gateway)
    assert ada.bring("mine", folder / "three").status_code == 201
    digest = ada.get("/v1/adapters")["data"][0]["digest"]
    assert gateway.client.delete(f"/admin/tenants/{ada.name}").status_code == 200
    cards = gateway.client.get("/admin/adapters").json()["data"]
    assert digest not in {each["digest"] for each in cards}

    def held() -> list[str]:
        [engine] = gateway.client.get("/admin/replicas").json()["data"]
        return [each["digest"] for each in engine["adapters"]]

    gateway.first(held, lambda digests: digest not in digests)


def test_a_tenants_adapter_reaches_an_engine_that_starts_later(
    gateway: Gateway, two: tuple[Tenant, Tenant], folder: Path, nats_url: str
) -> None:
    ada, _ = two
    assert ada.bring("far", folder / "one").status_code == 201
    digest = ada.get("/v1/adapters")["data"][0]["digest"]
    later = engine_stage("--adapter-memory=64", f"--nats-url={nats_url}", "--replica-id=later")
    with started(later):

        def held() -> set[str]:
            engines = gateway.client.get("/admin/replicas").json()["data"]
            return {
                engine["id"]
                for engine in engines
                for each in engine["adapters"]
                if each["digest"] == digest
            }

        gateway.first(held, lambda engines: engines == {"own", "later"})
    gateway.wait_for_replicas(1)
