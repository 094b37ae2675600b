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


def reported(*command: str, cwd: Path | None = None, **variables: str) -> dict[str, Any]:
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
    output = reported(
        sys.executable, str(CLIENTS / "langchain_client.py"), f"{thinker.rest}/v1", THINKER
    )
    assert output["streamed"] == output["whole"]
    assert output["responses"]
    assert output["usage"] == 12
    assert output["call"]["name"] == "weather"
    assert isinstance(output["call"]["args"]["city"], str)
    assert output["structured"].keys() == {"river"}
    assert output["continued"]
    assert output["num_vectors"] == 2
    assert output["same"]


@pytest.mark.long
def test_litellm_chats_streams_calls_tools_and_embeds(thinker: Gateway) -> None:
    output = reported(
        sys.executable, str(CLIENTS / "litellm_client.py"), f"{thinker.rest}/v1", THINKER
    )
    assert output["streamed"] == output["whole"]
    assert output["usage"] == 12
    assert output["call"] == "weather"
    assert isinstance(output["arguments"], dict)
    assert output["num_vectors"] == 2
    assert "temperature is 7.0; allowed: 0…2" in output["refused"]


@pytest.mark.long
def test_anthropics_client_streams_calls_tools_and_counts_tokens(thinker: Gateway) -> None:
    output = reported(sys.executable, str(CLIENTS / "anthropic_client.py"), thinker.rest, THINKER)
    print("anthropic", output["version"])
    assert output["call"] == {"name": "weather", "input": {"city": "Ulm"}}
    assert output["stop_reason"] == "tool_use"
    [call] = output["streamed"]
    assert (call["name"], call["input"]) == ("weather", {"city": "Ulm"})
    assert output["kinds"][0] == "message_start"
    assert output["kinds"][-1] == "message_stop"
    assert output["usage"] > 0
    assert output["after"] == output["text"]
    assert output["count"] == output["prompt"]
    assert output["has_id"]
    assert output["refusals"] == {
        "model": {"class": "NotFoundError", "status": 404, "has_id": True},
        "temperature": {"class": "BadRequestError", "status": 400, "has_id": True},
    }


@pytest.mark.long
def test_ollamas_client_chats_generates_streams_and_embeds(thinker: Gateway) -> None:
    output = reported(sys.executable, str(CLIENTS / "ollama_client.py"), thinker.rest, THINKER)
    print("ollama", output["version"])
    assert output["streamed"] == output["whole"]
    assert output["reason"] == "length"
    [num_prompt_tokens, *num_tokens] = output["counts"]
    assert (num_prompt_tokens > 0, num_tokens) == (True, [12, 12])
    assert output["has_durations"]
    assert output["river"] == "Blau"
    assert output["after"]
    assert output["pieces"] == output["generated"] != ""
    assert output["lengths"] == [output["old"]] * 2 == [64, 64]
    assert output["listed"] == output["running"] == [THINKER]
    assert output["capabilities"] == ["completion", "tools", "thinking"]
    refusals = output["refusals"]
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
    output = reported("node", str(js_folder / "openai_client.js"), f"{thinker.rest}/v1", THINKER)
    assert output["streamed"] == output["whole"] == output["response"]
    assert output["usage"] == 12
    assert output["call"]["name"] == "weather"
    assert output["deltas"].startswith(output["call"]["arguments"])
    assert output["finish"] == "tool_calls"
    assert output["kinds"] == ["response.created", "response.incomplete"]
    assert output["vectors"] == [64, 64]
    assert output["refused"] == {"status": 400, "param": "temperature"}
