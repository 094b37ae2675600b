"""`headwater up` with models that take turns on one device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.services.models.manifest import ModelManifest
from headwater.services.runtime.cluster_key import using
from headwater.services.stack import engine_calls
from headwater.services.stack.token_file import key_of_cluster
from tests.chatting_model import make_chatting_model
from tests.line.conftest import Line

ENGINES = {"one": "engine-0", "two": "two-engine-0"}
REPLICAS = ("engine-0", "engine-1")
PROMPT = "the water of the river is the water of the sea, and " * 6


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("turns")
    flags = (
        f"--model=one={make_chatting_model(folder / 'one')}",
        f"--model=two={make_chatting_model(folder / 'two')}",
        "--resident=0.0015",
    )
    env = {"HEADWATER_CACHE": str(folder / "cache"), "HEADWATER_KV_CACHE_MEMORY": str(64 << 20)}
    (folder / "state").mkdir()
    with Line(folder / "state", *flags, env=env) as started:
        # The supervisor's first catalogue comes a moment after the cluster is ready.
        started.wait_for(lambda: len(turns(started)) == 2, 20, "no catalogue came")
        yield started


def turns(line: Line) -> dict[str, str]:
    cards = line.client.get("/v1/models").json()["data"]
    return {card["id"]: card["turn"]["state"] for card in cards if "turn" in card}


def answer(line: Line, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | more
    reply = line.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def models(line: Line, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater.services.cli", "models", *arguments]
    environment = os.environ | {"HEADWATER_STATE_DIR": str(line.state_dir)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_request_wakes_its_model_and_the_old_prefix_is_a_hit(line: Line) -> None:
    assert turns(line) == {"one": "awake", "two": "asleep"}
    first = answer(line, "one")
    second = answer(line, "two")
    assert turns(line) == {"one": "asleep", "two": "awake"}
    again = answer(line, "one")
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 32
    assert second["choices"][0]["text"] == answer(line, "two")["choices"][0]["text"]


@pytest.mark.long
def test_new_weights_take_the_place_of_old_ones(
    line: Line, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_chatting_model(tmp_path_factory.mktemp("new"), seed=1)
    replace(ModelManifest.read(folder), revision="2").write(folder)
    before = answer(line, "two")
    endings: list[dict[str, Any]] = []

    def ask() -> None:
        """Asks until the weights are replaced."""
        more = {"max_tokens": 400, "ignore_eos": True, "logprobs": 1}
        while not reloading.done():
            with line.stream("b", model="two", **more) as events:
                *_, ending = (event["choices"][0] for event in events if event.get("choices"))
            endings.append(ending)

    with ThreadPoolExecutor() as pool:
        reloading = pool.submit(models, line, "reload", "two", str(folder))
        # Of two clients one waits for an answer at any time.
        asking = [pool.submit(ask) for _ in range(2)]
    for each in asking:
        each.result()
    assert reloading.result().returncode == 0, reloading.result().stderr
    revisions = [[each["revision"] for each in ending["weights"]] for ending in endings]
    # The request went on from its tokens.
    assert ["1", "2"] in revisions, revisions
    assert {ending["finish_reason"] for ending in endings} == {"length"}
    after = answer(line, "two")
    assert after["choices"][0]["text"] != before["choices"][0]["text"]
    # Nothing that the old weights computed is hit.
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    line.wait_for(lambda: weights_of(line, "two") == "2", 10, "gateways know the old weights")
    os.kill(line.pid_of(ENGINES["two"]), signal.SIGKILL)
    assert answer(line, "two")["choices"][0]["text"] == after["choices"][0]["text"]
    other = make_chatting_model(tmp_path_factory.mktemp("other"), num_layers=2)
    refused = models(line, "reload", "two", str(other))
    assert refused.returncode != 0
    assert "num_layers of the new weights is 2; allowed: 3" in refused.stderr
    assert answer(line, "two")["choices"][0]["text"] == after["choices"][0]["text"]


@pytest.mark.long
def test_a_supervisor_that_was_killed_comes_back_with_the_new_weights(tmp_path: Path) -> None:
    flags = (f"--model=one={make_chatting_model(tmp_path / 'one')}", "--replicas=1")
    env = {"HEADWATER_CACHE": str(tmp_path / "cache"), "HEADWATER_KV_CACHE_MEMORY": str(64 << 20)}
    folder = make_chatting_model(tmp_path / "new", seed=1)
    replace(ModelManifest.read(folder), revision="2").write(folder)
    state = tmp_path / "state"
    state.mkdir()
    with Line(state, *flags, env=env) as line:
        before = answer(line, "one")["choices"][0]["text"]
        reloaded = models(line, "reload", "one", str(folder))
        assert reloaded.returncode == 0, reloaded.stderr
        after = answer(line, "one")["choices"][0]["text"]
        assert after != before
        pids = line.pids()
        line.kill()
        assert not line.wait_ended(pids, 60)
    with Line(state, *flags, env=env) as line:
        assert answer(line, "one")["choices"][0]["text"] == after
        assert weights_of(line, "one") == "2"
        [card] = json.loads(models(line, "list", "--json").stdout)
        assert card["weights"]["revision"] == "2"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_engine_killed_in_a_replacement_leaves_all_replicas_with_the_same_weights(
    tmp_path: Path,
) -> None:
    folders = {str(seed): make_chatting_model(tmp_path / f"{seed}", seed=seed) for seed in (1, 2)}
    for revision, folder in folders.items():
        replace(ModelManifest.read(folder), revision=revision).write(folder)
    flags = (f"--model=one={folders['1']}", "--replicas=2")
    env = {"HEADWATER_CACHE": str(tmp_path / "cache"), "HEADWATER_KV_CACHE_MEMORY": str(64 << 20)}
    (tmp_path / "state").mkdir()
    source = random.Random(0)
    with Line(tmp_path / "state", *flags, env=env) as line:
        ids = {"1": settled(line)}
        texts = {"1": answer(line, "one")["choices"][0]["text"]}
        now = "1"
        for _ in range(10):
            other = "2" if now == "1" else "1"
            body = {"folder": str(folders[other]), "requests": "pause"}
            asked = line.client.post("/admin/models/one/weights", json=body)
            assert asked.status_code == 202, asked.text
            # Engines load for some tenths of a second, and change in some hundredths.
            time.sleep(source.uniform(0, 1))
            killed = source.choice(line.pids_of(source.choice(REPLICAS)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(killed, signal.SIGKILL)
            numerics_id = settled(line)
            [now] = {weights_of(line, "one") or "1"}
            assert ids.setdefault(now, numerics_id) == numerics_id
            text = answer(line, "one")["choices"][0]["text"]
            assert texts.setdefault(now, text) == text
        assert len(set(texts.values())) == len(texts)


def settled(line: Line) -> str:
    """Id of what both replicas compute, when both are there and nothing changes."""
    found: list[str] = []

    def is_settled() -> bool:
        [card] = line.client.get("/admin/models").json()["data"]
        if card["replicas"] < len(REPLICAS) or card["weights"]["is_replacing"]:
            return False
        found[:] = asyncio.run(numerics_ids(line))
        return len(found) == len(REPLICAS) and len(set(found)) == 1

    line.wait_for(is_settled, 120, "replicas compute with different weights")
    return found[0]


async def numerics_ids(line: Line) -> list[str]:
    """Ids of what the engines compute; none of those that cannot be asked."""
    addresses = [each.addresses["grpc"] for each in line.record.stages if each.name in REPLICAS]
    with using(key_of_cluster(line.state_dir, os.environ)):
        calls = map(engine_calls.described, addresses)
        found = await asyncio.gather(*calls, return_exceptions=True)
    return [each.numerics_id for each in found if not isinstance(each, BaseException)]


def weights_of(line: Line, model: str) -> str | None:
    """Revision of the weights by the receipt of an answer."""
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    reply = line.client.post("/v1/completions", json=body, headers={"x-headwater-receipt": "1"})
    found: str | None = reply.json()["receipt"]["decision"]["weights"]
    return found


@pytest.mark.long
def test_a_stream_goes_on_behind_the_turn_of_another_model(line: Line) -> None:
    more = {"max_tokens": 900, "ignore_eos": True, "prompt": "b"}
    whole = answer(line, "one", **more)["choices"][0]["text"]
    texts: list[str] = []

    def read() -> None:
        with line.stream("b", model="one", max_tokens=900, ignore_eos=True) as events:
            texts.extend(event["choices"][0]["text"] for event in events if event.get("choices"))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3):
        answer(line, "two", prompt="c")
    reader.join(60)
    assert "".join(texts) == whole


@pytest.mark.long
def test_models_are_put_to_sleep_woken_and_pinned_by_hand(line: Line) -> None:
    answer(line, "two")
    slept = models(line, "sleep", "two")
    assert (slept.returncode, turns(line)["two"]) == (0, "asleep"), slept.stderr
    assert models(line, "wake", "two").returncode == 0
    assert turns(line) == {"one": "asleep", "two": "awake"}
    refused = models(line, "pin", "two")
    assert refused.returncode != 0
    assert "bytes are left for the other models" in refused.stderr
    cards = {card["id"]: card for card in json.loads(models(line, "list", "--json").stdout)}
    assert cards["two"]["num_bytes"] > 0
    assert cards["two"]["turn"] == "awake"
    unknown = line.client.post("/admin/models/three/sleep")
    assert unknown.status_code == 404


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
def test_no_answer_changes_over_twenty_deaths_and_turns(line: Line, seed: int) -> None:
    source = random.Random(seed)
    expected = {name: answer(line, name)["choices"][0]["text"] for name in ENGINES}
    for _ in range(20):
        model = source.choice(list(ENGINES))
        match source.choice(("kill", "sleep", "wake", "ask")):
            case "kill":
                # One that was killed a moment ago may not be back yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(line.pid_of(ENGINES[model]), signal.SIGKILL)
            case "sleep" | "wake" as turn:
                asked = line.client.post(f"/admin/models/{model}/{turn}")
                assert asked.status_code in (202, 400), asked.text
        model = source.choice(list(ENGINES))
        assert answer(line, model)["choices"][0]["text"] == expected[model]
    line.wait_for(lambda: len(turns(line)) == 2, 60, "an engine did not come back")
    assert list(turns(line).values()).count("awake") <= 1
