"""More adapters than host memory takes: those that have left it are read again for their next
request, and each answer is its adapter's."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headwater.gateway.adapters.placement import LOOK_SECONDS
from tests.engine_core.small_adapters import tensors_of, write_adapter
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    Stage,
    completion_body,
    engine_stage,
    started,
)

NAMES = ("ada", "bob", "cyd", "dee", "eve")
NUM_KEPT = 3
PROMPT = list(range(40))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(base / name, tensors_of(i, num_layers=1))
        for i, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[Stage]:
    size = (folders[NAMES[0]] / "adapter_model.safetensors").stat().st_size
    room = f"--adapter-host-memory={NUM_KEPT * size}"
    stage = engine_stage(
        "--adapter-memory=64", "--simulated-step-seconds=0.001", "--metrics-port=0", room
    )
    with started(stage):
        yield stage


@pytest.fixture(scope="module")
def gateway(behind: Behind, engine: Stage, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    replicas = (engine.address,)
    with start_gateway(Behind(behind.processor, behind.output_processor, replicas)) as running:
        running.wait_for_replicas(1)
        yield running


def num_evicted(engine: Stage) -> int:
    text = httpx.get(f"http://{engine.addresses['metrics']}/metrics").text
    [found] = re.findall(r"^headwater_adapter_evictions_total{.*} ([0-9.]+)$", text, re.MULTILINE)
    return int(float(found))


def ask(client: httpx.Client, name: str) -> list[int]:
    body = completion_body(PROMPT, model=name, max_tokens=9, ignore_eos=True)
    reply = client.post("/v1/completions", json=body | {"return_token_ids": True} | UNDRAFTED)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def test_adapters_that_have_left_host_memory_are_read_again_for_their_requests(
    gateway: Gateway, engine: Stage, folders: dict[str, Path]
) -> None:
    alone = {}
    for name, folder in folders.items():
        body = {"name": name, "folder": str(folder), "base": MODEL}
        assert gateway.client.post("/admin/adapters", json=body).status_code == 201
        alone[name] = ask(gateway.client, name)
    assert len({tuple(each) for each in alone.values()}) == len(NAMES)
    gateway.wait_until(lambda: num_evicted(engine) >= len(NAMES) - NUM_KEPT)
    # The gateway fills an engine that joins, and lets one be whose memory has no room.
    time.sleep(1.2 * LOOK_SECONDS)
    assert num_evicted(engine) == len(NAMES) - NUM_KEPT
    [shown] = gateway.client.get("/admin/replicas").json()["data"]
    assert sum(each["is_evicted"] for each in shown["adapters"]) == len(NAMES) - NUM_KEPT
    chosen = random.Random(1).sample(NAMES * 8, 8 * len(NAMES))
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda name: ask(gateway.client, name), chosen))
    assert found == [alone[name] for name in chosen]
    for name in NAMES:
        assert gateway.client.delete(f"/admin/adapters/{name}").status_code == 200
