"""Stages of this version beside stages of the release before, which the changelog names by its
commit: requests and messages between any two of them are understood."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chatting_model import make_chatting_model
from tests.forked_stage import ForkedStage
from tests.gateway.processes import (
    MODEL,
    QUIET,
    UNDRAFTED,
    Gateway,
    Stage,
    chat_body,
    completion_body,
    started,
)

ROOT = Path(__file__).parents[2]
STAGES = ("gateway", "processor", "output_processor", "engine")
MODULES = {
    "gateway": "headwater.gateway",
    **{stage: f"headwater.services.{stage}" for stage in STAGES[1:]},
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}
Start = Callable[..., Any]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def release_before() -> str:
    """Commit of the latest release in the changelog."""
    found = re.search(
        r"^## \d.*?commit ([0-9a-f]{8})", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S
    )
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def start_before(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a stage of the release before, over the packages of this version."""
    packed = subprocess.run(
        ["git", "archive", release_before()], cwd=ROOT, capture_output=True, check=False
    )
    if packed.returncode:
        pytest.skip(f"the checkout has no commit {release_before()}: git fetch --unshallow")
    code = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(code / "headwater", filter="data")

    def start(module: str, *flags: str, stderr: int, **descriptors: int) -> Any:
        known = {name: value for name, value in os.environ.items() if "HEADWATER" not in name}
        numbers = {name: str(number) for name, number in descriptors.items()}
        return subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            env=known | numbers | {"PYTHONPATH": str(code)},
            pass_fds=tuple(descriptors.values()),
            stderr=stderr,
            cwd=code,
        )

    return start


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("others_are_older", [False, True], ids=["older", "newer"])
def test_one_stage_of_another_version_serves_among_the_others(
    stage: str,
    others_are_older: bool,
    start_before: Start,
    model_folder: Path,
    nats_url: str,
    redis_url: str,
) -> None:
    def start_of(each: str) -> Start:
        return start_before if (each == stage) is not others_are_older else ForkedStage

    servers = [f"--nats-url={nats_url}", f"--redis-url={redis_url}"]
    model = [f"--model-folder={model_folder}", f"--served-model-name={MODEL}"]
    flags = {
        "processor": model,
        "output_processor": model,
        "engine": [*model, "--executor=simulated", "--simulated-step-seconds=0.01"],
        "gateway": ["--port=0", "--grpc-port=0"],
    }
    stages = {
        each: Stage(MODULES[each], *QUIET, *flags[each], *servers, start=start_of(each))
        for each in reversed(STAGES)
    }
    with started(*stages.values()), Gateway(stages["gateway"]) as gateway:
        gateway.wait_for_replicas(1)
        gateway.wait_until(gateway.is_ready)
        ask_all(gateway)
        assert not [each for each, found in stages.items() if found.says("Traceback")]


def ask_all(gateway: Gateway) -> None:
    """Requests that together use each message between stages."""
    whole = gateway.complete("Once upon a time " * 3, n=2, logprobs=2, seed=7, temperature=1)
    assert [len(each["logprobs"]["tokens"]) for each in whole["choices"]] == [8, 8]
    again = gateway.complete("Once upon a time " * 3, max_tokens=4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    streamed = gateway.events("/v1/completions", completion_body(max_tokens=40) | UNDRAFTED)
    assert len(streamed) > 2
    chat = gateway.chat(stop=["zzz"], max_tokens=12)
    assert chat["choices"][0]["finish_reason"] in ("length", "stop")
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    answer = gateway.chat(response_format=held, max_tokens=60)["choices"][0]["message"]["content"]
    assert json.loads(answer).keys() <= {"name"}
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    called = gateway.chat(tools=tools, tool_choice="required", max_tokens=200)
    assert called["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    tokens = gateway.client.post("/tokenize", json={"model": MODEL, "prompt": "a river"})
    assert tokens.json()["tokens"]
    refused = gateway.client.post("/v1/chat/completions", json=chat_body(max_tokens=10**7))
    assert refused.status_code == 400
    leave_early(gateway)
    # The engine's own figures of its load.
    gateway.wait_until(lambda: running(gateway) == 0)


def leave_early(gateway: Gateway) -> None:
    """A client that disconnects: the stages behind are told to stop."""
    body = completion_body(max_tokens=150, ignore_eos=True) | UNDRAFTED | {"stream": True}
    with gateway.client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    gateway.wait_until(lambda: gateway.metric("headwater_num_streams") == 0)


def running(gateway: Gateway) -> int:
    """Requests that the engine says it runs."""
    [replica] = gateway.client.get("/admin/replicas").json()["data"]
    return int(replica["num_running"])
