"""What `headwater launch` prints: each agent's configuration, read back as the agent reads it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml

from headwater.services.cli.agents import AGENTS, Target
from tests.exported import exported

URL = "http://127.0.0.1:9000"
MODEL = 'an "odd" model'
TO = Target(gateway=URL, model=MODEL, key="s3cret $KEY")


def opencode(text: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(text)
    options = config["provider"]["headwater"]["options"]
    assert [*config["provider"]["headwater"]["models"]] == [MODEL]
    assert config["model"] == config["small_model"] == f"headwater/{MODEL}"
    return {"url": options["baseURL"], "key": options["apiKey"]}


def from_continue(text: str) -> dict[str, Any]:
    [model] = yaml.safe_load(text)["models"]
    assert (model["provider"], model["model"]) == ("openai", MODEL)
    return {"url": model["apiBase"], "key": model["apiKey"]}


def aider(text: str) -> dict[str, Any]:
    given = exported(text)
    assert given["AIDER_MODEL"] == given["AIDER_WEAK_MODEL"] == f"openai/{MODEL}"
    return {"url": given["OPENAI_API_BASE"], "key": given["OPENAI_API_KEY"]}


def open_webui(text: str) -> dict[str, Any]:
    given = exported(text)
    assert given["DEFAULT_MODELS"] == given["TASK_MODEL_EXTERNAL"] == MODEL
    return {"url": given["OPENAI_API_BASE_URL"], "key": given["OPENAI_API_KEY"]}


def claude(text: str) -> dict[str, Any]:
    given = exported(text)
    assert {value for name, value in given.items() if name.endswith("MODEL")} == {MODEL}
    return {"url": f"{given['ANTHROPIC_BASE_URL']}/v1", "key": given["ANTHROPIC_AUTH_TOKEN"]}


def codex(text: str) -> dict[str, Any]:
    config = tomllib.loads(text)
    provider = config["model_providers"][config["model_provider"]]
    assert (config["model"], provider["wire_api"]) == (MODEL, "responses")
    assert provider["env_key"] == "HEADWATER_API_KEY"
    return {"url": provider["base_url"], "key": TO.key}


READERS = {
    "aider": aider,
    "claude": claude,
    "codex": codex,
    "continue": from_continue,
    "open-webui": open_webui,
    "opencode": opencode,
}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_reads_address_model_and_key(agent: str) -> None:
    assert READERS[agent](AGENTS[agent](TO)) == {"url": f"{URL}/v1", "key": TO.key}


def test_codex_needs_no_variable_where_there_are_no_keys() -> None:
    assert "env_key" not in AGENTS["codex"](Target(gateway=URL, model=MODEL))


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater.services.cli", "launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_nothing_but_the_configuration() -> None:
    done = launched("claude", "--base-url", f"{URL}/v1", "--model", MODEL, "--api-key", TO.key)
    assert done.stdout == AGENTS["claude"](TO)


def test_an_unknown_agent_is_refused_by_name() -> None:
    done = launched("emacs")
    assert done.returncode != 0
    assert "allowed: aider, claude, codex, continue, open-webui, opencode" in done.stderr
