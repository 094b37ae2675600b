"""Adapters that are loaded, replaced and unloaded while requests run: each answer has the tokens of
the content that it was admitted with."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.engine_core.small_adapters import tensors_of, write_adapter
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    completion_body,
    engine_stage,
    started,
)

NAMES = ("one", "other")
NUM_VERSIONS = 4
PROMPTS = [[prompt * 100 + i for i in range(40)] for prompt in range(5)]
WITH_RECEIPT = {"x-headwater-receipt": "1"}
FLAGS = ("--adapter-memory=16", "--simulated-step-seconds=0.001")
"""Memory for two adapters."""
Answers = dict[tuple[str, int], list[int]]
"""Tokens by the adapter's hash and the number of the prompt."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("adapters")
    return [write_adapter(base / str(i), tensors_of(i, num_layers=1)) for i in range(NUM_VERSIONS)]


@pytest.fixture(scope="module")
def gateway(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    first = engine_stage(*FLAGS)
    second = engine_stage(*FLAGS)
    with started(first, second):
        replicas = (first.address, second.address)
        with start_gateway(Behind(behind.processor, behind.output_processor, replicas)) as running:
            running.wait_for_replicas(2)
            yield running


def load(gateway: Gateway, name: str, folder: Path) -> str:
    body = {"name": name, "folder": str(folder), "base": MODEL}
    reply = gateway.client.post("/admin/adapters", json=body)
    assert reply.status_code == 201, reply.text
    return str(reply.json()["digest"])


def ask(client: httpx.Client, name: str, prompt: int, num_tokens: int) -> httpx.Response:
    body = completion_body(PROMPTS[prompt], model=name, max_tokens=num_tokens, ignore_eos=True)
    body |= {"return_token_ids": True} | UNDRAFTED
    return client.post("/v1/completions", json=body, headers=WITH_RECEIPT)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def answers_alone(gateway: Gateway, versions: list[Path], num_tokens: int) -> Answers:
    """Answers of each version while nothing else happens."""
    alone = {}
    for folder in versions:
        digest = load(gateway, NAMES[0], folder)
        for prompt in range(len(PROMPTS)):
            answer = ask(gateway.client, NAMES[0], prompt, num_tokens).json()
            assert answer["receipt"]["adapter"] == digest
            alone[digest, prompt] = tokens_of(answer)
            assert len(alone[digest, prompt]) == num_tokens
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    return alone


def churn(
    gateway: Gateway, versions: list[Path], num_clients: int, num_tokens: int, num_wanted: int
) -> Counter[int]:
    """Changes names until clients have so many tokens, and checks each answer. Returns the number
    of answers by status, and that of tokens by 0."""
    alone = answers_alone(gateway, versions, num_tokens)
    chosen = random.Random(7)
    is_over = Event()
    counts: Counter[int] = Counter()
    begun: set[str] = set()

    def client(number: int) -> None:
        own = random.Random(number)
        with httpx.Client(base_url=gateway.rest, timeout=60) as http:
            while not is_over.is_set():
                prompt = own.randrange(len(PROMPTS))
                reply = ask(http, own.choice(NAMES), prompt, num_tokens)
                counts[reply.status_code] += 1
                if reply.status_code == 200:
                    answer = reply.json()
                    digest = answer["receipt"]["adapter"]
                    assert tokens_of(answer) == alone[digest, prompt]
                    counts[0] += num_tokens
                    begun.add(digest)
                else:
                    assert reply.status_code == 404, reply.text

    with ThreadPoolExecutor(num_clients) as threads:
        clients = [threads.submit(client, i) for i in range(num_clients)]
        try:
            for turn in itertools.count():
                load(gateway, chosen.choice(NAMES), chosen.choice(versions))
                if turn % 5 == 4:
                    gateway.client.delete(f"/admin/adapters/{chosen.choice(NAMES)}")
                if counts[0] >= num_wanted or any(each.done() for each in clients):
                    break
        finally:
            is_over.set()
        for each in clients:
            each.result()
    assert len(begun) == NUM_VERSIONS
    return counts


def held(gateway: Gateway) -> set[str]:
    """Hashes of adapters that engines have."""
    engines = gateway.client.get("/admin/replicas").json()["data"]
    return {each["digest"] for engine in engines for each in engine["adapters"]}


@pytest.mark.parametrize(
    ("num_clients", "num_tokens", "num_wanted"),
    [(6, 24, 2_400), pytest.param(24, 400, 1_000_000, marks=pytest.mark.long)],
)
def test_no_answer_has_a_token_of_another_adapter(
    gateway: Gateway, versions: list[Path], num_clients: int, num_tokens: int, num_wanted: int
) -> None:
    counts = churn(gateway, versions, num_clients, num_tokens, num_wanted)
    print(f"{counts[0]} tokens, {counts[200]} answers, {counts[404]} of names that were unloaded")
    assert counts[404] > 0
    for name in NAMES:
        gateway.client.delete(f"/admin/adapters/{name}")
    # Nothing stays in engines that has no name.
    gateway.first(lambda: held(gateway), lambda digests: not digests)
