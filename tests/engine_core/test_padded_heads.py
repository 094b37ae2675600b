"""Heads whose size is no power of two, padded with zeros where a device's kernels want such sizes:
answers are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.foreign_models import PADDED, convert_foreign
from tests.engine_core.small_models import (
    FAMILIES,
    LONG_ROPE,
    SHAPE,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.test_model_suite import PROMPTS
from tests.long_values import long_but

LONG_OF_48 = LONG_ROPE | {"short_factor": [1.0] * 24, "long_factor": [1 + i for i in range(24)]}
HEADS: dict[str, Any] = {
    "biases and tied": lambda: transformers.LlamaConfig(
        **SHAPE | {"head_dim": 48, "tie_word_embeddings": True}, attention_bias=True
    ),
    "joined and long positions": lambda: transformers.Phi3Config(
        **PADDED | {"hidden_size": 192},
        original_max_position_embeddings=256,
        rope_parameters=LONG_OF_48,
        sliding_window=40,
    ),
    "neighbours that rotate": lambda: transformers.CohereConfig(**PADDED | {"hidden_size": 192}),
    "learned positions": lambda: transformers.GPT2Config(
        vocab_size=512, n_embd=192, n_layer=2, n_head=4, n_positions=512
    ),
}


@pytest.fixture(autouse=True)
def _kernels_of_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "capabilities", replace(cpu.capabilities, odd_heads=False))


@pytest.mark.parametrize("family", long_but(HEADS, "biases and tied", "neighbours that rotate"))
def test_answers_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, family, HEADS[family])
    model = random_checkpoint(family, tmp_path / "hf")
    convert_it = convert_foreign if model.config.model_type == "cohere" else convert
    engine = SmallEngine(convert_it(tmp_path / "hf", tmp_path / "ours"), max_model_len=256)
    (cache,) = engine.executor.kv_caches
    assert cache.shape[-1] == 64
    answers = engine.answer(PROMPTS, greedy(8, num_logprobs=1))
    engine.close()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
        after = expected[len(prompt) - 1 : -1]
        assert answer.token_ids == after.argmax(-1).tolist()
        chosen = after.max(-1).values.tolist()
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(chosen, abs=1e-3)


def test_weights_that_are_packed_are_refused_by_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "heads", HEADS["biases and tied"])
    random_checkpoint("heads", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours", quantization="int8")
    with pytest.raises(ConfigError, match="head_dim is 48; allowed: powers of two with weights"):
        SmallEngine(folder, max_model_len=512)


def test_norms_of_heads_are_refused_by_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        FAMILIES, "heads", lambda: transformers.Qwen3Config(**SHAPE | {"head_dim": 48})
    )
    random_checkpoint("heads", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    options = ExecutorOptions(model_folder=folder)
    with pytest.raises(ConfigError, match="head_dim is 48; allowed: powers of two on the platform"):
        checked(options, "toy", cpu.capabilities)
