"""Libraries that are no dependency of the project, unchanged, each in an environment of its own.

What they send stands word for word in `openai/test_sent_bodies.py`; here they send it, in their
newest releases. docs/clients.md says which releases were seen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    QUIET,
    THINKER,
    Behind,
    Gateway,
    Stage,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.gateway.test_clients import CLIENTS, told
from tests.own_environment import node_with, python_with
from tests.small_models import make_thinking_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_instructor_makes_objects_in_every_mode(thinker: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", "instructor", "openai")
    said = told(python, str(CLIENTS / "instructor_client.py"), f"{thinker.rest}/v1", THINKER)
    print("instructor", said["version"])
    assert said["made"].keys() == {
        "TOOLS",
        "TOOLS_STRICT",
        "JSON_SCHEMA",
        "FUNCTIONS",
        "RESPONSES_TOOLS",
    }
    assert all(trip.keys() == {"city", "days"} for trip in said["made"].values())


def test_an_agent_calls_the_tool_that_it_must_and_ends_with_its_type(
    thinker: Gateway, tmp_path: Path
) -> None:
    python = python_with(tmp_path / "env", "openai-agents")
    said = told(python, str(CLIENTS / "openai_agents_client.py"), f"{thinker.rest}/v1", THINKER)
    print("openai-agents", said["version"])
    for kind in ("chat", "responses"):
        assert said[kind]["num_calls"] > 0
        assert said[kind]["made"].keys() == {"city", "days"}


@pytest.fixture
def unthinking(
    text_folder: Path, start_gateway: GatewayStarter, tmp_path: Path
) -> Iterator[Gateway]:
    """As `thinker`, for a client that cannot ask for no thoughts: what it writes is its answer."""
    folder = make_thinking_folder(text_folder, tmp_path / THINKER, name=THINKER)
    processor = processor_stage(folder, "--reasoning-parser=none")
    output_processor = output_processor_stage(folder)
    flags = (
        "--executor=simulated",
        f"--served-model-name={THINKER}",
        f"--model-folder={folder}",
        "--num-blocks=2048",
    )
    engine = Stage("headwater.services.engine", *flags, *QUIET)
    with started(processor, output_processor, engine):
        behind = Behind(processor.address, output_processor.address, (engine.address,))
        with start_gateway(behind) as gateway:
            yield gateway


def test_guidance_holds_a_model_to_its_grammars(unthinking: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", "guidance", "openai")
    said = told(python, str(CLIENTS / "guidance_client.py"), f"{unthinking.rest}/v1", THINKER)
    print("guidance", said["version"])
    assert said["choice"] in ("yes", "no")
    assert len(said["number"]) == 3
    assert int(said["number"]) >= 0
    assert json.loads(said["trip"]).keys() == {"city"}


def test_vercels_ai_sees_an_enforced_call_and_no_empty_part(
    thinker: Gateway, tmp_path: Path
) -> None:
    folder = node_with(tmp_path / "node", "ai", "@ai-sdk/openai", "zod")
    shutil.copy(CLIENTS / "vercel_client.mjs", folder)
    said = told("node", "vercel_client.mjs", f"{thinker.rest}/v1", THINKER, cwd=folder)
    print("ai", said["version"], "@ai-sdk/openai", said["provider"])
    for kind in ("chat", "responses"):
        assert set(said[kind]["content"]) == {"tool-call"}
        assert said[kind]["object"].keys() == {"city", "days"}


def test_pydantic_ai_makes_objects_and_streams_over_every_api(
    thinker: Gateway, tmp_path: Path
) -> None:
    python = python_with(tmp_path / "env", "pydantic-ai-slim[openai,anthropic]")
    said = told(python, str(CLIENTS / "pydantic_ai_client.py"), thinker.rest, THINKER)
    print("pydantic-ai", said["version"])
    for kind in ("chat", "responses", "messages"):
        assert said[kind]["made"].keys() == {"city", "days"}
        assert said[kind]["streamed"]
        assert all(said[kind]["num_tokens"])
    assert said["chat"]["streamed"] == said["responses"]["streamed"] == said["messages"]["streamed"]


def test_langchain_speaks_anthropics_api(thinker: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", "langchain-anthropic")
    said = told(python, str(CLIENTS / "langchain_anthropic_client.py"), thinker.rest, THINKER)
    print("langchain-anthropic", said["version"])
    assert said["streamed"] == said["whole"] != ""
    assert said["usage"] == 12
    assert said["call"]["name"] == "weather"
    assert isinstance(said["call"]["args"]["city"], str)
    assert said["after"] > 0


def test_litellms_proxy_passes_both_apis_on(thinker: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", "litellm[proxy]", "anthropic", "openai")
    said = told(python, str(CLIENTS / "litellm_proxy_client.py"), thinker.rest, THINKER)
    print("litellm[proxy]", said["version"])
    for name in ("by-openai", "by-anthropic"):
        assert said[name]["streamed"] == said[name]["whole"] != ""
        assert said[name]["usage"] == 12
    assert said["messages"]["usage"] == 12
    assert said["messages"]["text"]
