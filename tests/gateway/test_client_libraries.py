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
from tests.gateway.test_clients import CLIENTS, reported
from tests.own_environment import node_with, python_with
from tests.small_models import make_thinking_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_instructor_makes_objects_in_every_mode(thinker: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", "instructor", "openai")
    sent = reported(python, str(CLIENTS / "instructor_client.py"), f"{thinker.rest}/v1", THINKER)
    print("instructor", sent["version"])
    assert sent["made"].keys() == {
        "TOOLS",
        "TOOLS_STRICT",
        "JSON_SCHEMA",
        "FUNCTIONS",
        "RESPONSES_TOOLS",
    }
    assert all(trip.keys() == {"city", "days"} for trip in sent["made"].values())


def test_an_agent_calls_the_tool_that_it_must_and_ends_with_its_type(
    thinker: Gateway, tmp_path: Path
) -> None:
    python = python_with(tmp_path / "env", "openai-agents")
    sent = reported(python, str(CLIENTS / "openai_agents_client.py"), f"{thinker.rest}/v1", THINKER)
    print("openai-agents", sent["version"])
    for kind in ("chat", "responses"):
        assert sent[kind]["num_calls"] > 0
        assert sent[kind]["made"].keys() == {"city", "days"}


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
    sent = reported(python, str(CLIENTS / "guidance_client.py"), f"{unthinking.rest}/v1", THINKER)
    print("guidance", sent["version"])
    assert sent["choice"] in ("yes", "no")
    assert len(sent["number"]) == 3
    assert int(sent["number"]) >= 0
    assert json.loads(sent["trip"]).keys() == {"city"}


def test_vercels_ai_sees_an_enforced_call_and_no_empty_part(
    thinker: Gateway, tmp_path: Path
) -> None:
    folder = node_with(tmp_path / "node", "ai", "@ai-sdk/openai", "zod")
    shutil.copy(CLIENTS / "vercel_client.mjs", folder)
    sent = reported("node", "vercel_client.mjs", f"{thinker.rest}/v1", THINKER, cwd=folder)
    print("ai", sent["version"], "@ai-sdk/openai", sent["provider"])
    for kind in ("chat", "responses"):
        assert set(sent[kind]["content"]) == {"tool-call"}
        assert sent[kind]["object"].keys() == {"city", "days"}


def test_pydantic_ai_makes_objects_and_streams_over_every_api(
    thinker: Gateway, tmp_path: Path
) -> None:
    python = python_with(tmp_path / "env", "pydantic-ai-slim[openai,anthropic]")
    sent = reported(python, str(CLIENTS / "pydantic_ai_client.py"), thinker.rest, THINKER)
    print("pydantic-ai", sent["version"])
    for kind in ("chat", "responses", "messages"):
        assert sent[kind]["made"].keys() == {"city", "days"}
        assert sent[kind]["streamed"]
        assert all(sent[kind]["num_tokens"])
    assert sent["chat"]["streamed"] == sent["responses"]["streamed"] == sent["messages"]["streamed"]


def test_langchain_speaks_anthropics_api(thinker: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", "langchain-anthropic")
    sent = reported(python, str(CLIENTS / "langchain_anthropic_client.py"), thinker.rest, THINKER)
    print("langchain-anthropic", sent["version"])
    assert sent["streamed"] == sent["whole"] != ""
    assert sent["usage"] == 12
    assert sent["call"]["name"] == "weather"
    assert isinstance(sent["call"]["args"]["city"], str)
    assert sent["after"] > 0


def test_litellms_proxy_passes_both_apis_on(thinker: Gateway, tmp_path: Path) -> None:
    python = python_with(tmp_path / "env", "litellm[proxy]", "anthropic", "openai")
    sent = reported(python, str(CLIENTS / "litellm_proxy_client.py"), thinker.rest, THINKER)
    print("litellm[proxy]", sent["version"])
    for name in ("by-openai", "by-anthropic"):
        assert sent[name]["streamed"] == sent[name]["whole"] != ""
        assert sent[name]["usage"] == 12
    assert sent["messages"]["usage"] == 12
    assert sent["messages"]["text"]
