"""Adapters of a cluster: models by name that are loaded while requests run, on two simulated
engines."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine_core.small_adapters import tensors_of, write_adapter
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body, engine_stage, started
from tests.services.cli.test_cli import headwater

ENGINE_FLAGS = ("--adapter-memory=64", "--simulated-step-seconds=0.005")
LONG = {"max_tokens": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of adapters: two versions of a poet, and a cook of a rank that no engine holds."""
    base = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("poet", "poet2", "clerk")):
        write_adapter(base / name, tensors_of(i, num_layers=1))
    write_adapter(base / "cook", tensors_of(4, num_layers=1), r=256)
    return base


@pytest.fixture(scope="module")
def gateway(behind: Behind, start_gateway: GatewayStarter, folder: Path) -> Iterator[Gateway]:
    first = engine_stage(*ENGINE_FLAGS, f"--lora-modules=clerk={folder / 'clerk'}")
    second = engine_stage(*ENGINE_FLAGS)
    with started(first, second):
        replicas = (first.address, second.address)
        seen = Behind(behind.processor, behind.output_processor, replicas)
        with start_gateway(seen, f"--adapter-dir={folder}") as running:
            running.wait_for_replicas(2)
            yield running


@pytest.fixture(autouse=True)
def unload(gateway: Gateway) -> Iterator[None]:
    yield
    gateway.client.delete("/admin/adapters/poet")


def load(gateway: Gateway, name: str, folder: Path, **more: Any) -> httpx.Response:
    body = {"name": name, "folder": str(folder), "base": MODEL} | more
    return gateway.client.post("/admin/adapters", json=body)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_an_adapter_is_a_model_by_name(gateway: Gateway, folder: Path) -> None:
    reply = load(gateway, "poet", folder / "poet")
    assert reply.status_code == 201, reply.text
    card = reply.json()
    assert (card["id"], card["base"], card["rank"], len(card["replicas"])) == ("poet", MODEL, 4, 2)
    listed = {each["id"]: each for each in gateway.client.get("/v1/models").json()["data"]}
    assert listed.keys() == {MODEL, "clerk", "poet"}
    assert (listed["poet"]["parent"], listed["poet"]["root"]) == (MODEL, MODEL)
    assert listed[MODEL]["parent"] is None
    assert gateway.client.get("/v1/models/poet").json()["max_model_len"] == 8192
    base = gateway.chat()
    poet = gateway.chat(model="poet")
    assert poet["model"] == "poet"
    counted = 'headwater_adapter_requests_total{adapter="poet"} 1.0'
    assert counted in gateway.client.get("/metrics").text
    assert text_of(poet) != text_of(base)
    assert gateway.client.post("/tokenize", json={"model": "poet", "prompt": "a"}).json()["count"]


def test_a_prompt_of_an_adapter_hits_nothing_of_the_base_or_of_another(
    gateway: Gateway, folder: Path
) -> None:
    load(gateway, "poet", folder / "poet")
    prompt = "A prefix of its own. " * 30
    cached = []
    for name in (MODEL, "poet", "clerk", MODEL, "poet", "clerk"):
        answer = gateway.chat(prompt, model=name)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    # Every chat begins with the same block of the template.
    assert max(cached[:3]) <= 16
    assert min(cached[3:]) > 100


def test_receipt_and_explanation_name_the_content(gateway: Gateway, folder: Path) -> None:
    digest = load(gateway, "poet", folder / "poet").json()["digest"]
    headers = {"x-headwater-receipt": "1"}
    reply = gateway.client.post(
        "/v1/chat/completions", json=chat_body(model="poet"), headers=headers
    ).json()
    assert reply["receipt"]["adapter"] == digest
    explained = gateway.client.get(f"/v1/requests/{reply['id']}/explain").json()
    assert explained["model"] == "poet"
    assert explained["prompts"][0]["adapter"] == digest
    assert (
        gateway.client.get(f"/v1/requests/{gateway.chat()['id']}/explain").json()["prompts"][0][
            "adapter"
        ]
        is None
    )


def test_one_engine_alone_has_what_it_was_started_with(gateway: Gateway) -> None:
    [clerk] = gateway.client.get("/admin/adapters").json()["data"]
    assert len(clerk["replicas"]) == 1
    for i in range(6):
        assert text_of(gateway.chat(f"Prompt {i}.", model="clerk"))


def test_a_running_answer_keeps_the_version_that_it_began_with(
    gateway: Gateway, folder: Path
) -> None:
    load(gateway, "poet", folder / "poet")
    before = gateway.chat(model="poet", **LONG)
    found: list[dict[str, Any]] = []
    running = threading.Thread(
        target=lambda: found.append(gateway.chat(model="poet", cache_salt="other", **LONG))
    )
    running.start()
    gateway.wait_until(lambda: gateway.metric("headwater_num_requests_running") > 0)
    assert load(gateway, "poet", folder / "poet2").status_code == 201
    assert running.is_alive()
    after = gateway.chat(model="poet", **LONG)
    running.join()
    assert text_of(found[0]) == text_of(before)
    assert text_of(after) != text_of(before)


def hub_cache(folder: Path, repo: str, adapter: Path) -> Path:
    """A cache of the Hub's client with one repository."""
    commit = "0" * 40
    kept = folder / f"models--{repo.replace('/', '--')}"
    shutil.copytree(adapter, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    return folder


@pytest.mark.long
def test_the_command_loads_an_id_from_the_hubs_cache_and_lists_and_unloads_it(
    gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    cache = hub_cache(tmp_path / "hub", "writers/poet", folder / "poet")
    (cache / "models--writers--poet").rename(cache / "models--writers--poet.old")
    env = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "HEADWATER_BASE_URL": gateway.rest}
    load = ("models", "load-adapter", "poet", "writers/poet", "--base", MODEL)
    absent = headwater(*load, **env)
    assert absent.returncode != 0
    assert "'writers/poet' is not in the cache" in " ".join(absent.stderr.split())
    (cache / "models--writers--poet.old").rename(cache / "models--writers--poet")
    loaded = headwater(*load, **env)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout == "poet is served\n"
    assert text_of(gateway.chat(model="poet"))
    listed = headwater("models", "list-adapters", "--json", **env)
    assert {each["id"] for each in json.loads(listed.stdout)} == {"clerk", "poet"}
    assert headwater("models", "unload-adapter", "poet", **env).returncode == 0
    assert gateway.client.get("/v1/models/poet").status_code == 404


def test_an_adapter_that_is_unloaded_is_not_found(gateway: Gateway, folder: Path) -> None:
    load(gateway, "poet", folder / "poet")
    assert gateway.client.delete("/admin/adapters/poet").status_code == 200
    reply = gateway.client.post("/v1/chat/completions", json=chat_body(model="poet"))
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert gateway.client.delete("/admin/adapters/poet").status_code == 404


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("cook", "cook", "rank of the adapter is 256; allowed: at most 64"),
        ("nothing", "nothing", "adapter is 'without adapter_config.json'"),
        (MODEL, "poet", "a name that no model has"),
        ("a\tb", "poet", "name is"),
    ],
)
def test_what_an_engine_refuses_is_served_by_none(
    name: str, where: str, words: str, gateway: Gateway, folder: Path
) -> None:
    reply = load(gateway, name, folder / where)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]
    listed = gateway.client.get("/admin/adapters").json()["data"]
    assert {each["id"] for each in listed} == {"clerk"}


def test_an_unknown_base_is_not_found(gateway: Gateway, folder: Path) -> None:
    assert load(gateway, "poet", folder / "poet", base="other").status_code == 404


def test_vllms_paths_load_from_the_operators_folder_alone(
    gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    def ask(path: str, **body: Any) -> httpx.Response:
        return gateway.client.post(f"/v1/{path}", json=body)

    name = {"lora_name": "poet"}
    inside = str(folder / "poet")
    reply = ask("load_lora_adapter", **name, lora_path=inside)
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'poet' added successfully.",
    )
    again = ask("load_lora_adapter", **name, lora_path=inside)
    assert again.json()["error"]["param"] == "lora_name"
    assert ask("load_lora_adapter", **name, lora_path=inside, load_inplace=True).status_code == 200
    assert ask("unload_lora_adapter", **name).status_code == 200
    assert ask("unload_lora_adapter", **name).status_code == 404
    write_adapter(tmp_path / "other", tensors_of(9, num_layers=1))
    (folder / "link").symlink_to(tmp_path / "other")
    for path in (tmp_path / "other", folder / ".." / "x", folder / "link"):
        outside = ask("load_lora_adapter", **name, lora_path=str(path))
        assert outside.status_code == 400
        assert f"allowed: a folder in {folder}" in outside.json()["error"]["message"]


def test_clients_load_nothing_where_the_operator_did_not_allow_it(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind) as gateway:
        body = {"lora_name": "poet", "lora_path": "/x"}
        reply = gateway.client.post("/v1/load_lora_adapter", json=body)
        assert reply.status_code == 404
        assert "--adapter-dir" in reply.json()["error"]["message"]
        refused = load(gateway, "poet", Path("/x")).json()["error"]["message"]
        assert refused == "adapter_memory is 0; allowed: bytes of device memory for adapters"
