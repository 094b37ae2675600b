"""Anthropic's Claude Code, unchanged: it runs a command in a shell that the model calls, and reads
what came of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from headwater.services.cli.agents import AGENTS, Target
from headwater.services.text.tokenizer import Tokenizer
from tests.exported import exported
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    THINKER,
    Behind,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.gateway.scripted_model import scripted_model
from tests.own_environment import node_with
from tests.small_models import THINKING_TEMPLATE, make_thinking_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
CONTEXT = 131_072
"""Length of the model's context. The first prompt has some 20,000 tokens, and 32,000 are asked
for."""
VOCAB_SIZE = 49_152
CALL = {
    "name": "Bash",
    "arguments": {"command": "echo written by a shell", "description": "Writes a line"},
}
LOOP = "{%- for message in messages %}"
STRICT_TEMPLATE = THINKING_TEMPLATE.replace(
    LOOP,
    LOOP + "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must be the first') }}{% endif %}",
)
"""A template that refuses system messages between turns, as many do; Claude Code sends them."""
ANSWER = "<|im_start|>assistant\n"
"""What a prompt of the model ends with."""
SCRIPT = [
    f"One moment. <tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "The shell has written a line.",
]


def test_claude_code_runs_a_command_that_the_model_calls(
    text_folder: Path, start_gateway: GatewayStarter, tmp_path: Path
) -> None:
    modules = node_with(tmp_path / "node", "@anthropic-ai/claude-code")
    folder = make_thinking_folder(
        text_folder, tmp_path / THINKER, name=THINKER, template=STRICT_TEMPLATE
    )
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
        reported = run_claude(modules, gateway.rest, "Write a line in a shell.")
        first, second = (model.prompt(i) for i in range(len(SCRIPT)))
        prompts = [tokenizer.decode(ids) for ids in (first, second)]
    assert reported["result"] == SCRIPT[-1]
    assert not reported["is_error"]
    assert reported["num_turns"] == len(SCRIPT)
    # The answer begins behind the same tokens, so that the prefix is found in a cache.
    shared = first[: -len(tokenizer.encode(ANSWER, add_special_tokens=False))]
    assert second[: len(shared)] == shared
    assert '"Bash"' in prompts[0]
    assert "x-anthropic-billing-header" not in prompts[0]
    assert "written by a shell\n" not in prompts[0]
    assert "written by a shell\n" in prompts[1].replace("<|im_end|>", "\n")


def run_claude(modules: Path, url: str, question: str) -> dict[str, object]:
    """What Claude Code prints at its end."""
    home = modules / "home"
    home.mkdir()
    launched = exported(AGENTS["claude"](Target(gateway=url, model=THINKER)))
    variables = launched | {"HOME": str(home)}
    env = {name: value for name, value in os.environ.items() if "ANTHROPIC" not in name}
    done = subprocess.run(
        ["npx", "claude", "-p", question, "--output-format=json", "--allowedTools=Bash"],
        cwd=home,
        env=env | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    result: dict[str, object] = json.loads(done.stdout)
    return result
