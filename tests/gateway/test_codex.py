"""OpenAI's Codex CLI, unchanged: it calls a tool of an MCP server, which it offers in a namespace,
and a shell, and reads what came of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.services.cli.agents import AGENTS, Target
from headwater.services.text.tokenizer import Tokenizer
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    THINKER,
    Behind,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.gateway.scripted_model import scripted_model
from tests.gateway.test_clients import CLIENTS
from tests.own_environment import node_with
from tests.small_models import make_thinking_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
CONTEXT = 65_536
"""Length of the model's context. The first prompt of Codex has 11,000 tokens."""
VOCAB_SIZE = 49_152
CALLS = [
    {"name": "mcp__clock__time", "arguments": {"zone": "Ulm"}},
    {"name": "exec_command", "arguments": {"cmd": "echo written by a shell"}},
]
SCRIPT = [
    *(f"One moment. <tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS),
    "It is noon, says the clock.",
]
SERVERS = """\
[mcp_servers.clock]
command = "{python}"
args = ["{server}"]
"""


def test_codex_calls_a_tool_of_a_namespace_and_a_shell(
    text_folder: Path, start_gateway: GatewayStarter, tmp_path: Path
) -> None:
    modules = node_with(tmp_path / "node", "@openai/codex")
    folder = make_thinking_folder(text_folder, tmp_path / THINKER, name=THINKER)
    manifest = folder / "model.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"max_model_len": CONTEXT}))
    tokenizer = Tokenizer.from_folder(folder, VOCAB_SIZE)
    processor = processor_stage(folder)
    output_processor = output_processor_stage(folder)
    with (
        started(processor, output_processor),
        scripted_model(processor.address, tokenizer, SCRIPT) as (model, address),
        start_gateway(Behind(processor.address, output_processor.address, (address,))) as gateway,
    ):
        reported = run_codex(modules, gateway.rest, "What time is it in Ulm?")
        assert reported.strip().endswith(SCRIPT[-1]), reported
        prompts = [tokenizer.decode(model.prompt(i)) for i in range(len(SCRIPT))]
    assert '"mcp__clock__time"' in prompts[0]
    assert "It is noon in Ulm." in prompts[1]
    assert json.dumps(CALLS[0]) in prompts[1]
    assert "written by a shell\n" in prompts[2]


def run_codex(modules: Path, url: str, question: str) -> str:
    """What Codex prints as its last message."""
    home = modules / "home"
    home.mkdir()
    launched = AGENTS["codex"](Target(gateway=url, model=THINKER))
    servers = SERVERS.format(python=sys.executable, server=CLIENTS / "mcp_clock.py")
    (home / "config.toml").write_text(launched + servers)
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    done = subprocess.run(
        ["npx", "codex", "exec", *flags, question],
        cwd=modules,
        env=os.environ | {"CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
