"""A line whose replicas and models come and go: nobody who asks notices more than a wait."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.bench.text_folder import demo_text_folder
from tests.line.conftest import MODEL, Line
from tests.small_models import make_thinking_folder

FLAGS = ("--executor=simulated", "--min-replicas=0", "--max-replicas=2", "--idle-seconds=2", "--target-requests=4")
WITHOUT = "headwater_model_requests_without_replica"
SECOND = "second/model"
QUESTION = [{"role": "user", "content": "What is a headwater?"}]


@pytest.fixture(scope="module")
def elastic_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """A line that begins with no replica; tests let it come back to that."""
    line = Line(tmp_path_factory.mktemp("elastic"), *FLAGS, env={"HEADWATER_SSE_KEEP_ALIVE": "0.2"})
    yield line
    assert line.stop() == 0, line.log.read_text()


@pytest.fixture(scope="module")
def second_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = demo_text_folder(tmp_path_factory.mktemp("plain"))
    return make_thinking_folder(plain, tmp_path_factory.mktemp("models") / "second", name=SECOND)


def engines(line: Line) -> list[str]:
    return sorted(stage.name for stage in line.record.stages if "engine" in stage.name)


def wait_for_none(line: Line) -> None:
    line.wait_for(lambda: not engines(line), 20, "an idle replica stays")


def models(line: Line, *words: str, fails: bool = False) -> str:
    """`headwater models …`; what it said."""
    command = [sys.executable, "-m", "headwater.services.cli", "models", *words, f"--base-url={line.record.rest}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_first_request_starts_a_replica_and_the_last_one_is_followed_by_its_end(elastic_line: Line) -> None:
    line = elastic_line
    assert line.client.get("/ready").json() == {"ready": True, "missing": []}
    assert engines(line) == []
    late = {"x-headwater-deadline-ms": "300"}
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "stream": True}
    refused = line.client.post("/v1/chat/completions", json=body, headers=late)
    assert "deadline_exceeded" in refused.text
    with line.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = (each for each in reply.iter_lines() if each)
        assert next(lines) == ": keep-alive"
        assert line.metric(WITHOUT) == 1
        answered = list(lines)
    assert answered[-1] == "data: [DONE]"
    assert line.metric(WITHOUT) == 0
    assert engines(line) == ["engine-0"]
    wait_for_none(line)
    assert line.loads() == {}


@pytest.mark.slow
def test_a_client_that_leaves_while_it_waits_leaves_nothing(elastic_line: Line) -> None:
    line = elastic_line
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=line.record.rest, timeout=0.3) as client:
        client.post("/v1/chat/completions", json={"model": MODEL, "messages": QUESTION})
    line.wait_for(lambda: line.metric(WITHOUT) == line.metric("headwater_model_requests") == 0, 5, "it still waits")


@pytest.mark.slow
def test_replicas_come_with_the_load_and_one_that_leaves_loses_no_stream(elastic_line: Line) -> None:
    line = elastic_line

    def story(idx: int, max_tokens: int) -> list[Any]:
        with line.stream(f"Story {idx}", max_tokens=max_tokens, ignore_eos=True, return_token_ids=True) as events:
            return [choice for event in events for choice in event["choices"]]

    with ThreadPoolExecutor(8) as clients:
        short = [clients.submit(story, idx, 300) for idx in range(8)]
        line.wait_for(lambda: engines(line) == ["engine-0", "engine-1"], 30, "no second replica")
        line.wait_for(lambda: len(line.loads()) == 2, 20, "the second replica is not ready")
        long = [clients.submit(story, idx, 900) for idx in range(8, 10)]
        line.wait_for(lambda: "stopping engine-" in line.log.read_text().rpartition("starting")[2], 30, "both stay")
        choices = [each.result(60) for each in [*short, *long]]
    for events in choices:
        assert events[-1]["finish_reason"] == "length", events[-1]
    assert {sum(len(choice.get("token_ids") or []) for choice in events) for events in choices} == {300, 900}
    wait_for_none(line)


@pytest.mark.slow
def test_a_model_is_loaded_asked_and_unloaded_while_the_line_runs(elastic_line: Line, second_folder: Path) -> None:
    line = elastic_line
    assert "allowed: smollm2-135m-instruct, a Hugging Face id" in models(line, "load", "/no/such/folder", fails=True)
    assert "does not exist" in models(line, "unload", "nothing", fails=True)
    asked = {"model": SECOND, "messages": QUESTION, "max_tokens": 4}
    assert line.client.post("/v1/chat/completions", json=asked).status_code == 404
    with ThreadPoolExecutor(2) as others:
        loading = others.submit(models, line, "load", str(second_folder), "--json")
        line.wait_for(lambda: SECOND in models(line, "list", "--json"), 20, "it is not even known")
        # It waits until there are text stages, then until there is a replica.
        answer = others.submit(line.client.post, "/v1/chat/completions", json=asked)
        assert json.loads(loading.result(60))["state"] == "serving"
        assert answer.result(60).status_code == 200, answer.result().text
    assert "is serving already" in models(line, "load", str(second_folder), fails=True)
    assert {card["id"] for card in line.client.get("/v1/models").json()["data"]} == {MODEL, SECOND}
    before = line.pid_of("second-model-processor-0")
    subprocess.run(["kill", "-9", str(before)], check=True)
    line.wait_for(lambda: line.pid_of("second-model-processor-0") != before, 20, "its processor is not back")
    assert line.client.post("/v1/chat/completions", json=asked).status_code == 200
    with (
        line.stream("On and on", model=SECOND, max_tokens=200, ignore_eos=True) as events,
        ThreadPoolExecutor(1) as other,
    ):
        next(events)
        unloading = other.submit(models, line, "unload", SECOND)
        line.wait_for(
            lambda: line.client.post("/v1/chat/completions", json=asked).status_code == 404, 10, "not refused"
        )
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        unloading.result(60)
    assert SECOND not in models(line, "list")
    assert [stage.name for stage in line.record.stages if "second" in stage.name] == []
    assert [card["id"] for card in line.client.get("/v1/models").json()["data"]] == [MODEL]
