"""Adapters against PEFT, in float32: greedy tokens and log probabilities of a model that has the
adapter beside its weights, and of one into which it was merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_core.small_adapters import answer, load_adapter
from tests.engine_core.small_models import (
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
    reference_greedy,
)

# PEFT asks torch and transformers for names that they give up.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (70, 9)]
NUM_TOKENS = 12
CONFIGS = {
    "all linear layers": {"r": 6, "lora_alpha": 24, "target_modules": "all-linear"},
    "rslora and patterns": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": r".*\.(q_proj|v_proj|down_proj)",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 12, r"layers\.1\.mlp\.down_proj": 3},
        "alpha_pattern": {"v_proj": 20},
    },
}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama3 with scaled rope", "all linear layers"),
        ("qwen3", "rslora and patterns"),
        ("gemma3", "all linear layers"),
        ("llama with biases", "rslora and patterns"),
    ],
)
def test_an_answer_is_pefts(family: str, config: str, tmp_path: Path) -> None:
    base = random_checkpoint(family, tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "model")
    torch.manual_seed(1)
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(**CONFIGS[config], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    model.save_pretrained(tmp_path / "adapter")
    engine = SmallEngine(folder, adapter_memory=4 << 20, max_num_seqs=8)
    digest = load_adapter(engine, tmp_path / "adapter")
    both = [*PROMPTS, *PROMPTS]
    found = answer(engine, both, [digest, digest, b"", b""], greedy(NUM_TOKENS, num_logprobs=1))
    engine.close()
    expected = [_reference(model, prompt) for prompt in PROMPTS]
    with model.disable_adapter():
        expected += [_reference(model, prompt) for prompt in PROMPTS]
    assert expected[:2] != expected[2:]
    for one, (tokens, logprobs) in zip(found, expected, strict=True):
        assert one.token_ids == tokens
        assert [each.logprob for each in one.logprobs] == pytest.approx(logprobs, abs=1e-3)
    merged = model.merge_and_unload()
    assert [_reference(merged, prompt)[0] for prompt in PROMPTS] == [
        each.token_ids for each in found[:2]
    ]


def _reference(model: Any, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log probabilities."""
    tokens = reference_greedy(model, prompt, NUM_TOKENS)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(tokens)[:, None]
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, chosen)[:, 0]
    return tokens, logprobs.tolist()
