"""Figures of experts, from the core of an engine to its metrics."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.chatting_model import make_chatting_model
from tests.gateway.processes import launched
from tests.services.engine.engine_process import add, client_of, engine_process
from tests.services.engine.test_kv_swap import metrics
from tests.services.engine.test_ranks import PROMPT, SMALL

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.mark.long
async def test_metrics_of_an_engine_have_the_experts_of_its_steps(tmp_path: Path) -> None:
    folder = make_chatting_model(tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | EXPERTS))
    flags = (f"--model-folder={folder}", *SMALL, "--load-format=dummy", "--dtype=float32")
    with engine_process(*flags, start=launched) as engine:
        async with client_of(engine) as client:
            await client.send(add(1, PROMPT, 60))
            await client.read_until_finished(1)
        patience = time.monotonic() + 10
        while "headwater_step_experts" not in (found := await metrics(engine)):
            assert time.monotonic() < patience, "no figures"
            await asyncio.sleep(0.2)
    num_layers = json.loads(file.read_text())["num_hidden_layers"]
    assert found["headwater_step_experts"] >= 3 * num_layers
    assert found["headwater_step_expert_bytes"] > 0
    assert 1 / 8 < found["headwater_expert_largest_share"] <= 1
