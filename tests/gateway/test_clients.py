"""The clients that people use, unchanged, each in a process of its own: LangChain, LiteLLM,
Anthropic's, Ollama's, OpenAI's for JavaScript."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.processes import THINKER, Gateway

CLIENTS = Path(__file__).parent / "clients"


def told(*command: str, cwd: Path | None = None, **variables: str) -> dict[str, Any]:
    """What a client printed."""
    # Neither asks the network for prices or reports on its users.
    env = (
        os.environ
        | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGCHAIN_TRACING_V2": "false"}
        | variables
    )
    # Packages of the project's own environment are none of the client's.
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=cwd
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.long
def test_langchain_chats_streams_calls_tools_and_embeds(thinker: Gateway) -> None:
    said = told(sys.executable, str(CLIENTS / "langchain_client.py"), f"{thinker.rest}/v1", THINKER)
    assert said["streamed"] == said["whole"]
    assert said["responses"]
    assert said["usage"] == 12
    assert said["call"]["name"] == "weather"
    assert isinstance(said["call"]["args"]["city"], str)
    assert said["structured"].keys() == {"river"}
    assert said["continued"]
    assert said["num_vectors"] == 2
    assert said["same"]


@pytest.mark.long
def test_litellm_chats_streams_calls_tools_and_embeds(thinker: Gateway) -> None:
    said = told(sys.executable, str(CLIENTS / "litellm_client.py"), f"{thinker.rest}/v1", THINKER)
    assert said["streamed"] == said["whole"]
    assert said["usage"] == 12
    assert said["call"] == "weather"
    assert isinstance(said["arguments"], dict)
    assert said["num_vectors"] == 2
    assert "temperature is 7.0; allowed: 0…2" in said["refused"]


@pytest.mark.long
def test_anthropics_client_streams_calls_tools_and_counts_tokens(thinker: Gateway) -> None:
    said = told(sys.executable, str(CLIENTS / "anthropic_client.py"), thinker.rest, THINKER)
    print("anthropic", said["version"])
    assert said["call"] == {"name": "weather", "input": {"city": "Ulm"}}
    assert said["stop_reason"] == "tool_use"
    [call] = said["streamed"]
    assert (call["name"], call["input"]) == ("weather", {"city": "Ulm"})
    assert said["kinds"][0] == "message_start"
    assert said["kinds"][-1] == "message_stop"
    assert said["usage"] > 0
    assert said["after"] == said["text"]
    assert said["count"] == said["prompt"]
    assert said["has_id"]
    assert said["refusals"] == {
        "model": {"class": "NotFoundError", "status": 404, "has_id": True},
        "temperature": {"class": "BadRequestError", "status": 400, "has_id": True},
    }


@pytest.mark.long
def test_ollamas_client_chats_generates_streams_and_embeds(thinker: Gateway) -> None:
    said = told(sys.executable, str(CLIENTS / "ollama_client.py"), thinker.rest, THINKER)
    print("ollama", said["version"])
    assert said["streamed"] == said["whole"]
    assert said["reason"] == "length"
    [num_prompt_tokens, *num_tokens] = said["counts"]
    assert (num_prompt_tokens > 0, num_tokens) == (True, [12, 12])
    assert said["has_durations"]
    assert said["river"] == "Blau"
    assert said["after"]
    assert said["pieces"] == said["generated"] != ""
    assert said["lengths"] == [said["old"]] * 2 == [64, 64]
    assert said["listed"] == said["running"] == [THINKER]
    assert said["capabilities"] == ["completion", "tools", "thinking"]
    refusals = said["refusals"]
    assert {name: each["status"] for name, each in refusals.items()} == {
        "model": 404,
        "temperature": 400,
        "pull": 404,
    }
    assert refusals["temperature"]["sentence"] == "options.temperature is 7.0; allowed: 0…2"
    assert "`headwater pull`" in refusals["pull"]["sentence"]


def test_openais_client_for_javascript_chats_streams_calls_tools_and_embeds(
    thinker: Gateway, js_folder: Path
) -> None:
    said = told("node", str(js_folder / "openai_client.js"), f"{thinker.rest}/v1", THINKER)
    assert said["streamed"] == said["whole"] == said["response"]
    assert said["usage"] == 12
    assert said["call"]["name"] == "weather"
    assert said["deltas"].startswith(said["call"]["arguments"])
    assert said["finish"] == "tool_calls"
    assert said["kinds"] == ["response.created", "response.incomplete"]
    assert said["vectors"] == [64, 64]
    assert said["refused"] == {"status": 400, "param": "temperature"}
