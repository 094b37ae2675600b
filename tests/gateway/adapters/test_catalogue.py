"""The catalogue of adapters outlives engines and gateways: processes that start later serve what it
names."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.small_adapters import tensors_of, write_adapter
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body, engine_stage, started

NAMES = ("keeper", "second")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, tensors_of(i, num_layers=1))
    return tmp_path


@pytest.fixture
def text_stages(behind: Behind) -> Behind:
    """The processor and the output processor alone."""
    return Behind(behind.processor, behind.output_processor, ())


@contextlib.contextmanager
def gateway_on(
    nats_url: str, text_stages: Behind, start_gateway: GatewayStarter
) -> Iterator[Gateway]:
    cold = ("--cold-start-timeout=60", "--ready-needs-engine=never")
    flags = (f"--nats-url={nats_url}", *cold)
    with start_gateway(text_stages, *flags) as gateway:
        yield gateway


@contextlib.contextmanager
def engine_on(nats_url: str, name: str, *flags: str) -> Iterator[None]:
    stage = engine_stage(
        f"--nats-url={nats_url}", f"--replica-id={name}", "--adapter-memory=64", *flags
    )
    with started(stage):
        yield


@pytest.fixture
def gateway(nats_url: str, text_stages: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    with gateway_on(nats_url, text_stages, start_gateway) as running:
        yield running
        for name in NAMES:
            running.client.delete(f"/admin/adapters/{name}")


def load(gateway: Gateway, name: str, folder: Path) -> dict[str, Any]:
    body = {"name": name, "folder": str(folder), "base": MODEL}
    reply = gateway.client.post("/admin/adapters", json=body)
    assert reply.status_code == 201, reply.text
    card: dict[str, Any] = reply.json()
    return card


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def replicas_of(gateway: Gateway, name: str) -> list[str]:
    """Engines that have an adapter."""
    cards = gateway.client.get("/admin/adapters").json()["data"]
    return next((list(each["replicas"]) for each in cards if each["id"] == name), [])


def test_engines_and_gateways_that_start_later_serve_what_was_loaded(
    gateway: Gateway,
    folder: Path,
    nats_url: str,
    text_stages: Behind,
    start_gateway: GatewayStarter,
) -> None:
    with engine_on(nats_url, "first"):
        gateway.wait_for_replicas(1)
        digest = load(gateway, "keeper", folder / "one")["digest"]
        before = text_of(gateway.chat(model="keeper"))
        assert before != text_of(gateway.chat())
        with engine_on(nats_url, "later"):
            gateway.first(
                lambda: replicas_of(gateway, "keeper"), lambda has: has == ["first", "later"]
            )
    gateway.wait_for_replicas(0)
    # The model has no engine: the name is known all the same, and its request waits for one.
    listed = {each["id"] for each in gateway.client.get("/v1/models").json()["data"]}
    assert listed >= {"keeper", MODEL}
    with (
        gateway_on(nats_url, text_stages, start_gateway) as other,
        ThreadPoolExecutor() as threads,
    ):
        waiting = threads.submit(other.chat, model="keeper", seed=1)
        other.wait_until(lambda: other.metric("headwater_model_requests_without_replica") > 0)
        with engine_on(nats_url, "from-zero"):
            assert text_of(waiting.result(60)) == before
        assert {each["digest"] for each in other.client.get("/admin/adapters").json()["data"]} == {
            digest
        }


def test_a_new_version_reaches_other_gateways_and_the_old_one_leaves_engines(
    gateway: Gateway,
    folder: Path,
    nats_url: str,
    text_stages: Behind,
    start_gateway: GatewayStarter,
) -> None:
    with (
        engine_on(nats_url, "first"),
        gateway_on(nats_url, text_stages, start_gateway) as other,
    ):
        other.wait_for_replicas(1)
        gateway.wait_for_replicas(1)
        old = load(gateway, "keeper", folder / "one")["digest"]
        new = load(gateway, "keeper", folder / "two")["digest"]
        assert old != new

        def seen() -> list[str]:
            data = other.client.get("/admin/adapters").json()["data"]
            return [each["digest"] for each in data]

        other.first(seen, lambda digests: digests == [new])

        def held() -> list[str]:
            members = other.client.get("/admin/replicas").json()["data"]
            return [each["digest"] for member in members for each in member["adapters"]]

        other.first(held, lambda digests: digests == [new])
        assert other.client.delete("/admin/adapters/keeper").status_code == 200
        other.first(held, lambda digests: digests == [])
        refused = gateway.client.post("/v1/chat/completions", json=chat_body(model="keeper"))
        assert refused.status_code == 404


def test_an_engine_does_not_serve_files_that_changed_since_they_were_loaded(
    gateway: Gateway, folder: Path, nats_url: str
) -> None:
    with engine_on(nats_url, "first"):
        gateway.wait_for_replicas(1)
        load(gateway, "keeper", folder / "one")
    gateway.wait_for_replicas(0)
    shutil.rmtree(folder / "one")
    shutil.copytree(folder / "two", folder / "one")
    with engine_on(nats_url, "second"):
        gateway.wait_for_replicas(1)
        reply = gateway.client.post("/v1/chat/completions", json=chat_body(model="keeper"))
        assert reply.status_code == 503
        error = reply.json()["error"]
        assert error["code"] == "adapter_unavailable"
        assert "the files of the adapter hash to" in error["message"]
        assert text_of(gateway.chat())
